"""Keep the history of a table: one row for each version of each row, with where and when it was valid.

Open versions and closed ones are partitions of one Delta table. A MERGE reads only the open ones, and of these only the files that may have
a changed key: its cost follows the changes, not the history's length. A version that has ended is written once more, as closed, and never
again.

Each commit carries the LSN that it brings the history to. The history is built on a reading of the table, as `current` is: when `current`
was built on a new one, the open versions are compared with it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace as altered
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from deltalake import DeltaTable
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    ByteType,
    DataType,
    DecimalType,
    IntegerType,
    LongType,
    ShortType,
    StructField,
    StructType,
)

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake import bag, files, fold, frozen, kept, key_ranges, properties, statements, versions
from pgwal_pipeline.lake.bag import ROW, TAKEN
from pgwal_pipeline.lake.columns import null_of, quote, same_types
from pgwal_pipeline.lake.current import MERGE_CONF, VIEW, widen
from pgwal_pipeline.lake.files import Files
from pgwal_pipeline.lake.fold import Shape, Traits
from pgwal_pipeline.lake.isolation import conf_for, failures, few, isolated, set_write_options, table_failures
from pgwal_pipeline.lake.replacing import by_key
from pgwal_pipeline.lake.schema import names_in_raw
from pgwal_pipeline.lake.standing import FENCE, GENERATION, open_current, rows_in
from pgwal_pipeline.lake.versions import CLOSES
from pgwal_pipeline.lake.work import fence
from pgwal_pipeline.messages.errors import LakeError, TableError
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.own_columns import COMMIT_LSN, COMMITTED_AT, END_OP, OPEN, VALID_FROM_LSN, VALID_TO, VALID_TO_LSN
from pgwal_pipeline.values.relation import TableName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Course = Literal["begun", "followed", "compared", "unchanged"]

_INTEGERS = (ByteType, ShortType, IntegerType, LongType)


@dataclass(frozen=True, slots=True)
class HistoryRequest:
    """A history to be brought to `to_lsn`, where the version `current_version` of `current` stands.

    `generation` is the reading that `current` is built on. `from_lsn` is where the history stands, None if there is none. `followed`:
    whether raw has every change since then. `at` is the time of the newest commit before `to_lsn`. The rest is as in a MergeRequest.
    """

    table: TableName
    raw_path: str
    current_path: str
    current_version: int
    path: str
    key: tuple[str, ...]
    columns: tuple[str, ...]
    from_lsn: int | None
    to_lsn: int
    generation: str
    at: datetime
    every_change: bool = False
    followed: bool = True
    traits: Traits = fold.ANYTHING
    schema_json: str | None = None
    rows: int = 0
    arriving_json: str | None = None

    @property
    def shape(self) -> Shape:
        """The table whose rows are kept."""
        return Shape(self.table, self.key, self.columns)

    @property
    def moment(self) -> str:
        """The expression of `at`."""
        return f"timestamp_micros({round(self.at.timestamp() * 1_000_000)}L)"


@dataclass(frozen=True, slots=True)
class HistoryResult:
    """The Delta version of the history at the request's LSN, and how it came there.

    `compared`: it was compared with a new reading of the table, as the stream did not show every change.
    """

    version: int
    course: Course


@dataclass(frozen=True, slots=True)
class HistoryStanding:
    """The state of a history: its newest Delta version, the LSN it stands at, the reading it is built on, and its columns."""

    version: int
    watermark: int
    generation: str | None
    columns: frozenset[str]


def standing(path: str) -> HistoryStanding | None:
    """Return the state of the history at `path`, None if there is none. Raises LakeError if it cannot be read."""
    table = open_current(path)
    mark = None if table is None else table.transaction_version(FENCE)
    if table is None or mark is None:
        return None
    names = frozenset(field.name for field in table.schema().fields)
    return HistoryStanding(table.version(), mark, table.metadata().configuration.get(GENERATION), names)


def keep(spark: "SparkSession", request: HistoryRequest) -> HistoryResult:
    """Bring a history to `to_lsn`; begin it with what is in `current` if there is none. What was done before is not done again.

    Raises TableError if the history cannot be kept by its own fault, LakeError if Spark or the lake fails.
    """
    table = open_current(request.path)
    mark = None if table is None else table.transaction_version(FENCE)
    if table is None or mark is None:
        with isolated(spark, conf_for(request.rows)) as session:
            _begin(session, request)
        return HistoryResult(_reached(request), "begun")
    if mark > request.to_lsn:
        raise LakeError(
            f"{request.table}: its history stands at {format_lsn(mark)}, past {format_lsn(request.to_lsn)}, this publish's LSN."
        )
    course: Course = "unchanged"
    anew = table.metadata().configuration.get(GENERATION) != request.generation
    if mark < request.to_lsn:
        course = "followed" if request.followed and _follow(spark, altered(request, from_lsn=mark), table, anew=anew) else "compared"
    if anew or course == "compared":
        _compare(spark, request)
        course = "compared"
    return HistoryResult(_reached(request), course)


def _reached(request: HistoryRequest) -> int:
    """The version that holds the work just committed. Raises LakeError if another publish has changed the history meanwhile."""
    table = open_current(request.path)
    if table is None or table.transaction_version(FENCE) != request.to_lsn:
        lost = LakeError(f"{request.table}: another publish changed its history at the same time; try again.")
        lost.transient = True
        raise lost
    return table.version()


def _current(session: "SparkSession", request: HistoryRequest) -> "DataFrame":
    """The rows of `current` at `to_lsn`, without those that it keeps though the source deleted them."""
    rows = session.read.format("delta").option("versionAsOf", request.current_version).load(request.current_path)
    return kept.living(rows, rows.columns)


def _begin(session: "SparkSession", request: HistoryRequest) -> None:
    with failures(str(request.table)):
        now = _current(session, request)
        shape = _known_in(request.shape, now.schema)
        rows = versions.begun(now, shape, request.to_lsn, request.moment, unseen=False)
        wanted = {
            "delta.enableDeletionVectors": "true",
            GENERATION: request.generation,
            **properties.readable(properties.HISTORY_HOURS),
            **properties.delta_features({field.name: field.dataType.simpleString() for field in rows.schema.fields}),
            properties.STATISTICS: properties.columns_with_statistics(rows.schema, (*shape.key, VALID_FROM_LSN, VALID_TO_LSN)),
        }
        whole = by_key(rows, shape.key, _parts(request)) if shape.key else rows
        writer = whole.writeTo(statements.table_at(request.path)).using("delta").partitionedBy(F.col(OPEN)).options(**fence(request.to_lsn))
        for name, value in wanted.items():
            writer = writer.tableProperty(name, value)
        failpoints.hit("publish.in_history")
        writer.createOrReplace()
        failpoints.hit("publish.in_history")


def _parts(request: HistoryRequest) -> int:
    """In how many files the open versions are laid out: as many as `current` has."""
    table = open_current(request.current_path, request.current_version)
    return 1 if table is None else max(1, len(table.file_uris()))


def _follow(spark: "SparkSession", request: HistoryRequest, table: DeltaTable, *, anew: bool) -> bool:
    """Apply the events since `from_lsn`; return False if they do not say what the versions are. `anew`: the table has been read again."""
    assert request.from_lsn is not None
    changes = files.changes(request.raw_path, request.from_lsn, request.to_lsn)
    if changes is None:
        return False
    files.require(request.table, request.rows, {request.raw_path: changes})
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    types = _source_types(request, changes.schema)
    retyped = _retyped(request.shape, types, schema)
    if retyped:
        known = altered(request, columns=tuple(name for name in request.columns if name in schema.names))
        until = _first_of_types(spark, known, changes, retyped)
        if until > request.from_lsn:
            _apply(spark, altered(known, to_lsn=until), table, schema, changes, schema)
        return False
    if anew and _has_other_types(changes.schema, request.shape, types):
        return False
    return _apply(spark, request, table, schema, changes, types)


def _first_of_types(spark: "SparkSession", request: HistoryRequest, changes: Files, retyped: Mapping[str, DataType]) -> int:
    """The commit LSN of the first event with a value of one of these types; `to_lsn` if there is none."""
    assert request.from_lsn is not None
    held = [fold.holder_in_raw(changes.schema, name, kind) for name, kind in retyped.items()]
    if not any(held):
        return request.to_lsn
    with isolated(spark, conf_for(request.rows)) as session, failures(str(request.table)):
        rows = fold.between(changes.read(session), request.from_lsn, request.to_lsn)
        valued = rows.where(" OR ".join(f"{quote(name)} IS NOT NULL" for name in held if name is not None))
        first = valued.selectExpr(f"min({COMMIT_LSN})").collect()[0][0]
    return request.to_lsn if first is None else first


def _has_other_types(raw: StructType, shape: Shape, types: StructType) -> bool:
    """Whether raw has values of one of the columns in another type than it has now."""
    both = [name for name in shape.columns if name in raw.names and name in types.names]
    return any(not same_types(raw[name].dataType, types[name].dataType) for name in both)


def _apply(
    spark: "SparkSession", request: HistoryRequest, table: DeltaTable, schema: StructType, changes: Files, types: StructType
) -> bool:
    """Apply the events up to `to_lsn`; return False if they do not say what the versions are. `schema` is the history's."""
    plain = bool(request.key) and not request.traits.truncated
    ranges = key_ranges.find(table, schema, changes, request.key, (OPEN, True)) if plain else None
    rows = request.rows + (rows_in(table) if ranges is None else ranges.rows)
    conf = {} if few(rows) else {"spark.databricks.delta.merge.repartitionBeforeWrite.enabled": "false"}
    try:
        with isolated(spark, MERGE_CONF | conf_for(rows) | conf) as session:
            _merge(session, request, changes, types, ranges)
    except TableError:  # a value that no version has, or a row that is not there
        return False
    return True


