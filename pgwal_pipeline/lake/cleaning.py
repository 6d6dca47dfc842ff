"""Remove from the lake what a table has in it from before the options of tables protected its columns.

A Delta table keeps what it once had: in files that no version names any more, and in its log, which has the smallest and largest values of
each file. So files and log entries go, not only rows.
"""

from urllib.parse import unquote

import pyarrow.fs as pafs
from deltalake import DeltaTable

from pgwal_pipeline.lake.delta import has_checkpoint, lake_errors, open_table
from pgwal_pipeline.lake.layout import Lake, filesystem, remove_file, storage_options
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.relation import TableName

_OID = slice(1, 5)  # of a message that changes a row


def clean_raw(lake: Lake, location: TableName, oid: int) -> None:
    """Remove the raw table of that location, and what was set aside of the table, whose oid is given. Raises LakeError."""
    _remove(lake, lake.layer_path("raw", location))
    for layer in ("raw", "snapshot", "current"):
        _remove(lake, f"_pgwal/damaged/{lake.layer_path(layer, location)}")
    _remove(lake, "_pgwal/verify")  # copies that a comparison left behind when it was killed
    with lake_errors(lake.absolute("_pgwal/undecodable")):
        for info in _files(lake, "_pgwal/undecodable"):
            with filesystem(lake.uri).open_input_file(info.path) as stream:
                head = stream.read(_OID.stop)
            if head[:1] in (b"I", b"U", b"D") and int.from_bytes(head[_OID]) == oid:
                remove_file(lake.uri, info.path)


def clean_keys(ledger: Ledger, location: TableName) -> None:
    """Remove the bounds of a table's chunks and of its proof, which are values of its key, and the ledger's files that had them.

    Raises LakeError.
    """
    ledger.forget_keys(location)
    for uri in (ledger.lake.ledger("chunks"), ledger.lake.ledger("proofs")):
        with lake_errors(uri):
            table = open_table(ledger.lake, uri)
            if table is not None:
                table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)


def clean_snapshots(lake: Lake, location: TableName) -> None:
    """Remove the snapshot table of that location. Raises LakeError."""
    _remove(lake, lake.layer_path("snapshot", location))


def clean_current(lake: Lake, location: TableName) -> None:
    """Remove everything of the `current` table of that location that its newest version does not need: its older versions, then.

    Raises LakeError.
    """
    path, uri = lake.layer_path("current", location), lake.current(location)
    table = open_table(lake, uri)
    if table is None:
        return
    with lake_errors(uri):
        version = table.version()
        if not has_checkpoint(lake, uri, version):
            DeltaTable(uri, storage_options=storage_options(uri)).create_checkpoint()
        named = {f"{path}/{unquote(name)}" for name in table.get_add_actions()["path"].to_pylist()}
        found, log = _files(lake, path), f"{path}/_delta_log/"
        if not named <= {info.path for info in found}:
            raise LakeError(f"The current table at {uri} lacks files that its log names, so that its older versions are not removed.")
        for info in found:
            if info.path.startswith(log):
                of = _version_of(info.base_name)
                gone = of is not None and of < version
            else:
                gone = info.path not in named and not _is_vector(info.base_name)
            if gone:
                remove_file(lake.uri, info.path)


def _version_of(name: str) -> int | None:
    """The version that a file of a Delta log belongs to; None for a file that belongs to none."""
    number = name.lstrip(".").split(".", 1)[0]
    return int(number) if len(number) == 20 and number.isdigit() else None


def _is_vector(name: str) -> bool:
    """Whether a file says which rows of another are deleted; it has no values."""
    return name.lstrip(".").startswith("deletion_vector_")


def _files(lake: Lake, path: str) -> list[pafs.FileInfo]:
    found = filesystem(lake.uri).get_file_info(pafs.FileSelector(path, allow_not_found=True, recursive=True))
    return [info for info in found if info.type == pafs.FileType.File]


def _remove(lake: Lake, path: str) -> None:
    """Remove a folder of the lake, if it is there, and all that is in it."""
    with lake_errors(lake.absolute(path)):
        if lake.is_local:
            if filesystem(lake.uri).get_file_info(path).type == pafs.FileType.Directory:
                filesystem(lake.uri).delete_dir(path)
            return
        for info in _files(lake, path):
            remove_file(lake.uri, info.path)
