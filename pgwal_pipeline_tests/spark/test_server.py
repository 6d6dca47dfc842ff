"""The Connect server in the foreground: its command, and (in make soak) that it serves, clears up and ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pgwal_pipeline.host.spawn import free_port
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark import server
from pgwal_pipeline.spark.engine_process import listens
from pgwal_pipeline.spark.session import spark_session
from pgwal_pipeline_tests.support import wait_for


def _conf(settings: Settings, scratch: Path) -> dict[str, str]:
    command, _ = server._command(settings, 15002, scratch)
    lines = Path(command[command.index("--properties-file") + 1]).read_text().splitlines()
    return dict(line.split(" ", 1) for line in lines)


def test_its_heap_follows_the_memory_and_the_users_settings_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "machine_memory", lambda: 3 << 30)
    conf = _conf(Settings(lake=str(tmp_path)), tmp_path)
    assert (conf["spark.driver.memory"], conf["spark.local.dir"]) == ("1843m", str(tmp_path))
    assert conf["spark.connect.grpc.binding.address"] == "0.0.0.0"
    assert conf["spark.sql.extensions"] == "io.delta.sql.DeltaSparkSessionExtension"
    assert _conf(Settings(lake=str(tmp_path), spark_conf={"spark.driver.memory": "5g"}), tmp_path)["spark.driver.memory"] == "5g"


def test_without_a_folder_of_its_own_it_does_not_start() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_LOCAL_DIRS"}
    done = subprocess.run([sys.executable, "-m", server.__name__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("SPARK_LOCAL_DIRS is not set")


@pytest.mark.soak
def test_it_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    scratch, lake, port = tmp_path / "scratch", tmp_path / "lake", free_port()
    (scratch / "blockmgr-1").mkdir(parents=True)
    conf = '{"spark.driver.memory": "700m"}'
    environment = os.environ | {"SPARK_LOCAL_DIRS": str(scratch), "PGWAL_LAKE": str(lake), "PGWAL_SPARK_CONF": conf}
    process = subprocess.Popen([sys.executable, "-m", server.__name__, str(port)], env=environment)
    try:
        wait_for(lambda: listens(port) or process.poll() is not None, seconds=120, what="the server")
        assert not (scratch / "blockmgr-1").exists()
        session = spark_session(Settings(lake=str(lake), spark_remote=f"sc://127.0.0.1:{port}"))
        session.range(3).write.format("delta").save(str(lake / "t"))
        assert session.read.format("delta").load(str(lake / "t")).count() == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert not listens(port)
    finally:
        process.kill()
        process.wait()
