"""Fold the events of a keyed table into one final change per key.

This is pure DataFrame logic: only `heads`, `last_truncate` and `truncates` start jobs. Expressions are SQL text, because each part of a
Column object is a call to the JVM (thousands for one small table).

The input is *steps*: rows with the source's columns, `_pgwal_op`, `_pgwal_text`, `_pgwal_commit_lsn`, `_pgwal_unchanged`, and their
position, `_pgwal_at_lsn` and `_pgwal_at_ordinal`. A step is one of three things: an event of raw; a whole row of a snapshot or of `current`
(op `S`), which counts as an insert; or the fact that a snapshot has no row with that key (op `A`).

A row's *incarnation* under a key begins with `I`, with `S`, or with a `U` that has a `K` at the same position (the row came from another
key). It ends with `D`, `K` or `A`. Incarnations that are linked by key changes form one *life* of the row. A value that was not sent can
only come from the same life.

The output is *changes*, one per key: the columns, `_pgwal_commit_lsn`, `_pgwal_text` and `_pgwal_gone` (the key has no row any more). Where
values may be unsent there are two arrays of column names too, null when empty: `_pgwal_kept` (the target's value under this key stays) and
`_pgwal_lost` (the value is in none of the lake's tables).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from pgwal_pipeline.lake.columns import key_parts, literal, null_of, quote, same_types, text_of
from pgwal_pipeline.lake.schema import names_in_raw
from pgwal_pipeline.messages.errors import TableError
from pgwal_pipeline.values.own_columns import COMMIT_LSN, COMMITTED_AT, OP, ORDINAL, TEXT, UNCHANGED, XID
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline.values.xid import Snapshot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

GONE = "_pgwal_gone"
KEPT = "_pgwal_kept"
LOST = "_pgwal_lost"
KNOWN = "_pgwal_known"
AT_LSN = "_pgwal_at_lsn"
AT_ORDINAL = "_pgwal_at_ordinal"

BEFORE_ALL = -1
"""The LSN and ordinal of rows that were there before every event."""
PLACE = f"struct({AT_LSN} AS lsn, {AT_ORDINAL} AS ordinal)"
NO_NAMES = "CAST(NULL AS array<string>)"

ORDER = (AT_LSN, AT_ORDINAL, f"CASE WHEN {OP} = 'K' THEN 0 WHEN {OP} IN ('S', 'A') THEN 2 ELSE 1 END")
"""The total order of a key's steps. At one position `K` comes first, and `S` and `A` last: their snapshot includes the event there."""
AT = f"struct({', '.join(f'{part} AS p{number}' for number, part in enumerate(ORDER))})"
"""The order as one comparable value."""

_FIXED = (BooleanType, ByteType, ShortType, IntegerType, LongType, FloatType, DoubleType, DateType, TimestampType, TimestampNTZType)


@dataclass(frozen=True, slots=True)
class Traits:
    """What the ledger knows about the events to be folded; it lets the fold skip work.

    `truncated`: there may be a TRUNCATE. `key_changes`: rows may have changed their key. `unchanged`: values may be unsent. True is always
    safe.
    """

    truncated: bool = True
    key_changes: bool = True
    unchanged: bool = True


ANYTHING = Traits()
"""The traits of events about which nothing is known."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The table that is folded: its name, its key's columns (empty for a bag of rows), and its columns in the source's order.

    With `keeps` deleted rows stay, marked: `kept` has the rules. Steps have the time of their commit then, `_pgwal_committed_at`.
    """

    table: TableName
    key: tuple[str, ...]
    columns: tuple[str, ...]
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class ChunkSnapshot:
    """The Postgres snapshot under which a chunk was read.

    `attempt` is the `_pgwal_chunk` of its rows, `snapshot_text` is `xmin:xmax:xip,xip` (64-bit xids). `single` marks a chunk that read one
    key again: its row replaces the row that an earlier chunk had of that key.
    """

    attempt: str
    snapshot_text: str
    single: bool = False

    @property
    def snapshot(self) -> Snapshot:
        """The parsed `snapshot_text`."""
        return Snapshot.parse(self.snapshot_text)


