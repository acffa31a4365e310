"""What servers refuse commands with, by their own words."""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    """Commands with one of the flags ``spares`` are not refused."""

    text: str
    spares: frozenset[str]


# What a server says while it is in a state of that name; ``Server.states`` has the names.
REFUSALS = {
    "LOADING": Refusal("LOADING Valkey is loading the dataset in memory", frozenset({"loading"})),
    "BUSY": Refusal(
        "BUSY Valkey is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", frozenset({"busy"})
    ),
    "MASTERDOWN": Refusal(
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", frozenset({"stale"})
    ),
}
# Those of commands that write.
WRITE_REFUSALS = {
    "MISCONF": (
        "MISCONF Valkey is configured to save RDB snapshots, but it's currently unable to persist to disk. Commands"
        " that may modify the data set are disabled, because this instance is configured to report errors during"
        " writes if RDB snapshotting fails (stop-writes-on-bgsave-error option). Please check the Valkey logs for"
        " details about the RDB error."
    ),
    "NOREPLICAS": "NOREPLICAS Not enough good replicas to write.",
    "READONLY": "READONLY You can't write against a read only replica.",
}
OUT_OF_MEMORY = "OOM command not allowed when used memory > 'maxmemory'."
LISTENERS_ONLY = "only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are allowed in this context"
