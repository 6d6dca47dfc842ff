"""Keep messages of the stream that could not be decoded, whole: `<lake>/_pgwal/undecodable/<LSN as 16 hex digits>`."""

from pgwal_pipeline.lake.delta import lake_errors
from pgwal_pipeline.lake.layout import Lake, filesystem
from pgwal_pipeline.lake.parquet import make_folder
from pgwal_pipeline.values.lsn import window_key

_FOLDER = "_pgwal/undecodable"


def keep(lake: Lake, lsn: int, payload: bytes) -> str:
    """Write the payload of a message into the lake and return its file's address. The same message always gets the same file."""
    path = f"{_FOLDER}/{window_key(lsn)}"
    with lake_errors(lake.absolute(path)):
        make_folder(lake, _FOLDER)
        with filesystem(lake.uri).open_output_stream(path) as file:
            file.write(payload)
    return lake.absolute(path)
