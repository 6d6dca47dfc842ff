"""Whose fault an error is: the table's that the work was for, or the run's."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from pgwal_pipeline.lake.faults import STAGES, is_tables_own, table_error, table_work
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, Source
from pgwal_pipeline.messages.errors import LakeError, SettingError, SlotLost, SourceUnavailable, TableError
from pgwal_pipeline_tests.faults import injected


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(str(tmp_path / "lake"))
    Ledger(made).record_source(Source(1, 1, 1, "shop", "pgwal", "pgwal"))
    return made


def passing(text: str) -> LakeError:
    error = LakeError(text)
    error.transient = True
    return error


def caused_by(cause: Exception) -> Exception:
    try:
        raise RuntimeError("A write failed.") from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "own"),
    [
        (TableError("t", "It is odd."), True),
        (RuntimeError("odd"), True),
        (LakeError("A file is gone."), True),
        (pa.ArrowInvalid("odd"), True),
        (MemoryError(), False),
        (pa.ArrowMemoryError("malloc of size 1 failed"), False),
        (KeyboardInterrupt(), False),
        (passing("The store failed for now."), False),
        (SourceUnavailable("gone"), False),
        (SlotLost("gone"), False),
        (SettingError("wrong"), False),
        (OSError(28, "No space left on device"), False),
        (RuntimeError("java.lang.OutOfMemoryError: Java heap space"), False),
        (caused_by(OSError(28, "No space left on device")), False),
        (caused_by(OSError(2, "No such file")), True),
    ],
    ids=lambda value: f"{type(value).__name__} {value}" if isinstance(value, BaseException) else str(value),
)
def test_whose_fault_it_is(error: BaseException, own: bool, lake: Lake) -> None:
    assert is_tables_own(error, lake) is own


def test_no_error_is_a_tables_where_the_lake_cannot_be_written(lake: Lake) -> None:
    raw = Path(lake.uri) / "raw"
    raw.write_text("no folder")
    assert not is_tables_own(RuntimeError("odd"), lake)
    assert is_tables_own(TableError("t", "It is odd."), lake), "its kind says it already"
    raw.unlink()
    assert is_tables_own(RuntimeError("odd"), lake)


def test_no_error_is_a_tables_where_spark_does_not_answer(lake: Lake) -> None:
    def gone() -> object:
        raise ConnectionRefusedError

    assert not is_tables_own(RuntimeError("odd"), lake, gone)
    assert is_tables_own(RuntimeError("odd"), lake, lambda: None)


def test_the_look_leaves_nothing_behind(lake: Lake) -> None:
    for layer in ("raw", "current"):
        (Path(lake.uri) / layer).mkdir()
    before = sorted(Path(lake.uri).rglob("*"))
    assert is_tables_own(RuntimeError("odd"), lake)
    assert sorted(Path(lake.uri).rglob("*")) == before


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_says_what_failed_in_one_sentence(stage: str, lake: Lake) -> None:
    with pytest.raises(TableError) as caught, table_work(lake, "public.t", stage, oid=5):
        raise RuntimeError("odd\x1b[31m.\nand more")
    assert str(caught.value) == rf"Table public.t: {STAGES[stage]} (RuntimeError: odd\x1b[31m)."
    assert (caught.value.stage, caught.value.oid) == (stage, 5)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_that_knows_its_stage_keeps_it() -> None:
    error = TableError("public.t", "It is odd.", 5, "decode")
    assert table_error(error, "public.t", "write", 6) is error
    assert (error.stage, error.oid) == ("decode", 5)
    bare = TableError("public.t", "It is odd.")
    assert table_error(bare, "public.t", "write", 6) is bare
    assert (bare.stage, bare.oid) == ("write", 6)


@pytest.mark.parametrize(
    ("kind", "raised"), [("RuntimeError", TableError), ("MemoryError", MemoryError), ("TransientLakeError", LakeError)]
)
def test_work_for_a_table_passes_its_failpoint(kind: str, raised: type[Exception], lake: Lake) -> None:
    done: list[str] = []
    work: Callable[[str], None] = done.append
    with injected(f"table.merge/public.t=raise:{kind}"):
        with table_work(lake, "public.u", "merge"):
            work("u")
        with pytest.raises(raised), table_work(lake, "public.t", "merge"):
            work("t")
    assert done == ["u"]