@dataclass(frozen=True, slots=True, order=True)
class Truncate:
    """A TRUNCATE: its position (commit LSN, ordinal), and its transaction's xid and commit time, in microseconds since 1970."""

    lsn: int
    ordinal: int
    xid: int = field(compare=False)
    at: int = field(compare=False)

    @property
    def moment(self) -> str:
        """The expression of its time."""
        return f"timestamp_micros({self.at}L)"


def between(raw: "DataFrame", from_lsn: int, to_lsn: int) -> "DataFrame":
    """Return the rows of raw with `from_lsn <= commit LSN < to_lsn`."""
    return raw.where(f"{COMMIT_LSN} >= {from_lsn}L AND {COMMIT_LSN} < {to_lsn}L")


_OF_TRUNCATE = (COMMIT_LSN, ORDINAL, XID, f"unix_micros({COMMITTED_AT})")


def last_truncate(rows: "DataFrame") -> Truncate | None:
    """Return the last TRUNCATE among rows of raw, None if there is none. Starts a job."""
    found = rows.where(f"{OP} = 'T'").selectExpr(f"max(struct({', '.join(_OF_TRUNCATE)})) AS newest").collect()[0]["newest"]
    return None if found is None else Truncate(*found)


def truncates(rows: "DataFrame") -> list[Truncate]:
    """Return the TRUNCATEs among rows of raw, in their order. Starts a job."""
    return sorted(Truncate(*row) for row in rows.where(f"{OP} = 'T'").selectExpr(*_OF_TRUNCATE).distinct().collect())


def steps(rows: "DataFrame", has: StructType, shape: Shape, types: StructType, *extra: str, after: Truncate | None = None) -> "DataFrame":
    """Return rows of raw, whose schema is `has`, as steps with the column types of `types`. With `after`, only those after that TRUNCATE.

    `extra` are columns of `rows` to keep.

    Schemas are given to the functions of this module: asking Spark for one analyzes the plan anew, which costs more than a small merge.
    """
    wanted = f"{OP} != 'T'"
    if after is not None:
        wanted += f" AND ({COMMIT_LSN} > {after.lsn}L OR {COMMIT_LSN} = {after.lsn}L AND {ORDINAL} > {after.ordinal}L)"
    columns = [_typed(has, name, types[name].dataType) for name in shape.columns]
    own = [OP, COMMIT_LSN, XID, TEXT, UNCHANGED, f"{COMMIT_LSN} AS {AT_LSN}", f"{ORDINAL} AS {AT_ORDINAL}"]
    own += [COMMITTED_AT] if shape.keeps else []
    return rows.where(wanted).selectExpr(*columns, *own, *extra)


def _typed(has: StructType, name: str, kind: DataType) -> str:
    """The column `name` of raw with the type `kind`. Values of another type are null: a snapshot of type `kind` includes their rows."""
    holder = holder_in_raw(has, name, kind)
    return f"{null_of(kind) if holder is None else quote(holder)} AS {quote(name)}"


def holder_in_raw(has: StructType, name: str, kind: DataType) -> str | None:
    """Return the column of raw, whose schema is `has`, with the values of the source's column `name` that have the type `kind`."""
    names = names_in_raw(name, kind.jsonValue())
    return next((held for held in names if held in has.names and same_types(has[held].dataType, kind)), None)


def whole_rows(rows: "DataFrame", shape: Shape, *extra: str) -> "DataFrame":
    """Return rows of `current` or of a snapshot (with `_pgwal_commit_lsn` and `_pgwal_text`) as steps before all events.

    `extra` are columns of `rows` to keep.
    """
    return rows.selectExpr(
        *map(quote, shape.columns),
        f"'S' AS {OP}",
        COMMIT_LSN,
        f"CAST(NULL AS bigint) AS {XID}",
        TEXT,
        f"{NO_NAMES} AS {UNCHANGED}",
        f"{BEFORE_ALL}L AS {AT_LSN}",
        f"{BEFORE_ALL}L AS {AT_ORDINAL}",
        *([f"CAST(NULL AS timestamp) AS {COMMITTED_AT}"] if shape.keeps else []),
        *extra,
    )


