"""One window: the WAL from one LSN to another, read once on one slot and written to Parquet files that nothing names yet.

The reader stays on the thread that owns the connection, so that the server always gets its answers; decoding and writing go on beside
it, and a bounded queue between the two keeps memory within the budget whatever the size of a transaction.
"""

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow.compute as pc
from deltalake import Schema

from pgwal_pipeline import failpoints
from pgwal_pipeline.decode.batch import Decoded, Decoder, TableChanges
from pgwal_pipeline.decode.pgoutput import RelationMessage
from pgwal_pipeline.errors import SourceUnavailable, TableError
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.places import Places
from pgwal_pipeline.lake.raw import TableWrite, WindowWriter
from pgwal_pipeline.lsn import window_key
from pgwal_pipeline.postgres.standbys import HeldBack
from pgwal_pipeline.postgres.stream import ReplicationStream
from pgwal_pipeline.progress import Progress
from pgwal_pipeline.relation import Relation

_IDLE = 0.25  # seconds the reader waits for the server before it looks round


class StreamBroke(SourceUnavailable):
    """The connection broke in the middle of a window. `kept` is what had come whole by then, a window that ends at `kept_end`.

    `kept` is None where no transaction had come whole.
    """

    def __init__(self, error: SourceUnavailable, kept: "WindowRead | None", kept_end: int) -> None:
        super().__init__(str(error))
        self.kept = kept
        self.kept_end = kept_end


@dataclass(frozen=True)
class WindowRead:
    """What was read of a window: its files, not yet part of any Delta table, and what they hold.

    `refused` says which tables could not be written, by their places, and why: none of their changes is in `writes`. `relations` are all
    definitions of the tables that the stream showed, in the order in which each came last, `truncated` the transactions (32 bits) that
    truncated a table, by its oid. `refilled` are the oids of tables that one transaction truncated and wrote rows to, `partitions` those of
    the partitions whose rows came as a table's, by its oid, `lacking` those of tables with an insert that left values out. `min_xid` and
    `max_xid` bound the 32-bit transaction ids of the changes, None where there are none; `seconds` has `drain`, `decode` and `write`.
    """

    writes: tuple[TableWrite, ...]
    refused: tuple[TableError, ...]
    relations: tuple[Relation, ...]
    truncated: Mapping[int, Collection[int]]
    refilled: Collection[int]
    partitions: Mapping[int, Collection[int]]
    lacking: Collection[int]
    transactions: int
    changes: int
    bytes: int
    min_xid: int | None
    max_xid: int | None
    seconds: dict[str, float]


@dataclass
class _Tally:
    transactions: int = 0
    changes: int = 0
    bytes: int = 0
    xids: list[int] = field(default_factory=list)
    relations: dict[Relation, None] = field(default_factory=dict)
    truncated: dict[int, set[int]] = field(default_factory=dict)
    refilled: set[int] = field(default_factory=set)
    partitions: dict[int, set[int]] = field(default_factory=dict)
    lacking: set[int] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=lambda: {"decode": 0.0, "write": 0.0})

    def add(self, decoded: Decoded, size: int) -> None:
        self.bytes += size
        self.transactions += decoded.transactions
        self.changes += decoded.changes_count
        self.xids += [xid for xid in (decoded.min_xid, decoded.max_xid) if xid is not None]
        for relation in decoded.relations:
            self.relations.pop(relation, None)
            self.relations[relation] = None
        for table, partition in decoded.partitions:
            self.partitions.setdefault(table, set()).add(partition)
        for changes in decoded.changes:
            self._note(changes)

    def _note(self, changes: TableChanges) -> None:
        oid, op = changes.relation.oid, pc.field("_pgwal_op")
        rows = changes.rows.select(["_pgwal_op", "_pgwal_xid", "_pgwal_unchanged"])
        if changes.truncates:
            self.truncated.setdefault(oid, set()).update(rows.filter(op == "T")["_pgwal_xid"].to_pylist())
        if oid in self.truncated and oid not in self.refilled:
            written = rows.filter(op.isin(["I", "U"]))["_pgwal_xid"].unique().to_pylist()
            self.refilled |= set() if self.truncated[oid].isdisjoint(written) else {oid}
        if changes.unchanged and changes.inserts and oid not in self.lacking:
            lacking = rows.filter((op == "I") & pc.field("_pgwal_unchanged").is_valid())
            self.lacking |= {oid} if lacking.num_rows else set()

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] += time.perf_counter() - started


