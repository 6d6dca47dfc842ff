"""Windows: the WAL from one LSN to another, read once on one slot and written to Parquet files that nothing names yet.

The reader stays on the thread that owns the connection, so that the server always gets its answers; decoding and writing go on beside
it, and a bounded queue between the two keeps memory within the budget whatever the size of a transaction. A long stretch of WAL becomes
several windows on one stream: each is handed over as soon as it is whole, while the next one is read.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from deltalake import Schema

from pgwal_pipeline import failpoints
from pgwal_pipeline.decode.batch import Checkpoint, Decoded, Decoder
from pgwal_pipeline.decode.frames import heads_of_large
from pgwal_pipeline.decode.pgoutput import RelationMessage
from pgwal_pipeline.errors import ChangeNotSent, DecodeError, PgwalError, SourceUnavailable, TableError, TableWorkFailed
from pgwal_pipeline.lake import undecodable
from pgwal_pipeline.lake.facts import Refusal
from pgwal_pipeline.lake.faults import is_tables_own, table_error
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.places import Places
from pgwal_pipeline.lake.raw import WindowWriter
from pgwal_pipeline.lake.records import Window
from pgwal_pipeline.lake.schema import check_columns
from pgwal_pipeline.lsn import window_key
from pgwal_pipeline.pipeline.tally import Tally, WindowRead
from pgwal_pipeline.postgres.standbys import HeldBack
from pgwal_pipeline.postgres.stream import ReplicationStream
from pgwal_pipeline.progress import Progress
from pgwal_pipeline.relation import Relation

_IDLE = 0.25  # seconds the reader waits for the server before it looks round

Describe = Callable[[RelationMessage], Relation | None]


class StreamBroke(SourceUnavailable):
    """The stream ended in the middle of a window. `kept` is what had come whole by then, a window too; None if nothing had.

    `counted` are the windows before it that the same stream brought, which count.
    """

    def __init__(self, error: PgwalError, kept: WindowRead | None, counted: Sequence[Window] = ()) -> None:
        super().__init__(str(error))
        self.kept = kept
        self.counted = counted


@dataclass(frozen=True)
class Portions:
    """How a long stretch of WAL is cut into windows: after about `size` bytes of WAL, or `seconds` of reading, at a transaction's end.

    `take` gets each window but the last, in their order, on a thread of its own; it may wait, and what it raises ends the reading.
    `between` is called on the reader's thread now and then.
    """

    size: int
    seconds: float
    take: Callable[[WindowRead], None]
    between: Callable[[], None]


@dataclass(frozen=True)
class _Feed:
    """Messages in the order they came, and how far the server said it had read when the last of them was taken.

    `heads` are those of which only the head was kept, by their index: the bytes that each had.
    """

    messages: Sequence[memoryview]
    size: int
    server_position: int
    heads: Mapping[int, int]


class _Cut:
    """Stands behind the last feed of a stream that broke."""


class _Open:
    """The window that is being read."""

    def __init__(self, start_lsn: int, end_lsn: int, writer: WindowWriter) -> None:
        self.start_lsn = start_lsn
        self.end_lsn = end_lsn
        self.writer = writer
        self.tally = Tally()
        self.since = time.perf_counter()


class _Consumer(threading.Thread):
    """Decodes and writes what the reader hands over, until the last window's end has been passed or something fails."""

    def __init__(
        self,
        decoder: Decoder,
        lake: Lake,
        places: Places,
        limits: tuple[int, int],
        budget: int,
        expected: Mapping[str, Schema],
        portions: Portions | None,
    ) -> None:
        super().__init__(name="pgwal-consumer", daemon=True)
        self.last: WindowRead | None = None
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._decoder = decoder
        self._lake = lake
        self._places = places
        self._end_lsn = limits[1]
        self._budget = budget
        self._expected = dict(expected)
        self._portions = portions
        self._left_out: set[int] = set()
        self._position = 0
        self._in_transaction = False
        self._last_commit_end = 0
        self._open = self._window(limits[0])
        decoder.next_window(self._open.end_lsn)
        self._feeds: queue.SimpleQueue[_Feed | _Cut | None] = queue.SimpleQueue()
        self._held = 0
        self._room = threading.Condition()

    def has_room(self, timeout: float) -> bool:
        """Whether another feed may be handed over; waits up to `timeout` seconds for it."""
        with self._room:
            return self._room.wait_for(lambda: self._held < self._budget // 4 or self.ended.is_set(), timeout)

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

    @property
    def passed_end(self) -> bool:
        """Whether the last window has been seen whole."""
        return self.last is not None and self.last.end_lsn == self._end_lsn

    def abandon(self) -> None:
        """Take the files of the window that is being read away."""
        self._open.writer.abandon()

    def run(self) -> None:
        try:
            while (feed := self._feeds.get()) is not None:
                if isinstance(feed, _Cut):
                    self._cut()
                    break
                passed = self._consume(feed)
                with self._room:
                    self._held -= feed.size
                    self._room.notify_all()
                if passed:
                    break
        except BaseException as error:  # noqa: BLE001 - carried to the reader's thread, which raises it
            self.error = error
        finally:
            self.ended.set()
            with self._room:
                self._room.notify_all()

    def _consume(self, feed: _Feed) -> bool:
        """Take one feed, which may pass the ends of several windows; true once the last of them has been seen whole."""
        self._position = max(self._position, feed.server_position)
        self._open.tally.bytes += feed.size
        messages = feed.messages
        while True:
            checkpoint = self._decoder.checkpoint()
            passed = self._take_in(messages, feed.heads) if messages else False
            if not passed and (self._in_transaction or self._position < self._open.end_lsn):
                return False
            if not passed:
                messages = ()
                self._reach_further()
            if self._open.end_lsn >= self._end_lsn:
                self.last = self._finished()
                return True
            assert self._portions is not None
            self._portions.take(self._finished())
            self._begin_next(checkpoint if passed else None)

    def _take_in(self, messages: Sequence[memoryview], heads: Mapping[int, int]) -> bool:
        """Decode messages and hand their rows to the writer; true if they pass the window's end."""
        self._mind_the_time()
        with self._open.tally.timed("decode"):
            decoded = self._decoded(messages, heads)
        self._open.tally.add(decoded)
        with self._open.tally.timed("write"):
            for changes in decoded.changes:
                self._open.writer.add(changes)
            self._leave_out(error.oid for error in self._open.writer.refused.values())
        self._in_transaction = decoded.in_transaction
        self._last_commit_end = max(self._last_commit_end, decoded.last_commit_end_lsn or 0)
        self._position = max(self._position, self._last_commit_end)
        return decoded.passed_end

    def _mind_the_time(self) -> None:
        """End the window with the transaction that is open, or was last, once it has been read for long enough."""
        due = self._portions is not None and time.perf_counter() - self._open.since >= self._portions.seconds
        if due and self._decoder.last_commit_lsn >= self._open.start_lsn:
            self._open.end_lsn = self._decoder.end_after_this_transaction()

    def _reach_further(self) -> None:
        """Stretch a window without a change to where the server has come: much WAL that is not ours makes no row of empty windows."""
        if not self._open.tally.transactions:
            self._open.end_lsn = min(max(self._open.end_lsn, self._position), self._end_lsn)
            self._decoder.next_window(self._open.end_lsn)

    def _begin_next(self, checkpoint: Checkpoint | None) -> None:
        self._open = self._window(self._open.end_lsn)
        self._decoder.next_window(self._open.end_lsn, checkpoint)

    def _window(self, start_lsn: int) -> _Open:
        """A window from `start_lsn` on; a rest that is not worth a window of its own belongs to it."""
        end = self._end_lsn
        if self._portions is not None and end - start_lsn > 1.5 * self._portions.size:
            end = start_lsn + self._portions.size
        return _Open(start_lsn, end, WindowWriter(self._lake, self._budget // 2, window_key(end), self._expected, self._places))

    def _decoded(self, messages: Sequence[memoryview], heads: Mapping[int, int]) -> Decoded:
        """Decode messages, without the tables whose own fault it is that this fails."""
        while True:
            try:
                return self._decoder.feed(messages, heads)
            except DecodeError as error:
                self._set_aside(error)
            except TableWorkFailed as failed:
                assert failed.__cause__ is not None
                if failed.oid in self._left_out or not is_tables_own(failed.__cause__, self._lake):
                    raise failed.__cause__ from None
                self._refuse(failed.oid, table_error(failed.__cause__, failed.table, failed.stage, failed.oid))

    def _set_aside(self, error: DecodeError) -> None:
        """Keep a message that cannot be decoded, and leave its table out; raises where it belongs to no table."""
        path = undecodable.keep(self._lake, error.lsn, error.payload)
        if not error.oid or error.oid in self._left_out:
            raise DecodeError(
                f"{error} Nothing past it is confirmed. The whole message is in {path}: report it, and keep the slot.",
                lsn=error.lsn,
                payload=error.payload,
            ) from error
        self._refuse(error.oid, TableError(str(error.oid), f"{error} The whole message is in {path}: report it.", error.oid, "decode"))

    def _refuse(self, oid: int, error: TableError) -> None:
        """Leave a table out of this window and those after it."""
        relation = self._decoder.relation(oid)
        known = self._places.by_oid.get(oid)
        self._leave_out([oid])
        if known is not None or relation is not None:
            place = known[0] if known is not None else self._places.find(relation)[0] if relation is not None else None
            assert place is not None
            self._open.writer.refuse(place, error)

    def _leave_out(self, oids: Iterable[int]) -> None:
        for oid in oids:
            if oid not in self._left_out:
                self._left_out.add(oid)
                self._decoder.leave_out(oid)

    def _cut(self) -> None:
        """End the window that is open behind the last transaction that came whole, if one did."""
        end = self._last_commit_end
        if end > self._open.start_lsn:
            with self._open.tally.timed("write"):
                self._open.writer.cut(end)
            self._open.end_lsn = min(end, self._open.end_lsn)
            self.last = self._finished()

    def _finished(self) -> WindowRead:
        """What was read of the window that is open; its files are on disk then."""
        window = self._open
        with window.tally.timed("write"):
            writes = window.writer.finish()
        self._leave_out(error.oid for error in window.writer.refused.values())
        self._expected |= {write.path: Schema.from_json(write.schema_json) for write in writes}
        refused = {
            str(place): Refusal(error.oid, error.stage or "write", str(error), window.start_lsn)
            for place, error in window.writer.refused.items()
        }
        seconds = time.perf_counter() - window.since
        return window.tally.read(window.start_lsn, window.end_lsn, writes, refused, seconds)


def read_window(
    stream: ReplicationStream,
    lake: Lake,
    places: Places,
    describe: Describe,
    *,
    start_lsn: int,
    end_lsn: int,
    memory_budget: int,
    largest_row: int,
    progress: Progress,
    stage: str = "drain",
    expected: Mapping[str, Schema] | None = None,
    portions: Portions | None = None,
) -> WindowRead:
    """Read every transaction with `start_lsn <= commit LSN < end_lsn` from `stream` into Parquet files in the lake; the last window of it.

    Without `portions` that is the only one. Ends when the server has read past `end_lsn`; its silence never counts as that, for a walsender
    is silent while it decodes a large transaction that is not ours. At most `memory_budget` bytes of changes are held, undecoded and
    unwritten together. Nothing is committed and nothing confirmed here. A table that by its own fault cannot be decoded or written is left
    out from there on, and named in `facts.refused`; so is one with a row of more than `largest_row` bytes.
    `stage` is what `progress` calls it, `places` and `expected` are as `WindowWriter` has them.

    Raises StreamBroke, which has what came whole, where the connection breaks, or something came whole before a change that the source
    cannot send; ChangeNotSent where nothing did; and what decoding, writing or `portions` raise.
    """
    feed_bytes = max(64 << 10, min(4 << 20, memory_budget // 16))

    def wanted(message: RelationMessage) -> Relation | None:
        relation = None if message.oid in places.left_out else describe(message)
        if relation is not None:
            check_columns(relation)  # before its rows stand beside our columns, which are found there by their names
        return relation

    decoder = Decoder(wanted, start_lsn, start_lsn, largest_row=largest_row)
    consumer = _Consumer(decoder, lake, places, (start_lsn, end_lsn), memory_budget, expected or {}, portions)
    consumer.start()
    broken: SourceUnavailable | ChangeNotSent | None = None

    def between(position: int) -> None:
        progress.stage(stage, *_share(start_lsn, position, end_lsn), "bytes of WAL")
        if portions is not None:
            portions.between()

    try:
        _pump(stream, consumer, (feed_bytes, largest_row), HeldBack(stream.dsn, stream.slot, progress.warn), between)
    except (SourceUnavailable, ChangeNotSent) as error:
        broken = error
        consumer.cut_short()
    finally:
        if broken is None:
            consumer.stop()
        consumer.join()
        if consumer.last is None:
            consumer.abandon()
    if consumer.error is not None:
        raise consumer.error
    if broken is not None and not consumer.passed_end:
        if isinstance(broken, ChangeNotSent) and consumer.last is None:
            raise broken
        raise StreamBroke(broken, consumer.last) from broken
    assert consumer.last is not None
    return consumer.last


def _pump(stream: ReplicationStream, consumer: _Consumer, limits: tuple[int, int], held: HeldBack, between: Callable[[int], None]) -> None:
    """Hand over what the stream brings until the consumer has seen the window's end; `between` is told how far the server has read.

    `limits` are the bytes that are handed over at once, about, and those that one row may have.
    """
    feed_bytes, largest_row = limits
    reported = -1
    while not consumer.ended.is_set():
        if not consumer.has_room(_IDLE):
            stream.keep_alive()
            between(reported)
            continue
        messages = stream.read(feed_bytes, _IDLE)
        failpoints.hit("drain.read")
        if messages or stream.server_position != reported:
            reported = stream.server_position
            size, heads = sum(map(len, messages)), {}
            if size > largest_row:
                messages, heads = heads_of_large(messages, largest_row)
                size = sum(map(len, messages))
            consumer.hand_over(_Feed(messages, size, reported, heads))
            held.moved()
        else:
            stream.request_reply()
            held.stands()
        between(reported)


def _share(start_lsn: int, position: int, end_lsn: int) -> tuple[int, int]:
    return max(0, min(position, end_lsn) - start_lsn), end_lsn - start_lsn
