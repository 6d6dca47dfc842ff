"""Connect to the source, and turn the errors of libpq and the server into ours.

Every session that reads values pins the settings on which Postgres's text output depends, so that a snapshot and the stream have the same
text for the same value, whatever the defaults of the server, the database or the role.
"""

import os
import re
import socket
from typing import Any, TypeVar

import psycopg2
from psycopg2 import errors, extensions

from pgwal_pipeline.messages.errors import PgwalError, SettingError, SlotBusy, SlotLost, SourceRefused, SourceUnavailable
from pgwal_pipeline.postgres.connection import Connection, ReplicationConnection, default_of, open_session
from pgwal_pipeline.values.relation import quote_ident
from pgwal_pipeline.values.source_dsn import Way, way_of

_VARIABLE = "PGWAL_SOURCE_DSN"

# Time-outs are turned off first, as the pipeline has its own: a role's statement_timeout would end a long COPY, an idle time-out the
# connection that holds the lock on the slot.
_PINNED = (
    "SET statement_timeout = 0",
    "SET idle_in_transaction_session_timeout = 0",
    "SET idle_session_timeout = 0",
    "SET client_encoding = 'UTF8'",
    "SET DateStyle = 'ISO, YMD'",
    "SET IntervalStyle = 'postgres'",
    "SET TimeZone = 'UTC'",
    "SET extra_float_digits = 1",
    "SET bytea_output = 'hex'",
    "SET lc_monetary = 'C'",
    "SET search_path = 'pg_catalog'",
    "SET quote_all_identifiers = off",
    "SET standard_conforming_strings = on",
)
_PINNED_FROM_17 = ("SET transaction_timeout = 0",)

_DEFAULTS = {
    "client_encoding": "UTF8",
    "keepalives": "1",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}


BYTES_AS_THEY_ARE = "SET client_encoding = 'SQL_ASCII'"
"""For reading rows of a SQL_ASCII database: its text may be in any encoding, and the server would fail on text that is not UTF-8."""


_Session = TypeVar("_Session", Connection, ReplicationConnection)


def connect(dsn: str, *, application: str = "pgwal", **overrides: Any) -> Connection:
    """Connect to the source for SQL, with the text output settings pinned.

    `dsn` is a libpq string or URI, "" for libpq's own environment variables; `overrides` are libpq parameters that override it. A
    `SourceDsn` goes the way that it knows.
    `application` is the application name if the DSN and `PGAPPNAME` give none. Rows are tuples. Gives up on a host after `connect_timeout`
    (10 s unless the DSN or `PGCONNECT_TIMEOUT` says otherwise).

    Raises SettingError if the DSN cannot be read, SourceUnavailable if the server cannot be reached now, SourceRefused if it refuses the
    connection; for the password's command and the tunnel as `password.ask` and `tunnel.local_end` do.
    """
    return _pinned(_opened(Connection, dsn, application, overrides))


def copying_connection(dsn: str, *, application: str = "pgwal", **overrides: Any) -> Connection:
    """Connect as `connect` does, for a COPY. It waits inside libpq, which interrupts do not reach: use it outside the main thread."""
    return _pinned(_opened(Connection, dsn, application, overrides, blocking=True))


def on_this_machine(conn: Connection) -> bool:
    """Return whether the server runs on this machine: the connection is a Unix socket, or both ends have the same address.

    Of a tunnel the other end's machine is not known.
    """
    if conn.way.tunnel is not None:
        return False
    with socket.socket(fileno=os.dup(conn.fileno())) as ours:
        return ours.family == socket.AF_UNIX or ours.getpeername()[0] == ours.getsockname()[0]


def replication_connection(dsn: str, *, application: str = "pgwal", **overrides: Any) -> ReplicationConnection:
    """Connect to the source's walsender (`replication=database`), with the text output settings pinned.

    Raises as `connect` does, and SourceRefused if the role may not replicate or all walsenders are taken.
    """
    conn = _pinned(_opened(ReplicationConnection, dsn, application, overrides))
    if conn.info.parameter_status("server_encoding") == "SQL_ASCII":
        return _set(conn, BYTES_AS_THEY_ARE)
    return conn