def with_left_behind(events: "DataFrame", target: "DataFrame", shape: Shape) -> "DataFrame":
    """Return `events` and the target's rows with a key that some row left: the row may need their values under its new key."""
    left = events.where(f"{OP} = 'K'")
    return events.unionByName(whole_rows(matching(target, left, shape.key), shape))


def matching(rows: "DataFrame", keys: "DataFrame", key: Sequence[str], how: str = "left_semi") -> "DataFrame":
    """Return the `rows` whose key is in `keys`; with `left_anti` those whose key is not. Both have the key's columns and `_pgwal_text`."""
    right = keys.selectExpr(*numbered(key_parts(keys.schema, key)))
    pairs = [f"{part} <=> _pgwal_k{number}" for number, part in enumerate(key_parts(rows.schema, key))]
    return rows.join(right, F.expr(" AND ".join(pairs)), how)


def numbered(parts: Sequence[str]) -> list[str]:
    """Return the parts of a key as columns `_pgwal_k<number>`."""
    return [f"{part} AS _pgwal_k{number}" for number, part in enumerate(parts)]


def net(events: "DataFrame", types: StructType, shape: Shape, traits: Traits) -> "DataFrame":
    """Return the final change of each key. `types` are those of the steps' columns."""
    if not traits.unchanged:
        return _newest(events, types, shape)
    if not traits.key_changes:
        return _newest_sent(events, types, shape)
    return _followed(events, types, shape)


def checked_schema(types: StructType, shape: Shape, traits: Traits) -> StructType:
    """Return the schema of `checked`."""
    found = StructType([StructField(name, types[name].dataType) for name in shape.columns])
    found.add(COMMIT_LSN, LongType()).add(TEXT, MapType(StringType(), StringType())).add(GONE, BooleanType())
    if shape.keeps:
        found.add(COMMITTED_AT, TimestampType()).add(KNOWN, BooleanType())
    return found.add(KEPT, ArrayType(StringType())) if traits.unchanged else found


def _newest(events: "DataFrame", types: StructType, shape: Shape) -> "DataFrame":
    """The changes where every value is sent: the newest step of a key is its row."""
    of_key = ", ".join(key_parts(types, shape.key))
    backwards = ", ".join(f"{part} DESC" for part in ORDER)
    nth = f"row_number() OVER (PARTITION BY {of_key} ORDER BY {backwards}) AS _pgwal_nth"
    newest = events.selectExpr("*", nth).where("_pgwal_nth = 1")
    return newest.selectExpr(*map(quote, shape.columns), COMMIT_LSN, TEXT, f"{ends(OP)} AS {GONE}")


def _newest_sent(events: "DataFrame", types: StructType, shape: Shape) -> "DataFrame":
    """The changes where no row changes its key: of each column the newest value that was sent. An insert sends all values."""
    movable = may_be_unsent(types, shape)
    last = ", ".join([OP, COMMIT_LSN, TEXT, *_fixed(shape, movable)])
    of_key = map(F.expr, numbered(key_parts(types, shape.key)))
    folded = events.groupBy(*of_key).agg(F.expr(f"max_by(struct({last}), {AT}) AS _pgwal_last"), *map(F.expr, sent_values(movable)))
    gone = ends(f"_pgwal_last.{OP}")
    unsent = f"CASE WHEN NOT {gone} THEN {unsent_names(movable)} END"
    return folded.selectExpr(
        *_values(shape, movable),
        f"_pgwal_last.{COMMIT_LSN} AS {COMMIT_LSN}",
        merged_text(movable),
        f"{gone} AS {GONE}",
        *_judged(unsent, "false"),
    )