def _merge(
    session: "SparkSession", request: HistoryRequest, changes: Files, types: StructType, ranges: key_ranges.KeyRanges | None
) -> None:
    assert request.from_lsn is not None
    with failures(str(request.table)):
        shape = _widened(session, request, types)
        target = session.read.format("delta").load(request.path)
        schema = target.schema
        raw, has = frozen.as_kept(changes.read(session), changes.schema, types, request.arriving_json)
        rows = fold.between(raw, request.from_lsn, request.to_lsn)
        ended = fold.truncates(rows) if request.traits.truncated else []
        events = fold.steps(rows, has, shape, schema, COMMITTED_AT)
        present = target.where(OPEN if ranges is None else f"{OPEN} AND {ranges.condition()}")
        if shape.key:
            source = versions.of_keys(events, present, schema, shape, request.traits, ended, every_change=request.every_change)
            within = "" if ranges is None else f" AND {ranges.condition('t')}"
            statement = _merge_keys(request, schema, source.columns, shape, within)
        else:
            source = versions.of_bag(events, present, shape, ended, every_change=request.every_change)
            statement = _merge_bag(request, schema, source.columns, shape)
    with table_failures(shape, lambda: None):
        source.createOrReplaceTempView(VIEW)
        set_write_options(session, fence(request.to_lsn))
        failpoints.hit("publish.in_history")
        session.sql(statement).collect()
        failpoints.hit("publish.in_history")


