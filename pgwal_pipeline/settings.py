"""Every setting with its default and what it takes.

Sizes and durations are written as Postgres writes them: `16MB` (1 kB is 1024 bytes), `500ms`, `60s`, `10min`, `2h`, `7d`.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, SecretStr, ValidationError, field_validator

from pgwal_pipeline.messages.errors import SettingError
from pgwal_pipeline.values.catalog_name import PATTERN as CATALOG_PATTERN
from pgwal_pipeline.values.protection import Protection
from pgwal_pipeline.values.table_options import OptionError, TableOptions, parse_options

PREFIX = "PGWAL_"

ROW_BYTES = 64 << 20
"""Bytes that one row may have, whatever the memory budget."""

_SHOWN = 80  # characters of a wrong value that its error message repeats
_SECRET = frozenset({"source_dsn", "spark_conf", "spark_remote", "hash_key", "table_options"})
_IN_FILE = "_FILE"  # after the name of a setting that may hold a secret: the file that holds its value
_UNITS = {"B": 1, "": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(value: Any) -> Any:
    """Return the bytes of a size such as `16MB`; return any other type unchanged. Raises ValueError."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([kKMGT]?[bB]?)\s*", value)
    unit = match[2].upper() if match else ""
    if match is None or unit not in _UNITS:
        raise ValueError("a size such as 16MB or 1GB")
    return int(float(match[1]) * _UNITS[unit])


