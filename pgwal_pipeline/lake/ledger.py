"""Read and write the ledger, the truth about a lake: its windows, the state of each table, its publishes and its source.

A lake that does not exist has an empty ledger, and reading creates nothing. A read sees every record that any process has written by then.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from pgwal_pipeline.lake import rows as as_rows
from pgwal_pipeline.lake.delta import lake_errors
from pgwal_pipeline.lake.layout import Lake, filesystem
from pgwal_pipeline.lake.log import ALL, NEWEST, SEQUENCE, RowLog
from pgwal_pipeline.lake.records import FORMAT, Chunk, Plan, Proof, Publish, Registration, Source, TablePointer, TableState, Window
from pgwal_pipeline.lake.stream_facts import Read
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.relation import TableName

__all__ = ["LOGS", "Chunk", "Ledger", "Plan", "Publish", "Read", "Source", "TablePointer", "TableState", "Window"]

LOGS = ("source", "windows", "plans", "reads", "tables", "chunks", "publishes", "registrations", "proofs")
"""The names of the ledger's Delta tables, as `Lake.ledger` takes them."""

_CONFLICT = "Only one pipeline may feed a lake: make sure that no other one uses PGWAL_LAKE, then try again."


class Ledger:
    """The ledger of `lake`. Threads may share one object; each process has its own.

    Every method raises LakeError if the lake cannot be used, or if two processes write records that contradict each other.
    """

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self._source = RowLog(lake, "source", as_rows.SOURCE, ["slot"])
        self._windows = RowLog(lake, "windows", as_rows.WINDOWS, ["key"], without_pruned, order="end_lsn")
        self._plans = RowLog(lake, "plans", as_rows.PLANS, ["start_lsn"])
        self._reads = RowLog(lake, "reads", as_rows.READS, ["key"])
        self._tables = RowLog(lake, "tables", as_rows.TABLES, ["table"])
        self._chunks = RowLog(lake, "chunks", as_rows.CHUNKS, ["table", "generation", "chunk"])
        self._publishes = RowLog(lake, "publishes", as_rows.PUBLISHES, ["lsn"], order="lsn")
        self._registrations = RowLog(lake, "registrations", as_rows.REGISTRATIONS, ["location"])
        self._proofs = RowLog(lake, "proofs", as_rows.PROOFS, ["location"])
        self._read: dict[int, Window] = {}
        self._is_known_form = False

    def source(self) -> Source | None:
        """Return the source that the lake is built from, None before there is one. Raises LakeError if PGWAL_LAKE holds something else.

        Raises it too if a newer version has worked on the lake.
        """
        source = self._recorded_source()
        if source is None:
            require_empty(self.lake)
        return source

    def _recorded_source(self) -> Source | None:
        rows = self._source.rows()
        if rows.num_rows == 0:
            return None
        source = as_rows.sources(rows.slice(rows.num_rows - 1))[0]
        if source.format > FORMAT:
            raise LakeError(
                f"A newer version of pgwal_pipeline has worked on the lake {self.lake.uri} (its ledger has form {source.format}, and this "
                f"version knows {FORMAT}): install that version again."
            )
        return source

    def record_source(self, source: Source) -> None:
        """Record which source the lake is built from; the newest record counts. Raises LakeError if the lake has another source already."""

        def decide(rows: pa.Table) -> pa.Table:
            known = as_rows.sources(rows.slice(rows.num_rows - 1))[0] if rows.num_rows else source
            if _same_for_all(known) != _same_for_all(source):
                raise LakeError(f"The lake {self.lake.uri} was taken by another pipeline just now. {_CONFLICT}")
            return as_rows.source_rows(source, _now())

        self._source.append(decide)

    def windows(self, after: int = 0) -> tuple[Window, ...]:
        """Return the windows that end past `after`, in the order of their LSNs. A `pruned` one may stand for many."""
        rows = self._windows.rows(after or ALL)
        chosen = rows.filter(pc.field("end_lsn") > after) if after else rows
        return tuple(sorted(self._as_windows(chosen), key=lambda window: (window.start_lsn, window.end_lsn)))

    def prepared(self) -> tuple[Window, ...]:
        """Return the windows whose files are durable but may not be in raw yet, in the order of their LSNs."""
        rows = self._windows.rows(self._published()).filter(pc.field("state") == "prepared")
        return tuple(sorted(self._as_windows(rows), key=lambda window: window.start_lsn))

    def append_window(self, window: Window) -> None:
        """Record a window. For a `prepared` one this is the commit: from here on its files count.

        Recording the same window again changes nothing; a `complete` record replaces a `prepared` one. Raises LakeError if the window
        overlaps another one, or if another process has recorded the same range.
        """
        self.append_windows([window])

    def append_windows(self, windows: Sequence[Window]) -> None:
        """Record windows that follow one another, all in one commit; otherwise as `append_window`."""

        def decide(rows: pa.Table) -> pa.Table:
            added = [row for row in (self._accept(window, rows) for window in windows) if row.num_rows]
            return pa.concat_tables(added) if added else rows.slice(0, 0)

        self._windows.append(decide, min((window.start_lsn for window in windows), default=0) - 1)

    def record_plan(self, plan: Plan) -> None:
        """Record how a backlog is cut into windows. A newer plan from the same start LSN replaces an older one."""
        self._plans.append(lambda _: as_rows.plan_rows(plan, _now()))

    def plan(self) -> Plan | None:
        """Return the plan that starts at the frontier, None if there is none. None of its windows is committed yet."""
        found = as_rows.plans(self._plans.rows())
        frontier = self.frontier() if found else None
        return next((plan for plan in found if plan.start_lsn == frontier and plan.ends), None)

    def record_read(self, read: Read) -> None:
        """Record that a window of a plan has been read: its files are kept from here on. If there is a record already, that one counts."""

        def decide(rows: pa.Table) -> pa.Table:
            known = rows.filter((pc.field("key") == read.window.key) & (pc.field("start_lsn") == read.window.start_lsn))
            row = as_rows.read_rows(read, self.lake, _now())
            return row if known.num_rows == 0 else row.slice(0, 0)

        self._reads.append(decide)

    def forget_read(self, window: Window) -> None:
        """Delete the record that a window of a plan has been read: it has to be read again."""
        self._reads.rewrite(lambda rows: rows.filter(pc.field("key") != window.key))

    def forget_reads(self, plan: Plan) -> None:
        """Delete the records of all windows that were read from the start of `plan` on."""
        self._reads.rewrite(lambda rows: rows.filter(pc.field("start_lsn") < plan.start_lsn))

    def refined(self, plan: Plan) -> Plan:
        """Return `plan` with each window cut in two whose reading broke off: the first part has been read, the rest has not."""
        rows = self._reads.rows()
        read = set(zip(rows["start_lsn"].to_pylist(), rows["end_lsn"].to_pylist(), strict=True))
        while True:
            missing = [limits for limits in plan.ranges if limits not in read]
            cuts = {max(kept) for start, end in missing if (kept := [to for of, to in read if of == start and start < to < end])}
            if not cuts:
                return plan
            plan = Plan(plan.start_lsn, tuple(sorted({*plan.ends, *cuts})), plan.ended)

    def reads(self, plan: Plan) -> dict[str, Read]:
        """Return the windows of `plan` that have been read, by their keys."""
        rows = self._reads.rows()
        found = {(read.window.start_lsn, read.window.end_lsn): read for read in as_rows.reads(rows, self.lake)}
        return {found[limits].window.key: found[limits] for limits in plan.ranges if limits in found}

    def take_back(self, windows: Sequence[Window]) -> None:
        """Delete prepared windows. They have to be read again with the same limits, because raw may have some of their tables."""
        keys = pa.array([window.key for window in windows], pa.string())
        self._windows.rewrite(lambda rows: rows.filter(~((pc.field("state") == "prepared") & pc.field("key").isin(keys))))

    def prune_windows(self, keys: Iterable[str]) -> None:
        """Record that raw no longer has these complete windows. Windows that follow one another become one record."""
        wanted = set(keys)

        def decide(rows: pa.Table) -> pa.Table:
            known = sorted(self._as_windows(rows), key=lambda window: (window.start_lsn, window.end_lsn))
            return as_rows.window_rows(_runs(known, wanted), self.lake, _now())

        self._windows.append(decide)

    def frontier(self) -> int | None:
        """Return the LSN up to which every change is in raw, None before the first window.

        Complete windows cover everything from the start of the newest slot up to there.
        """
        # A publish is at what was the frontier, so only the windows from there on can tell where it is now.
        published = self._published()
        found = self._reached(published) if published else None
        return self._reached(0) if found is None else found

    def _reached(self, begin: int) -> int | None:
        """The frontier, given that it is at `begin` at least (0: nothing is known of it). None if no window ends there or after it."""
        rows = self._windows.rows(begin - 1 if begin else ALL)
        done = rows.filter((pc.field("state") != "prepared") & (pc.field("end_lsn") >= begin))
        if done.num_rows == 0:
            return None
        starts, ends = done["start_lsn"].to_numpy(), done["end_lsn"].to_numpy()
        origins = starts[starts == ends]
        reached = max(begin, int(origins.max() if len(origins) else starts.min()))
        for position in np.lexsort((ends, starts)):
            if starts[position] <= reached:
                reached = max(reached, int(ends[position]))
        return reached

    def _published(self) -> int:
        """The LSN of the newest publish; 0 before the first."""
        return max(self._publishes.rows(NEWEST)["lsn"].to_pylist(), default=0)

    def tables(self) -> dict[TableName, TableState]:
        """Return the state of every table that the pipeline has ever met, by name, in the order of the names."""
        if not self._is_known_form:
            self._recorded_source()
            self._is_known_form = True
        return {state.table: state for state in sorted(as_rows.states(self._tables.rows()), key=lambda state: state.table)}

    def record_tables(self, states: Iterable[TableState]) -> None:
        """Record the states of tables, all in one commit."""
        rows = as_rows.state_rows(states, _now())
        self._tables.append(lambda _: rows)

    def amend_tables(self, decide: Callable[[dict[TableName, TableState]], Iterable[TableState]]) -> None:
        """Record the states that `decide` returns for the present ones. It is called again if another process was faster."""
        self._tables.append(lambda rows: as_rows.state_rows(decide({state.table: state for state in as_rows.states(rows)}), _now()))

    def chunks(self, location: TableName, generation: str) -> tuple[Chunk, ...]:
        """Return the chunks of one snapshot of the table at that location, in their order."""
        rows = self._chunks.rows().filter((pc.field("table") == str(location)) & (pc.field("generation") == generation))
        return tuple(sorted(as_rows.chunks(rows), key=lambda chunk: chunk.chunk))

    def record_chunks(self, chunks: Iterable[Chunk]) -> None:
        """Record chunks, all in one commit. The newest record of a chunk counts."""
        rows = as_rows.chunk_rows(chunks, _now())
        self._chunks.append(lambda _: rows)

    def forget_keys(self, location: TableName) -> None:
        """Drop what has values of the key of the table at that location: its chunks, and how far it is proven."""
        self._chunks.rewrite(lambda rows: rows.filter(pc.field("table") != str(location)))
        self._proofs.rewrite(lambda rows: rows.filter(pc.field("location") != str(location)))

    def publish(self) -> Publish | None:
        """Return the newest publish, None before the first."""
        newest = self._publishes.rows(NEWEST).sort_by("lsn")
        return as_rows.publishes(newest.slice(newest.num_rows - 1), self.lake)[0] if newest.num_rows else None

    def publish_before(self, lsn: int | None = None, moment: datetime | None = None) -> Publish | None:
        """Return the newest publish that is not past `lsn`, or not after `moment`; None if there is none."""
        found = self._publishes.rows()
        if lsn is not None:
            found = found.filter(pc.field("lsn") <= lsn)
        if moment is not None:
            found = found.filter(pc.field("published_at") <= moment)
        newest = found.sort_by("lsn" if moment is None else "published_at")
        return as_rows.publishes(newest.slice(newest.num_rows - 1), self.lake)[0] if newest.num_rows else None

    def publishes(self) -> tuple[Publish, ...]:
        """Return all publishes in the order of their LSNs; of several at one LSN the last."""
        return tuple(as_rows.publishes(self._publishes.rows().sort_by("lsn"), self.lake))

    def record_publish(self, publish: Publish) -> None:
        """Record a publish. Raises LakeError if its LSN is below the newest one's, or equal to it with an older version of a table."""

        def decide(rows: pa.Table) -> pa.Table:
            newest = rows.sort_by("lsn")
            if newest.num_rows:
                _require_forward(as_rows.publishes(newest.slice(newest.num_rows - 1), self.lake)[0], publish)
            return as_rows.publish_rows(publish, self.lake)

        self._publishes.append(decide, NEWEST)

    def registrations(self) -> dict[TableName, Registration]:
        """Return what is known of the tables' entries in the catalog of PGWAL_SPARK_CATALOG, by the tables' locations."""
        return {found.location: found for found in as_rows.registrations(self._registrations.rows())}

    def record_registrations(self, registrations: Iterable[Registration]) -> None:
        """Record what the catalog has of tables, all in one commit. The newest record of a location counts."""
        rows = as_rows.registration_rows(registrations, _now())
        self._registrations.append(lambda _: rows)

    def proofs(self) -> dict[TableName, Proof]:
        """Return how far `current` tables are proven to equal the source, by the tables' locations."""
        return {found.location: found for found in as_rows.proofs(self._proofs.rows())}

    def record_proofs(self, proofs: Iterable[Proof]) -> None:
        """Record how far tables are proven, all in one commit. The newest record of a location counts."""
        rows = as_rows.proof_rows(proofs, _now())
        self._proofs.append(lambda _: rows)

    def generations(self, location: TableName) -> set[str]:
        """Return the generations of the table at that location that have chunks in the ledger."""
        return set(self._chunks.rows().filter(pc.field("table") == str(location))["generation"].to_pylist())

    def forget(self, published_before: datetime, read_before: datetime) -> None:
        """Drop old records: publishes before `published_before`, except the newest; chunks before `read_before` that no table state names.

        Plans and read windows from before the frontier go too.
        """

        def recent(rows: pa.Table) -> pa.Table:
            return rows.filter(
                (pc.field("published_at") >= published_before) | (pc.field("lsn") == max(rows["lsn"].to_pylist(), default=0))
            )

        def living(rows: pa.Table) -> pa.Table:
            states = self.tables().values()
            kept = {(str(state.location), name) for state in states for name in (state.generation, state.reading, state.published)}
            pairs = zip(rows["table"].to_pylist(), rows["generation"].to_pylist(), rows["at"].to_pylist(), strict=True)
            return rows.filter(pa.array([(table, name) in kept or at >= read_before for table, name, at in pairs], pa.bool_()))

        frontier = self.frontier() or 0
        self._publishes.rewrite(recent)
        self._chunks.rewrite(living)
        self._plans.rewrite(lambda rows: rows.filter(pc.field("start_lsn") >= frontier))
        self._reads.rewrite(lambda rows: rows.filter(pc.field("start_lsn") >= frontier))

    def _as_windows(self, rows: pa.Table) -> list[Window]:
        """The windows of `rows`; each row is decoded only once."""
        numbers = rows[SEQUENCE].to_pylist()
        fresh = rows.filter(pa.array([number not in self._read for number in numbers], pa.bool_()))
        self._read.update(zip(fresh[SEQUENCE].to_pylist(), as_rows.windows(fresh, self.lake), strict=True))
        return [self._read[number] for number in numbers]

    def _accept(self, window: Window, rows: pa.Table) -> pa.Table:
        """The row that `window` adds to `rows`; an empty table if it is there already."""
        overlapping = (
            (pc.field("state") != "pruned")
            & (pc.field("key") != window.key)
            & (pc.field("start_lsn") < window.end_lsn)
            & (pc.field("end_lsn") > window.start_lsn)
        )
        others = self._as_windows(rows.filter(overlapping))
        same = next(iter(self._as_windows(rows.filter(pc.field("key") == window.key))), None)
        if same is not None:
            if window.start_lsn == window.end_lsn:
                return rows.slice(0, 0)  # a slot that begins where the last window ended
            if (same.start_lsn, same.slot) != (window.start_lsn, window.slot) or (
                window.state == "prepared" and window.tables != same.tables
            ):
                others = [same]
            elif same.state == window.state or same.state != "prepared":
                return rows.slice(0, 0)
        if others:
            raise LakeError(
                f"The window from {format_lsn(window.start_lsn)} to {format_lsn(window.end_lsn)} of slot {window.slot} cannot be added to "
                f"the lake {self.lake.uri}, which has one from {format_lsn(others[0].start_lsn)} to {format_lsn(others[0].end_lsn)}. "
                f"{_CONFLICT}"
            )
        return as_rows.window_rows([window], self.lake, _now())