def _pinned(conn: _Session) -> _Session:
    return _set(conn, pinned_settings(conn.info.server_version))


def _set(conn: _Session, settings: str | bytes) -> _Session:
    """Set a new session's settings; it is closed if that fails."""
    try:
        conn.execute(settings)
    except BaseException as error:
        conn.close()
        if isinstance(error, psycopg2.Error):
            raise translate(error) from error
        raise
    return conn


def pinned_settings(server_version: int) -> bytes:
    """Return the SQL that pins a session's text output and turns its time-outs off; `server_version` as in `server_version_num`."""
    return "; ".join(_PINNED + (_PINNED_FROM_17 if server_version >= 170000 else ())).encode()


def describe_dsn(dsn: str) -> str:
    """Return `user@host:port/database`, without secrets, with libpq's defaults for what the DSN leaves out. Raises SettingError."""
    return _describe(parse_dsn(dsn))


def parse_dsn(dsn: str) -> dict[str, str]:
    """Return the libpq parameters in `dsn`. Raises SettingError if libpq cannot connect with them to any server.

    The message repeats nothing of the DSN: in a URI whose password is not percent-encoded, any part may be a piece of the password.
    """
    try:
        parameters = {name: str(value) for name, value in extensions.parse_dsn(dsn).items()}
    except (psycopg2.Error, UnicodeError):
        raise SettingError(
            f"{_VARIABLE} cannot be read as a connection string; it takes a libpq string (host=… dbname=… user=…) or a URI "
            "(postgresql://user@host:port/database) in which special characters of the password are percent-encoded."
        ) from None
    if re.match(r"postgres(ql)?://", dsn) and ("@" in parameters.get("dbname", "") or "@" in parameters.get("host", "")[1:]):
        raise SettingError(
            f"{_VARIABLE} is a URI whose user or password holds a special character; write it percent-encoded (/ as %2F, @ as %40)."
        )
    ports = parameters.get("port", "")
    if not all(re.fullmatch(r"|\d{1,5}", port) and 0 < int(port or 5432) < 65536 for port in ports.split(",")):
        raise SettingError(
            f"{_VARIABLE} has a port that is not a number from 1 to 65535; in a URI, special characters of a password are percent-encoded."
        )
    return parameters


def translate(error: psycopg2.Error, doing: str = "") -> PgwalError:
    """Return the exception to raise for an error of the server or libpq; `doing` names the work, such as "reading shop.orders".

    SourceUnavailable if the same work may succeed later (connection lost, server shutting down, cancelled, deadlock, locks, too many
    connections), SlotBusy for a slot in use, SlotLost for a slot whose WAL is gone, SourceRefused for the rest.
    """
    where = f" while {doing}" if doing else ""
    state = error.pgcode or ""
    said = _one_line(error.diag.message_primary or "")
    if not state:
        reason = _one_line(str(error)) or "no reason given"
        return SourceUnavailable(f"The connection to the source was lost{where}: {reason}; run it again when the source is back.")
    if isinstance(error, errors.ObjectInUse):
        return SlotBusy(f"The source reports{where}: {said}.")
    if state == "58P01" or "requested WAL segment" in said or "can no longer" in said:
        return SlotLost(f"The source no longer has the WAL that is needed{where}: {said}.")
    if isinstance(error, errors.DiskFull):
        return SourceUnavailable(f"The source has no room left on its disk{where}: {said}; make room there and run it again.")
    if state[:2] in ("08", "40", "53", "57") or state == "55P03":
        return SourceUnavailable(f"The source broke off{where}: {said}; run it again.")
    if state in ("22021", "22P05"):
        return SourceRefused(
            f"The source has a name or a text that it cannot write as UTF-8{where}: {said}; rename it, or correct it, on the source."
        )
    hint = _one_line(error.diag.message_hint or "")
    return SourceRefused(f"The source refused{where}: {said}{f' ({hint})' if hint else ''}.")


def _parameters(dsn: str, application: str, overrides: dict[str, Any]) -> dict[str, str]:
    given = parse_dsn(dsn)
    defaults = _DEFAULTS | {"fallback_application_name": application}
    if not os.environ.get("PGCONNECT_TIMEOUT"):
        defaults["connect_timeout"] = "10"
    # The user cannot choose the encoding: the decoder reads UTF-8.
    return defaults | given | {name: str(value) for name, value in overrides.items()} | {"client_encoding": "UTF8"}