def _merge_keys(request: HistoryRequest, target: StructType, has: list[str], shape: Shape, within: str) -> str:
    ended = ", ".join(f"{name} = s.{name}" for name in (VALID_TO_LSN, VALID_TO, END_OP, OPEN))
    empty = "" if request.every_change else f"WHEN MATCHED AND s.{VALID_TO_LSN} <= t.{VALID_FROM_LSN} THEN DELETE "
    return (
        f"MERGE INTO {statements.table_at(request.path)} t USING {quote(VIEW)} s "
        f"ON s.{CLOSES} AND t.{OPEN} AND {statements.same_key(target, target, shape)}{within} "
        f"{empty}WHEN MATCHED THEN UPDATE SET {ended} WHEN NOT MATCHED AND NOT s.{CLOSES} THEN {_insert(target, has)}"
    )


def _merge_bag(request: HistoryRequest, target: StructType, has: list[str], shape: Shape) -> str:
    same = f"s.{ROW} = {bag.row_identity(target, shape, 't')}"
    return (
        f"MERGE INTO {statements.table_at(request.path)} t USING {quote(VIEW)} s ON s.{TAKEN} AND t.{OPEN} AND {same} "
        f"WHEN MATCHED THEN DELETE WHEN NOT MATCHED AND NOT s.{TAKEN} THEN {_insert(target, has)}"
    )


def _insert(target: StructType, has: list[str]) -> str:
    names = [name for name in target.names if name in has]
    return f"INSERT ({', '.join(map(quote, names))}) VALUES ({', '.join(quote(name, 's') for name in names)})"


