"""The warm engine: a Spark Connect server on this machine that outlives the run that starts it, so that the next ones need not start Spark.

Whoever first needs it starts it; later runs and commands of the same user with the same settings find it by the files in its folder
(`engine_folder`). Its process (`engine_process`) ends it. One that is dead, hung, made by another version or not ours is replaced.
"""

import atexit
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any

import psutil

from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.spark.engine_folder import EngineFolder, EngineRecord

if TYPE_CHECKING:
    import grpc
    from pyspark.sql.connect.proto.base_pb2_grpc import SparkConnectServiceStub

_START_SECONDS = 200.0
_ANSWER_SECONDS = 20.0
_TERMINATED_SECONDS = 12.0
_KILLED_SECONDS = 18.0
_POLL_SECONDS = 0.05
_USER = "pgwal"  # a session is found by its user and its id
_SECRETS = re.compile(r"PGWAL_|PGPASS|PGSSL|SPARK_REMOTE|SPARK_CONNECT")
# What decides whether Spark can read the lake: an engine that was started with other keys is another one.
_STORE_VARIABLES = re.compile(r"AWS_|HADOOP_|JAVA_HOME")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What makes an engine another one: the lake it works on, Spark's master and settings. `idle` is in seconds."""

    lake: str
    master: str
    conf: Mapping[str, str]
    launch: Mapping[str, str]
    idle: float

    @property
    def folder(self) -> EngineFolder:
        """The engine's folder."""
        store = {name: value for name, value in sorted(os.environ.items()) if _STORE_VARIABLES.match(name)}
        key = json.dumps([self.lake, self.master, dict(sorted(self.conf.items())), store])
        return EngineFolder.of(hashlib.sha256(key.encode()).hexdigest()[:16])


def is_for(master: str) -> bool:
    """Return whether an engine can stand in for `master`: Spark in one process on this machine."""
    return re.match(r"local(\[|$)", master) is not None


def engine_version() -> str:
    """Return what an engine must have been made by."""
    return " ".join(version(name) for name in ("pgwal-pipeline", "pyspark", "delta-spark"))


def start(wanted: EngineSettings) -> None:
    """Start the engine without waiting for it, unless it is alive."""
    folder = wanted.folder
    if folder.engine_pid() is None:
        _spawn(folder, wanted)


def attach(wanted: EngineSettings, say: Callable[[str], None]) -> str:
    """Return the address of a new session in the engine for `wanted`, with the token.

    The engine is started if need be, and one that cannot be used is replaced. `say` gets a line before a start. The session
    is released when this process ends. Raises LakeError if the engine does not start.
    """
    folder, session_id = wanted.folder, str(uuid.uuid4())
    # Registered before the record is read: from then on the engine does not end for want of use.
    registration = folder.register(session_id, wanted.idle)
    _belong(folder)
    deadline = time.monotonic() + _START_SECONDS
    living, dead = folder.clients()
    pid = folder.engine_pid()
    if pid is not None and dead and living == [session_id]:
        _end(folder, pid)  # with what it still does for a client that was killed
    record = _running(folder)
    if record is None:
        _end_others(wanted.lake, folder)
        say("Starting Spark; it stays for the runs after this one.")
    while record is None:
        if folder.engine_pid() is None:
            _spawn(folder, wanted)
        record = _awaited(folder, deadline)
        if record is None:
            raise _not_started(folder, wanted)
    _release_at_exit(record, folder, session_id, registration)
    return f"{_address(record)};session_id={session_id}"


def status(folder: EngineFolder | None) -> dict[str, Any]:
    """Return what `pgwal engine status --json` prints: times are ISO 8601, and there is no token in it."""
    record = None if folder is None else folder.record()
    if folder is None or record is None:
        return {"running": False, "pid": None, "since": None, "remote": None, "used_at": None}
    used_at = folder.used_at
    return {
        "running": True,
        "pid": record.jvm_pid,
        "since": _time(record.since),
        "remote": record.remote,
        "used_at": None if used_at is None else _time(used_at),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def stop(folder: EngineFolder) -> bool:
    """End the engine, also beneath the runs that use it; return whether there was one."""
    pid = folder.engine_pid()
    if pid is None:
        return False
    _end(folder, pid)
    return True


def _spawn(folder: EngineFolder, wanted: EngineSettings) -> None:
    """Start the engine's process. If another one is faster, it ends by itself."""
    folder.log_file.open("wb").close()
    folder.log_file.chmod(0o600)
    folder.write_idle(wanted.idle)
    environment = {name: value for name, value in os.environ.items() if not _SECRETS.match(name) or name == "PGWAL_DEMO_FOLDER"}
    plan = {"conf": dict(wanted.conf), "master": wanted.master, "version": engine_version(), "lake": wanted.lake}
    with folder.log_file.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pgwal_pipeline.spark.engine_process", str(folder.path)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment | dict(wanted.launch),
            start_new_session=True,
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps(plan).encode() + b"\n")
    _children.append(process)


_children: list[subprocess.Popen[bytes]] = []  # kept, or Python would warn of a process that nobody waits for


