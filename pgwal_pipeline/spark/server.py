"""`python -m pgwal_pipeline.spark.server [PORT]`: a Spark Connect server with Delta Lake for `PGWAL_SPARK_REMOTE`, in the foreground.

The `spark` service of docker-compose.yaml runs it: one warm Spark, which the runs of several containers share. It listens on all addresses
and asks for no token, so only those who may change the lake may reach its port. Its temporary files are in `SPARK_LOCAL_DIRS`, which
belongs to it alone.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from pgwal_pipeline.host.limits import machine_memory
from pgwal_pipeline.messages.errors import PgwalError, SettingError
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark.engine_folder import write_private
from pgwal_pipeline.spark.engine_process import JAVA_OPTIONS, SERVER_CLASS, listens, properties
from pgwal_pipeline.spark.jars import spark_home
from pgwal_pipeline.spark.session import ENGINE_CONF, ensure_jars, launch_environment, spark_conf

DEFAULT_PORT = 15002

_HEAP_SHARE = 0.6  # of the memory: Spark alone is here, and Java takes more than its heap
_END_SECONDS = 10.0
_POLL_SECONDS = 0.2
_WARM_UP_SECONDS = 120.0


class _Ended(Exception):
    """The server is asked to end."""


def serve(settings: Settings, port: int, scratch: Path) -> int:
    """Run the server until it ends or a signal comes; return its exit code, 0 after a signal. Files in `scratch` are removed first."""
    _clear(scratch)
    command, environment = _command(settings, port, scratch)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    jvm = subprocess.Popen(command, env=environment, cwd=scratch, stdin=subprocess.DEVNULL)
    try:
        while jvm.poll() is None and not listens(port):
            time.sleep(_POLL_SECONDS)
        _warm_up(port, scratch)
        return jvm.wait()
    except _Ended:
        jvm.terminate()
        with suppress(subprocess.TimeoutExpired):
            jvm.wait(_END_SECONDS)
        return 0
    finally:
        jvm.kill()


def _command(settings: Settings, port: int, scratch: Path) -> tuple[list[str], dict[str, str]]:
    """The command that starts the JVM, and its environment."""
    heap = max(512, int(machine_memory() * _HEAP_SHARE) >> 20)
    conf = {
        **spark_conf(settings, jars=ensure_jars(settings, print)),
        "spark.driver.memory": f"{heap}m",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": str(scratch),
        "spark.connect.grpc.binding.address": "0.0.0.0",  # noqa: S104 (others' containers are to reach it)
        "spark.connect.grpc.binding.port": str(port),
        # What a run has begun that was killed ends soon after it.
        "spark.connect.execute.manager.detachedTimeout": "15s",
        "spark.connect.execute.manager.maintenanceInterval": "5s",
        **ENGINE_CONF,
        **settings.spark_conf,
    }
    file = scratch / "spark.properties"
    write_private(file, properties(conf))
    environment = {**os.environ, **launch_environment(settings), "SPARK_LOCAL_DIRS": str(scratch)}
    environment["SPARK_SUBMIT_OPTS"] += f" {JAVA_OPTIONS} -Djava.io.tmpdir={scratch}"
    program = str(spark_home() / "bin/spark-submit")
    master = settings.spark_master
    return [program, "--properties-file", str(file), "--master", master, "--class", SERVER_CLASS, "spark-internal"], environment


def _warm_up(port: int, scratch: Path) -> None:
    """Merge a little, so that the first run meets compiled code. If that fails, the server is only slower at first."""
    environment = {**os.environ, "SPARK_REMOTE": f"sc://127.0.0.1:{port}"}
    command = [sys.executable, "-m", "pgwal_pipeline.spark.warm_up", str(scratch / "warm_up")]
    warming = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with suppress(subprocess.TimeoutExpired):
            warming.wait(_WARM_UP_SECONDS)
    finally:
        warming.kill()
        warming.wait()


def _clear(folder: Path) -> None:
    """Remove what a server has left in `folder` that was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _end(_number: int, _frame: FrameType | None) -> None:
    raise _Ended


def main() -> int:
    """Run the server for the settings of the environment; return the exit code."""
    folder = os.environ.get("SPARK_LOCAL_DIRS", "")
    try:
        if not Path(folder).is_absolute():
            raise SettingError("SPARK_LOCAL_DIRS is not set; it takes a folder for Spark's temporary files alone, which is emptied.")
        return serve(Settings.from_environment(), int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_PORT, Path(folder))
    except PgwalError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