def _opened(kind: type[_Session], dsn: str, application: str, overrides: dict[str, Any], *, blocking: bool = False) -> _Session:
    parameters, way = _parameters(dsn, application, overrides), way_of(dsn)
    try:
        return open_session(kind, parameters, way, blocking=blocking)
    except psycopg2.Error as error:
        raise _connection_failure(error, parameters, way) from None
    except UnicodeError:
        # Raised by Python's name lookup for a host name with an empty part, a part of more than 63 characters, or an invalid character.
        raise SettingError(_unusable(" (its host is not a valid host name)")) from None


def _unusable(about: str) -> str:
    return f"{_VARIABLE} or libpq's own variables hold something libpq cannot use{about}; correct it."


def _describe(parameters: dict[str, str]) -> str:
    defaults = {keyword: _fill(keyword) for keyword in ("host", "hostaddr", "port", "user", "dbname", "service")}
    filled = {keyword: value for keyword, value in defaults.items() if value} | parameters
    if "service" in filled and not {"host", "hostaddr"} & filled.keys():
        return f"service {filled['service']}"
    host = filled.get("host") or filled.get("hostaddr") or "localhost"
    user = filled.get("user", "")
    return f"{user}@{host}:{filled.get('port', '5432')}/{filled.get('dbname') or user}"


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().rstrip(".")


# Pairs of the server's message when it refuses a connection, and what to do. Messages in another language match none of them and get the
# general sentence, which quotes the message.
_REFUSALS = (
    (
        r"password authentication failed for user|no password supplied|empty password",
        "the password of {user} is missing or wrong; {password}",
    ),
    (r"(peer|ident) authentication failed", "{said}; connect over TCP with a password, or let the server's pg_hba.conf trust this user"),
    (r'role "(.*)" does not exist', "there is no role {user}; correct the user in " + _VARIABLE + " or create the role"),
    (r'database "(.*)" does not exist', "there is no database {dbname} on it; correct the database in " + _VARIABLE),
    (r"no pg_hba.conf entry|rejects connection", "{said}; let its pg_hba.conf admit this user from here"),
    (
        r'permission denied for database "',
        "{user} may not connect to database {dbname}; run GRANT CONNECT ON DATABASE {dbname_sql} TO {user_sql}",
    ),
    (r"not permitted to log in", "{user} may not log in; run ALTER ROLE {user_sql} LOGIN"),
    (
        r"permission denied to start WAL sender|must be superuser or replication role",
        "{user} may not replicate; run ALTER ROLE {user_sql} REPLICATION (on a managed service grant its replication role instead)",
    ),
    (r"max_wal_senders", "all its walsenders are taken; raise max_wal_senders or end one that is not needed"),
    (
        r"certificate authentication failed for user",
        "the client certificate is not for {user}; give one that is in sslcert, or map it in the server's pg_ident.conf",
    ),
)
# TLS failures that last until somebody changes something. Most patterns match messages of libpq or OpenSSL, which are not translated.
_TLS_REFUSALS = (
    (
        r"certificate verify failed",
        "its certificate is not one of the authority in sslrootcert, or has expired; name the right authority's file in sslrootcert, or "
        "have the server's certificate renewed",
    ),
    (
        r"does not match host name",
        "its certificate is for another host: {said}; connect by the name in the certificate (hostaddr may give the address too)",
    ),
    (r"alert certificate (expired|revoked)", "the client certificate in sslcert has {alert}; give one that is valid"),
    (
        r"certificate required|requires a valid client certificate|alert handshake failure",
        "it accepts no connection without a client certificate that it trusts; give one in sslcert, and its key in sslkey",
    ),
    (
        r"alert (unknown ca|bad certificate|unsupported certificate|certificate unknown|decrypt error|access denied)",
        "it does not trust the client certificate in sslcert; give one of an authority that it trusts (its ssl_ca_file)",
    ),
    (
        r"does not support SSL",
        "it has no TLS (SSL), which sslmode asks for; turn it on there (ssl = on), or choose an sslmode that does not need it",
    ),
    (
        r"no pg_hba.conf entry.*(no encryption|SSL off)",
        "{said}; connect with TLS (sslmode=verify-full), or let its pg_hba.conf admit this user from here without TLS",
    ),
)
# Refusals that may pass in a moment.
_PASSING = re.compile(
    r"too many clients|connection slots|too many connections|terminating connection"
    r"|is (starting up|shutting down|in recovery mode|not yet accepting|not accepting)"
)
_UNUSABLE = re.compile(
    r"invalid port number|definition of service|service file"
    r"|invalid (\w+) value|invalid integer value|invalid connection option|could not match \d+"
    r"|(root )?certificate file|certificate revocation list|private key file|sslmode|sslrootcert"
)

