"""Read which files a Delta table has from its log as it is written, and commit that some were rewritten into others with the same rows.

delta-rs says which files a table has, but not which deletion vector each has: without it the file cannot be removed by a commit of ours.
Only what is done under the lock that publishes take may be committed here.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from uuid import UUID

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pgwal_pipeline.lake.delta import lake_errors
from pgwal_pipeline.lake.layout import Lake, filesystem
from pgwal_pipeline.lake.parquet import flush
from pgwal_pipeline.messages.errors import LakeError

Add = Mapping[str, Any]
"""The action of the log that adds a file, as JSON: `path`, `size`, `stats`, `deletionVector` and more."""

_LOG = "_delta_log"
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
"""The digits of a deletion vector's name (Z85)."""
_NAME = 20
"""The digits that a name has: five for four bytes."""


def files_at(path: str, version: int) -> dict[str, Add]:
    """Return the files of the table at `path` in a version, by their paths. Raises LakeError if the log does not say it."""
    log = filesystem(f"{path}/{_LOG}")
    with lake_errors(path):
        names = [entry.base_name for entry in log.get_file_info(pafs.FileSelector(""))]
        checkpoints = [int(name[:20]) for name in names if name.endswith(".checkpoint.parquet") and len(name) == 39]
        start = max((found for found in checkpoints if found <= version), default=-1)
        live: dict[str, Add] = {}
        if start >= 0:
            adds = pq.read_table(f"{start:020}.checkpoint.parquet", columns=["add"], filesystem=log)["add"].to_pylist()
            live = {add["path"]: _plain(add) for add in adds if add is not None}
        for number in range(start + 1, version + 1):
            if f"{number:020}.json" not in names:
                raise LakeError(f"The log of {path} lacks version {number}, so its files cannot be rewritten.")
            with log.open_input_stream(f"{number:020}.json") as stream:
                actions = [json.loads(line) for line in stream.read().splitlines() if line.strip()]
            for action in actions:
                if "remove" in action:
                    live.pop(action["remove"]["path"], None)
            live |= {action["add"]["path"]: action["add"] for action in actions if "add" in action}
    return live


def _plain(add: Mapping[str, Any]) -> Add:
    """An action as a checkpoint has it, in the form of a commit: without what is null, and with maps."""
    vector = add.get("deletionVector")
    return {
        "path": add["path"],
        "partitionValues": dict(add.get("partitionValues") or {}),
        "size": add["size"],
        "modificationTime": add["modificationTime"],
        "dataChange": add["dataChange"],
        **({"stats": add["stats"]} if add.get("stats") is not None else {}),
        **({"deletionVector": {name: value for name, value in vector.items() if value is not None}} if vector is not None else {}),
    }


def rows_of(add: Add) -> int | None:
    """Return how many rows a file has, deleted ones among them; None if the log does not say."""
    return json.loads(add.get("stats") or "{}").get("numRecords")


def deleted_rows(add: Add) -> int:
    """Return how many of a file's rows are deleted."""
    return int(add.get("deletionVector", {}).get("cardinality", 0))


def absolute(path: str, add: Add) -> dict[str, Any]:
    """Return `add`, of the table at `path`, as another table can name the file: with absolute addresses."""
    root = path if "://" in path else f"file://{quote(path)}"
    found = {**add, "path": f"{root}/{add['path']}"}
    vector = add.get("deletionVector")
    if vector is not None and vector["storageType"] == "u":
        text = vector["pathOrInlineDv"]
        folder, name = text[:-_NAME], _uuid(text[-_NAME:])
        place = f"{root}/{quote(folder)}/" if folder else f"{root}/"
        found["deletionVector"] = {**vector, "storageType": "p", "pathOrInlineDv": f"{place}deletion_vector_{name}.bin"}
    return found


def _uuid(text: str) -> UUID:
    value = b""
    for start in range(0, _NAME, 5):
        number = 0
        for digit in text[start : start + 5]:
            number = number * 85 + _ALPHABET.index(digit)
        value += number.to_bytes(4, "big")
    return UUID(bytes=value)


def commit_rewrite(lake: Lake, path: str, version: int, removed: Sequence[Add], added: Sequence[Add]) -> bool:
    """Commit, as version `version` + 1 of the table at `path`, that the rows of `removed` are in `added` now; False if it is there already.

    The rows are the same, so it is no change of data. On an object store nothing but the lock keeps others from that version.
    """
    now = int(time.time() * 1000)
    actions: list[dict[str, Any]] = [
        {
            "commitInfo": {
                "timestamp": now,
                "operation": "OPTIMIZE",
                "operationParameters": {"predicate": "[]"},
                "readVersion": version,
                "isolationLevel": "SnapshotIsolation",
                "isBlindAppend": False,
                "operationMetrics": {
                    "numRemovedFiles": str(len(removed)),
                    "numRemovedBytes": str(sum(add["size"] for add in removed)),
                    "numAddedFiles": str(len(added)),
                    "numAddedBytes": str(sum(add["size"] for add in added)),
                },
                "engineInfo": "pgwal",
            }
        }
    ]
    for add in removed:
        kept = {name: add[name] for name in ("path", "partitionValues", "size", "deletionVector", "stats") if name in add}
        actions.append({"remove": {**kept, "deletionTimestamp": now, "dataChange": False, "extendedFileMetadata": True}})
    actions += [{"add": {**add, "dataChange": False}} for add in added]
    text = "".join(json.dumps(action, separators=(",", ":")) + "\n" for action in actions)
    with lake_errors(path):
        return _create(lake, path, f"{version + 1:020}.json", text.encode())


def _create(lake: Lake, path: str, name: str, content: bytes) -> bool:
    """Write a file of the log whole; False if there is one of that name."""
    if not lake.is_local:
        log = filesystem(f"{path}/{_LOG}")
        if log.get_file_info(name).type != pafs.FileType.NotFound:
            return False
        with log.open_output_stream(name) as stream:
            stream.write(content)
        return True
    target = Path(path, _LOG, name)
    draft = target.with_name(f".{name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(content)
        flush(lake, [lake.relative(str(draft))])
        os.link(draft, target)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    flush(lake, [lake.relative(str(target))])
    return True


def file_name(add: Add) -> str:
    """Return the name of a file, from its path in the log."""
    return unquote(add["path"])
