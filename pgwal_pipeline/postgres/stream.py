"""The stream of a logical replication slot: whole pgoutput messages as the server sent them, and what is reported back.

Nothing moves the slot but `confirm`. Status updates have the last LSN that was confirmed, however far the server has read: what was
received is not yet durable.
"""

import fcntl
import re
import select
import termios
import time
from array import array
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import repeat
from types import TracebackType
from typing import Self

import psycopg2

from pgwal_pipeline.messages.errors import ChangeNotSent, PgwalError, PublicationMissing, SourceRefused, SourceUnavailable
from pgwal_pipeline.postgres.command import run
from pgwal_pipeline.postgres.connection import ReplicationConnection, wait
from pgwal_pipeline.postgres.driver import reading_cursor
from pgwal_pipeline.postgres.dsn import connect, replication_connection, translate
from pgwal_pipeline.postgres.slot_state import explain
from pgwal_pipeline.values.lsn import format_lsn

_IN_CHANGE = re.compile(r"in the change callback, associated LSN ([0-9A-F]+/[0-9A-F]+)")
_MOST_MESSAGES = 20_000
_ENVELOPE = 25  # bytes that come with each payload: the kind of message, two LSNs, the server's clock

_LONGEST_INTERVAL = 10.0  # seconds between two status updates
_LEAST_INTERVAL = 0.1  # the same, for answers to a server that asks again at every one
_LEAST_SILENCE = 60.0  # seconds without a sign of the server before its state is queried
_LINGER = 0.02  # seconds without a message after which a read gives what it has
_NEVER = 2e9  # seconds: status updates are sent here, at times that are chosen here

# The walsender sends each message by itself. A reader that is woken by each of them spends more on waking than on reading, so after a
# small gain it sleeps while more gathers, but not for so long that a Unix socket's buffer (208 kB, some 200 messages) fills up meanwhile.
_PAUSE = 0.0003
_SMALL_GAIN = 8 << 10  # bytes
_WORTH_READING = 4 << 10  # bytes waiting in the socket

