"""The settings as attributes of the component: one for each field of Settings, so that Dagster's schema has their meaning and default.

An attribute that is left out is the environment's. Whatever is given goes through Settings as if the environment had it, so the errors are
the same. The schema finds what can be told without that: wrong names, types, units, choices and ranges.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import dagster as dg
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from pgwal_pipeline.components.environment import SourceSettings
from pgwal_pipeline.messages.errors import SettingError
from pgwal_pipeline.settings import PREFIX, Settings, parse_duration, parse_size

MEANINGS = {
    "source_dsn": "The source. Take it from the environment, as in '{{ env.SHOP_DSN }}': the file is no place for a password",
    "lake": "The lake",
    "slot": "The replication slot",
    "publication": "The publication: used as it is when it exists and is not ours, else made and kept in step with `tables`",
    "tables": "The tables of our publication; or a mapping from table globs to options, as `table_options` takes it",
    "lag_threshold": "The sensor asks for a run past this lag",
    "max_staleness": "The sensor asks for a run when a commit may have been unread for longer than this",
    "busy_timeout": "How long a second drain waits for the slot before it gives up",
    "blocked_timeout": "How long to wait for old transactions of the source before giving up",
    "catchup_threshold": "Past this lag the backlog is cut into windows, which are read side by side",
    "catchup_slots": "Most extra slots at once for that; 0 turns it off",
    "on_slot_loss": "What to do when the slot is lost",
    "on_table_error": "What to do with a table that cannot be followed",
    "on_rewrite": "What to do when a table is rewritten in a way that the WAL does not show",
    "snapshot_workers": "Chunks read at once",
    "snapshot_chunk_rows": "Rows of a chunk, about",
    "window_size": "A long drain is committed and confirmed in windows of about so much WAL",
    "window_time": "A long drain is committed and confirmed in windows of about so much reading time",
    "memory_budget": "Bytes of undecoded and unwritten changes held at once",
    "raw_retention": "Raw windows older than this, and published, may be pruned",
    "as_of_retention": "How long the versions that a publish names stay readable",
    "verify_every": "Each table is proven whole to equal its source within this time",
    "verify_budget": "How long one run of verify compares, about",
    "spark_master": "The Spark master",
    "spark_remote": "A Spark Connect server instead of a session of our own",
    "spark_idle": "How long the warm engine of a local master outlives its last use",
    "spark_conf": "More Spark settings",
    "table_options": "What must not arrive of single tables, and what a change of their columns leads to",
    "hash_key": "The key of hashed columns. Take it from the environment, as in '{{ env.HASH_KEY }}': the file is no place for it",
    "spark_catalog": "Each current table is registered there after a publish",
}
"""What each setting means, as the schema says it."""

_SIZE = r"^\s*\d{1,18}(\.\d+)?\s*([kKMGT]?[bB]?)\s*$"
_DURATION = r"^\s*\d{1,12}(\.\d+)?\s*(ms|s|min|m|h|d|)\s*$"
_TEMPLATE = r"\{\{"  # what is only known once it is rendered
_SIZES = {"TB": 1 << 40, "GB": 1 << 30, "MB": 1 << 20, "kB": 1 << 10, "B": 1}
_DURATIONS = {"d": 86400, "h": 3600, "min": 60, "s": 1}
_VARIABLE = re.compile(r"env(?:\.|\(\s*['\"])(\w+)")


@dataclass(frozen=True)
class Unset:
    """The value of an attribute whose template gave none; `variables` are those that it names."""

    variables: tuple[str, ...]


def given_settings(attributes: Mapping[str, Any]) -> SourceSettings:
    """Return the settings of a source from its component's attributes, of which None is left out.

    Raises SettingError for an attribute whose template or variable gave no value. Only that of the DSN may: its source cannot be read then,
    and what stands beside it can.
    """
    given, unset = {}, ()
    for attribute_name, attribute in attributes.items():
        value = _plain(attribute)
        # A mapping says what is wanted of tables, and not only which of them.
        name = "table_options" if attribute_name == "tables" and isinstance(value, Mapping) else attribute_name
        if isinstance(value, Unset) and name == "source_dsn":
            unset = value.variables or (name,)
        elif isinstance(value, Unset):
            raise SettingError(
                f"{' and '.join(value.variables) or name} is not set; {name} takes {Settings.model_fields[name].description}."
            )
        elif value is not None:
            given[PREFIX + name.upper()] = json.dumps(dict(value)) if isinstance(value, Mapping) else str(value)
    return SourceSettings(given, unset)


def _plain(value: Any) -> Any:
    """Return the value of what Dagster and pydantic wrap."""
    if isinstance(value, dg.EnvVar):
        return value.get_value() or Unset((value.env_var_name,))
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def shown_default(name: str) -> str | int | None:
    """Return a setting's default as the guides have it, None if it has none."""
    setting = Settings.model_fields[name]
    value: Any = setting.default if setting.default_factory is None else None
    if _parser(setting) is parse_size:
        return next(f"{value // size}{unit}" for unit, size in _SIZES.items() if value % size == 0)
    if _parser(setting) is parse_duration:
        return next(f"{value / size:g}{unit}" for unit, size in _DURATIONS.items() if value >= 2 * size or unit == "s")
    return value


