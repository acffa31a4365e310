"""Apart, because processes that tests start need nothing else of them."""

from __future__ import annotations

from importlib.util import find_spec


def is_driver_there() -> bool:
    """Django asks for mysqlclient; PyMySQL gives itself out for it."""
    if find_spec("MySQLdb"):
        return True
    if not find_spec("pymysql"):
        return False
    import pymysql

    pymysql.install_as_MySQLdb()
    return True
