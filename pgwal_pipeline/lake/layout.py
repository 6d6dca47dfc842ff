"""Where everything stands in a lake, and how its storage is reached: a local folder and an object store alike.

`<lake>/raw|snapshot|current/<schema>/<table>` are the tables, `<lake>/_pgwal/<name>` the ledger's. Two tables never share a path, on a
file system that ignores case either.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pyarrow.fs as pafs
from deltalake.fs import DeltaStorageHandler

from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.relation import TableName

Layer = Literal["raw", "snapshot", "current"]

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_")
# What the Delta library cannot take in a path: it fails on the first kind and reads the second as an escape, so that files go elsewhere.
_UNUSABLE = re.compile(r"[\[\]^|\\\x00-\x1f\x7f]|%[0-9A-Fa-f]{2}")

_PASSED_ON = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_PROFILE",
    "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_ENDPOINT_URL",
    "AWS_ALLOW_HTTP",
    "AWS_CONDITIONAL_PUT",
    "AWS_S3_ALLOW_UNSAFE_RENAME",
    "AWS_S3_LOCKING_PROVIDER",
)

_TRIES = 8  # of a request that fails for the moment, about as many as delta-rs makes; after each it waits twice as long


def path_segment(name: str) -> str:
    """`name` as one folder's name: what is not a lower-case letter, a digit or `_` stands as `-` and two hex digits a byte.

    A leading `_` is written so too, since readers of Delta take such a folder for a hidden one.
    """
    text = "".join(chr(byte) if byte in _PLAIN else f"-{byte:02x}" for byte in name.encode())
    return "-5f" + text[1:] if text.startswith("_") else text


def _name_of(segment: str) -> str:
    """The name that `path_segment` made a folder's name of. Raises ValueError for what it never makes."""
    parts = re.split(r"-(..)", segment)
    return b"".join(bytes.fromhex(part) if number % 2 else part.encode() for number, part in enumerate(parts)).decode()


@dataclass(frozen=True, slots=True)
class Lake:
    """A lake by its address: an absolute local path, or `s3://bucket/prefix`. Its methods give absolute paths or full URIs.

    Raises LakeError for a path that Delta tables cannot be kept under.
    """

    uri: str

    def __post_init__(self) -> None:
        uri = self.uri.rstrip("/") if "://" in self.uri else str(Path(self.uri).expanduser().absolute())
        found = _UNUSABLE.search(uri)
        if found is not None:
            raise LakeError(
                f"PGWAL_LAKE is {uri!r}, but Delta tables cannot be kept under a path with {found[0]!r} in it; choose another path."
            )
        object.__setattr__(self, "uri", uri)

    @property
    def is_local(self) -> bool:
        """Whether the lake is a folder on this machine."""
        return "://" not in self.uri

    def raw(self, table: TableName) -> str:
        """The Delta table of every change of `table`."""
        return self.absolute(self.layer_path("raw", table))

    def snapshot(self, table: TableName) -> str:
        """The Delta table of the rows of `table` that were there before the stream."""
        return self.absolute(self.layer_path("snapshot", table))

    def current(self, table: TableName) -> str:
        """The Delta table of `table` as it is now."""
        return self.absolute(self.layer_path("current", table))

    def ledger(self, name: str) -> str:
        """The ledger's Delta table called `name`."""
        return self.absolute(f"_pgwal/{name}")

    def layer_path(self, layer: Layer, table: TableName) -> str:
        """The path of a table's Delta table from the lake's root, as `filesystem` takes it."""
        return f"{layer}/{path_segment(table.schema)}/{path_segment(table.name)}"

    def absolute(self, path: str) -> str:
        """The absolute path or URI of `path`, which is given from the lake's root; one that is absolute already stays as it is."""
        return path if path.startswith("/") or "://" in path else f"{self.uri}/{path}"

    def relative(self, uri: str) -> str:
        """`uri` from the lake's root, so that what is written down still holds when the lake moves; another place's stays absolute."""
        return uri.removeprefix(self.uri + "/")


