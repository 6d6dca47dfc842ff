"""Check a table's Delta tables before the table is read again, and set aside those that cannot be used.

Those are not deleted but moved to `<lake>/_pgwal/damaged/<layer>/<schema>/<table>/<UTC time>`, where a person can examine them.
"""

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import DeltaTable

from pgwal_pipeline.lake.delta import lake_errors, open_table
from pgwal_pipeline.lake.layout import Lake, Layer, filesystem, remove_file, storage_options
from pgwal_pipeline.lake.standing import FENCE
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.own_columns import GENERATION, WINDOW
from pgwal_pipeline.values.relation import TableName

_OURS: Mapping[Layer, Callable[[DeltaTable], bool]] = {
    "raw": lambda table: WINDOW in table.metadata().partition_columns,
    "snapshot": lambda table: GENERATION in table.metadata().partition_columns,
    "current": lambda table: table.transaction_version(FENCE) is not None,
    "history": lambda table: table.transaction_version(FENCE) is not None,
}


def raw_is_whole(lake: Lake, location: TableName) -> bool:
    """Return whether the raw table at that location, if there is one, can be read and has all the files that its log names."""
    path = lake.layer_path("raw", location)
    return _usable(lake, "raw", path) and not _wrong_files(lake, path)


def heal(lake: Lake, location: TableName) -> dict[Layer, str]:
    """Set aside those of a table's Delta tables that cannot be used, so that the table can be read again; return where they went, by layer.

    A raw or snapshot table that only lacks files goes on without them; a history begins anew.

    Raises LakeError if the lake cannot be written.
    """
    moved: dict[Layer, str] = {}
    for layer in _OURS:
        path = lake.layer_path(layer, location)
        if not _usable(lake, layer, path) or (layer == "history" and _wrong_files(lake, path)):
            moved[layer] = _set_aside(lake, path)
        elif layer in ("raw", "snapshot"):  # `current` is replaced as a whole
            _forget(lake, path, _wrong_files(lake, path))
    return moved


def _usable(lake: Lake, layer: Layer, path: str) -> bool:
    """Whether the Delta table at `path` can be used, or nothing prevents the creation of a new one."""
    uri = lake.absolute(path)
    with lake_errors(uri):
        kind = filesystem(lake.uri).get_file_info(path).type
        if kind == pafs.FileType.NotFound:
            return True
        if kind == pafs.FileType.File:
            return False
    try:
        table = open_table(lake, uri)
        if table is None:  # a folder without a log: only an empty one can become a table
            return not filesystem(lake.uri).get_file_info(pafs.FileSelector(path, allow_not_found=True))
        return _OURS[layer](table)
    except LakeError as error:
        if error.transient:
            raise
        return False


def _wrong_files(lake: Lake, path: str) -> list[pafs.FileInfo]:
    """The files of a table that are gone, or whose size differs from the log's."""
    uri = lake.absolute(path)
    with lake_errors(uri):
        table = open_table(lake, uri)
        if table is None:
            return []
        named = pa.table(table.get_add_actions(flatten=True))
        names, sizes = named["path"].to_pylist(), named["size_bytes"].to_pylist()
        infos = filesystem(lake.uri).get_file_info([f"{path}/{name}" for name in names]) if names else []
        return [info for info, size in zip(infos, sizes, strict=True) if info.type != pafs.FileType.File or info.size != size]


def _forget(lake: Lake, path: str, files: Collection[pafs.FileInfo]) -> None:
    """Remove files that are gone or wrong from a table, so that the rest of it can be read."""
    uri = lake.absolute(path)
    with lake_errors(uri):
        for info in files:
            if info.type == pafs.FileType.File:
                remove_file(lake.uri, info.path)
        if files:
            DeltaTable(uri, storage_options=storage_options(uri)).repair()


def _set_aside(lake: Lake, path: str) -> str:
    """Move what is at `path` to `_pgwal/damaged`; return where it is then."""
    target = f"_pgwal/damaged/{path}/{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
    store = filesystem(lake.uri)
    with lake_errors(lake.absolute(path)):
        if lake.is_local:
            store.create_dir(target.rsplit("/", 1)[0], recursive=True)
            store.move(path, target)
            return lake.absolute(target)
        for info in store.get_file_info(pafs.FileSelector(path, recursive=True)):
            if info.type == pafs.FileType.File:
                store.copy_file(info.path, f"{target}/{info.path.removeprefix(path + '/')}")
                remove_file(lake.uri, info.path)
    return lake.absolute(target)
