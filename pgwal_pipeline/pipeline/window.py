"""Read windows: the WAL from one LSN to another, read once on one slot and written to Parquet files that no commit names yet.

The thread that owns the connection only reads, so that the server always gets its answers. A second thread decodes and writes. A bounded
queue between the two keeps memory within the budget, whatever the size of a transaction. A long stretch of WAL becomes several windows on
one stream: each is handed over as soon as it is whole, while the next one is read.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from deltalake import Schema

from pgwal_pipeline import failpoints
from pgwal_pipeline.decode.batch import Checkpoint, Decoded, Decoder
from pgwal_pipeline.decode.frames import HEAD, heads_of_large
from pgwal_pipeline.decode.pgoutput import RelationMessage
from pgwal_pipeline.lake import undecodable
from pgwal_pipeline.lake.faults import is_tables_own, table_error
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.locations import Locations
from pgwal_pipeline.lake.raw import WindowWriter
from pgwal_pipeline.lake.records import Window
from pgwal_pipeline.lake.schema import check_columns
from pgwal_pipeline.lake.stream_facts import Refusal
from pgwal_pipeline.messages.errors import ChangeNotSent, DecodeError, PgwalError, SourceUnavailable, TableError, TableWorkFailed
from pgwal_pipeline.messages.progress import Progress
from pgwal_pipeline.pipeline.tally import Tally, WindowRead
from pgwal_pipeline.postgres.standbys import HeldBack
from pgwal_pipeline.postgres.stream import Messages, ReplicationStream
from pgwal_pipeline.values.lsn import window_key
from pgwal_pipeline.values.protection import NO_PROTECTION, Protection
from pgwal_pipeline.values.relation import Relation

_IDLE = 0.25  # seconds that the reader waits for the server before it does its other work

Describe = Callable[[RelationMessage], Relation | None]


class StreamBroke(SourceUnavailable):
    """The stream ended in the middle of a window.

    `kept` holds the transactions received whole by then, as a shorter window; None if there are none.
    `complete` are the windows before it on the same stream that are complete in the ledger.
    """

    def __init__(self, error: PgwalError, kept: WindowRead | None, complete: Sequence[Window] = ()) -> None:
        super().__init__(str(error))
        self.kept = kept
        self.complete = complete


@dataclass(frozen=True)
class WindowLimits:
    """How a long stretch of WAL is cut into windows: after about `size` bytes of WAL, or `seconds` of reading, at a transaction's end.

    `take` gets each window but the last, in order, on the thread that decodes; it may wait, and an error that it raises ends the reading.
    `between` is called on the reader's thread now and then.
    """

    size: int
    seconds: float
    take: Callable[[WindowRead], None]
    between: Callable[[], None]


@dataclass(frozen=True)
class _Feed:
    """Messages in the order they came, and the LSN up to which the server had read when the last of them was taken.

    `heads` has the full size in bytes of each message of which only the head was kept, by its index.
    """

    messages: Messages
    size: int
    server_position: int
    heads: Mapping[int, int]


class _StreamEnd:
    """Marks in the queue of feeds that the stream broke after the feed before it."""


class _Open:
    """The window that is being read."""

    def __init__(self, start_lsn: int, end_lsn: int, writer: WindowWriter) -> None:
        self.start_lsn = start_lsn
        self.end_lsn = end_lsn
        self.writer = writer
        self.tally = Tally()
        self.since = time.perf_counter()


class _Consumer(threading.Thread):
    """Decodes and writes what the reader hands over, until the last window's end has been passed or an error occurs."""

    def __init__(
        self,
        decoder: Decoder,
        lake: Lake,
        locations: Locations,
        limits: tuple[int, int],
        budget: int,
        expected: Mapping[str, Schema],
        portions: WindowLimits | None,
    ) -> None:
        super().__init__(name="pgwal-consumer", daemon=True)
        self.last: WindowRead | None = None
        self.error: BaseException | None = None
        self.finished = threading.Event()
        self._decoder = decoder
        self._lake = lake
        self._places = locations
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
        self._feeds: queue.SimpleQueue[_Feed | _StreamEnd | None] = queue.SimpleQueue()
        self._held = 0
        self._room = threading.Condition()

    def has_room(self, timeout: float) -> bool:
        """Return whether another feed may be handed over, waiting up to `timeout` seconds for room."""
        with self._room:
            return self._room.wait_for(lambda: self._held < self._budget // 4 or self.finished.is_set(), timeout)

    def hand_over(self, feed: _Feed) -> None:
        with self._room:
            self._held += feed.size
        self._feeds.put(feed)

    def stop(self) -> None:
        """Stop before the feeds that are not consumed yet."""
        self._feeds.put(None)

    def cut_short(self) -> None:
        """End the window after the last transaction that came whole, once every feed handed over has been consumed."""
        self._feeds.put(_StreamEnd())

    @property
    def passed_end(self) -> bool:
        """Whether the last window has been read whole."""
        return self.last is not None and self.last.end_lsn == self._end_lsn

    def abandon(self) -> None:
        """Remove the files of the window that is being read."""
        self._open.writer.abandon()

    def run(self) -> None:
        try:
            while (feed := self._feeds.get()) is not None:
                if isinstance(feed, _StreamEnd):
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
            self.finished.set()
            with self._room:
                self._room.notify_all()

    def _consume(self, feed: _Feed) -> bool:
        """Decode one feed, which may pass the ends of several windows; return true once the last window has been read whole."""
        self._position = max(self._position, feed.server_position)
        self._open.tally.bytes += feed.size
        messages = feed.messages
        while True:
            checkpoint = self._decoder.checkpoint()
            passed = self._take_in(messages, feed.heads) if messages else False
            if not passed and (self._in_transaction or self._position < self._open.end_lsn):
                return False
            if not passed:
                messages = Messages()
                self._reach_further()
            if self._open.end_lsn >= self._end_lsn:
                self.last = self._finished()
                return True
            assert self._portions is not None
            self._portions.take(self._finished())
            self._begin_next(checkpoint if passed else None)

    def _take_in(self, messages: Messages, heads: Mapping[int, int]) -> bool:
        """Decode messages and hand their rows to the writer; return whether they pass the window's end."""
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
        """End the window with the open (or else the last) transaction, once the window has been read for long enough."""
        due = self._portions is not None and time.perf_counter() - self._open.since >= self._portions.seconds
        if due and self._decoder.last_commit_lsn >= self._open.start_lsn:
            self._open.end_lsn = self._decoder.end_after_this_transaction()

    def _reach_further(self) -> None:
        """Extend a window without changes to where the server is, so that WAL without our changes does not become many empty windows."""
        if not self._open.tally.transactions:
            self._open.end_lsn = min(max(self._open.end_lsn, self._position), self._end_lsn)
            self._decoder.next_window(self._open.end_lsn)

    def _begin_next(self, checkpoint: Checkpoint | None) -> None:
        self._open = self._window(self._open.end_lsn)
        self._decoder.next_window(self._open.end_lsn, checkpoint)

    def _window(self, start_lsn: int) -> _Open:
        """Return a new window from `start_lsn` on; it takes in the rest of the WAL if that is too short for a window of its own."""
        end = self._end_lsn
        if self._portions is not None and end - start_lsn > 1.5 * self._portions.size:
            end = start_lsn + self._portions.size
        return _Open(start_lsn, end, WindowWriter(self._lake, self._budget // 2, window_key(end), self._expected, self._places))

    def _decoded(self, messages: Messages, heads: Mapping[int, int]) -> Decoded:
        """Decode messages, leaving out tables whose own fault makes that fail."""
        while True:
            try:
                return self._decoder.feed(messages.payloads, messages.positions, heads)
            except DecodeError as error:
                self._set_aside(error)
            except TableWorkFailed as failed:
                assert failed.__cause__ is not None
                if failed.oid in self._left_out or not is_tables_own(failed.__cause__, self._lake):
                    raise failed.__cause__ from None
                self._refuse(failed.oid, table_error(failed.__cause__, failed.table, failed.stage, failed.oid))

    def _set_aside(self, error: DecodeError) -> None:
        """Keep a message that cannot be decoded, and leave its table out; raises DecodeError if it belongs to no table."""
        path = undecodable.keep(self._lake, error.lsn, error.payload)
        what = "The whole message" if len(error.payload) > HEAD else "The head of the message"
        if not error.oid or error.oid in self._left_out:
            raise DecodeError(
                f"{error} Nothing past it is confirmed. {what} is in {path}: report it, and keep the slot.",
                lsn=error.lsn,
                payload=error.payload,
            ) from error
        self._refuse(error.oid, TableError(str(error.oid), f"{error} {what} is in {path}: report it.", error.oid, "decode"))

    def _refuse(self, oid: int, error: TableError) -> None:
        """Leave a table out of this window and the windows after it."""
        relation = self._decoder.relation(oid)
        known = self._places.by_oid.get(oid)
        self._leave_out([oid])
        if known is not None or relation is not None:
            location = known[0] if known is not None else self._places.find(relation)[0] if relation is not None else None
            assert location is not None
            self._open.writer.refuse(location, error)

    def _leave_out(self, oids: Iterable[int]) -> None:
        for oid in oids:
            if oid not in self._left_out:
                self._left_out.add(oid)
                self._decoder.leave_out(oid)

    def _cut(self) -> None:
        """End the open window after the last transaction that came whole, if there is one."""
        end = self._last_commit_end
        if end > self._open.start_lsn:
            with self._open.tally.timed("write"):
                self._open.writer.cut(end)
            self._open.end_lsn = min(end, self._open.end_lsn)
            self.last = self._finished()

    def _finished(self) -> WindowRead:
        """Write the open window's files to disk and return what was read of it."""
        window = self._open
        with window.tally.timed("write"):
            writes = window.writer.finish()
        self._leave_out(error.oid for error in window.writer.refused.values())
        self._expected |= {write.path: Schema.from_json(write.schema_json) for write in writes}
        refused = {
            str(location): Refusal(error.oid, error.stage or "write", str(error), window.start_lsn)
            for location, error in window.writer.refused.items()
        }
        seconds = time.perf_counter() - window.since
        return window.tally.read(window.start_lsn, window.end_lsn, writes, refused, seconds)


def read_window(
    stream: ReplicationStream,
    lake: Lake,
    locations: Locations,
    describe: Describe,
    *,
    start_lsn: int,
    end_lsn: int,
    memory_budget: int,
    largest_row: int,
    protection: Protection = NO_PROTECTION,
    progress: Progress,
    stage: str = "drain",
    expected: Mapping[str, Schema] | None = None,
    portions: WindowLimits | None = None,
) -> WindowRead:
    """Read every transaction with `start_lsn <= commit LSN < end_lsn` from `stream` into Parquet files in the lake.

    Returns the last window; without `portions` there is only one. Ends when the server has read past `end_lsn`. Silence does not show that:
    a walsender is silent while it decodes a large transaction that is not ours. At most `memory_budget` bytes of changes are held, whether
    undecoded or unwritten. Nothing is committed or confirmed here. A table that cannot be decoded or written by its own fault, or has a row
    of more than `largest_row` bytes, is left out from there on and named in `facts.refused`.
    `stage` is the name shown by `progress`; `locations` and `expected` are as for `WindowWriter`.

    Raises StreamBroke, with what came whole, if the connection breaks, or if the source cannot send a change but transactions came whole
    before it; ChangeNotSent if none did; and any error of decoding, of writing and of `portions`.
    """
    feed_bytes = max(64 << 10, min(4 << 20, memory_budget // 16))

    def wanted(message: RelationMessage) -> Relation | None:
        relation = None if message.oid in locations.left_out else describe(message)
        if relation is not None:
            check_columns(relation)  # before its rows are put beside our columns, which are found there by name
        return relation

    decoder = Decoder(wanted, start_lsn, start_lsn, largest_row=largest_row, protection=protection)
    consumer = _Consumer(decoder, lake, locations, (start_lsn, end_lsn), memory_budget, expected or {}, portions)
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
    """Hand the stream's messages to the consumer until it is finished; `between` gets the LSN up to which the server has read.

    `limits` are the bytes to hand over at once, about, and the bytes that one row may have.
    """
    feed_bytes, largest_row = limits
    reported = -1
    while not consumer.finished.is_set():
        if not consumer.has_room(_IDLE):
            stream.keep_alive()
            between(reported)
            continue
        messages = stream.read(feed_bytes, _IDLE)
        failpoints.hit("drain.read")
        if messages or stream.server_position != reported:
            reported = stream.server_position
            size, heads = messages.size, dict[int, int]()
            if size > largest_row:
                payloads, heads = heads_of_large(messages.payloads, largest_row)
                messages = Messages(payloads, messages.positions)
                size = messages.size
            consumer.hand_over(_Feed(messages, size, reported, heads))
            held.moved()
        else:
            stream.request_reply()
            held.stands()
        between(reported)


def _share(start_lsn: int, position: int, end_lsn: int) -> tuple[int, int]:
    return max(0, min(position, end_lsn) - start_lsn), end_lsn - start_lsn
