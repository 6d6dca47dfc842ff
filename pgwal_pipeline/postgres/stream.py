"""The stream of a logical replication slot: whole pgoutput messages as the server sent them, and what is reported back.

Nothing moves the slot but `confirm`. Keepalives are answered with the last LSN that was confirmed, however far the server has read: what
was received is not yet durable.
"""

import fcntl
import re
import select
import struct
import termios
import time
from array import array
from contextlib import closing, suppress
from itertools import repeat
from types import TracebackType
from typing import Self

import psycopg
from psycopg import errors
from psycopg.pq import DiagnosticField, ExecStatus
from psycopg.pq.abc import PGconn, PGresult

from pgwal_pipeline.errors import ChangeNotSent, PgwalError, PublicationMissing, SourceRefused, SourceUnavailable
from pgwal_pipeline.lsn import format_lsn
from pgwal_pipeline.postgres.command import run
from pgwal_pipeline.postgres.dsn import connect, replication_connection, translate
from pgwal_pipeline.postgres.slot_state import explain

HEADER_BYTES = 25
"""What stands before the payload of each message: 'w', the WAL's start and end (u64 each), the server's clock (i64)."""

_IN_CHANGE = re.compile(r"in the change callback, associated LSN ([0-9A-F]+/[0-9A-F]+)")
_MOST_MESSAGES = 20_000
_KEEPALIVE = struct.Struct(">cQqB")
_STATUS_UPDATE = struct.Struct(">cQQQqB")
_POSTGRES_EPOCH = 946_684_800  # 2000-01-01 in Unix time, seconds

_LONGEST_INTERVAL = 10.0  # seconds between two status updates
_LEAST_INTERVAL = 0.1  # the same, for a server that asks again at every answer, as one does that would shut down
_LEAST_SILENCE = 60.0  # seconds without a sign of the server before its state is looked up
_LINGER = 0.02  # seconds without a message after which a read gives what it has

# The walsender sends each message by itself. A reader that is woken by each of them spends more on waking than on reading, so after a
# small gain it sleeps while more gathers, but not for so long that a Unix socket's buffer (208 kB, some 200 messages) fills up meanwhile.
_PAUSE = 0.0003
_SMALL_GAIN = 8 << 10  # bytes
_WORTH_READING = 4 << 10  # bytes waiting in the socket
_MOST_CALLS = 64


