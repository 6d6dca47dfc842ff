"""Which columns of Dagster's lineage depend on columns of the source. Loading this module loads Dagster."""

import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import dagster as dg

from pgwal_pipeline.asset_specs import CURRENT, LAYER, LINEAGE, TABLE, AssetNames
from pgwal_pipeline.sources import project_file, project_of
from pgwal_pipeline.values.relation import TableName

Column = tuple[dg.AssetKey, str]


def columns_lost(names: AssetNames, lost: Iterable[tuple[TableName, str]]) -> tuple[list[dict[str, str]], list[str]]:
    """Return the columns of assets that lose their source if the columns `lost` of tables are gone, and warnings.

    They are those of `current`, which `names` has the keys of, and what the lineage of other assets says comes from these: that of the
    definitions of the Dagster project around the working directory, and that of the newest materializations in Dagster's instance.
    """
    gone = list(lost)
    if not gone:
        return [], []
    definitions, warnings = _definitions()
    deps: dict[Column, set[Column]] = {}
    keys: dict[str, set[dg.AssetKey]] = {}
    for key, metadata in (*_of_definitions(definitions), *_of_instance()):
        if metadata.get(LAYER) == CURRENT and isinstance(table := metadata.get(TABLE), str):
            keys.setdefault(table, set()).add(key)
        if isinstance(lineage := metadata.get(LINEAGE), dg.TableColumnLineage):
            for column, upstream in lineage.deps_by_column.items():
                for dep in upstream:
                    deps.setdefault((dep.asset_key, dep.column_name), set()).add((key, column))
    found: dict[Column, str] = {}
    for table, column in gone:
        source = f"{table}.{column}"
        todo: list[Column] = [(key, column) for key in sorted(keys.get(str(table), {names.current(table)}))]
        while todo:
            at = todo.pop()
            if at not in found:
                found[at] = source
                todo += deps.get(at, ())
    return [
        {"asset": key.to_user_string(), "column": column, "source": source}
        for (key, column), source in sorted(found.items(), key=lambda item: (item[0][0].to_user_string(), item[0][1]))
    ], warnings


def _of_definitions(definitions: dg.Definitions | None) -> Iterator[tuple[dg.AssetKey, Mapping[str, Any]]]:
    if definitions is not None:
        for spec in definitions.resolve_all_asset_specs():
            yield spec.key, spec.metadata


def _of_instance() -> Iterator[tuple[dg.AssetKey, Mapping[str, Any]]]:
    """The metadata of the newest materialization of each asset, if there is an instance."""
    home = os.environ.get("DAGSTER_HOME") or ".dagster"
    if not Path(home).expanduser().is_dir():
        return
    os.environ["DAGSTER_HOME"] = str(Path(home).expanduser().absolute())
    with suppress(dg.DagsterError), dg.DagsterInstance.get() as instance:
        for record in instance.get_asset_records():
            newest = record.asset_entry.last_materialization
            if newest is not None and newest.asset_materialization is not None:
                yield (
                    record.asset_entry.asset_key,
                    {name: getattr(value, "value", value) for name, value in newest.asset_materialization.metadata.items()},
                )


def _definitions() -> tuple[dg.Definitions | None, list[str]]:
    """The definitions of the Dagster project around the working directory, if there is one and it loads; and warnings."""
    file = project_file()
    project = {} if file is None or file.suffix != ".toml" else project_of(file) or {}
    root = project.get("root_module")
    module = project.get("module_name") or (root and f"{root}.definitions")
    if file is None or not isinstance(module, str):
        return None, []
    for place in (str(file.parent / "src"), str(file.parent)):
        if place not in sys.path:
            sys.path.insert(0, place)
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - it is the user's code
        return None, [f"The definitions {module} do not load ({type(error).__name__}), so their columns were not looked at."]
    for value in vars(loaded).values():
        if isinstance(value, dg.Definitions):
            return value, []
        if type(value).__name__ == "LazyDefinitions" and callable(getattr(value, "load_fn", None)):
            try:
                return value(), []
            except Exception as error:  # noqa: BLE001 - it is the user's code
                return None, [f"The definitions {module} do not load ({type(error).__name__}), so their columns were not looked at."]
    return None, []
