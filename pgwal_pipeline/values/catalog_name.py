"""The names that published tables have in a catalog of Spark's."""

import re
from dataclasses import dataclass

from pgwal_pipeline.values.relation import TableName

PATTERN = r"^([A-Za-z0-9_-]+)\.((?:[A-Za-z0-9_-]|\{schema\})+)$"
"""What the text of a CatalogPattern matches as a whole."""

_UNUSUAL = re.compile(r"[^a-z0-9_]")


@dataclass(frozen=True, slots=True, order=True)
class CatalogName:
    """A table's name in a catalog; `str()` is what people read, `sql` what Spark does."""

    catalog: str
    schema: str
    table: str

    def __str__(self) -> str:
        return f"{self.catalog}.{self.schema}.{self.table}"

    @property
    def sql(self) -> str:
        """The name in Spark SQL."""
        return f"{self.schema_sql}.`{self.table}`"

    @property
    def schema_sql(self) -> str:
        """The name of its schema in Spark SQL."""
        return f"`{self.catalog}`.`{self.schema}`"

    @classmethod
    def parse(cls, text: str) -> "CatalogName":
        """Read what `str()` wrote."""
        return cls(*text.split("."))


@dataclass(frozen=True, slots=True)
class CatalogPattern:
    """Where tables are registered: a catalog, and a schema in which `{schema}` is that of the source."""

    catalog: str
    schema: str

    @classmethod
    def parse(cls, text: str) -> "CatalogPattern":
        """Read `catalog.schema-pattern`. Raises ValueError."""
        match = re.fullmatch(PATTERN, text)
        if match is None:
            raise ValueError(f"{text!r} is not a catalog and a schema such as spark_catalog.lake_{{schema}}")
        return cls(match[1], match[2])

    def of(self, table: TableName) -> CatalogName:
        """Return the name of `table`: in lower case, and with `_` for what catalogs do not take in a name."""
        schema = self.schema.replace("{schema}", _usual(table.schema))
        return CatalogName(self.catalog, schema.lower(), _usual(table.name))


def _usual(name: str) -> str:
    return _UNUSUAL.sub("_", name.lower())