def stored(lake: Lake, layer: Layer) -> list[TableName]:
    """The places at which a layer has tables, those included that nothing goes by any more. Raises what the storage raises."""

    def folders(path: str) -> list[str]:
        found = filesystem(lake.uri).get_file_info(pafs.FileSelector(path, allow_not_found=True))
        return sorted(entry.base_name for entry in found if entry.type == pafs.FileType.Directory)

    pairs = [(schema, name) for schema in folders(layer) for name in folders(f"{layer}/{schema}")]
    return [TableName(_name_of(schema), _name_of(name)) for schema, name in pairs]


def require_writable(lake: Lake) -> None:
    """Raise LakeError unless the lake's place can be reached and, as far as looking tells, be written to; nothing is made by looking."""
    if not lake.is_local:
        try:
            filesystem(lake.uri).get_file_info(pafs.FileSelector("", allow_not_found=True))
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise LakeError(f"The lake {lake.uri} cannot be reached: {reason}; see to the AWS_* variables or set PGWAL_LAKE.") from None
        return
    place = Path(lake.uri)
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise LakeError(f"The lake {lake.uri} cannot be written: {place} is no folder; set PGWAL_LAKE to another place.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise LakeError(f"The lake {lake.uri} cannot be written: this user may not write to {place}; set PGWAL_LAKE to another place.")


def storage_options(uri: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """What delta-rs and Polars need to reach `uri`: nothing for a local folder, the usual AWS_* variables for `s3://`.

    An endpoint of one's own is spoken to with the bucket in the path, in region us-east-1 unless another is set; one that is `http://`
    allows HTTP unless AWS_ALLOW_HTTP says otherwise.
    """
    if "://" not in uri:
        return {}
    environment = os.environ if environment is None else environment
    options = {name: environment[name] for name in _PASSED_ON if environment.get(name)}
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or options.get("AWS_ENDPOINT_URL")
    if endpoint:
        options["AWS_ENDPOINT_URL"] = endpoint
        options["AWS_VIRTUAL_HOSTED_STYLE_REQUEST"] = "false"
        options.setdefault("AWS_ALLOW_HTTP", str(endpoint.lower().startswith("http://")).lower())
    if "AWS_REGION" not in options and (endpoint or "AWS_DEFAULT_REGION" in options):
        options["AWS_REGION"] = options.get("AWS_DEFAULT_REGION", "us-east-1")
    return options


def filesystem(uri: str) -> pafs.FileSystem:
    """A pyarrow file system rooted at `uri`, on the same storage and with the same credentials as the Delta tables there.

    On a local one the folder of a file must exist before the file is opened for writing.
    """
    return _filesystem(uri, tuple(sorted(storage_options(uri).items())))


@lru_cache(maxsize=16)
def _filesystem(uri: str, options: tuple[tuple[str, str], ...]) -> pafs.FileSystem:
    if "://" not in uri:
        return pafs.SubTreeFileSystem(uri, pafs.LocalFileSystem())
    # Arrow's own client, not the one that delta-rs lends: that one stops every thread of the process while it waits for the store.
    known = dict(options)
    endpoint = urlsplit(known.get("AWS_ENDPOINT_URL", ""))
    settings = {
        "access_key": known.get("AWS_ACCESS_KEY_ID"),
        "secret_key": known.get("AWS_SECRET_ACCESS_KEY"),
        "session_token": known.get("AWS_SESSION_TOKEN"),
        "region": known.get("AWS_REGION"),
        "scheme": endpoint.scheme or None,
        "endpoint_override": endpoint.netloc or None,
    }
    store = pafs.S3FileSystem(
        connect_timeout=5,
        request_timeout=60,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(_TRIES),
        **{name: value for name, value in settings.items() if value},
    )
    return pafs.SubTreeFileSystem(uri.split("://", 1)[1], store)


def remove_file(uri: str, path: str) -> None:
    """Remove the file at `path` from `uri` on. Arrow's client for object stores would leave an empty object in the folder's name behind."""
    if "://" in uri:
        DeltaStorageHandler(uri, storage_options(uri)).delete_file(path)
    else:
        filesystem(uri).delete_file(path)
