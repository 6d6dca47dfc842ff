"""A source that goes away under `pgwal sync`: what came is kept and told, what raw has is published, and then it ends with 1."""

import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from pgwal_pipeline.values.lsn import parse_lsn
from pgwal_pipeline_tests.commands import Commands
from pgwal_pipeline_tests.oracle import assert_equal
from pgwal_pipeline_tests.proxy import Proxy, proxied, tcp
from pgwal_pipeline_tests.support import Source, wait_for

# As the command, but that it gives a source up sooner.
_SYNC = """
from pgwal_pipeline import cli
from pgwal_pipeline.pipeline import drain
drain._PATIENCE = 1.0
cli.main(["sync"], prog_name="pgwal")
"""
_KEPT = re.compile(
    r"What came whole is kept: [1-9][\d,]* rows of [1-9][\d,]* transactions, up to [0-9A-F]+/[0-9A-F]+, read in [0-9.]+ s\. "
    r"The drain goes on from there in "
)


def fill(source: Source, first: int, transactions: int) -> None:
    for number in range(first, first + transactions):
        source.sql(
            "INSERT INTO t SELECT %s, string_agg(md5(random()::text), '') FROM generate_series(1, 3200)",
            number,
        )


def ids(folder: Path, layer: str, version: int | None = None) -> list[int]:
    return sorted(pl.scan_delta(str(folder / "lake" / layer / "public" / "t"), version=version).select("id").collect()["id"])


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "in the drain"])
def test_a_source_that_stays_away(when: str, source: Source, tmp_path: Path, connect_address: str) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    with Proxy(*tcp(source)) as proxy:
        commands = Commands(tmp_path, proxied(source, proxy))
        commands.environment |= {"PGWAL_SPARK_REMOTE": connect_address, "PGWAL_WINDOW_SIZE": "1MB", "PGWAL_MEMORY_BUDGET": "1MB"}
        first = commands.json("sync")["publish"]
        fill(source, 0, 100)
        marker = tmp_path / "reached"
        if when == "before":
            commands.json("drain")
            proxy.refusing = True
        environment = {**commands.environment, "PGWAL_FAILPOINTS": f"drain.between_windows=touch:{marker}@3"}
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", _SYNC], cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
            if when != "before":
                wait_for(marker.exists, seconds=240, what="the third window")
                proxy.refusing, proxy.cut_after = True, 0
                marker.unlink()
            _, err = process.communicate(timeout=240)
        assert process.returncode == 1
        assert when == "before" or _KEPT.search(err), err
        said = err.strip().splitlines()[-1]
        newest = commands.json("as-of")
        assert said.startswith("pgwal: ")
        assert said.endswith(f"What raw holds is published, at {newest['lsn']}.")
        assert parse_lsn(newest["lsn"]) > parse_lsn(first["lsn"])
        there = ids(tmp_path, "current", newest["tables"]["public.t"]["version"])
        assert there == ids(tmp_path, "raw") == list(range(len(there)))
        assert len(there) == 100 if when == "before" else 0 < len(there) < 100
        proxy.refusing, proxy.cut_after = False, None
        pointer = commands.json("sync")["publish"]["tables"]["public.t"]
        assert_equal(source, "public.t", pointer["path"], pointer["version"])
        assert ids(tmp_path, "raw") == list(range(100))