def _attribute(name: str, setting: FieldInfo) -> tuple[str, Any, Any]:
    """Return the component's attribute for a setting: name, type with Dagster's resolver, and field."""
    text, default = _text(setting), shown_default(name)
    schema = _range(setting)
    schema |= {} if text is None else {"pattern": f"{text}|{_TEMPLATE}"}
    schema |= {} if default is None else {"default": default}
    left_out = f"Left out, it is {PREFIX}{name.upper()} of the environment{'' if default is None else f', else {default}'}."
    resolver = dg.Resolver(
        _resolve,
        model_field_type=str | dict[str, Any] if name == "tables" else _yaml_type(setting),
        description=f"{MEANINGS.get(name, name)}: {setting.description}. {left_out}",
        json_schema_extra=schema,
        inject_before_resolve=False,
    )
    return name, Annotated[Any, resolver], field(default=None, repr=False, kw_only=True)


def _resolve(context: dg.ResolutionContext, value: Any) -> Any:
    """Render the templates of a value; Unset if that gives none."""
    found = context.resolve_value(value)
    if found is None or found == "":
        return Unset(tuple(_VARIABLE.findall(value)) if isinstance(value, str) else ())
    return found


def _yaml_type(setting: FieldInfo) -> Any:
    """Return the type that a setting has in YAML. Any may be a template, and so text."""
    if _parser(setting) is parse_duration:
        return str | int | float
    if setting.annotation is int:
        return str | int
    kinds = {setting.annotation, *get_args(setting.annotation)}
    of_text = get_origin(setting.annotation) is Literal or (get_origin(setting.annotation) is not dict and kinds & {str, SecretStr})
    return str if of_text else str | dict[str, Any]


def _parser(setting: FieldInfo) -> Callable[[Any], Any] | None:
    return next((found.func for found in setting.metadata if hasattr(found, "func")), None)


def _range(setting: FieldInfo) -> dict[str, Any]:
    """Return the range of a setting as JSON schema has it."""
    limits = {"ge": "minimum", "le": "maximum"}
    return {told: getattr(found, name) for found in setting.metadata for name, told in limits.items() if hasattr(found, name)}


def _text(setting: FieldInfo) -> str | None:
    """Return the pattern of what a setting takes as text, None if that is any."""
    parser = _parser(setting)
    if parser in (parse_size, parse_duration):
        return _SIZE if parser is parse_size else _DURATION
    if get_origin(setting.annotation) is Literal:
        return f"^({'|'.join(get_args(setting.annotation))})$"
    if setting.annotation is int:
        return r"^\d+$"
    return next((found.pattern for found in setting.metadata if getattr(found, "pattern", None)), None)


_ATTRIBUTES = [_attribute(name, setting) for name, setting in Settings.model_fields.items()]

SettingAttributes: Any = make_dataclass("SettingAttributes", _ATTRIBUTES)
"""The base class of the component, with a field for each setting. Any, since a type checker cannot know the fields."""