def _followed(events: "DataFrame", types: StructType, shape: Shape) -> "DataFrame":
    """The changes where rows change their keys and values may be unsent: each row is followed through its life."""
    lives = with_lives(events, types, shape)
    kinds = {name: types[name].dataType for name in shape.columns}
    gone = lives.where(f"_pgwal_is_last AND {ends(OP)}").selectExpr(
        *(quote(name) if name in shape.key else f"{null_of(kind)} AS {quote(name)}" for name, kind in kinds.items()),
        COMMIT_LSN,
        TEXT,
        f"true AS {GONE}",
        f"{NO_NAMES} AS {KEPT}",
        f"{NO_NAMES} AS {LOST}",
    )
    return living(lives, types, shape).unionByName(gone)


def of_life(types: StructType, shape: Shape) -> list[str]:
    """Return the expressions that are equal for the steps of one life (`with_lives`), or of one incarnation that is in no life."""
    apart = "CASE WHEN _pgwal_life IS NULL THEN"
    return ["_pgwal_life", f"{apart} _pgwal_birth_number END", *(f"{apart} {part} END" for part in key_parts(types, shape.key))]


def living(lives: "DataFrame", types: StructType, shape: Shape) -> "DataFrame":
    """Return the changes of `lives` (`with_lives`) that have a row: each life is followed to its end."""
    movable = may_be_unsent(types, shape)
    group = [f"{part} AS _pgwal_l{number}" for number, part in enumerate(of_life(types, shape))]
    last = ", ".join([OP, COMMIT_LSN, TEXT, "_pgwal_is_last", "_pgwal_birth_number", "_pgwal_life", *_fixed(shape, movable)])
    folded = lives.groupBy(*map(F.expr, group)).agg(
        F.expr(f"max_by(struct({last}), {AT}) AS _pgwal_last"), *map(F.expr, sent_values(movable))
    )
    stayed = "(_pgwal_last._pgwal_life IS NULL AND _pgwal_last._pgwal_birth_number = 0)"
    ended = ends(f"_pgwal_last.{OP}")
    return folded.where(f"_pgwal_last._pgwal_is_last AND NOT {ended}").selectExpr(
        *_values(shape, movable),
        f"_pgwal_last.{COMMIT_LSN} AS {COMMIT_LSN}",
        merged_text(movable),
        f"false AS {GONE}",
        *_judged(unsent_names(movable), f"NOT {stayed}"),
    )


def with_lives(events: "DataFrame", types: StructType, shape: Shape) -> "DataFrame":
    """Return the steps with three more columns, by which a row is followed through changes of its key.

    `_pgwal_life` is the position of the row's first key change, null for a row that never changed its key. `_pgwal_birth_number` counts
    the incarnations that have begun under the key so far. `_pgwal_is_last` marks the key's last step.
    """
    moves = events.where(f"{OP} = 'K'").selectExpr(f"{AT_LSN} AS _pgwal_move_lsn", f"{AT_ORDINAL} AS _pgwal_move_ordinal")
    beside = F.expr(f"{AT_LSN} = _pgwal_move_lsn AND {AT_ORDINAL} = _pgwal_move_ordinal")
    arrives = f"({OP} = 'U' AND _pgwal_move_lsn IS NOT NULL)"
    born = f"({OP} IN ('I', 'S') OR {arrives})"
    of_key = f"PARTITION BY {', '.join(key_parts(types, shape.key))}"
    ordered = f"{of_key} ORDER BY {', '.join(ORDER)}"
    so_far = f"{ordered} ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW"
    birth = f"CASE WHEN {born} THEN struct({PLACE} AS place, {arrives} AS arrives) END"
    counted = (
        events.join(moves, beside, "left")
        .selectExpr(
            "*",
            f"sum(CAST({born} AS int)) OVER ({so_far}) AS _pgwal_birth_number",
            f"last({birth}, true) OVER ({so_far}) AS _pgwal_birth",
            f"lead({OP}) OVER ({ordered}) IS NULL AS _pgwal_is_last",
        )
        .drop("_pgwal_move_lsn", "_pgwal_move_ordinal")
    )
    departure = f"max(CASE WHEN {OP} = 'K' THEN {PLACE} END) OVER ({of_key}, _pgwal_birth_number)"
    arrived = "CASE WHEN _pgwal_birth.arrives THEN _pgwal_birth.place END"
    lives = counted.selectExpr("*", f"coalesce({arrived}, {departure}) AS _pgwal_life")
    chained = lives.where(f"{OP} = 'K' AND _pgwal_birth.arrives")
    first = heads(chained.selectExpr(f"{PLACE} AS _pgwal_from", "_pgwal_birth.place AS _pgwal_to"))
    if first is not None:
        lives = lives.join(first, F.expr("_pgwal_life = _pgwal_from"), "left")
        lives = lives.withColumn("_pgwal_life", F.expr("coalesce(_pgwal_to, _pgwal_life)")).drop("_pgwal_from", "_pgwal_to")
    return lives.drop("_pgwal_birth")


