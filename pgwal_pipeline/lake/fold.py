"""From the events of a keyed table to the final change of each key.

Pure DataFrame logic: nothing here starts a job but `heads` and `last_truncate`.

The functions work on *steps*: rows with the source's columns, `_pgwal_op`, `_pgwal_text`, `_pgwal_commit_lsn`, `_pgwal_unchanged`, and
their place in the order, `_pgwal_at_lsn` and `_pgwal_at_ordinal`. A step is an event of raw, or a whole row known from elsewhere (op `S`:
of a snapshot, or of `current`), which counts as the birth of its row, or the absence of one (op `A`: a snapshot had no row of that key).
A row's *incarnation* under a key begins with its birth (`I`, `S`, or a `U` that has a `K` beside it: the row came from another key) and
ends with `D`, `K` or `A`; incarnations that follow one another by key changes are one *life* of the row, and a value that was not sent is
to be looked for in the same life only.

What comes out are *changes*, one for each key: the columns, `_pgwal_commit_lsn`, `_pgwal_text`, `_pgwal_gone` (the key has no row any more)
and, where values may be unsent, `_pgwal_kept` (columns whose value is the one that the target has under this key) and `_pgwal_lost`
(columns whose value is nowhere); both are arrays of names, null when empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from pgwal_pipeline.errors import TableError
from pgwal_pipeline.lake.columns import (
    COMMIT_LSN,
    OP,
    ORDINAL,
    TEXT,
    UNCHANGED,
    XID,
    key_parts,
    literal,
    null_of,
    quote,
    same_types,
    text_of,
)
from pgwal_pipeline.lake.schema import names_in_raw
from pgwal_pipeline.relation import TableName
from pgwal_pipeline.xid import Snapshot

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

GONE = "_pgwal_gone"
KEPT = "_pgwal_kept"
LOST = "_pgwal_lost"
AT_LSN = "_pgwal_at_lsn"
AT_ORDINAL = "_pgwal_at_ordinal"

_ENDS = ("D", "K", "A")
"""The ops after which a key has no row."""

BEFORE_ALL = -1
"""The place of what was there before every event."""

_FIXED = (BooleanType, ByteType, ShortType, IntegerType, LongType, FloatType, DoubleType, DateType, TimestampType, TimestampNTZType)


@dataclass(frozen=True, slots=True)
class Traits:
    """What the ledger knows of the events to be folded; work that they do not need is left out. True is always right.

    `truncated`: there may be a TRUNCATE; `key_changes`: rows may have changed their key; `unchanged`: values may be unsent.
    `inserts_only`: there is nothing but inserts, for certain.
    """

    truncated: bool = True
    key_changes: bool = True
    unchanged: bool = True
    inserts_only: bool = False


ANYTHING = Traits()
"""Of events of which nothing is known."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The table that is folded: its name, the columns of its key (none: a bag of rows), its columns in the source's order."""

    table: TableName
    key: tuple[str, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChunkSnapshot:
    """What a chunk of a snapshot saw: `attempt` is the `_pgwal_chunk` of its rows, `snapshot_text` is `xmin:xmax:xip,xip` (64-bit xids).

    `single` tells a chunk of one key, read again: its row counts rather than the one that an earlier chunk had of that key.
    """

    attempt: str
    snapshot_text: str
    single: bool = False

    @property
    def snapshot(self) -> Snapshot:
        """What it saw."""
        return Snapshot.parse(self.snapshot_text)


@dataclass(frozen=True, slots=True, order=True)
class Truncate:
    """A TRUNCATE: its position, and its transaction."""

    lsn: int
    ordinal: int
    xid: int = field(compare=False)


def between(raw: "DataFrame", from_lsn: int, to_lsn: int) -> "DataFrame":
    """The rows of raw with `from_lsn <= commit LSN < to_lsn`."""
    return raw.where((F.col(COMMIT_LSN) >= from_lsn) & (F.col(COMMIT_LSN) < to_lsn))


def last_truncate(rows: "DataFrame") -> Truncate | None:
    """The last TRUNCATE among rows of raw; starts a job."""
    newest = F.max(F.struct(COMMIT_LSN, ORDINAL, XID))
    found = rows.where(F.col(OP) == "T").agg(newest.alias("newest")).collect()[0]["newest"]
    return None if found is None else Truncate(*found)


def steps(rows: "DataFrame", shape: Shape, types: StructType, *, after: Truncate | None = None) -> "DataFrame":
    """Rows of raw as steps, those after a TRUNCATE only where one is given; columns get the types of `types`."""
    has = rows.schema
    wanted = F.col(OP) != "T"
    if after is not None:
        wanted = wanted & ((F.col(COMMIT_LSN) > after.lsn) | ((F.col(COMMIT_LSN) == after.lsn) & (F.col(ORDINAL) > after.ordinal)))
    columns = [_typed(has, name, types[name].dataType) for name in shape.columns]
    own = [OP, COMMIT_LSN, XID, TEXT, UNCHANGED, F.col(COMMIT_LSN).alias(AT_LSN), F.col(ORDINAL).alias(AT_ORDINAL)]
    return rows.where(wanted).select(*columns, *own)


def _typed(has: StructType, name: str, kind: DataType) -> "Column":
    """The column `name` of raw as values of `kind`: those written in another type are of rows that a snapshot in `kind` has seen."""
    names = names_in_raw(name, kind.jsonValue())
    holder = next((held for held in names if held in has.names and same_types(has[held].dataType, kind)), None)
    return F.expr(null_of(kind)).alias(name) if holder is None else F.col(quote(holder)).alias(name)


def whole_rows(rows: "DataFrame", shape: Shape, *extra: "Column") -> "DataFrame":
    """Rows of `current` or of a snapshot (with `_pgwal_commit_lsn` and `_pgwal_text`) as steps before all events."""
    return rows.select(
        *(F.col(quote(name)) for name in shape.columns),
        F.lit("S").alias(OP),
        COMMIT_LSN,
        F.lit(None).cast("long").alias(XID),
        TEXT,
        F.lit(None).cast("array<string>").alias(UNCHANGED),
        F.lit(BEFORE_ALL).cast("long").alias(AT_LSN),
        F.lit(BEFORE_ALL).cast("long").alias(AT_ORDINAL),
        *extra,
    )


def with_left_behind(events: "DataFrame", target: "DataFrame", shape: Shape) -> "DataFrame":
    """`events` and the target's rows that had a key which some row left: a row that moved may need their values."""
    left = events.where(F.col(OP) == "K")
    return events.unionByName(whole_rows(matching(target, left, shape.key), shape))


def matching(rows: "DataFrame", keys: "DataFrame", key: Sequence[str], how: str = "left_semi") -> "DataFrame":
    """The `rows` whose key is among the keys of `keys`; with `left_anti` the others. Both have the key's columns and `_pgwal_text`."""
    wanted = [F.expr(part).alias(f"_pgwal_k{number}") for number, part in enumerate(key_parts(keys.schema, key))]
    right = keys.select(*wanted)
    pairs = [F.expr(part).eqNullSafe(F.col(f"_pgwal_k{number}")) for number, part in enumerate(key_parts(rows.schema, key))]
    return rows.join(right, reduce(lambda one, other: one & other, pairs), how)


def net(events: "DataFrame", shape: Shape, traits: Traits) -> "DataFrame":
    """The change of each key that the steps come to."""
    if not traits.unchanged:
        return _newest(events, shape)
    if not traits.key_changes:
        return _newest_sent(events, shape)
    return _followed(events, shape)


def _newest(events: "DataFrame", shape: Shape) -> "DataFrame":
    """Every value is sent: the newest step of a key is its row."""
    order = Window.partitionBy(*_key(events, shape)).orderBy(*(part.desc() for part in _place()))
    newest = events.withColumn("_pgwal_nth", F.row_number().over(order)).where(F.col("_pgwal_nth") == 1)
    return newest.select(*(F.col(quote(name)) for name in shape.columns), COMMIT_LSN, TEXT, _ends().alias(GONE))


def _newest_sent(events: "DataFrame", shape: Shape) -> "DataFrame":
    """No row changes its key: the newest value that was sent, column by column; an insert sends all."""
    movable = may_be_unsent(events.schema, shape)
    folded = events.groupBy(*(part.alias(f"_pgwal_k{number}") for number, part in enumerate(_key(events, shape)))).agg(
        F.max_by(F.struct(OP, COMMIT_LSN, TEXT, *_fixed(shape, movable)), _struct(_place())).alias("_pgwal_last"), *_sent_values(movable)
    )
    last = F.col("_pgwal_last")
    gone = last[OP].isin(*_ENDS)
    unsent = F.when(~gone, _unsent_names(movable))
    return folded.select(
        *_values(shape, movable),
        last[COMMIT_LSN].alias(COMMIT_LSN),
        _merged_text(movable),
        gone.alias(GONE),
        *_judged(unsent, F.lit(False)),
    )


def _followed(events: "DataFrame", shape: Shape) -> "DataFrame":
    """Rows change their keys, and values may be unsent: each row is followed through its life."""
    lives = _with_lives(events, shape)
    movable = may_be_unsent(events.schema, shape)
    apart = F.col("_pgwal_life").isNull()
    group = [F.col("_pgwal_life"), F.when(apart, F.col("_pgwal_birth_number")).alias("_pgwal_number")]
    group += [F.when(apart, part).alias(f"_pgwal_k{number}") for number, part in enumerate(_key(events, shape))]
    last_fields = [OP, COMMIT_LSN, TEXT, "_pgwal_is_last", "_pgwal_birth_number", "_pgwal_life", *_fixed(shape, movable)]
    folded = lives.groupBy(*group).agg(F.max_by(F.struct(*last_fields), _struct(_place())).alias("_pgwal_last"), *_sent_values(movable))
    last = F.col("_pgwal_last")
    unsent = _unsent_names(movable)
    stayed = last["_pgwal_life"].isNull() & (last["_pgwal_birth_number"] == 0)
    alive = folded.where(last["_pgwal_is_last"] & ~last[OP].isin(*_ENDS)).select(
        *_values(shape, movable),
        last[COMMIT_LSN].alias(COMMIT_LSN),
        _merged_text(movable),
        F.lit(False).alias(GONE),
        *_judged(unsent, ~stayed),
    )
    nothing = F.lit(None)
    gone = lives.where(F.col("_pgwal_is_last") & _ends()).select(
        *(F.col(quote(name)) if name in shape.key else F.expr(null_of(events.schema[name].dataType)).alias(name) for name in shape.columns),
        COMMIT_LSN,
        TEXT,
        F.lit(True).alias(GONE),
        nothing.cast("array<string>").alias(KEPT),
        nothing.cast("array<string>").alias(LOST),
    )
    return alive.unionByName(gone)


def _with_lives(events: "DataFrame", shape: Shape) -> "DataFrame":
    """The steps with what `_followed` needs to know.

    `_pgwal_life` is the place of the row's first key change, null for a row that never changed its key; `_pgwal_birth_number` counts the
    births under the key so far; `_pgwal_is_last` tells the key's last step.
    """
    moves = events.where(F.col(OP) == "K").select(F.col(AT_LSN).alias("_pgwal_move_lsn"), F.col(AT_ORDINAL).alias("_pgwal_move_ordinal"))
    beside = (F.col(AT_LSN) == F.col("_pgwal_move_lsn")) & (F.col(AT_ORDINAL) == F.col("_pgwal_move_ordinal"))
    arrives = (F.col(OP) == "U") & F.col("_pgwal_move_lsn").isNotNull()
    born = F.col(OP).isin("I", "S") | arrives
    key = _key(events, shape)
    ordered = Window.partitionBy(*key).orderBy(*_place())
    so_far = ordered.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    place = F.struct(F.col(AT_LSN).alias("lsn"), F.col(AT_ORDINAL).alias("ordinal"))
    numbered = (
        events.join(moves, beside, "left")
        .withColumn("_pgwal_birth_number", F.sum(born.cast("int")).over(so_far))
        .withColumn(
            "_pgwal_birth", F.last(F.when(born, F.struct(place.alias("place"), arrives.alias("arrives"))), ignorenulls=True).over(so_far)
        )
        .withColumn("_pgwal_is_last", F.lead(OP).over(ordered).isNull())
        .drop("_pgwal_move_lsn", "_pgwal_move_ordinal")
    )
    incarnation = Window.partitionBy(*key, F.col("_pgwal_birth_number"))
    departure = F.max(F.when(F.col(OP) == "K", place)).over(incarnation)
    arrived = F.when(F.col("_pgwal_birth.arrives"), F.col("_pgwal_birth.place"))
    lives = numbered.withColumn("_pgwal_life", F.coalesce(arrived, departure))
    chained = lives.where((F.col(OP) == "K") & F.col("_pgwal_birth.arrives")).select(
        place.alias("_pgwal_from"), F.col("_pgwal_birth.place").alias("_pgwal_to")
    )
    first = heads(chained)
    if first is not None:
        lives = lives.join(first, F.col("_pgwal_life") == F.col("_pgwal_from"), "left")
        lives = lives.withColumn("_pgwal_life", F.coalesce("_pgwal_to", "_pgwal_life")).drop("_pgwal_from", "_pgwal_to")
    return lives.drop("_pgwal_birth")


def heads(links: "DataFrame") -> "DataFrame | None":
    """The head of the chain that each link belongs to, None where there is no link at all.

    `links` are pairs (`_pgwal_from`, `_pgwal_to`), `to` being earlier; at a head no link begins. Each round doubles the distance that a
    link spans, so that a chain of n links takes log2(n) jobs.
    """
    links = links.localCheckpoint()
    if links.isEmpty():
        return None
    while True:
        further = links.select(F.col("_pgwal_from").alias("_pgwal_between"), F.col("_pgwal_to").alias("_pgwal_further"))
        joined = links.join(further, F.col("_pgwal_to") == F.col("_pgwal_between"), "left")
        onward = F.coalesce("_pgwal_further", "_pgwal_to").alias("_pgwal_to")
        spanned = joined.select("_pgwal_from", onward, F.col("_pgwal_further").isNotNull().alias("_pgwal_grown")).localCheckpoint()
        links = spanned.drop("_pgwal_grown")
        if spanned.where("_pgwal_grown").isEmpty():
            return links


def checked(changes: "DataFrame", shape: Shape) -> "DataFrame":
    """`changes` that fail with `unsent_marker` when they are read, if a value is nowhere."""
    if LOST not in changes.columns:
        return changes
    return changes.withColumn(
        KEPT, F.when(F.col(LOST).isNotNull(), F.raise_error(F.lit(unsent_marker(shape.table)))).otherwise(F.col(KEPT))
    ).drop(LOST)


def rows_alone(changes: "DataFrame", shape: Shape) -> "tuple[DataFrame, DataFrame | None]":
    """The rows that `changes` come to where there is no target, and the changes that lack a value, None where none can.

    The rows have the columns, `_pgwal_commit_lsn` and `_pgwal_text`; reading them fails with `unsent_marker` if any value is nowhere.
    """
    lacking = None
    if LOST in changes.columns:
        changes = changes.withColumn(LOST, F.coalesce(LOST, KEPT)).withColumn(KEPT, F.lit(None).cast("array<string>"))
        lacking = changes.where(F.col(LOST).isNotNull())
        changes = checked(changes, shape).where(F.col(KEPT).isNull())  # so that it is looked at
    return changes.where(~F.col(GONE)).select(*(F.col(quote(name)) for name in shape.columns), COMMIT_LSN, TEXT), lacking


def unsent_marker(table: TableName) -> str:
    """What a failing query's message contains when a value of `table` was not sent and is nowhere."""
    return f"pgwal: a value of {table} was not sent and is nowhere"


class Unresolved(TableError):
    """Values that were not sent and stand nowhere in the lake. `rows` are some of the rows that lack them: (key, names of the columns).

    `keys` has the keys of all of them, each column as text for Postgres; None where they are too many or of a type without such text.
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
            f"{table}: the source did not send the value of {shown}, and it stands nowhere in the lake; run `pgwal resnapshot '{table}'`.",
        )


def may_be_unsent(schema: StructType, shape: Shape) -> list[str]:
    """Only values of variable length are stored out of line, and left unsent when they did not change."""
    return [name for name in shape.columns if not isinstance(schema[name].dataType, _FIXED)]


def _key(events: "DataFrame", shape: Shape) -> "list[Column]":
    return [F.expr(part) for part in key_parts(events.schema, shape.key)]


def _place() -> "list[Column]":
    """The total order of a key's steps: a row leaves its old key before it takes the new one; a whole row comes after what it has seen."""
    return [F.col(AT_LSN), F.col(AT_ORDINAL), F.when(F.col(OP) == "K", 0).when(F.col(OP).isin("S", "A"), 2).otherwise(1)]


def _struct(parts: "Sequence[Column]") -> "Column":
    return F.struct(*(part.alias(f"p{number}") for number, part in enumerate(parts)))


def _ends() -> "Column":
    return F.col(OP).isin(*_ENDS)


def _fixed(shape: Shape, movable: Sequence[str]) -> "list[Column]":
    return [F.col(quote(name)) for name in shape.columns if name not in movable]


def _sent_values(movable: Sequence[str]) -> "list[Column]":
    """For each column the newest value that was sent and its text, as a struct (v, t) called `_pgwal_v<number>`; null where none was."""
    found = []
    for number, name in enumerate(movable):
        sent = F.col(OP).isin("I", "U", "S") & ~F.coalesce(F.array_contains(F.col(UNCHANGED), name), F.lit(False))
        value = F.struct(F.col(quote(name)).alias("v"), F.expr(text_of(name)).alias("t"))
        found.append(F.max_by(F.when(sent, value), F.when(sent, _struct(_place()))).alias(f"_pgwal_v{number}"))
    return found


def _values(shape: Shape, movable: Sequence[str]) -> "list[Column]":
    number = {name: number for number, name in enumerate(movable)}
    return [
        (F.col(f"_pgwal_v{number[name]}")["v"] if name in number else F.col(f"_pgwal_last.{quote(name)}")).alias(name)
        for name in shape.columns
    ]


def _merged_text(movable: Sequence[str]) -> "Column":
    """`_pgwal_text` of the folded row: each entry goes with the value that it belongs to."""
    names = ", ".join(literal(name) for name in movable)
    ours = ", ".join(f"struct({literal(name)} AS key, _pgwal_v{number}.t AS value)" for number, name in enumerate(movable))
    if not movable:
        return F.expr(f"_pgwal_last.{TEXT}").alias(TEXT)
    fixed = f"coalesce(map_entries(map_filter(_pgwal_last.{TEXT}, (k, v) -> NOT k IN ({names}))), array())"
    entries = f"filter(concat({fixed}, array({ours})), e -> e.value IS NOT NULL)"
    return F.expr(f"CASE WHEN size({entries}) > 0 THEN map_from_entries({entries}) END").alias(TEXT)


def _unsent_names(movable: Sequence[str]) -> "Column":
    names = [F.when(F.col(f"_pgwal_v{number}").isNull(), F.lit(name)) for number, name in enumerate(movable)]
    found = F.array_compact(F.array(*names)) if names else F.lit(None).cast("array<string>")
    return F.when(F.size(found) > 0, found)


def _judged(unsent: "Column", lost: "Column") -> "list[Column]":
    return [F.when(~lost, unsent).alias(KEPT), F.when(lost, unsent).alias(LOST)]