def _awaited(folder: EngineFolder, deadline: float) -> EngineRecord | None:
    """Wait until the engine can be used; None if it ended before, or is not ready by the deadline."""
    time.sleep(_POLL_SECONDS)
    while time.monotonic() < deadline:
        record = _running(folder)
        if record is not None:
            return record
        if folder.engine_pid() is None and (not _children or _children[-1].poll() is not None):
            return None
        time.sleep(_POLL_SECONDS)
    return None


def _running(folder: EngineFolder) -> EngineRecord | None:
    """Return the engine that can be used. One that takes sessions but cannot be trusted or does not answer is ended."""
    if not folder.has_record():
        return None
    record = folder.record()
    if (
        record is not None
        and record.version == engine_version()
        and record.pid == folder.engine_pid()
        and _is_ours(record)
        and _answers(record)
    ):
        return record
    pid = folder.engine_pid()
    if pid is not None:
        _end(folder, pid)
    return None


def _is_ours(record: EngineRecord) -> bool:
    """Whether the JVM is the engine's child and listens at the port; anybody might after the JVM's end."""
    try:
        jvm = psutil.Process(record.jvm_pid)
        return jvm.ppid() == record.pid and any(
            connection.laddr.port == record.port for connection in jvm.net_connections("tcp") if connection.status == psutil.CONN_LISTEN
        )
    except psutil.Error:
        return False


def _answers(record: EngineRecord) -> bool:
    """Whether Spark answers, and takes the token."""
    import grpc
    from pyspark.sql.connect.proto import base_pb2 as messages

    channel = _open(record)
    try:
        question = messages.AnalyzePlanRequest(
            session_id=str(uuid.uuid4()),
            user_context=messages.UserContext(user_id=_USER),
            spark_version=messages.AnalyzePlanRequest.SparkVersion(),
        )
        _stub(channel).AnalyzePlan(question, timeout=_ANSWER_SECONDS)
        _release_session(channel, question.session_id)
    except grpc.RpcError:
        return False
    finally:
        channel.close()
    return True


def _end(folder: EngineFolder, pid: int) -> None:
    """End the engine's process, by force after 12 s; its JVM ends with it. Return when a new engine can be started, or after 30 s."""
    record = folder.record()
    folder.remove_record()
    for number, seconds in ((signal.SIGTERM, _TERMINATED_SECONDS), (signal.SIGKILL, _KILLED_SECONDS)):
        deadline = time.monotonic() + seconds
        if folder.engine_pid() == pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while folder.engine_pid() == pid and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    if record is not None and _is_ours(record):
        with suppress(ProcessLookupError):
            os.kill(record.jvm_pid, signal.SIGKILL)


def _end_others(lake: str, folder: EngineFolder) -> None:
    """End engines of the same lake that nobody uses, such as those with other settings, and clear what dead ones have left behind."""
    for other in EngineFolder.all():
        if other == folder:
            continue
        record = other.record()
        pid = other.engine_pid()
        if pid is None:
            other.clear_if_dead()
        elif other.is_here and record is not None and record.lake == lake and not other.clients()[0]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def _belong(folder: EngineFolder) -> None:
    """Let the engine end with the `dagster dev` that this process runs under, if there is one."""
    for parent in psutil.Process().parents():
        try:
            if _is_dagster_dev(parent.cmdline()):
                folder.add_owner(parent.pid)
        except psutil.Error:
            continue


def _is_dagster_dev(command: Sequence[str]) -> bool:
    return any(before.rpartition("/")[2] in ("dagster", "dg") and word == "dev" for before, word in pairwise(command))


def _open(record: EngineRecord) -> "grpc.Channel":
    from pyspark.sql.connect.client import DefaultChannelBuilder

    return DefaultChannelBuilder(_address(record)).toChannel()


def _address(record: EngineRecord) -> str:
    return f"{record.remote}/;token={record.token};user_id={_USER}"


def _stub(channel: "grpc.Channel") -> "SparkConnectServiceStub":
    from pyspark.sql.connect.proto.base_pb2_grpc import SparkConnectServiceStub

    return SparkConnectServiceStub(channel)


def _release_session(channel: "grpc.Channel", session_id: str) -> None:
    from pyspark.sql.connect.proto import base_pb2 as messages

    request = messages.ReleaseSessionRequest(session_id=session_id, user_context=messages.UserContext(user_id=_USER))
    _stub(channel).ReleaseSession(request, timeout=_ANSWER_SECONDS)


def _release_at_exit(record: EngineRecord, folder: EngineFolder, session_id: str, registration: IO[str]) -> None:
    def release() -> None:
        import grpc

        channel = _open(record)
        with suppress(grpc.RpcError):
            _release_session(channel, session_id)
        channel.close()
        folder.deregister(session_id)
        registration.close()

    atexit.register(release)


def _not_started(folder: EngineFolder, wanted: EngineSettings) -> LakeError:
    said = [line.strip() for line in folder.log_file.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in said if "Exception" in line or "Error" in line or "error" in line]
    return LakeError(
        f"Spark did not start on {wanted.master} ({(telling or said or ['it said nothing'])[-1][:300]}); see {folder.log_file}, and check "
        "PGWAL_SPARK_MASTER and PGWAL_SPARK_CONF. PGWAL_SPARK_IDLE=0 starts Spark in each run instead."
    )