class ReplicationStream:
    """One START_REPLICATION on one slot, made by `open`; a context manager that ends the connection.

    Owned by one thread: libpq's connection takes one call at a time.
    """

    dsn: str
    slot: str
    """The slot that is read, and the source's DSN."""
    silence_limit: float
    """Seconds without any message, though answers were asked for, after which the walsender's state is looked up on another connection."""

    def __init__(self, pgconn: PGconn, *, dsn: str, slot: str, publication: str, sender_timeout: float) -> None:
        """`pgconn` is in COPY_BOTH already; `sender_timeout` is the server's wal_sender_timeout in seconds, 0 where it has none."""
        self._pgconn = pgconn
        self.dsn = dsn
        self.slot = slot
        self._publication = publication
        self._interval = min(_LONGEST_INTERVAL, sender_timeout / 3) if sender_timeout else _LONGEST_INTERVAL
        self.silence_limit = max(_LEAST_SILENCE, 2 * sender_timeout)
        self._server_position = 0
        self._confirmed = 0
        self._calls = 2
        self._available = array("i", [0])
        self._socket = pgconn.socket
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._warning: PGresult | None = None
        self._failure: PgwalError | None = None
        self._rest: list[memoryview] = []
        now = time.monotonic()
        self._due = now + self._interval
        self._told = self._asked = 0.0
        self._heard = now
        self._looked = now
        pgconn.notice_handler = self._notice

    @classmethod
    def open(cls, dsn: str, slot: str, publication: str, start_lsn: int, *, server_version: int) -> Self:
        """Begin to read `slot` at `start_lsn` (the server begins at the slot's own confirmed LSN where that is larger).

        Sent are the changes of `publication`, whole transactions in commit order. `server_version` as in `server_version_num`. Raises
        SlotBusy while the slot is read by another, SlotLost where it is gone or invalidated, SourceRefused, SourceUnavailable.
        """
        pgconn = replication_connection(dsn)
        try:
            return cls.begin(pgconn, dsn, slot, publication, start_lsn, server_version=server_version)
        except BaseException as error:
            pgconn.finish()
            if isinstance(error, psycopg.Error):
                raise explain(dsn, slot, error) from error
            raise

    @classmethod
    def begin(cls, pgconn: PGconn, dsn: str, slot: str, publication: str, start_lsn: int, *, server_version: int) -> Self:
        """As `open`, on a walsender's session that is there already. Raises psycopg.Error, and leaves the session open then."""
        setting = run(pgconn, "SELECT setting FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'").get_value(0, 0)
        run(pgconn, start_command(slot, publication, start_lsn, server_version))
        return cls(pgconn, dsn=dsn, slot=slot, publication=publication, sender_timeout=int(setting or 0) / 1000)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def server_position(self) -> int:
        """The largest LSN announced by a keepalive: every transaction that committed below it has been sent. 0 before the first one."""
        return self._server_position

    @property
    def confirmed(self) -> int:
        """The LSN last confirmed on this stream, 0 before the first one."""
        return self._confirmed

    def read(self, max_bytes: int, timeout: float) -> list[memoryview]:
        """The next messages, each with its header of `HEADER_BYTES`; an empty list where none came.

        Gives what it has once that is `max_bytes` or 20,000 messages, when `timeout` is over, or when nothing more has come for a moment,
        be it only a keepalive that moved `server_position`. Answers the server meanwhile. Raises, when all that came before has been
        given, SourceUnavailable where the stream ended or broke, PublicationMissing where the publication was not there at a point of the
        WAL, ChangeNotSent where the source fails at a change, otherwise what `translate` makes of the error.
        """
        if self._failure is not None:
            return self._last_messages(self._failure)
        get, consume = self._pgconn.get_copy_data, self._pgconn.consume_input
        messages: list[memoryview] = []
        append = messages.append
        size = 0
        before = self._server_position
        now = time.monotonic()
        deadline = now + timeout
        if now - self._looked > self._interval:
            self._heard = now  # nobody listened, so there was no silence
        try:
            while True:
                had = size
                for _ in repeat(None, _MOST_MESSAGES - len(messages)):
                    length, message = get(1)
                    if length < HEADER_BYTES:
                        if length <= 0:
                            break
                        self._keepalive(message)
                        continue
                    append(message)
                    size += length
                    if size >= max_bytes:
                        break
                else:
                    length = 1
                if length < 0:
                    return self._last_messages(self._end(None, messages))
                now = time.monotonic()
                if size > had:
                    self._heard = now
                if now >= self._due:
                    self._report(ask=now - self._heard >= self._interval)
                if length > 0 or now >= deadline:
                    return messages
                if self._warning is not None:
                    raise self._missing_publication()
                if not self._more_at_hand(size - had):
                    until = min(deadline, self._due)
                    lingers = now + _LINGER < until and bool(messages or self._server_position > before)
                    if not self._poll.poll((_LINGER if lingers else until - now) * 1000):
                        if lingers:
                            return messages
                        self._mind_silence()
                        continue
                for _ in repeat(None, self._calls):
                    consume()
        except psycopg.Error as error:
            return self._last_messages(self._end(error, messages))
        finally:
            self._looked = time.monotonic()

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
        self._looked = self._heard = time.monotonic()
        if self._looked >= self._due:
            self._tell(ask=False)

    def close(self) -> None:
        """End the connection at once, whatever is under way; twice is once."""
        self._pgconn.finish()

    def _more_at_hand(self, gain: int) -> bool:
        """Whether to read on without waiting, judged by the last gain (bytes) and by what waits in the socket."""
        if gain >= _SMALL_GAIN:
            return True
        fcntl.ioctl(self._socket, termios.FIONREAD, self._available)
        if self._available[0] >= _WORTH_READING:
            # Encrypted: a call takes one record, and a record is one message.
            self._calls = min(_MOST_CALLS, self._calls * 2)
            return True
        self._calls = max(2, self._calls // 2)
        if gain:
            time.sleep(_PAUSE)
        return gain > 0

    def _keepalive(self, message: memoryview) -> None:
        kind, position, _, answer = _KEEPALIVE.unpack(message)
        if kind != b"k":
            return
        self._heard = time.monotonic()
        self._server_position = max(self._server_position, position)
        if answer and self._heard - self._told >= _LEAST_INTERVAL:
            self._report(ask=False)
        elif answer:
            self._due = min(self._due, self._told + _LEAST_INTERVAL)

    def _tell(self, *, ask: bool) -> None:
        if self._failure is not None:
            return
        try:
            self._report(ask=ask)
        except psycopg.Error as error:
            self._end(error, [])

    def _report(self, *, ask: bool) -> None:
        """Send a status update; `ask` for an answer to it."""
        clock = int((time.time() - _POSTGRES_EPOCH) * 1_000_000)
        update = _STATUS_UPDATE.pack(b"r", self._confirmed, self._confirmed, self._confirmed, clock, ask)
        self._pgconn.put_copy_data(update)
        # What the socket does not take now (its peer takes nothing) goes out with the next update.
        self._pgconn.flush()
        self._told = time.monotonic()
        if ask:
            self._asked = self._told
        self._due = self._told + self._interval

    def _notice(self, result: PGresult) -> None:
        """From 18 on a publication that is missing at a point of the WAL is a warning, and its changes are left out.

        Its code alone says less: a standby that holds a failover slot back is warned of by the same.
        """
        if result.error_field(DiagnosticField.SOURCE_FUNCTION) == b"LoadPublications":
            self._warning = result

    def _missing_publication(self) -> PgwalError:
        return self._fail(
            PublicationMissing(
                f"Publication {self._publication} is missing at a point of the WAL that slot {self.slot} has still to read: it "
                f"was dropped, or made after the slot, and the changes there are in no stream. Run `pgwal resnapshot --all` to read every "
                f"table again."
            )
        )

    def _last_messages(self, failure: PgwalError) -> list[memoryview]:
        """What a stream that has failed still brought, once; then the failure is raised."""
        if not self._rest:
            raise failure
        rest, self._rest = self._rest, []
        return rest

    def _end(self, error: psycopg.Error | None, messages: list[memoryview]) -> PgwalError:
        """What to raise now that nothing more comes: the server's last words rather than libpq's `error`.

        `messages`, and those that libpq has read already, are left for `_last_messages`.
        """
        self._rest = messages
        with suppress(psycopg.Error):
            while (came := self._pgconn.get_copy_data(1))[0] > 0:
                if came[0] >= HEADER_BYTES:
                    self._rest.append(came[1])
        result = self._pgconn.get_result()
        failure = self._said(error, result)
        failure.__cause__ = error
        return self._fail(failure)

    def _said(self, error: psycopg.Error | None, result: PGresult | None) -> PgwalError:
        if result is not None and result.status == ExecStatus.FATAL_ERROR:
            said = errors.error_from_result(result)
            error = said if said.sqlstate or error is None else error
        if error is None:
            return SourceUnavailable(
                f"The source ended the stream of slot {self.slot}, as it does when it shuts down; run it again when it is back."
            )
        if error.sqlstate == "42704":
            return self._missing_publication()
        found = translate(error, f"reading slot {self.slot}")
        at = _IN_CHANGE.search(error.diag.context or "")
        if at is None or not isinstance(found, SourceRefused):
            return found
        return ChangeNotSent(
            f"The source fails at a change that slot {self.slot} has to send, at {at[1]}, and nothing behind it is in the stream: "
            f"{error.diag.message_primary} (the row is too large for the source itself, or a row filter of the publication fails on it). "
            f"Mend the cause, or leave the table out of the publication; then run `pgwal resnapshot --all` to make the slot anew and read "
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
                    f"connection is dead. Run it again, and look at what stands between this machine and the source."
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
