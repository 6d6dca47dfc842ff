"""The paths in a lake, and access to its storage, a local folder or an object store.

`<lake>/raw|snapshot|current|history/<schema>/<table>` are the tables, `<lake>/_pgwal/<name>` the ledger's. Two tables never share a path,
not even on a file system that ignores case.
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

Layer = Literal["raw", "snapshot", "current", "history"]

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_")
# What the Delta library cannot take in a path: it fails on the first kind, and reads the second as an escape and writes elsewhere.
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

_TRIES = 8  # for a request that fails, about as many as delta-rs makes; the pause doubles after each


def path_segment(name: str) -> str:
    """Return `name` as a folder's name: each byte that is no lower-case letter, digit or `_` becomes `-` and two hex digits.

    A leading `_` is escaped too, because Delta readers take such a folder for a hidden one.
    """
    text = "".join(chr(byte) if byte in _PLAIN else f"-{byte:02x}" for byte in name.encode())
    return "-5f" + text[1:] if text.startswith("_") else text


def _name_of(segment: str) -> str:
    """The name from which `path_segment` made a folder's name. Raises ValueError if it cannot have made it."""
    parts = re.split(r"-(..)", segment)
    return b"".join(bytes.fromhex(part) if number % 2 else part.encode() for number, part in enumerate(parts)).decode()


@dataclass(frozen=True, slots=True)
class Lake:
    """A lake by its address: an absolute local path, or `s3://bucket/prefix`. Its methods return absolute paths or full URIs.

    Raises LakeError for a path that Delta tables cannot have.
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
        """Return the address of the Delta table with every change of `table`."""
        return self.absolute(self.layer_path("raw", table))

    def snapshot(self, table: TableName) -> str:
        """Return the address of the Delta table with the snapshots of `table`."""
        return self.absolute(self.layer_path("snapshot", table))

    def current(self, table: TableName) -> str:
        """Return the address of the Delta table with the current rows of `table`."""
        return self.absolute(self.layer_path("current", table))

    def history(self, table: TableName) -> str:
        """Return the address of the Delta table with the versions of the rows of `table`."""
        return self.absolute(self.layer_path("history", table))

    def ledger(self, name: str) -> str:
        """Return the address of the ledger's Delta table `name`."""
        return self.absolute(f"_pgwal/{name}")

    def layer_path(self, layer: Layer, table: TableName) -> str:
        """Return the path of a table's Delta table relative to the lake's root, as `filesystem` takes it."""
        return f"{layer}/{path_segment(table.schema)}/{path_segment(table.name)}"

    def absolute(self, path: str) -> str:
        """Return the absolute path or URI of `path`, which is relative to the lake's root or absolute already."""
        return path if path.startswith("/") or "://" in path else f"{self.uri}/{path}"

    def relative(self, uri: str) -> str:
        """Return `uri` relative to the lake's root, so that records stay valid when the lake moves. One outside the lake stays absolute."""
        return uri.removeprefix(self.uri + "/")


def stored(lake: Lake, layer: Layer) -> list[TableName]:
    """Return the locations at which a layer has tables, also those that no table uses any more. Raises the storage's errors."""

    def folders(path: str) -> list[str]:
        found = filesystem(lake.uri).get_file_info(pafs.FileSelector(path, allow_not_found=True))
        return sorted(entry.base_name for entry in found if entry.type == pafs.FileType.Directory)

    pairs = [(schema, name) for schema in folders(layer) for name in folders(f"{layer}/{schema}")]
    return [TableName(_name_of(schema), _name_of(name)) for schema, name in pairs]


def require_writable(lake: Lake) -> None:
    """Raise LakeError if the lake cannot be reached or, locally, its folder's permissions forbid writing. Creates nothing."""
    if not lake.is_local:
        try:
            filesystem(lake.uri).get_file_info(pafs.FileSelector("", allow_not_found=True))
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise LakeError(f"The lake {lake.uri} cannot be reached: {reason}; check the AWS_* variables and PGWAL_LAKE.") from None
        return
    place = Path(lake.uri)
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise LakeError(f"The lake {lake.uri} cannot be written: {place} is not a folder; set PGWAL_LAKE to another path.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise LakeError(f"The lake {lake.uri} cannot be written: this user may not write to {place}; set PGWAL_LAKE to another path.")


def storage_options(uri: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the options with which delta-rs and Polars reach `uri`: none for a local folder, the usual AWS_* variables for `s3://`.

    With a custom endpoint the bucket goes into the path, and the region is us-east-1 unless one is set. An `http://` endpoint allows HTTP
    unless AWS_ALLOW_HTTP says otherwise.
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
    """Return a pyarrow file system rooted at `uri`, with the same storage and credentials as the Delta tables there.

    On a local one a file's folder must exist before the file is opened for writing.
    """
    return _filesystem(uri, tuple(sorted(storage_options(uri).items())))


@lru_cache(maxsize=16)
def _filesystem(uri: str, options: tuple[tuple[str, str], ...]) -> pafs.FileSystem:
    if "://" not in uri:
        return pafs.SubTreeFileSystem(uri, pafs.LocalFileSystem())
    # Arrow's own client, because the one of delta-rs blocks every thread of the process while it waits for the store.
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
    """Remove the file at `path`, relative to `uri`.

    On an object store by delta-rs: Arrow's client would leave an empty object with the folder's name.
    """
    if "://" in uri:
        DeltaStorageHandler(uri, storage_options(uri)).delete_file(path)
    else:
        filesystem(uri).delete_file(path)
