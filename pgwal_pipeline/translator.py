"""What users make of our assets: other keys, groups, tags, owners, descriptions, automation conditions and metadata.

A translator changes what an asset is called and shown as, never how the assets hang together: their dependencies on one another, column
lineage, partitions and checks follow the keys that it gives.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import dagster as dg

from pgwal_pipeline.asset_specs import CURRENT, HISTORY, RAW, SNAPSHOT, SOURCE, AssetNames, AssetSpecs, Layer
from pgwal_pipeline.known_tables import KnownColumn, KnownTable
from pgwal_pipeline.messages.errors import SettingError
from pgwal_pipeline.messages.printable import distinct, printable
from pgwal_pipeline.values.relation import TableName

_log = logging.getLogger("dagster.pgwal_pipeline")

_LINEAGE = "dagster/column_lineage"


@dataclass(frozen=True)
class CdcTable:
    """A table of the source as a translator gets it. As text it is `schema.table`."""

    known: KnownTable
    defaults: AssetSpecs

    @property
    def schema(self) -> str:
        """The name of its schema."""
        return self.known.table.schema

    @property
    def name(self) -> str:
        """Its own name."""
        return self.known.table.name

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of its key, none if it has none."""
        return self.known.key

    @property
    def columns(self) -> tuple[KnownColumn, ...]:
        """Its columns; none of a table that has joined since the definitions were loaded."""
        return self.known.columns

    @property
    def comment(self) -> str | None:
        """Its COMMENT in Postgres."""
        return self.known.comment

    def default_spec(self, layer: Layer) -> dg.AssetSpec:
        """Return the spec that its asset in a layer has without a translator."""
        return self.defaults.of(layer, self.known)

    def __str__(self) -> str:
        return str(self.known.table)


class PgwalTranslator:
    """Says how each table's assets are called and shown. Override `get_asset_spec`."""

    def get_asset_spec(self, layer: Layer, table: CdcTable) -> dg.AssetSpec:
        """Return the spec of the table's asset in a layer: `source`, `raw`, `snapshot`, `current`, or `history` where one is kept.

        It must say the same for the same layer and table each time, since definitions are loaded in many processes. Dependencies on our own
        assets need not be given: they follow the keys.
        """
        return table.default_spec(layer)


def translated(specs: AssetSpecs, translator: PgwalTranslator, tables: Iterable[KnownTable]) -> AssetSpecs:
    """Return `specs` as `translator` wants them, for the known `tables` and any other."""
    translation = _Translation(specs, translator, {known.table: known for known in tables})
    names = _TranslatedNames(**_fields(specs.names), translation=translation)
    return _TranslatedSpecs(**{**_fields(specs), "names": names}, translation=translation)


def _fields(of: AssetNames | AssetSpecs) -> dict[str, Any]:
    return {field.name: getattr(of, field.name) for field in fields(of)}


def refuse_shared_keys(specs: AssetSpecs, tables: Iterable[KnownTable]) -> None:
    """Raise SettingError if two assets have one key."""
    found: dict[dg.AssetKey, str] = {specs.names.slot: "the slot"}
    for known in tables:
        for layer in specs.layers_of(known):
            key, what = specs.names.of(layer, known.table), f"{layer} of {known.table}"
            if key in found:
                raise SettingError(
                    f"The translation gives {found[key]} and {printable(what)} the same key, {key.to_user_string()}; "
                    "make it of the layer, the schema and the table's name."
                )
            found[key] = printable(what)