_HANG_UP = getattr(select, "POLLRDHUP", 0)  # where there is none, POLLHUP and POLLERR are told in any case
_STANDBYS = "synchronized_standby_slots"
_QUOTES = "[\"'`«»‹›„“”‚‘’「」『』]"


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages in the order they came: their payloads, and where each stands in the WAL, 0 for those that have no place."""

    payloads: Sequence[bytes] = ()
    positions: Sequence[int] = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self.payloads)

    @property
    def size(self) -> int:
        """Bytes that they took on the way."""
        return sum(map(len, self.payloads)) + _ENVELOPE * len(self.payloads)


class ReplicationStream:
    """One START_REPLICATION on one slot, made by `open`; a context manager that ends the connection.

    Owned by one thread: libpq's connection takes one call at a time.
    """

    dsn: str
    slot: str
    """The slot that is read, and the source's DSN."""
    silence_limit: float
    """Seconds without any message, though answers were asked for, after which the walsender's state is queried on another connection."""

    def __init__(self, conn: ReplicationConnection, *, dsn: str, slot: str, publication: str, sender_timeout: float) -> None:
        """`conn` replicates nothing yet; `sender_timeout` is the server's wal_sender_timeout in seconds, 0 where it has none."""
        self._conn = conn
        self._reading = reading_cursor(conn)
        self._telling = conn.cursor()
        self.dsn = dsn
        self.slot = slot
        self._publication = publication
        self._interval = min(_LONGEST_INTERVAL, sender_timeout / 3) if sender_timeout else _LONGEST_INTERVAL
        self.silence_limit = max(_LEAST_SILENCE, 2 * sender_timeout)
        self._server_position = 0
        self._confirmed = 0
        # A part of a TLS record may wait inside of libpq, where neither the socket nor the first answer tells of it.
        self._doubts = int(conn.info.ssl_in_use)
        self._available = array("i", [0])
        self._socket = conn.fileno()
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._hang_up = select.poll()
        self._hang_up.register(self._socket, _HANG_UP)
        self._failure: PgwalError | None = None
        self._rest = Messages()
        now = time.monotonic()
        self._due = now + self._interval
        self._asked = 0.0
        self._heard = now
        self._last_served = now
        self._next_answer = 0.0
        self._last_io = self._reading.io_timestamp

    @classmethod
    def open(cls, dsn: str, slot: str, publication: str, start_lsn: int, *, server_version: int) -> Self:
        """Begin to read `slot` at `start_lsn` (the server begins at the slot's own confirmed LSN where that is larger).

        Sent are the changes of `publication`, whole transactions in commit order. `server_version` as in `server_version_num`. Raises
        SlotBusy while the slot is read by another, SlotLost where it is gone or invalidated, SourceRefused, SourceUnavailable.
        """
        conn = replication_connection(dsn)
        try:
            return cls.begin(conn, dsn, slot, publication, start_lsn, server_version=server_version)
        except BaseException as error:
            conn.close()
            if isinstance(error, psycopg2.Error):
                raise explain(dsn, slot, error) from error
            raise

    @classmethod
    def begin(cls, conn: ReplicationConnection, dsn: str, slot: str, publication: str, start_lsn: int, *, server_version: int) -> Self:
        """As `open`, on a walsender's session that is there already. Raises psycopg2.Error, and leaves the session open then."""
        setting = run(conn, "SELECT setting FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'").fetchall()[0][0]
        stream = cls(conn, dsn=dsn, slot=slot, publication=publication, sender_timeout=int(setting or 0) / 1000)
        command = start_command(slot, publication, start_lsn, server_version)
        stream._reading.start_replication_expert(command.encode(), decode=False, status_interval=_NEVER)
        wait(conn)
        return stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def server_position(self) -> int:
        """The largest LSN announced by the server: every transaction that committed below it has been sent. 0 before the first one."""
        return self._server_position

    @property
    def confirmed(self) -> int:
        """The LSN last confirmed on this stream, 0 before the first one."""
        return self._confirmed

    def read(self, max_bytes: int, timeout: float) -> Messages:
        """Return the next messages; none if none came.

        It returns what it has once that is `max_bytes` or 20,000 messages, when `timeout` is over, or when nothing more has come for a
        moment, be it only a keepalive that moved `server_position`. It answers the server meanwhile. Raises, when all that came before has
        been returned, SourceUnavailable if the stream ended or broke, PublicationMissing if the publication was missing at a point of the
        WAL, ChangeNotSent if the source fails at a change, otherwise what `translate` makes of the error.
        """
        if self._failure is not None:
            return self._last_messages(self._failure)
        payloads, positions = list[bytes](), array("Q")
        messages = Messages(payloads, positions)
        size, roused = 0, False
        before = self._server_position
        now = time.monotonic()
        deadline = now + timeout
        if now - self._last_served > self._interval:
            self._heard = now  # nobody listened, so there was no silence
        try:
            while True:
                if self._next_answer > now:
                    time.sleep(self._next_answer - now)
                gain, full = self._take(payloads, positions, max_bytes - size)
                size += gain
                now = time.monotonic()
                if roused or gain:
                    self._heard = now
                if now >= self._due and not self._hung_up():
                    self._report(ask=now - self._heard >= self._interval)
                if full:
                    return messages
                self._server_position = max(self._server_position, self._reading.wal_end)
                if now >= deadline:
                    self._heed_notices()
                    return messages
                if not gain:
                    self._count_answers(now)
                roused = False
                if not self._more_at_hand(gain):
                    lingers = bool(payloads or self._server_position > before) and now + _LINGER < min(deadline, self._due)
                    roused = self._wait_for_more(_LINGER if lingers else min(deadline, self._due) - now)
                    if lingers and not roused:
                        self._heed_notices()
                        return messages
                    if not roused:
                        self._mind_silence()
                    now = time.monotonic()
        except psycopg2.Error as error:
            self._server_position = before  # a warning of what is missing before it may not have been heard
            return self._last_messages(self._end(error, messages))
        finally:
            self._last_served = time.monotonic()

    def _take(self, payloads: list[bytes], positions: "array[int]", room: int) -> tuple[int, bool]:
        """Take the messages that have come, up to `room` bytes or 20,000 messages in all.

        Returns the bytes that they took on the way, and whether that is all that may be taken.
        """
        add, place, read = payloads.append, positions.append, self._reading.read_message
        size, message, doubts = 0, None, self._doubts
        for _ in repeat(None, _MOST_MESSAGES - len(payloads)):
            message = read()
            if message is None:
                if not doubts:
                    break
                doubts -= 1
                continue
            payload = message.payload
            add(payload)
            place(message.data_start)
            size += len(payload) + _ENVELOPE
            if size >= room:
                break
        return size, message is not None

    def _wait_for_more(self, seconds: float) -> bool:
        """Wait until the socket has something to read, for so long at most; whether it has."""
        return bool(self._poll.poll(max(0.0, seconds) * 1000))

    def confirm(self, lsn: int) -> None:
        """Tell the server, at once, that everything below `lsn` is durable: the slot may move there. Never moves back.

        The server takes it when it comes to it; `confirmed_flush_lsn` says when it has. Raises SourceUnavailable.
        """
        self._confirmed = max(self._confirmed, lsn)
        self._tell(ask=False)
        if self._failure is not None:
            raise self._failure

    def request_reply(self) -> None:
        """Ask the server for a keepalive, and so for its position. Of a connection that is gone, `read` tells."""
        self._tell(ask=True)

    def keep_alive(self) -> None:
        """Report to the server if it is time to; to be called several times a second by who holds the stream without reading.

        A connection that is gone is told of by `read`, after what it brought.
        """
        self._last_served = self._heard = time.monotonic()
        if self._last_served >= self._due:
            self._tell(ask=False)

    def close(self) -> None:
        """End the connection at once, whatever is under way. It may be closed already."""
        self._conn.close()

    def _more_at_hand(self, gain: int) -> bool:
        """Whether to read on without waiting, judged by the last gain (bytes) and by what waits in the socket."""
        if gain >= _SMALL_GAIN:
            return True
        fcntl.ioctl(self._socket, termios.FIONREAD, self._available)
        if self._available[0] >= _WORTH_READING:
            return True
        if gain:
            time.sleep(_PAUSE)
        return gain > 0

    def _count_answers(self, now: float) -> None:
        """psycopg2 answers a keepalive that asks for it when it is read, and a server that would shut down asks again at every answer.

        So keepalives that come alone are read no faster than one in `_LEAST_INTERVAL`, but for the first few.
        """
        before, self._last_io = self._last_io, self._reading.io_timestamp
        if before != self._last_io:
            self._next_answer = max(self._next_answer, now - 2 * _LEAST_INTERVAL) + _LEAST_INTERVAL

    def _tell(self, *, ask: bool) -> None:
        if self._failure is not None:
            return
        try:
            if self._hung_up():
                self._read_to_the_end()
            self._report(ask=ask)
        except psycopg2.Error as error:
            self._end(error, self._rest)

    def _report(self, *, ask: bool) -> None:
        """Send a status update; `ask` for an answer to it."""
        lsn, now = self._confirmed, time.monotonic()
        try:
            self._telling.send_feedback(write_lsn=lsn, flush_lsn=lsn, apply_lsn=lsn, reply=ask, force=True)
        except psycopg2.Error:
            # What the socket does not take now (its peer takes nothing) goes out with the next update. An end is told by a read.
            if self._conn.closed:
                raise
        if ask:
            self._asked = now
        self._due = now + self._interval

    def _hung_up(self) -> bool:
        """Whether the other side has ended the connection. Writing to it then would lose what came before the end and is not read yet."""
        return bool(self._hang_up.poll(0))

    def _read_to_the_end(self) -> None:
        """Read what came before the connection's end, to be given by `read`. Raises psycopg2.Error."""
        payloads, positions = [*self._rest.payloads], array("Q", self._rest.positions)
        self._rest = Messages(payloads, positions)
        deadline = time.monotonic() + _LONGEST_INTERVAL
        while time.monotonic() < deadline:
            message = self._reading.read_message()
            if message is not None:
                payloads.append(message.payload)
                positions.append(message.data_start)

    def _heed_notices(self) -> None:
        """From 18 on a publication that is missing at a point of the WAL is a warning, and its changes are left out.

        The server writes it in its own language, but always with the publication's name in quotes. Of standbys that hold a failover slot
        back it warns too, and names their setting. Raises PublicationMissing.
        """
        # Makes Python's list of what libpq was told. It reads on, too: with messages still to be taken, an end it met would hide them.
        self._conn.poll()
        notices = self._conn.notices
        found = any(
            re.search(f"{_QUOTES}\\s?{re.escape(self._publication)}\\s?{_QUOTES}", text) for text in notices if _STANDBYS not in text
        )
        notices.clear()
        if found:
            raise self._missing_publication()

    def _missing_publication(self) -> PgwalError:
        return self._fail(
            PublicationMissing(
                f"Publication {self._publication} is missing at a point of the WAL that slot {self.slot} has still to read: it "
                f"was dropped, or made after the slot, and the changes there are in no stream. Run `pgwal resnapshot --all` to read every "
                f"table again."
            )
        )

    def _last_messages(self, failure: PgwalError) -> Messages:
        """What a stream that has failed still brought, once; then the failure is raised."""
        if not self._rest:
            raise failure
        rest, self._rest = self._rest, Messages()
        return rest

    def _end(self, error: psycopg2.Error, messages: Messages) -> PgwalError:
        """What to raise now that nothing more comes; `messages` are left for `_last_messages`."""
        self._rest = messages
        failure = self._said(error)
        failure.__cause__ = error
        return self._fail(failure)

    def _said(self, error: psycopg2.Error) -> PgwalError:
        if error.pgcode is None and not self._conn.closed:
            return SourceUnavailable(
                f"The source ended the stream of slot {self.slot}, as it does when it shuts down; run it again when it is back."
            )
        if error.pgcode == "42704":
            return self._missing_publication()
        found = translate(error, f"reading slot {self.slot}")
        at = _IN_CHANGE.search(error.diag.context or "")
        if at is None or not isinstance(found, SourceRefused):
            return found
        return ChangeNotSent(
            f"The source fails at a change that slot {self.slot} has to send, at {at[1]}, and nothing behind it is in the stream: "
            f"{error.diag.message_primary} (the row is too large for the source itself, or a row filter of the publication fails on it). "
            f"Fix the cause, or leave the table out of the publication; then run `pgwal resnapshot --all` to make the slot anew and read "
            f"every table again."
        )

    def _fail(self, failure: PgwalError) -> PgwalError:
        self._failure = self._failure or failure
        return self._failure

    def _mind_silence(self) -> None:
        """After a long silence, ask over another connection whether the walsender is at work: a large transaction takes long to decode."""
        if time.monotonic() - self._heard < self.silence_limit:
            return
        if self._asked <= self._heard:
            self._report(ask=True)
            return
        with closing(connect(self.dsn)) as conn:
            row = conn.execute(
                "SELECT a.wait_event_type FROM pg_catalog.pg_replication_slots s "
                "JOIN pg_catalog.pg_stat_activity a ON a.pid = s.active_pid WHERE s.slot_name = %s",
                [self.slot],
            ).fetchone()
        # One that waits for its client, or for WAL, would have answered; perhaps it just has.
        if (row is None or row[0] in ("Activity", "Client")) and not self._poll.poll(0):
            raise self._fail(
                SourceUnavailable(
                    f"The stream of slot {self.slot} brought nothing for {self.silence_limit:.0f} s though answers were asked for: its "
                    f"connection is dead. Run it again, and check the network between this machine and the source."
                )
            )
        self._heard = time.monotonic()


def start_command(slot: str, publication: str, start_lsn: int, server_version: int) -> str:
    """The START_REPLICATION for pgoutput, in the newest protocol that the server speaks.

    Streaming of transactions in progress stays off: a read that ends at an LSN would get uncommitted work again and again.
    """
    protocol = 4 if server_version >= 160000 else 3 if server_version >= 150000 else 2 if server_version >= 140000 else 1
    names = _quoted(_quoted(publication, '"'), "'")
    return (
        f"START_REPLICATION SLOT {_quoted(slot, chr(34))} LOGICAL {format_lsn(start_lsn)} "
        f"(proto_version '{protocol}', publication_names {names})"
    )


def _quoted(text: str, quote: str) -> str:
    return quote + text.replace(quote, quote * 2) + quote