def parse_duration(value: Any) -> Any:
    """Return the seconds of a duration such as `10min`; return any other type unchanged. Raises ValueError."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d+)?)\s*(ms|s|min|m|h|d|)\s*", value)
    if match is None:
        raise ValueError("a duration such as 500ms, 60s, 10min, 2h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


def _parse_conf(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        conf = json.loads(value)
    except ValueError:
        conf = None
    if not isinstance(conf, dict) or not all(isinstance(item, (str, int, float, bool)) for item in conf.values()):
        raise ValueError('a JSON object of Spark settings such as {"spark.driver.memory": "4g"}')
    return {str(name): json.dumps(item) if isinstance(item, bool) else str(item) for name, item in conf.items()}


def _table_options(value: Any) -> Any:
    """Return the options of tables from a mapping, from JSON, or from the path of a YAML or JSON file. Raises SettingError."""
    if isinstance(value, TableOptions):
        return value
    where = f"{PREFIX}TABLE_OPTIONS"
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise SettingError(f"{where} is no JSON ({error}), and no path of a YAML or JSON file either.") from None
    elif isinstance(value, str):
        where = f"The file {value} that {where} names"
        value = _yaml(value, where)
    try:
        return parse_options(value)
    except OptionError as error:
        raise SettingError(f"{where} {error}.") from None


def _yaml(path: str, where: str) -> Any:
    try:
        return yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, RuntimeError) as error:
        raise SettingError(f"{where} cannot be read ({error.strerror if isinstance(error, OSError) else error}).") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" (line {mark.line + 1})"
        raise SettingError(f"{where} is neither YAML nor JSON in UTF-8{place}.") from None


def _hash_key(value: Any) -> Any:
    """Return the key of hashes, which may be in a file: `@/path`. Raises SettingError."""
    if not isinstance(value, str) or not value.startswith("@"):
        return value
    try:
        key = Path(value[1:]).expanduser().read_bytes().decode().rstrip("\r\n")
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8" if isinstance(error, ValueError) else error
        raise SettingError(f"{PREFIX}HASH_KEY names the file {value[1:]}, which cannot be read ({reason}).") from None
    if not key:
        raise SettingError(f"{PREFIX}HASH_KEY names the file {value[1:]}, which is empty; write the key into it.")
    return key


def _may_hold_secret(name: str, value: str) -> bool:
    """Return whether an error must not repeat the value: any value of some settings, of others what has the form of an address or a DSN."""
    return name in _SECRET or "://" in value or "=" in value


def _as_variable(value: Any) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, TableOptions):
        return value.to_json()
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _from_file(variable: str, environment: Mapping[str, str]) -> str | None:
    """What the file has that `variable` names, without the end of its line; None if the variable is not set or the file is empty."""
    path = environment.get(variable)
    if not path:
        return None
    try:
        return Path(path).read_text().rstrip("\r\n") or None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        shown = "" if _may_hold_secret(variable, path) else f" {path[:_SHOWN]}"
        raise SettingError(f"{variable} names a file{shown} that cannot be read ({reason}); correct its name or its permissions.") from None


Size = Annotated[int, BeforeValidator(parse_size)]
Duration = Annotated[float, BeforeValidator(parse_duration)]


class Settings(BaseModel):
    """Everything that a run needs to know. Frozen; made once, by `from_environment`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source_dsn: Annotated[
        SecretStr | None,
        Field(description="libpq string or URI of the source; PG* variables, PGPASSFILE and service files as libpq has them"),
    ] = None
    lake: Annotated[str, Field(description="folder or s3://bucket/prefix (then the usual AWS_* variables)")] = "./lake"
    slot: Annotated[
        str,
        Field(
            pattern=r"^[a-z0-9_]{1,50}$", description="the replication slot: lower-case letters, digits and underscores, at most 50 of them"
        ),
    ] = "pgwal"
    publication: Annotated[str, Field(description="the publication's name, at most 63 bytes")] = "pgwal"
    tables: Annotated[str, Field(description="comma-separated schema.table globs such as shop.*,public.orders")] = "*.*"
    lag_threshold: Annotated[Size, Field(ge=0, description="a size such as 16MB")] = 16 << 20
    max_staleness: Annotated[Duration, Field(ge=0, description="a duration such as 10s")] = 10.0
    busy_timeout: Annotated[Duration, Field(ge=0, description="a duration such as 60s")] = 60.0
    blocked_timeout: Annotated[Duration, Field(ge=0, description="a duration such as 10min")] = 600.0
    catchup_threshold: Annotated[Size, Field(ge=0, description="a size such as 1GB")] = 1 << 30
    catchup_slots: Annotated[int, Field(ge=0, le=64, description="a number from 0 to 64")] = 2
    on_slot_loss: Annotated[Literal["stop", "resnapshot"], Field(description="stop or resnapshot")] = "stop"
    on_table_error: Annotated[Literal["stop", "resnapshot"], Field(description="stop or resnapshot")] = "stop"
    on_rewrite: Annotated[Literal["resnapshot", "ignore"], Field(description="resnapshot or ignore")] = "resnapshot"
    snapshot_workers: Annotated[int, Field(ge=1, le=64, description="a number from 1 to 64")] = 2
    snapshot_chunk_rows: Annotated[int, Field(ge=1, description="a number of rows, at least 1")] = 500_000
    window_size: Annotated[Size, Field(ge=1 << 20, description="a size of at least 1MB such as 256MB")] = 256 << 20
    window_time: Annotated[Duration, Field(ge=1, description="a duration of at least 1s such as 60s")] = 60.0
    memory_budget: Annotated[Size, Field(ge=1 << 20, description="a size of at least 1MB such as 256MB")] = 256 << 20
    raw_retention: Annotated[Duration, Field(ge=0, description="a duration such as 7d")] = 7 * 86400.0
    as_of_retention: Annotated[Duration, Field(ge=0, description="a duration such as 7d")] = 7 * 86400.0
    verify_every: Annotated[Duration, Field(gt=0, description="a duration such as 7d")] = 7 * 86400.0
    verify_budget: Annotated[Duration, Field(gt=0, description="a duration such as 5min")] = 300.0
    spark_master: Annotated[str, Field(min_length=1, description="a Spark master such as local[*] or spark://host:7077")] = "local[*]"
    spark_remote: Annotated[str | None, Field(pattern=r"\Asc://", description="a Spark Connect address such as sc://host:15002")] = None
    spark_idle: Annotated[Duration, Field(ge=0, description="a duration such as 15min; 0 starts Spark in each run")] = 900.0
    spark_conf: Annotated[
        dict[str, str],
        BeforeValidator(_parse_conf),
        Field(description='a JSON object of Spark settings such as {"spark.driver.memory": "4g"}'),
    ] = Field(default_factory=dict)

    spark_catalog: Annotated[
        str | None,
        Field(
            pattern=CATALOG_PATTERN,
            description="a catalog and a schema pattern, of letters, digits, - and _, such as spark_catalog.lake_{schema}",
        ),
    ] = None

    table_options: Annotated[
        InstanceOf[TableOptions],
        BeforeValidator(_table_options),
        Field(description="a YAML or JSON file, or JSON itself, that gives table globs their options"),
    ] = Field(default_factory=TableOptions)
    hash_key: Annotated[
        SecretStr | None, BeforeValidator(_hash_key), Field(description="the key of hashed columns, or @/path of a file that holds it")
    ] = None

    @field_validator("publication")
    @classmethod
    def _publication_name(cls, value: str) -> str:
        if not 1 <= len(value.encode()) <= 63 or "\0" in value:
            raise ValueError
        return value

    @field_validator("tables")
    @classmethod
    def _table_globs(cls, value: str) -> str:
        if not all(re.fullmatch(r"[^.]+\..+", glob.strip()) for glob in value.split(",")):
            raise ValueError
        return value

    @field_validator("lake")
    @classmethod
    def _lake_uri(cls, value: str) -> str:
        if re.fullmatch(r"s3a?://[^/@]+(/.*)?", value):
            return "s3://" + value.split("://", 1)[1].rstrip("/")
        if value.strip() == "" or "://" in value:
            raise ValueError
        try:
            folder = Path(value).expanduser().absolute()
            is_file = folder.is_file()
        except (OSError, RuntimeError) as error:
            shown = "" if _may_hold_secret("lake", value) else f", {value[:_SHOWN]!r},"
            reason = str(error.strerror if isinstance(error, OSError) else error).rstrip(".")
            raise SettingError(
                f"{PREFIX}LAKE{shown} cannot be accessed ({reason}); set it to a folder that this user can reach, or to s3://bucket/prefix."
            ) from None
        if is_file:
            raise ValueError
        return str(folder)

    @property
    def dsn(self) -> str:
        """The source's connection string; libpq's variables fill what it leaves out. Raises SettingError if no source is named."""
        if self.source_dsn is not None:
            return self.source_dsn.get_secret_value()
        if any(os.environ.get(name) for name in ("PGHOST", "PGHOSTADDR", "PGPORT", "PGSERVICE", "PGDATABASE", "PGUSER")):
            return ""
        raise SettingError(
            "PGWAL_SOURCE_DSN is not set; it takes the source's libpq string or URI, such as postgresql://user@host/database."
        )

    @property
    def protection(self) -> Protection:
        """How columns are protected, by the options of tables. Raises SettingError if columns are to be hashed and there is no key."""
        if self.hash_key is None and self.table_options.hashes:
            raise SettingError(
                f"{PREFIX}HASH_KEY is not set, but {PREFIX}TABLE_OPTIONS has columns to hash; set it to the key, or to @/path of its file."
            )
        return Protection(self.table_options, b"" if self.hash_key is None else self.hash_key.get_secret_value().encode())

    @property
    def largest_row(self) -> int:
        """Bytes that one row may have: 64 MB, or a quarter of the memory budget where that is more. A merge takes many times as much."""
        return max(ROW_BYTES, self.memory_budget // 4)

    @property
    def catch_up_asked_for(self) -> bool:
        """Whether PGWAL_CATCHUP_THRESHOLD or PGWAL_CATCHUP_SLOTS was given."""
        return not self.model_fields_set.isdisjoint({"catchup_threshold", "catchup_slots"})

    def to_environment(self) -> dict[str, str]:
        """Return the `PGWAL_*` variables from which `from_environment` makes the same settings in another process, the DSN included."""
        return {
            PREFIX + name.upper(): _as_variable(value)
            for name in type(self).model_fields
            if (value := getattr(self, name)) is not None and value != {} and value != TableOptions()
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Read the `PGWAL_*` variables. Empty ones count as unset; `overrides` win. Raises SettingError naming the variable."""
        environment = os.environ if environment is None else environment
        values: dict[str, Any] = {
            name: environment[PREFIX + name.upper()] for name in cls.model_fields if environment.get(PREFIX + name.upper(), "") != ""
        }
        for name in _SECRET - values.keys() - overrides.keys():
            value = _from_file(PREFIX + name.upper() + _IN_FILE, environment)
            if value is not None:
                values[name] = value
        for name, value in values.items():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise SettingError(f"{PREFIX}{name.upper()} holds bytes that are not UTF-8; write it in UTF-8.") from None
        try:
            made = cls(**(values | overrides))
            assert made.protection is not None  # made at once, so that a missing key is found before anything is read
            return made
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0])
            field = cls.model_fields.get(name)
            takes = field.description if field is not None else "no value: there is no such setting"
            value = str(first["input"])
            shown = "" if _may_hold_secret(name, value) else f" is {value[:_SHOWN]!r}, but it"
            raise SettingError(f"{PREFIX}{name.upper()}{shown} takes {takes}.") from None