class _Translation:
    def __init__(self, specs: AssetSpecs, translator: PgwalTranslator, known: Mapping[TableName, KnownTable]) -> None:
        self._defaults, self._translator, self._known = specs, translator, known
        self._found: dict[tuple[str, TableName], dg.AssetSpec] = {}

    def key(self, layer: Layer, table: TableName) -> dg.AssetKey:
        """Return the key of an asset; of a table that has joined since the load the default one, if the translator fails for it."""
        if (known := self._known.get(table)) is not None:
            return self._translated(layer, known).key
        try:
            return self._translated(layer, KnownTable(table, ())).key
        except Exception as error:  # noqa: BLE001 - users' code, which must not hold up the other tables; the next load raises it
            _log.warning("The translation of %s fails (%s: %s).", printable(str(table)), type(error).__name__, error)
            return self._defaults.names.of(layer, table)

    def spec(self, layer: Layer, known: KnownTable) -> dg.AssetSpec:
        """Return the translated spec with the dependencies and the lineage of the default one, on translated keys."""
        spec, default = self._translated(layer, known), self._defaults.of(layer, known)
        keys = {self._defaults.names.of(each, known.table): self.key(each, known.table) for each in self._defaults.layers_of(known)}
        own = [dg.AssetDep(keys[dep.asset_key], partition_mapping=dep.partition_mapping) for dep in default.deps]
        taken = {*keys, *(dep.asset_key for dep in own)}
        ours: dict[str, Any] = {name: value for name, value in default.metadata.items() if name.startswith("pgwal/")}
        if isinstance(lineage := spec.metadata.get(_LINEAGE), dg.TableColumnLineage):
            ours[_LINEAGE] = _lineage_on(lineage, keys)
        return spec.replace_attributes(
            deps=[*own, *(dep for dep in spec.deps if dep.asset_key not in taken)], metadata={**spec.metadata, **ours}, skippable=False
        )

    def _translated(self, layer: Layer, known: KnownTable) -> dg.AssetSpec:
        if (found := self._found.get((layer, known.table))) is not None:
            return found
        spec = self._translator.get_asset_spec(layer, CdcTable(known, self._defaults))
        if not isinstance(spec, dg.AssetSpec):
            raise SettingError(f"The translation of {printable(str(known.table))} gives {layer} no AssetSpec, but {type(spec).__name__}.")
        if spec.partitions_def is not None:
            raise SettingError(
                f"The translation gives {layer} of {printable(str(known.table))} partitions; leave them out: raw has the windows of the "
                "slot, and the other layers have none."
            )
        # Names of tables may be in the key, which Dagster prints on terminals.
        spec = spec.replace_attributes(key=[part if printable(part) == part else distinct(part) for part in spec.key.path])
        return self._found.setdefault((layer, known.table), spec)


def _lineage_on(lineage: dg.TableColumnLineage, keys: Mapping[dg.AssetKey, dg.AssetKey]) -> dg.TableColumnLineage:
    return dg.TableColumnLineage(
        {
            column: [dg.TableColumnDep(asset_key=keys.get(dep.asset_key, dep.asset_key), column_name=dep.column_name) for dep in deps]
            for column, deps in lineage.deps_by_column.items()
        }
    )


@dataclass(frozen=True)
class _TranslatedNames(AssetNames):
    translation: _Translation | None = None

    def of(self, layer: Layer, table: TableName) -> dg.AssetKey:
        assert self.translation is not None
        return self.translation.key(layer, table)


@dataclass(frozen=True)
class _TranslatedSpecs(AssetSpecs):
    translation: _Translation | None = None

    def of(self, layer: Layer, known: KnownTable) -> dg.AssetSpec:
        assert self.translation is not None
        return self.translation.spec(layer, known)

    def source(self, known: KnownTable) -> dg.AssetSpec:
        return self.of(SOURCE, known)

    def raw(self, known: KnownTable) -> dg.AssetSpec:
        return self.of(RAW, known)

    def snapshot(self, known: KnownTable) -> dg.AssetSpec:
        return self.of(SNAPSHOT, known)

    def current(self, known: KnownTable) -> dg.AssetSpec:
        return self.of(CURRENT, known)

    def history(self, known: KnownTable) -> dg.AssetSpec:
        return self.of(HISTORY, known)
