"""A Spark Connect server of the tests' own, as a process beside them."""

import os
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pgwal_pipeline.host.spawn import free_port, port_free, spawn
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark.jars import spark_home
from pgwal_pipeline.spark.session import ensure_jars, launch_environment, spark_conf

_START_SECONDS = 120.0


class ConnectServer:
    """A server with Delta Lake on the master of `settings`, at `address` (`sc://127.0.0.1:PORT`); what it writes goes to `log_file`."""

    def __init__(self, settings: Settings, log_file: Path, port: int | None = None) -> None:
        self.settings = settings
        self.log_file = log_file
        self.port = port or free_port()
        self._process: subprocess.Popen[Any] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """What `PGWAL_SPARK_REMOTE` takes."""
        return f"sc://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server; returns when it takes connections. Raises PgwalError with the end of its log when it does not start."""
        conf = spark_conf(self.settings, jars=ensure_jars(self.settings, lambda _: None))
        conf |= {"spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": str(self.port)}
        command = [str(spark_home() / "bin/spark-submit"), "--master", self.settings.spark_master]
        for name, value in conf.items():
            command += ["--conf", f"{name}={value}"]
        command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
        environment = {**os.environ, **launch_environment(self.settings)}
        for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"):
            environment.pop(name, None)
        with self.log_file.open("ab") as log:
            process = self._process = spawn(command, log, death_signal=signal.SIGTERM, env=environment)
        deadline = time.monotonic() + _START_SECONDS
        while port_free(self.port):
            if process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                said = [line for line in self.log_file.read_text(errors="replace").splitlines() if line.strip()]
                raise PgwalError(f"The Spark Connect server did not start: {' / '.join(said[-3:]) or 'it said nothing'}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop the server and wait until it is gone."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End the server as a crash would; `start` then makes a new one at the same address."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