_FILES = {
    "root certificate file": "the file of sslrootcert is not there or cannot be read; without the option it is ~/.postgresql/root.crt",
    "certificate file": "the client certificate of sslcert is not there or cannot be read",
    "certificate revocation list": "the revocation list of sslcrl is not there or cannot be read",
    "private key file": "the key of sslkey is not there, cannot be read, is open to other users (chmod 0600), or does not fit sslcert",
}


def _connection_failure(error: psycopg2.Error, parameters: dict[str, str], way: Way) -> PgwalError:
    text = str(error)
    source = _describe(parameters)
    # libpq's own errors about the parameters. They may quote a value, which may be a piece of a password.
    match = _UNUSABLE.search(text)
    if match is not None and "FATAL" not in text and "SSL error" not in text:
        option = re.search(r'connection option "(\w+)"', text) or re.search(r"invalid (\w+) (?:value|number)", text)
        about = f" (its {option[1]})" if option else ""
        if match[0].startswith(("definition of", "service file")):
            about = " (its service is not in the service file)"
        elif "file" in match[0]:
            about = f" ({_FILES[match[0]]})"
        return SettingError(_unusable(about))
    fatal = re.search(r"(?:FATAL|ERROR):\s+([^\n]+)", text)
    said = _one_line(fatal[1]) if fatal else _last_reason(text)
    password = parameters.get("password") or os.environ.get("PGPASSWORD")
    if password and password in said and password not in source:
        said = "(its message is not shown, as it quotes the password)"
    user = parameters.get("user") or _fill("user")
    values = {"said": said, "user": user, "dbname": parameters.get("dbname") or _fill("dbname") or user}
    values["password"] = (
        f"give it in {_VARIABLE}, PGPASSWORD or PGPASSFILE"
        if way.password_command is None
        else "PGWAL_PASSWORD_COMMAND has to print the one that the server takes now"
    )
    values |= {"user_sql": quote_ident(values["user"]), "dbname_sql": quote_ident(values["dbname"])}
    if _PASSING.search(said):
        return SourceUnavailable(f"The source {source} accepts no connection now: {said}; try again in a while.")
    for pattern, advice in _TLS_REFUSALS:
        found = re.search(pattern, said)
        if found:
            alert = (found[1] if found.re.groups else "") or ""
            return SourceRefused(f"No TLS connection to the source {source}: {advice.format(**values, alert=alert)}.")
    for pattern, advice in _REFUSALS:
        if re.search(pattern, said, re.IGNORECASE):
            return SourceRefused(f"The source {source} refused the connection: {advice.format(**values)}.")
    if fatal:
        return SourceRefused(f"The source {source} refused the connection: {said}.")
    return SourceUnavailable(f"The source {source} cannot be reached: {said}; check {_VARIABLE} and that the server is up.")


def _last_reason(text: str) -> str:
    """Return the last reason in libpq's report of its attempts, without the addresses, which the sentence names already."""
    if re.search("could not translate host name|failed to resolve host", text):
        return "its host name is not known" + (" just now" if "Temporary" in text else "")
    reasons = re.findall(r"(?:failed: |is bad: |could not )((?:(?!connection to server)[^\n])+)", text)
    if not reasons:
        return _one_line(text)
    return _one_line(reasons[-1])


def _fill(keyword: str) -> str:
    """Return libpq's default for a parameter as valid text; the environment variable may not be UTF-8."""
    return (default_of(keyword) or "").encode(errors="surrogateescape").decode(errors="replace")
