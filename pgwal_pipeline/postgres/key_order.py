"""Find the order of a table's key in an index, and build the SQL for ranges in that order."""

from collections.abc import Sequence
from dataclasses import dataclass

from pgwal_pipeline.postgres.catalog import Connection
from pgwal_pipeline.values.relation import Relation, quote_ident

_PLAIN_OPERATORS = (("pg_catalog", "<"), ("pg_catalog", "<="), ("pg_catalog", "="), ("pg_catalog", ">="), ("pg_catalog", ">"))


BORROWED_SQL = """(p.proargtypes[0] <> t.oid
    AND (SELECT x.typtype FROM pg_catalog.pg_type x WHERE x.oid = p.proargtypes[0]) <> 'p')"""
"""SQL: whether the output function `p` of the type `t` belongs to another type, as refcursor's is that of text. A call by name does not
accept a value of `t`, though Postgres itself writes the value with that function."""


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """A column of the key, and how the index compares it.

    `type_name` is its type with domains resolved (`domain`: whether the column's type is a domain), without a length. `output` is that
    type's output function, None if it belongs to another type (`BORROWED_SQL`). `collation` is the index's. All three are ready for SQL.
    `operators` are the schema and name of <, <=, =, >=, > in the index's operator family: a bare name would be resolved by the search
    path, which lacks those of extensions.
    """

    name: str
    type_name: str
    domain: bool
    output: str | None
    collation: str | None
    operators: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The expression of the column's text, as its type's output function writes it."""
        return f"pg_catalog.textin({self.output}({self.value}))" if self.output else f"pg_catalog.concat({self.value})"

    @property
    def sql(self) -> str:
        """The column as an operand."""
        return self.value + self._collate

    @property
    def value(self) -> str:
        """The column, a domain cast to its base type: an enum's operators and output function do not accept a domain."""
        return f"{quote_ident(self.name)}::{self.type_name}" if self.domain else quote_ident(self.name)

    def literal(self, text: str) -> str:
        """Return a value of the column's type, given as text, as an operand."""
        return "'" + text.replace("'", "''") + f"'::{self.type_name}" + self._collate

    def operator(self, strategy: int) -> str:
        """Return the operator of a btree strategy: 1 to 5 for <, <=, =, >=, >."""
        schema, name = self.operators[strategy - 1]
        return f"OPERATOR({quote_ident(schema)}.{name})"

    @property
    def _collate(self) -> str:
        return f" COLLATE {self.collation}" if self.collation else ""


@dataclass(frozen=True, slots=True)
class KeyOrder:
    """The key's columns, in the order that the relation's key and the index share. A bound is a text for each column, in that order."""

    key: tuple[KeyColumn, ...]

    @property
    def columns(self) -> str:
        """The select list of the key."""
        return ", ".join(quote_ident(column.name) for column in self.key)

    @property
    def texts(self) -> str:
        """The select list of a bound, from rows of `columns`."""
        return ", ".join(column.text for column in self.key)

    @property
    def ascending(self) -> str:
        """The ORDER BY list of the index's ascending order."""
        return ", ".join(f"{column.sql} USING {column.operator(1)}" for column in self.key)

    @property
    def descending(self) -> str:
        """The ORDER BY list of the descending order."""
        return ", ".join(f"{column.sql} USING {column.operator(5)}" for column in self.key)

    def after(self, bound: tuple[str, ...]) -> str:
        """Return the condition for keys after `bound`."""
        return self._compared(bound, strict=5, loose=4, row=">")

    def up_to(self, bound: tuple[str, ...]) -> str:
        """Return the condition for keys up to and including `bound`."""
        return self._compared(bound, strict=1, loose=2, row="<=")

    def equal(self, bound: tuple[str, ...]) -> str:
        """Return the condition for the one key `bound`."""
        pairs = zip(self.key, bound, strict=True)
        return " AND ".join(f"{column.sql} {column.operator(3)} {column.literal(text)}" for column, text in pairs)

    def among(self, bounds: Sequence[tuple[str, ...]]) -> str:
        """Return the condition for the keys `bounds`."""
        if not bounds:
            return "false"
        if any(column.operators != _PLAIN_OPERATORS for column in self.key):
            return f"({' OR '.join(f'({self.equal(bound)})' for bound in bounds)})"
        rows = (", ".join(column.literal(text) for column, text in zip(self.key, bound, strict=True)) for bound in bounds)
        return f"({', '.join(column.sql for column in self.key)}) IN (VALUES {', '.join(f'({row})' for row in rows)})"

    def _compared(self, bound: tuple[str, ...], *, strict: int, loose: int, row: str) -> str:
        values = [column.literal(text) for column, text in zip(self.key, bound, strict=True)]
        if all(column.operators == _PLAIN_OPERATORS for column in self.key):
            # A row comparison is a single index condition for any number of columns.
            return f"({', '.join(column.sql for column in self.key)}) {row} ({', '.join(values)})"
        *leading, last = zip(self.key, values, strict=True)
        closing = strict if row == ">" else loose
        condition = f"{last[0].sql} {last[0].operator(closing)} {last[1]}"
        for column, value in reversed(leading):
            beyond = f"{column.sql} {column.operator(strict)} {value}"
            condition = f"({beyond} OR ({column.sql} {column.operator(3)} {value} AND {condition}))"
        if leading:
            # Redundant, but the index scan can start with it.
            column, value = leading[0]
            condition = f"{column.sql} {column.operator(loose)} {value} AND {condition}"
        return condition


