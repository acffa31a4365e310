"""How a connection is opened within a time, which drivers do not keep to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from django.db import OperationalError


def open_within(seconds: float, connect: Callable[[], Any], close: Callable[[Any], None], name: str) -> Any:
    """What ``connect()`` returns. Raises OperationalError after ``seconds``; what comes later is closed.

    In a thread of its own: drivers count whole seconds, for each address anew, and none while they look up a name. Nor
    do they count how long a pooler lets wait that is there while its server is not.
    """
    opening: Future[Any] = Future()

    def work() -> None:
        try:
            opened = connect()
        except BaseException as error:
            if opening.set_running_or_notify_cancel():
                opening.set_exception(error)
            return
        if opening.set_running_or_notify_cancel():
            opening.set_result(opened)
        else:
            close(opened)

    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        try:
            thread.start()
        except RuntimeError:  # there are too many, or the interpreter exits
            return connect()
        return opening.result(max(0.0, seconds))
    except TimeoutError as error:
        if opening.cancel():
            raise OperationalError(f"no connection within {seconds:.1f} s") from error
        return opening.result()  # it came at this very moment
    except BaseException:  # of a connect() that failed, or of a caller that is interrupted
        if not opening.cancel() and opening.exception() is None:
            close(opening.result())
        raise
