"""Named points at which a test can stop, delay or break the program, to show what a crash there leaves behind.

`PGWAL_FAILPOINTS="drain.before_confirm=kill;publish.between_tables=sleep:5;stream.read=kill@3"`: `kill` sends SIGKILL to this process,
`error` raises RuntimeError, `raise:KIND` raises one of `KINDS`, `sleep:SECONDS` waits, `exit` ends the process without clean-up.
`touch:PATH` creates an empty file and waits until it is removed. With `@N` the action happens only the N-th time that the point is passed.
Without the variable a point costs one dictionary look-up.

Work for one table passes points of its own, `table.STAGE/TABLE` (`table.merge/public.orders=raise:RuntimeError`). `table.STAGE` stands for
every table.
"""

import importlib
import os
import signal
import time
from pathlib import Path

_VARIABLE = "PGWAL_FAILPOINTS"

KINDS = {
    "LakeError": "pgwal_pipeline.messages.errors",
    "TransientLakeError": "pgwal_pipeline.messages.errors",
    "RuntimeError": "builtins",
    "MemoryError": "builtins",
    "PySparkException": "pyspark.errors",
    "DeltaError": "deltalake.exceptions",
    "ArrowInvalid": "pyarrow",
}
"""The errors that `raise:KIND` can raise, each with the module that it comes from."""


def _parse(text: str) -> dict[str, tuple[str, int]]:
    points = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, _, action = entry.partition("=")
        action, _, nth = action.partition("@")
        points[name] = (action, int(nth or 0))
    return points


_points = _parse(os.environ.get(_VARIABLE, ""))
_passed: dict[str, int] = {}


def at(stage: str, table: object) -> None:
    """Pass the points of work for one table: `table.STAGE/TABLE`, then `table.STAGE`, which all tables share."""
    if _points:
        hit(f"table.{stage}/{table}")
        hit(f"table.{stage}")


def hit(name: str) -> None:
    """Pass the point `name`, and do what `PGWAL_FAILPOINTS` says for it, if anything."""
    action = _points.get(name)
    if action is None:
        return
    _passed[name] = _passed.get(name, 0) + 1
    what, nth = action
    if nth and _passed[name] != nth:
        return
    verb, _, argument = what.partition(":")
    match verb:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(70)
        case "error":
            raise RuntimeError(f"failpoint {name}")
        case "raise":
            raise _error(argument, name)
        case "sleep":
            time.sleep(float(argument))
        case "touch":
            marker = Path(argument)
            marker.touch()
            while marker.exists():
                time.sleep(0.02)
        case _:
            raise ValueError(f"{_VARIABLE}: {what!r} is not an action for {name}")


def _error(kind: str, name: str) -> BaseException:
    said = f"failpoint {name}"
    module = importlib.import_module(KINDS[kind])
    if kind == "PySparkException":
        return module.PySparkException(message=said)
    if kind == "TransientLakeError":
        error = module.LakeError(said)
        error.transient = True
        return error
    return getattr(module, kind)(said)