def heads(links: "DataFrame") -> "DataFrame | None":
    """Return each link with the head of its chain as `_pgwal_to`, None if there is no link at all.

    `links` are pairs (`_pgwal_from`, `_pgwal_to`), where `_pgwal_to` is the earlier one; a head is where no link begins. Each round doubles
    the distance that a link spans, so a chain of n links takes log2(n) jobs.
    """
    links = links.localCheckpoint()
    if links.isEmpty():
        return None
    while True:
        further = links.selectExpr("_pgwal_from AS _pgwal_between", "_pgwal_to AS _pgwal_further")
        joined = links.join(further, F.expr("_pgwal_to = _pgwal_between"), "left")
        onward = "coalesce(_pgwal_further, _pgwal_to) AS _pgwal_to"
        spanned = joined.selectExpr("_pgwal_from", onward, "_pgwal_further IS NOT NULL AS _pgwal_grown").localCheckpoint()
        links = spanned.drop("_pgwal_grown")
        if spanned.where("_pgwal_grown").isEmpty():
            return links


def checked(changes: "DataFrame", shape: Shape, traits: Traits) -> "DataFrame":
    """Return `changes` (`net`) such that reading them fails with `unsent_marker` if a value is in none of the lake's tables."""
    if not traits.unchanged:
        return changes
    judged = f"CASE WHEN {LOST} IS NOT NULL THEN raise_error({literal(unsent_marker(shape.table))}) ELSE {KEPT} END"
    return changes.withColumn(KEPT, F.expr(judged)).drop(LOST)


def rows_alone(changes: "DataFrame", shape: Shape, traits: Traits) -> "tuple[DataFrame, DataFrame | None]":
    """Return the rows that `changes` give without a target, and the changes that lack a value (None if no change can lack one).

    The rows have the columns, `_pgwal_commit_lsn` and `_pgwal_text`. Reading them fails with `unsent_marker` if any change lacks a value.
    """
    lacking = None
    if traits.unchanged:
        changes = changes.withColumn(LOST, F.expr(f"coalesce({LOST}, {KEPT})")).withColumn(KEPT, F.expr(NO_NAMES))
        lacking = changes.where(f"{LOST} IS NOT NULL")
        changes = checked(changes, shape, traits).where(f"{KEPT} IS NULL")  # uses KEPT, so that Spark evaluates the check
    return changes.where(f"NOT {GONE}").selectExpr(*map(quote, shape.columns), COMMIT_LSN, TEXT), lacking


def unsent_marker(table: TableName) -> str:
    """Return what a failing query's message contains when a value of `table` was not sent and is in none of the lake's tables."""
    return f"pgwal: a value of {table} was not sent and is nowhere"


