"""`python -m pgwal_pipeline.spark.engine_process FOLDER`: the process that owns a warm engine's JVM, from its start to its end.

It starts Spark's Connect server and warms it up. It ends it when nobody has used it for long, when those it belongs to have ended, when its
lake is gone, or when memory is scarce and nobody uses it. The JVM ends with this process, however that ends.
"""

import contextlib
import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from pgwal_pipeline.host.spawn import free_port, spawn
from pgwal_pipeline.spark.engine_folder import EngineFolder, EngineRecord, write_private
from pgwal_pipeline.spark.jars import spark_home

SERVER_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"

_START_SECONDS = 180.0
_END_SECONDS = 10.0
_POLL_SECONDS = 0.5
_LOCK_TRIES = 20  # others hold the lock for a moment when they see whether the engine is alive
_LOG_LIMIT = 16 << 20  # bytes
_LAKE_SECONDS = 60.0  # in which whoever started the engine makes the lake
_SCARCE = 0.1  # of the machine's memory: if less is available, an engine that nobody uses ends

# G1 gives memory back while nothing runs; Java's default on small machines does not.
JAVA_OPTIONS = "-XX:+UseG1GC -XX:G1PeriodicGCInterval=60000 -XX:MinHeapFreeRatio=10 -XX:MaxHeapFreeRatio=30"


class _Ended(Exception):
    """The engine is asked to end."""


def run(folder: EngineFolder, plan: Mapping[str, Any]) -> None:
    """Be the engine until it ends. `plan` has `conf` (Spark's settings), `master`, `version` and `lake`.

    Return at once if another process is the engine.
    """
    for _ in range(_LOCK_TRIES):
        alive = folder.be_the_engine()
        if alive is not None:
            break
        time.sleep(0.01)
    else:
        return
    with alive:
        folder.remove_record()
        folder.clear()
        folder.scratch.mkdir(mode=0o700)
        jvm = None
        try:
            signal.signal(signal.SIGTERM, _end)
            signal.signal(signal.SIGINT, _end)
            jvm, record = _start(folder, plan)
            _serve(folder, plan, jvm, record)
        except _Ended:
            pass
        finally:
            folder.remove_record()
            if jvm is not None:
                _stop(jvm)
            folder.clear()


def _end(_number: int, _frame: FrameType | None) -> None:
    raise _Ended


def _start(folder: EngineFolder, plan: Mapping[str, Any]) -> tuple[subprocess.Popen[Any], EngineRecord]:
    """Start the JVM; return when it takes connections."""
    port, token = free_port(), secrets.token_urlsafe(32)
    conf = {
        "spark.local.dir": str(folder.scratch),
        **plan["conf"],
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.authenticate.token": token,
    }
    # In a file, for everyone on the machine can read command lines.
    write_private(folder.conf_file, properties(conf))
    program = str(spark_home() / "bin/spark-submit")
    command = [program, "--properties-file", str(folder.conf_file), "--master", plan["master"], "--class", SERVER_CLASS, "spark-internal"]
    options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    if not re.search(r"-XX:\+Use\w+GC", f"{options} {conf.get('spark.driver.extraJavaOptions')}"):
        options = f"{options} {JAVA_OPTIONS}".strip()
    # What a JVM leaves in its folder for temporary files when it is killed goes with the scratch.
    environment = {**os.environ, "SPARK_SUBMIT_OPTS": f"{options} {shlex.quote(f'-Djava.io.tmpdir={folder.scratch}')}"}
    with folder.log_file.open("ab") as log:
        jvm = spawn(command, log, death_signal=signal.SIGKILL, env=environment, cwd=folder.scratch)
    deadline = time.monotonic() + _START_SECONDS
    try:
        while not listens(port):
            if jvm.poll() is not None or time.monotonic() > deadline:
                raise _Ended
            time.sleep(0.05)
    except _Ended:
        _stop(jvm)
        raise
    finally:
        folder.conf_file.unlink(missing_ok=True)
    return jvm, EngineRecord(os.getpid(), jvm.pid, port, token, plan["version"], plan["lake"], time.time())


def listens(port: int) -> bool:
    """Return whether somebody listens on a port of the loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def properties(conf: Mapping[str, str]) -> str:
    """Return Spark's settings as the text of a file for `--properties-file`."""
    return "".join(f"{_escaped(name)} {_escaped(value)}\n" for name, value in conf.items())


def _escaped(text: str) -> str:
    """A key or value of Java's properties format (java.util.Properties.load)."""
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    for mark in " :=#!":
        escaped = escaped.replace(mark, f"\\{mark}")
    return escaped.encode("ascii", "backslashreplace").decode()


def _serve(folder: EngineFolder, plan: Mapping[str, Any], jvm: subprocess.Popen[Any], record: EngineRecord) -> None:
    """Let the engine be used until there is a reason to end it."""
    folder.write_record(record)
    warming = _warm_up(folder, record)
    began = used = time.monotonic()
    owners: dict[int, psutil.Process] = {}
    owned = False
    try:
        while jvm.poll() is None:
            time.sleep(_POLL_SECONDS)
            owners |= {owner.pid: owner for owner in folder.owners() if owner.pid not in owners}
            owned = owned or bool(owners)
            living, killed = folder.clients()
            if living:
                used = time.monotonic()
                _end_process(warming)  # what it would still do only takes time from the client
                continue
            if folder.log_file.stat().st_size > _LOG_LIMIT:
                os.truncate(folder.log_file, 0)
            idle = warming.poll() is not None and time.monotonic() - used >= folder.idle
            orphan = owned and not any(owner.is_running() for owner in owners.values())
            abandoned = time.monotonic() - began > _LAKE_SECONDS and _gone(plan["lake"])
            # What a client that was killed has begun here would go on.
            if (killed or idle or orphan or abandoned or _memory_scarce()) and _unused(folder, record):
                return
    finally:
        _end_process(warming)


def _unused(folder: EngineFolder, record: EngineRecord) -> bool:
    """Take no more clients, and return whether there is none; else go on."""
    folder.remove_record()
    # A client registers before it reads the record, so one that has read it is seen here.
    if not folder.clients()[0]:
        return True
    folder.write_record(record)
    return False


def _gone(lake: str) -> bool:
    return "://" not in lake and not Path(lake).exists()


def _memory_scarce() -> bool:
    memory = psutil.virtual_memory()
    return memory.available < _SCARCE * memory.total


def _warm_up(folder: EngineFolder, record: EngineRecord) -> subprocess.Popen[Any]:
    command = [sys.executable, "-m", "pgwal_pipeline.spark.warm_up", str(folder.scratch / "warm_up")]
    environment = {**os.environ, "SPARK_REMOTE": f"{record.remote}/;token={record.token}"}
    with folder.log_file.open("ab") as log:
        return spawn(command, log, death_signal=signal.SIGKILL, env=environment, cwd=folder.scratch)


def _end_process(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.kill()


def _stop(jvm: subprocess.Popen[Any]) -> None:
    """End the JVM: Spark may take some seconds to stop by itself."""
    jvm.terminate()
    try:
        jvm.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        jvm.kill()
        jvm.wait()


def main() -> None:
    """Read the plan from standard input, and be the engine."""
    folder = EngineFolder(Path(sys.argv[1]))
    plan = json.loads(sys.stdin.readline())
    with contextlib.suppress(OSError):
        sys.stdin.close()
    run(folder, plan)


if __name__ == "__main__":
    main()