def _compare(spark: "SparkSession", request: HistoryRequest) -> None:
    """Let the history go on from what `current` has at `to_lsn`: what differs ends or begins there, unseen."""
    conf = {"spark.databricks.delta.replaceWhere.constraintCheck.enabled": "false"}
    table = open_current(request.path)
    assert table is not None
    with isolated(spark, conf_for(2 * rows_in(table)) | conf) as session, failures(str(request.table)):
        now = _current(session, request)
        _retype(session, request, table, now.schema)
        shape = _known_in(_widened(session, request, now.schema), now.schema)
        present = session.read.format("delta").load(request.path).where(OPEN)
        rows = versions.compared(present, now, shape, request.to_lsn, request.moment)
        if shape.key:
            rows = by_key(rows, shape.key, _parts(request))
        mark = table.transaction_version(FENCE)
        more = {} if mark is not None and mark >= request.to_lsn else fence(request.to_lsn)
        failpoints.hit("publish.in_history")
        rows.write.format("delta").mode("overwrite").option("replaceWhere", f"{OPEN} = true").options(**more).save(request.path)
        failpoints.hit("publish.in_history")
        # Last: without it the next publish compares again, and finds no difference.
        if table.metadata().configuration.get(GENERATION) != request.generation:
            session.sql(statements.set_properties(request.path, {GENERATION: request.generation})).collect()


def _source_types(request: HistoryRequest, raw: StructType) -> StructType:
    return raw if request.schema_json is None else StructType.fromJson(json.loads(request.schema_json))


def _retyped(shape: Shape, types: StructType, has: StructType) -> dict[str, DataType]:
    """The columns of the history that have another type at the source now, with that type."""
    both = [name for name in shape.columns if name in types.names and name in has.names]
    return {name: types[name].dataType for name in both if not same_types(types[name].dataType, has[name].dataType)}


def _retype(session: "SparkSession", request: HistoryRequest, table: DeltaTable, types: StructType) -> None:
    """Give the history's columns the types that the source has now.

    Values that the new type holds as they are, such as those of an integer that has become a bigint, stay in their column. Others stay as
    they are in a column of their own, `_pgwal_<old type>_<name>`: nothing that was kept is converted. The files are written anew for it.
    """
    has = StructType.fromJson(json.loads(table.schema().to_json()))
    changed = _retyped(request.shape, types, has)
    if not changed:
        return
    values, taken = [], {name.lower() for name in has.names}
    for name in has.names:
        new, old = changed.get(name), has[name].dataType
        if new is None:
            values.append(quote(name))
        elif _holds(new, old):
            values.append(f"CAST({quote(name)} AS {new.simpleString()}) AS {quote(name)}")
        else:
            aside = next(free for free in names_in_raw(name, old.jsonValue()) if free.lower() not in taken)
            taken.add(aside.lower())
            values += [f"{null_of(new)} AS {quote(name)}", f"{quote(name)} AS {quote(aside)}"]
    # Delta refuses statistics on a column whose type has none, before the change and after it.
    bounded = [StructField(field.name, changed.get(field.name, field.dataType)) for field in has.fields if properties.is_bounded(field)]
    wanted = {properties.STATISTICS: properties.columns_with_statistics(StructType(bounded), (*request.key, VALID_FROM_LSN, VALID_TO_LSN))}
    wanted |= properties.delta_features({name: kind.simpleString() for name, kind in changed.items()})
    session.sql(statements.set_properties(request.path, wanted)).collect()
    whole = session.read.format("delta").load(request.path).selectExpr(*values)
    failpoints.hit("publish.in_history")
    whole.write.format("delta").mode("overwrite").option("overwriteSchema", "true").partitionBy(OPEN).save(request.path)


def _holds(new: DataType, old: DataType) -> bool:
    """Whether a column of the type `new` holds every value of the type `old` as it is."""
    if isinstance(new, _INTEGERS) and isinstance(old, _INTEGERS):
        return _INTEGERS.index(type(new)) > _INTEGERS.index(type(old))
    if isinstance(new, DecimalType) and isinstance(old, DecimalType):
        return new.scale >= old.scale and new.precision - new.scale >= old.precision - old.scale
    return False


def _known_in(shape: Shape, schema: StructType) -> Shape:
    """The table with only the columns of `schema`."""
    return altered(shape, columns=tuple(name for name in shape.columns if name in schema.names))


def _widened(session: "SparkSession", request: HistoryRequest, types: StructType) -> Shape:
    """The table with the columns whose type is known, after those that the history lacks were added to it."""
    table = open_current(request.path)
    assert table is not None
    has = StructType.fromJson(json.loads(table.schema().to_json()))
    shape = altered(request.shape, columns=tuple(name for name in request.columns if name in types.names or name in has.names))
    widen(session, request.path, shape.columns, types, has)
    return shape