@dataclass(frozen=True)
class _Feed:
    """Messages in the order they came, and how far the server said it had read when the last of them was taken."""

    messages: Sequence[memoryview]
    size: int
    server_position: int


class _Cut:
    """Stands behind the last feed of a stream that broke."""


class _Consumer(threading.Thread):
    """Decodes and writes what the reader hands over, until the window's end has been passed or something fails."""

    def __init__(self, decoder: Decoder, writer: WindowWriter, end_lsn: int, budget: int) -> None:
        super().__init__(name="pgwal-consumer", daemon=True)
        self.tally = _Tally()
        self.writes: tuple[TableWrite, ...] = ()
        self.refused: dict[str, TableError] = {}
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._decoder = decoder
        self._writer = writer
        self._end_lsn = end_lsn
        self._position = 0
        self._in_transaction = False
        self.last_commit_end = 0
        self.passed_end = False
        self.finished = False
        self._feeds: queue.SimpleQueue[_Feed | _Cut | None] = queue.SimpleQueue()
        self._budget = budget
        self._held = 0
        self._room = threading.Condition()

    def has_room(self, timeout: float) -> bool:
        """Whether another feed may be handed over; waits up to `timeout` seconds for it."""
        with self._room:
            return self._room.wait_for(lambda: self._held < self._budget or self.ended.is_set(), timeout)

    def hand_over(self, feed: _Feed) -> None:
        with self._room:
            self._held += feed.size
        self._feeds.put(feed)

    def stop(self) -> None:
        """Give up what is not consumed yet."""
        self._feeds.put(None)

    def cut_short(self) -> None:
        """End the window behind the last transaction that came whole, when all that was handed over has been consumed."""
        self._feeds.put(_Cut())

    def run(self) -> None:
        try:
            while (feed := self._feeds.get()) is not None:
                if isinstance(feed, _Cut):
                    self._finish(self.last_commit_end)
                    break
                passed = self._consume(feed)
                with self._room:
                    self._held -= feed.size
                    self._room.notify_all()
                if passed:
                    self.passed_end = True
                    self._finish()
                    break
        except BaseException as error:  # noqa: BLE001 - carried to the reader's thread, which raises it
            self.error = error
        finally:
            self.ended.set()
            with self._room:
                self._room.notify_all()

    def _finish(self, cut: int | None = None) -> None:
        with self.tally.timed("write"):
            while True:
                try:
                    if cut is not None:
                        self.tally.changes -= self._writer.cut(cut)
                    self.writes = self._writer.finish()
                    self.finished = True
                    return
                except TableError as error:
                    self._refuse(error)

    def _refuse(self, error: TableError) -> None:
        """Leave a table out of the window; the others go on."""
        self.refused.setdefault(error.table, error)

    def _consume(self, feed: _Feed) -> bool:
        """Take one feed; true once every transaction of the window has been seen whole."""
        self._position = max(self._position, feed.server_position)
        if feed.messages:
            with self.tally.timed("decode"):
                decoded = self._decoder.feed(feed.messages)
            self.tally.add(decoded, feed.size)
            with self.tally.timed("write"):
                for changes in decoded.changes:
                    try:
                        self._writer.add(changes)
                    except TableError as error:
                        self._refuse(error)
            if decoded.passed_end:
                return True
            self._in_transaction = decoded.in_transaction
            self.last_commit_end = max(self.last_commit_end, decoded.last_commit_end_lsn or 0)
            self._position = max(self._position, self.last_commit_end)
        return not self._in_transaction and self._position >= self._end_lsn