def key_order(conn: Connection, relation: Relation) -> KeyOrder | None:
    """Return the order of the relation's key in an index, None if there is no such index.

    The index must have just the key's columns in the key's order, all ascending or all descending. Raises psycopg2.Error.
    """
    rows = conn.execute(
        f"""SELECT i.indexrelid, a.attname::text, k.option,
               pg_catalog.quote_ident(cn.nspname) || '.' || pg_catalog.quote_ident(c.collname),
               pg_catalog.format_type(base.oid, -1), a.atttypid <> base.oid,
               CASE WHEN NOT {BORROWED_SQL.replace("t.oid", "base.oid")}
                   THEN pg_catalog.quote_ident(pn.nspname) || '.' || pg_catalog.quote_ident(p.proname) END,
               (SELECT pg_catalog.array_agg(ARRAY[opn.nspname::text, o.oprname::text] ORDER BY s.amopstrategy)
                FROM pg_catalog.pg_amop s
                JOIN pg_catalog.pg_operator o ON o.oid = s.amopopr
                JOIN pg_catalog.pg_namespace opn ON opn.oid = o.oprnamespace
                WHERE s.amopfamily = oc.opcfamily AND s.amoplefttype = oc.opcintype AND s.amoprighttype = oc.opcintype
                    AND s.amoppurpose = 's')
           FROM pg_catalog.pg_index i
           JOIN pg_catalog.pg_class ic ON ic.oid = i.indexrelid
           JOIN pg_catalog.pg_am am ON am.oid = ic.relam AND am.amname = 'btree'
           CROSS JOIN LATERAL unnest(i.indkey::int2[], i.indclass::oid[], i.indcollation::oid[], i.indoption::int2[])
               WITH ORDINALITY AS k (attnum, opclass, collated, option, place)
           JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
           JOIN pg_catalog.pg_opclass oc ON oc.oid = k.opclass
           JOIN unnest(%s::text[], %s::oid[]) AS asked (name, type) ON asked.name = a.attname
           JOIN pg_catalog.pg_type base ON base.oid = asked.type
           JOIN pg_catalog.pg_proc p ON p.oid = base.typoutput
           JOIN pg_catalog.pg_namespace pn ON pn.oid = p.pronamespace
           LEFT JOIN pg_catalog.pg_collation c ON c.oid = k.collated
           LEFT JOIN pg_catalog.pg_namespace cn ON cn.oid = c.collnamespace
           WHERE i.indrelid = %s AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
               AND i.indnkeyatts = %s AND k.place <= i.indnkeyatts
           ORDER BY i.indisprimary DESC, i.indisreplident DESC, i.indexrelid, k.place""",
        [
            list(relation.key),
            [column.type.oid for name in relation.key for column in relation.columns if column.name == name],
            relation.oid,
            len(relation.key),
        ],
    ).fetchall()
    by_index: dict[int, list[tuple[KeyColumn, int]]] = {}
    for index, name, option, collation, type_name, domain, output, operators in rows:
        column = KeyColumn(name, type_name, domain, output, collation, tuple((pair[0], pair[1]) for pair in operators or ()))
        by_index.setdefault(index, []).append((column, option))
    for found in by_index.values():
        columns = tuple(column for column, _ in found)
        # 0 is ascending with nulls last (read forward), 3 is descending with nulls first (read backward). A mixture does not fit.
        if (
            tuple(column.name for column in columns) == relation.key
            and {option for _, option in found} in ({0}, {3})
            and all(len(column.operators) == 5 for column in columns)
        ):
            return KeyOrder(columns)
    return None
