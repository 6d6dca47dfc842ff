"""A lake that fails on disk: full, cut off in the middle of a write, damaged. One sentence says where, and nothing is lost or doubled."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest

from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.values.lsn import parse_lsn
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source

_LARGE = "(SELECT string_agg(md5(random()::text || i || n), '') FROM generate_series(1, 100) n)"  # 3 kB that do not get smaller
_LIMITED = """
import resource, sys
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.pipeline.drain import drain
from pgwal_pipeline.pipeline.snapshot import snapshot
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, resource.RLIM_INFINITY))
try:
    {stage}(settings, progress=progress)
except PgwalError as error:
    print(type(error).__name__, error, file=sys.stderr)
    sys.exit(3)
"""


def confirmed(pipeline: Pipeline) -> int:
    return parse_lsn(
        pipeline.source.value("SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", pipeline.settings.slot)
    )


def raw_ids(pipeline: Pipeline, table: str = "t") -> list[int]:
    """The ids of raw's rows, in no order, as they are read without the pipeline."""
    return sorted(pl.read_delta(pipeline.lake.raw(TableName("public", table)))["id"].to_list())


@pytest.fixture
def stream(source: Source, make_pipeline: Callable[..., Pipeline]) -> Pipeline:
    """A pipeline whose raw has ten rows already, and whose source has a thousand large ones more."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    made = make_pipeline()
    made.drain()
    source.sql("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 10) i")
    made.drain()
    source.sql(f"INSERT INTO t SELECT i, {_LARGE} FROM generate_series(11, 1010) i")
    return made


@pytest.mark.parametrize("size", [200, pytest.param(3000, marks=pytest.mark.soak), 20_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_a_file_that_cannot_grow(stream: Pipeline, size: int) -> None:
    """Writes fail half-way, as on a full disk, in whichever file first needs more than `size` bytes."""
    before = confirmed(stream)
    limited = stream.child(_LIMITED.format(size=size, stage="drain"))
    assert limited.returncode == 3, limited.stderr
    (line,) = limited.stderr.strip().splitlines()
    assert line.startswith("LakeError The lake cannot be used at ")
    assert str(stream.lake.uri) in line
    assert line.endswith("File too large. Make room there and run it again.")
    frontier = stream.ledger.frontier()
    assert frontier is not None
    assert before <= confirmed(stream) <= max([frontier, *(window.end_lsn for window in stream.ledger.prepared())])
    stream.drain()
    assert raw_ids(stream) == list(range(1, 1011))


def test_a_snapshot_that_cannot_grow(stream: Pipeline) -> None:
    limited = stream.child(_LIMITED.format(size=100_000, stage="snapshot"))
    assert limited.returncode == 3, limited.stderr
    assert "File too large" in limited.stderr
    (state,) = stream.ledger.tables().values()
    assert state.state != "ready"
    stream.snapshot()
    (state,) = stream.ledger.tables().values()
    assert state.state == "ready"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("only root may mount a small disk; test_a_file_that_cannot_grow fails writes without one")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk(source: Source, make_pipeline: Callable[..., Pipeline], small_disk: Path) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipeline = make_pipeline(lake=str(small_disk / "lake"))
    pipeline.drain()
    source.sql("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 10) i")
    pipeline.drain()
    before = confirmed(pipeline)
    source.sql(f"INSERT INTO t SELECT i, {_LARGE} FROM generate_series(11, 2010) i")
    for _ in range(3):
        with pytest.raises(LakeError, match="No space left on device"):
            pipeline.drain()
    assert confirmed(pipeline) == before
    assert raw_ids(pipeline) == list(range(1, 11))
    # What was half written is taken away again: there is room for small work at once.
    assert shutil.disk_usage(small_disk).free > 1_000_000
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    pipeline.drain()
    assert raw_ids(pipeline) == list(range(1, 2011))


def _newest(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern), key=lambda path: (path.stat().st_mtime_ns, path.name))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _garble(path: Path) -> None:
    path.write_bytes(b"\x00\xffgarbage\x1b[31m" * 20)


def _turn_a_bit(path: Path) -> None:
    """In a value of the largest column: what stands between the pages has no checksum."""
    group = pq.ParquetFile(path).metadata.row_group(0)
    column = max((group.column(number) for number in range(group.num_columns)), key=lambda column: column.total_compressed_size)
    begin = column.data_page_offset if column.dictionary_page_offset is None else column.dictionary_page_offset
    octets = bytearray(path.read_bytes())
    octets[begin + column.total_compressed_size - 2] ^= 4
    path.write_bytes(octets)


DAMAGED = [
    ("_pgwal/windows", "_delta_log/*.json", _garble),
    ("_pgwal/windows", "_delta_log/*.json", _cut),
    ("_pgwal/windows", "*.parquet", _garble),
    ("_pgwal/windows", "*.parquet", _cut),
    ("_pgwal/windows", "*.parquet", _turn_a_bit),
    ("_pgwal/windows", "*.parquet", Path.unlink),
    ("_pgwal/tables", "*.parquet", _cut),
    ("_pgwal/source", "*.parquet", _cut),
    ("_pgwal/source", "*.parquet", _turn_a_bit),
]


@pytest.mark.parametrize("damage", [_garble, _cut])
def test_a_damaged_raw_table_costs_that_table_alone(stream: Pipeline, damage: Callable[[Path], object]) -> None:
    """The drain goes on without it, for the others' sake; its changes from there on are a gap."""
    source = stream.source
    source.sql("CREATE TABLE sound (id int PRIMARY KEY)")
    stream.drain()
    source.sql("INSERT INTO sound VALUES (1)")
    source.sql("INSERT INTO t VALUES (5000, 'x')")
    folder = Path(stream.settings.lake) / "raw/public/t"
    damage(_newest(folder, "_delta_log/*.json"))
    for _ in range(2):
        stream.drain()
    frontier = stream.ledger.frontier()
    assert confirmed(stream) == frontier
    state = stream.ledger.tables()[TableName("public", "t")]
    assert (state.state, state.stage) == ("error", "write")
    reason = state.reason or ""
    assert str(folder) in reason
    assert "restore it from a copy of the lake" in reason
    assert "pgwal resnapshot 'public.t'" in reason
    assert "\n" not in reason and "\x1b" not in reason
    assert raw_ids(stream, "sound") == [1]