def without_pruned(rows: pa.Table) -> pa.Table:
    """Return the window rows without those that a `pruned` one stands for. The empty windows where slots began stay."""
    spans = rows.filter(pc.field("state") == "pruned")
    if spans.num_rows == 0:
        return rows
    starts, ends = rows["start_lsn"].to_numpy(), rows["end_lsn"].to_numpy()
    hidden = np.zeros(rows.num_rows, bool)
    for start, end in zip(spans["start_lsn"].to_pylist(), spans["end_lsn"].to_pylist(), strict=True):
        within = (starts >= start) & (ends <= end) & (starts < ends)
        hidden |= within & ~((starts == start) & (ends == end))
    return rows.filter(pa.array(~hidden))


def require_empty(lake: Lake) -> None:
    """Raise LakeError if the lake's folder has entries other than a ledger, which a lake must not be mixed with. Ignores hidden entries."""
    with lake_errors(lake.uri):
        found = filesystem(lake.uri).get_file_info(pafs.FileSelector("", allow_not_found=True))
    names = sorted(
        entry.base_name for entry in found if not entry.base_name.startswith(".") and entry.base_name not in ("_pgwal", "lost+found")
    )
    if names:
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        raise LakeError(
            f"PGWAL_LAKE {lake.uri} is not a lake of this pipeline and holds something else ({shown}); "
            f"set it to a folder or prefix of its own."
        )