def read_window(
    stream: ReplicationStream,
    lake: Lake,
    places: Places,
    describe: Callable[[RelationMessage], Relation],
    *,
    start_lsn: int,
    end_lsn: int,
    memory_budget: int,
    progress: Progress,
    stage: str = "drain",
    expected: Mapping[str, Schema] | None = None,
) -> WindowRead:
    """Read every transaction with `start_lsn <= commit LSN < end_lsn` from `stream` into Parquet files in the lake.

    Ends when the server has read past `end_lsn`; its silence never counts as that, for a walsender is silent while it decodes a large
    transaction that is not ours. At most `memory_budget` bytes of changes are held, undecoded and unwritten together. Nothing is committed
    and nothing confirmed here. `stage` is what `progress` calls it, `places` and `expected` as `WindowWriter` has them. Raises StreamBroke,
    which has what came whole, where the connection breaks, and what decoding or writing raise.
    """
    started = time.perf_counter()
    feed_bytes = max(64 << 10, min(4 << 20, memory_budget // 16))
    writer = WindowWriter(lake, memory_budget // 2, window_key(end_lsn), expected, places)
    consumer = _Consumer(Decoder(describe, start_lsn, end_lsn), writer, end_lsn, memory_budget // 4)
    consumer.start()
    broken: SourceUnavailable | None = None
    try:
        held = HeldBack(stream.dsn, stream.slot, progress.warn)
        _pump(
            stream,
            consumer,
            feed_bytes,
            held,
            lambda position: progress.stage(stage, *_share(start_lsn, position, end_lsn), "bytes of WAL"),
        )
    except SourceUnavailable as error:
        broken = error
        consumer.cut_short()
    finally:
        if broken is None:
            consumer.stop()
        consumer.join()
        if consumer.error is not None or not consumer.finished or (broken is not None and not start_lsn < consumer.last_commit_end):
            writer.abandon()
    if consumer.error is not None:
        raise consumer.error
    read = _what_was_read(consumer, time.perf_counter() - started)
    if broken is not None and not consumer.passed_end:
        whole = start_lsn < consumer.last_commit_end
        raise StreamBroke(broken, read if whole else None, consumer.last_commit_end) from broken
    return read


def _pump(stream: ReplicationStream, consumer: _Consumer, feed_bytes: int, held: HeldBack, report: Callable[[int], None]) -> None:
    """Hand over what the stream brings until the consumer has seen the window's end; `report` is told how far the server has read."""
    reported = -1
    while not consumer.ended.is_set():
        if not consumer.has_room(_IDLE):
            stream.keep_alive()
            continue
        messages = stream.read(feed_bytes, _IDLE)
        failpoints.hit("drain.read")
        if messages or stream.server_position != reported:
            reported = stream.server_position
            consumer.hand_over(_Feed(messages, sum(map(len, messages)), reported))
            held.moved()
        else:
            stream.request_reply()
            held.stands()
        report(reported)


def _share(start_lsn: int, position: int, end_lsn: int) -> tuple[int, int]:
    return max(0, min(position, end_lsn) - start_lsn), end_lsn - start_lsn


def _what_was_read(consumer: _Consumer, seconds: float) -> WindowRead:
    tally = consumer.tally
    return WindowRead(
        writes=consumer.writes,
        refused=tuple(consumer.refused.values()),
        relations=tuple(tally.relations),
        truncated=tally.truncated,
        refilled=tally.refilled,
        partitions=tally.partitions,
        lacking=tally.lacking,
        transactions=tally.transactions,
        changes=tally.changes,
        bytes=tally.bytes,
        min_xid=min(tally.xids, default=None),
        max_xid=max(tally.xids, default=None),
        seconds={"drain": seconds, **tally.seconds},
    )