@pytest.mark.parametrize(("folder", "pattern", "damage"), DAMAGED)
def test_a_damaged_file_that_a_drain_needs(stream: Pipeline, folder: str, pattern: str, damage: Callable[[Path], object]) -> None:
    root = Path(stream.settings.lake)
    found = sorted(path.name for path in (root / "_pgwal").iterdir())
    assert (root / folder).exists(), found
    path = _newest(root / folder, pattern)
    whole, before = path.read_bytes(), confirmed(stream)
    damage(path)
    for _ in range(2):
        with pytest.raises(LakeError) as caught:
            stream.drain()
        sentence = str(caught.value)
        assert str(path if path.suffix == ".parquet" else root / folder) in sentence
        assert "restore it from a copy of the lake" in sentence
        assert "\n" not in sentence and "\x1b" not in sentence
        assert len(sentence) < 700
    assert confirmed(stream) == before
    path.write_bytes(whole)
    stream.drain()
    assert raw_ids(stream) == list(range(1, 1011))


NEEDED_BY_A_PUBLISH = [
    ("current/public/t", "_delta_log/*.json", _garble),
    ("raw/public/t", "_delta_log/*.json", _cut),
    ("raw/public/t", "_delta_log/*.json", Path.unlink),
    ("raw/public/t", "_pgwal_window=*/*.parquet", _turn_a_bit),
    ("raw/public/t", "_pgwal_window=*/*.parquet", Path.unlink),
    ("current/public/t", "*.parquet", _turn_a_bit),
]
NEEDED_BY_THE_FIRST = [
    ("snapshot/public/t", "_delta_log/*.json", Path.unlink),
    ("snapshot/public/t", "*/*.parquet", _turn_a_bit),
]


def test_a_damaged_file_that_a_publish_needs(source: Source, pipeline: Pipeline) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    source.sql(f"INSERT INTO t SELECT i, {_LARGE} FROM generate_series(1, 20) i")
    drains.bootstrap(pipeline.settings, progress=Silent())
    pipeline.snapshot()
    pipeline.drain()
    refused_while_damaged(pipeline, NEEDED_BY_THE_FIRST)
    pipeline.publish()
    pipeline.assert_current("public.t")
    source.sql(f"UPDATE t SET v = 'changed' WHERE id < 4; INSERT INTO t SELECT i, {_LARGE} FROM generate_series(21, 40) i")
    pipeline.drain()
    refused_while_damaged(pipeline, NEEDED_BY_A_PUBLISH)
    # The way on without a copy of the lake: what the table had before is not looked at then.
    _newest(Path(pipeline.settings.lake) / "raw/public/t", "_pgwal_window=*/*.parquet").unlink()
    for path in (Path(pipeline.settings.lake) / "current/public/t").glob("*.parquet"):
        _garble(path)
    snapshots.snapshot(pipeline.settings, tables=[TableName("public", "t")], progress=Silent())
    source.sql("UPDATE t SET v = 'again' WHERE id > 35")
    pipeline.drain()
    pipeline.publish()
    pipeline.assert_current("public.t")


def refused_while_damaged(pipeline: Pipeline, damages: Sequence[tuple[str, str, Callable[[Path], object]]]) -> None:
    """Each damage by itself puts the table in error, in one sentence that says where, and what to do; mended, it is published again."""
    table = TableName("public", "t")
    for folder, pattern, damage in damages:
        path = _newest(Path(pipeline.settings.lake) / folder, pattern)
        whole = path.read_bytes()
        damage(path)
        _drop_checksums(path)
        report = pipeline.publish()
        ((_, sentence),) = report.errors.items()
        assert folder in sentence, (damage, sentence)
        assert "restore" in sentence, (damage, sentence)
        assert path.suffix == ".json" or path.name in sentence, (damage, sentence)
        assert "pgwal resnapshot 'public.t'" in sentence
        assert "\n" not in sentence and "\x1b" not in sentence
        assert len(sentence) < 1100
        assert pipeline.ledger.tables()[table].state == "error"
        path.write_bytes(whole)
        now = datetime.now(UTC)
        pipeline.ledger.amend_tables(lambda known, now=now: [replace(state, retry_at=now) for state in known.values()])


def _drop_checksums(path: Path) -> None:
    """Hadoop keeps a checksum beside each file that it writes; what a restored backup has there is older."""
    (path.parent / f".{path.name}.crc").unlink(missing_ok=True)