def _runs(windows: Sequence[Window], keys: set[str]) -> list[Window]:
    """`pruned` records for the windows `keys`: one per run of windows that follow one another, including those pruned before."""
    runs: list[list[Window]] = [[]]
    for window in windows:
        if window.start_lsn == window.end_lsn:
            continue
        pruned = window.state == "pruned" or (window.state == "complete" and window.key in keys)
        if not pruned or (runs[-1] and runs[-1][-1].end_lsn != window.start_lsn):
            runs.append([])
        if pruned:
            runs[-1].append(window)
    return [
        Window(
            key=run[-1].key,
            slot=run[-1].slot,
            start_lsn=run[0].start_lsn,
            end_lsn=run[-1].end_lsn,
            state="pruned",
            transactions=sum(window.transactions for window in run),
            changes=sum(window.changes for window in run),
            bytes=sum(window.bytes for window in run),
        )
        for run in runs
        if any(window.state == "complete" for window in run)
    ]


def _require_forward(newest: Publish, publish: Publish) -> None:
    if publish.lsn < newest.lsn:
        raise LakeError(
            f"A publish at {format_lsn(publish.lsn)} cannot follow the one at {format_lsn(newest.lsn)} that the lake has. {_CONFLICT}"
        )
    if publish.lsn == newest.lsn:
        versions = {pointer.path: pointer.version for pointer in newest.tables.values()}
        for table, pointer in publish.tables.items():
            known = versions.get(pointer.path, 0)
            if known > pointer.version:
                raise LakeError(
                    f"Table {table} is already published at {format_lsn(publish.lsn)} with version {known} of its current table, "
                    f"so version {pointer.version} cannot be published there. {_CONFLICT}"
                )


def _same_for_all(source: Source) -> Source:
    """What of a source never changes in a lake."""
    return replace(source, timeline=0, publication_oid=0, database="", format=0)


def _now() -> datetime:
    return datetime.now(UTC)