class Unresolved(TableError):
    """Values that the source did not send and that are in none of the lake's tables.

    `rows` are some of the rows that lack them: (key, names of the columns). `keys` are the keys of all of them, each column as text for
    Postgres; None if there are too many or a key's type has no such text.
    """

    def __init__(
        self,
        table: TableName,
        rows: Sequence[tuple[dict[str, object], tuple[str, ...]]],
        keys: Sequence[tuple[str, ...]] | None = None,
    ) -> None:
        self.rows = tuple(rows)
        self.keys = None if keys is None else tuple(keys)
        shown = "a row"
        if rows:
            key, columns = rows[0]
            more = f" (and {len(rows) - 1} more rows)" if len(rows) > 1 else ""
            named = ", ".join(f"{name} = {value}" for name, value in key.items())
            shown = f"{', '.join(columns)} in the row with {named}{more}"
        super().__init__(
            str(table),
            f"{table}: the source did not send the value of {shown}, and the lake does not have it; run `pgwal resnapshot '{table}'`.",
        )


def may_be_unsent(schema: StructType, shape: Shape) -> list[str]:
    """Return the columns whose values may be unsent.

    Postgres stores only values of variable length out of line (TOAST), and does not send such a value when it did not change.
    """
    return [name for name in shape.columns if not isinstance(schema[name].dataType, _FIXED)]


def ends(op: str) -> str:
    """Return the expression whether a key has no row after a step with that op."""
    return f"{op} IN ('D', 'K', 'A')"


def _fixed(shape: Shape, movable: Sequence[str]) -> list[str]:
    return [quote(name) for name in shape.columns if name not in movable]


def sent_values(movable: Sequence[str]) -> list[str]:
    """Return per column the newest value sent and its text, as a struct (v, t) named `_pgwal_v<number>`; null if no value was sent."""
    sent = [(sent_value(name), if_sent(name, AT)) for name in movable]
    return [f"max_by({value}, {at}) AS _pgwal_v{number}" for number, (value, at) in enumerate(sent)]


def sent_value(name: str) -> str:
    """Return the expression of the value of a column that a step sent, and its text, as a struct (v, t); null if it sent none."""
    return if_sent(name, f"struct({quote(name)} AS v, {text_of(name)} AS t)")


def if_sent(name: str, value: str) -> str:
    """Return the expression that is `value` in a step which sent a value of the column, else null."""
    return f"CASE WHEN {OP} IN ('I', 'U', 'S') AND NOT coalesce(array_contains({UNCHANGED}, {literal(name)}), false) THEN {value} END"


def _values(shape: Shape, movable: Sequence[str]) -> list[str]:
    sent = {name: f"_pgwal_v{number}.v" for number, name in enumerate(movable)}
    return [f"{sent.get(name, f'_pgwal_last.{quote(name)}')} AS {quote(name)}" for name in shape.columns]


def merged_text(movable: Sequence[str], last: str = f"_pgwal_last.{TEXT}") -> str:
    """Return `_pgwal_text` of a folded row: entries of `movable` columns come with their values, the others from the expression `last`."""
    names = ", ".join(literal(name) for name in movable)
    ours = ", ".join(f"struct({literal(name)} AS key, _pgwal_v{number}.t AS value)" for number, name in enumerate(movable))
    if not movable:
        return f"{last} AS {TEXT}"
    fixed = f"coalesce(map_entries(map_filter({last}, (k, v) -> NOT k IN ({names}))), array())"
    entries = f"filter(concat({fixed}, array({ours})), e -> e.value IS NOT NULL)"
    return f"CASE WHEN size({entries}) > 0 THEN map_from_entries({entries}) END AS {TEXT}"


def unsent_names(movable: Sequence[str]) -> str:
    """Return the names of the columns without a value that was sent, as an array; null if there is none."""
    if not movable:
        return NO_NAMES
    names = ", ".join(f"CASE WHEN _pgwal_v{number} IS NULL THEN {literal(name)} END" for number, name in enumerate(movable))
    return f"CASE WHEN size(array_compact(array({names}))) > 0 THEN array_compact(array({names})) END"


def _judged(unsent: str, lost: str) -> list[str]:
    return [f"CASE WHEN {lost} THEN {NO_NAMES} ELSE {unsent} END AS {KEPT}", f"CASE WHEN {lost} THEN {unsent} END AS {LOST}"]
