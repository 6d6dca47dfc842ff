"""One table's Delta tables are damaged, gone, foreign or cannot be written: everything else goes on, and reading it again mends it."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pgwal_pipeline.lake.damaged import heal
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import as_of, doctor, maintenance, status, verify
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source

_TABLE = TableName("public", "b")
_SOUND = ("public.a", "public.c")


def newest(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern), key=lambda path: (path.stat().st_mtime, path.name))


def cut_log(folder: Path) -> None:
    path = newest(folder, "_delta_log/*.json")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove_log(folder: Path) -> None:
    newest(folder, "_delta_log/*.json").unlink()


def remove_data(folder: Path) -> None:
    newest(folder, "**/*.parquet").unlink()


def garble_data(folder: Path) -> None:
    newest(folder, "**/*.parquet").write_bytes(b"no Parquet at all")


def remove_deletion_vector(folder: Path) -> None:
    for path in folder.glob("**/deletion_vector*.bin"):
        path.unlink()


def remove_all(folder: Path) -> None:
    shutil.rmtree(folder)


def foreign_table(folder: Path) -> None:
    shutil.rmtree(folder)
    write_deltalake(folder, pa.table({"theirs": [1]}))


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("no folder")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "log cut": cut_log,
    "log gone": remove_log,
    "data gone": remove_data,
    "data garbled": garble_data,
    "deletion vector gone": remove_deletion_vector,
    "all gone": remove_all,
    "foreign": foreign_table,
    "a file": a_file,
}
_SHORT = {("current", "log cut"), ("raw", "foreign"), ("snapshot", "a file"), ("raw", "data gone"), ("current", "all gone")}
_MATRIX = [
    pytest.param(layer, name, marks=() if (layer, name) in _SHORT else pytest.mark.soak)
    for layer in ("current", "raw", "snapshot")
    for name in DAMAGES
    if layer == "current" or name != "deletion vector gone"
]


@pytest.fixture
def filled(source: Source, pipeline: Pipeline) -> Pipeline:
    for table in "abc":
        source.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)")
        source.sql(f"INSERT INTO {table} SELECT i, 'first' FROM generate_series(1, 50) i")
    pipeline.sync()
    for table in "abc":
        source.sql(f"UPDATE {table} SET v = 'second' WHERE id % 7 = 0")
    pipeline.drain()
    pipeline.publish()
    return pipeline


def changed(source: Source, value: str) -> None:
    for table in "abc":
        source.sql(f"UPDATE {table} SET v = %s WHERE id % 5 = 0".replace("% 5", "%% 5"), value)


def everything_goes_on(pipeline: Pipeline, spark: Any) -> None:
    """Drain, publish, status, as-of, doctor, verify and maintenance, with the sound tables as the source has them."""
    pipeline.drain()
    pipeline.publish()
    pipeline.assert_current(*_SOUND)
    told = status.status(pipeline.settings)
    assert all(told["tables"][table]["state"] == "ready" and told["tables"][table]["rows"] == 50 for table in _SOUND)
    assert set(as_of.find_publish(pipeline.settings)["tables"]) >= set(_SOUND)
    failed = [check for check in doctor.examine(pipeline.environment()) if not check.ok]
    in_error = [name for name, table in told["tables"].items() if table["state"] == "error"]
    assert [check.name for check in failed] == ["followed" for _ in in_error]
    assert all(name in check.found for name in in_error for check in failed)
    report = verify.verify(pipeline.settings, lambda: spark, progress=Silent())
    assert {str(table) for table, found in report.tables.items() if found.equal} >= set(_SOUND)
    maintenance.maintain(pipeline.settings, lambda: spark, progress=Silent())
    pipeline.assert_current(*_SOUND)


@pytest.mark.parametrize(("layer", "damage"), _MATRIX)
def test_a_damaged_table_costs_nobody_but_itself(layer: Any, damage: str, filled: Pipeline, source: Source, spark: Any) -> None:
    DAMAGES[damage](Path(filled.settings.lake) / layer / "public" / "b")
    changed(source, "third")
    everything_goes_on(filled, spark)
    filled.resnapshot("public.b")
    changed(source, "fourth")
    filled.drain()
    assert filled.publish().errors == {}
    filled.assert_current("public.b", *_SOUND)
    assert {state.state for state in filled.ledger.tables().values()} == {"ready"}
    # What was set aside is kept, and every layer can be read as a whole.
    for path in (filled.lake.raw(_TABLE), filled.lake.snapshot(_TABLE), filled.lake.current(_TABLE)):
        assert pl.scan_delta(path).collect().height > 0
    assert status.status(filled.settings)["tables"]["public.b"]["reason"] is None


@pytest.fixture
def locked() -> Iterator[Callable[[Path], None]]:
    """Make a folder such that nobody can write to it, root included; undone at the end."""
    done: list[Path] = []

    def lock(folder: Path) -> None:
        subprocess.run(["mount", "--bind", "-o", "ro", folder, folder], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        done.append(folder)

    yield lock
    for folder in done:
        subprocess.run(["umount", folder], check=False)


@pytest.mark.parametrize(
    "layer", ["raw", pytest.param("current", marks=pytest.mark.soak), pytest.param("snapshot", marks=pytest.mark.soak)]
)
def test_a_folder_that_cannot_be_written_to(
    layer: str, filled: Pipeline, source: Source, spark: Any, locked: Callable[[Path], None]
) -> None:
    folder = Path(filled.settings.lake) / layer / "public" / "b"
    try:
        locked(folder)
    except (OSError, subprocess.CalledProcessError):
        # Without the right to mount the folder is taken from everybody but root, who is not stopped by that.
        folder.chmod(0o500)
    changed(source, "third")
    everything_goes_on(filled, spark)
    subprocess.run(["umount", folder], check=False)
    folder.chmod(0o755)
    filled.resnapshot("public.b")
    filled.assert_current("public.b", *_SOUND)


def test_what_is_set_aside_is_kept(filled: Pipeline) -> None:
    folder = Path(filled.settings.lake) / "current" / "public" / "b"
    before = sorted(path.name for path in folder.glob("*.parquet"))
    cut_log(folder)
    moved = heal(filled.lake, _TABLE)
    assert list(moved) == ["current"]
    kept = Path(moved["current"])
    assert kept.is_relative_to(Path(filled.settings.lake) / "_pgwal" / "damaged" / "current" / "public" / "b")
    assert sorted(path.name for path in kept.glob("*.parquet")) == before
    assert not folder.exists()
    assert heal(filled.lake, _TABLE) == {}


def test_status_says_why_the_rows_of_a_published_table_are_not_counted(filled: Pipeline) -> None:
    cut_log(Path(filled.settings.lake) / "current" / "public" / "b")
    told = json.loads(json.dumps(status.status(filled.settings)))["tables"]
    assert told["public.b"]["rows"] is None
    assert "damaged or gone" in told["public.b"]["reason"]
    assert [told[table]["rows"] for table in _SOUND] == [50, 50]
    with pytest.raises((PgwalError, Exception)):
        DeltaTable(filled.lake.current(_TABLE)).to_pyarrow_table()
