import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from pgwal_pipeline.lake import log
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.log import RowLog
from pgwal_pipeline.messages.errors import LakeError

_SCHEMA = pa.schema([("key", pa.string()), ("value", pa.int64())])


def _log(folder: Path | str) -> RowLog:
    return RowLog(Lake(str(folder)), "things", _SCHEMA, ["key"])


def _rows(*pairs: tuple[str, int]) -> pa.Table:
    return pa.Table.from_pylist([{"key": key, "value": value} for key, value in pairs], _SCHEMA)


def _content(rows: pa.Table) -> dict[str, int]:
    return dict(zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True))


def test_reading_what_is_not_there_gives_nothing_and_makes_nothing(tmp_path: Path) -> None:
    assert _log(tmp_path / "lake").rows().num_rows == 0
    assert not (tmp_path / "lake").exists()


def test_the_newest_row_of_a_key_counts_for_every_reader(tmp_path: Path) -> None:
    writer, reader = _log(tmp_path), _log(tmp_path)
    writer.append(lambda _: _rows(("a", 1), ("b", 1)))
    assert _content(reader.rows()) == {"a": 1, "b": 1}
    writer.append(lambda _: _rows(("a", 2)))
    assert _content(reader.rows()) == {"a": 2, "b": 1}
    assert _log(tmp_path).rows()["seq"].to_pylist() == [2, 3]


def test_no_rows_are_no_commit(tmp_path: Path) -> None:
    writer = _log(tmp_path)
    writer.append(lambda _: _rows())
    assert list(tmp_path.iterdir()) == []
    writer.append(lambda _: _rows(("a", 1)))
    before = sorted(path.name for path in (tmp_path / "_pgwal/things/_delta_log").iterdir())
    writer.append(lambda _: _rows())
    assert sorted(path.name for path in (tmp_path / "_pgwal/things/_delta_log").iterdir()) == before


def test_what_the_decision_raises_is_passed_on_and_writes_nothing(tmp_path: Path) -> None:
    writer = _log(tmp_path)
    writer.append(lambda _: _rows(("a", 1)))

    def refuse(rows: pa.Table) -> pa.Table:
        raise ValueError(str(rows.num_rows))

    with pytest.raises(ValueError, match="1"):
        writer.append(refuse)
    assert _content(writer.rows()) == {"a": 1}


def test_small_files_are_joined_and_nothing_is_lost(tmp_path: Path) -> None:
    writer, reader = _log(tmp_path), _log(tmp_path)
    for number in range(3 * log._MANY_FILES):
        writer.append(lambda _, number=number: _rows((f"k{number % 20}", number)))
        if number % 7 == 0:
            assert _content(reader.rows())[f"k{number % 20}"] == number
    fresh = _log(tmp_path)
    assert _content(fresh.rows()) == {f"k{number % 20}": number for number in range(3 * log._MANY_FILES)}
    assert len(fresh._files) <= log._MANY_FILES + 1
    writer.append(lambda _: _rows(("new", 1)))
    assert fresh.rows()["seq"].to_pylist()[-1] == 3 * log._MANY_FILES + 1


def test_rewriting_leaves_only_what_is_kept_and_numbers_go_on(tmp_path: Path) -> None:
    writer, reader = _log(tmp_path), _log(tmp_path)
    writer.append(lambda _: _rows(("a", 1), ("b", 1)))
    writer.append(lambda _: _rows(("a", 2)))
    reader.rows()
    writer.rewrite(lambda rows: rows.filter(pc.field("key") == "b"))
    assert _content(reader.rows()) == {"b": 1}
    writer.append(lambda _: _rows(("c", 1)))
    assert reader.rows()["seq"].to_pylist() == [2, 4]


def test_a_reader_that_slept_while_old_commits_were_cleaned_away_reads_on(tmp_path: Path) -> None:
    writer, reader = _log(tmp_path), _log(tmp_path)
    writer.append(lambda _: _rows(("a", 1)))
    reader.rows()
    for number in range(45):
        writer.append(lambda _, number=number: _rows(("b", number)))
    commits = sorted((tmp_path / "_pgwal/things/_delta_log").glob("*.json"))
    for commit in commits[:40]:
        commit.unlink()
    assert _content(reader.rows()) == {"a": 1, "b": 44}
    reader.append(lambda _: _rows(("c", 1)))
    assert _content(_log(tmp_path).rows()) == {"a": 1, "b": 44, "c": 1}


def test_a_column_that_came_later_is_null_in_older_rows(tmp_path: Path) -> None:
    _log(tmp_path).append(lambda _: _rows(("a", 1)))
    wider = pa.schema([*_SCHEMA, ("more", pa.string())])
    later = RowLog(Lake(str(tmp_path)), "things", wider, ["key"])
    assert later.rows()["more"].to_pylist() == [None]
    later.append(lambda _: pa.Table.from_pylist([{"key": "b", "value": 2, "more": "x"}], wider))
    assert later.rows()["more"].to_pylist() == [None, "x"]
    assert _content(_log(tmp_path).rows()) == {"a": 1, "b": 2}


def test_threads_that_share_a_log_lose_nothing(tmp_path: Path) -> None:
    shared = _log(tmp_path)

    def add(worker: int) -> None:
        for number in range(5):
            shared.append(lambda _, number=number: _rows((f"{worker}-{number}", number)))

    threads = [threading.Thread(target=add, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(_content(_log(tmp_path).rows())) == 20


_COUNTS = """
import sys
import pyarrow as pa
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.log import RowLog
schema = pa.schema([("key", pa.string()), ("value", pa.int64())])
def next_number(rows):
    number = max(rows["value"].to_pylist(), default=0) + 1
    return pa.Table.from_pylist([{"key": f"n{number}", "value": number}], schema)
log = RowLog(Lake(sys.argv[1]), "things", schema, ["key"])
for _ in range(8):
    log.append(next_number)
"""


def test_processes_decide_on_every_row_before_their_own(tmp_path: Path) -> None:
    workers = [subprocess.Popen([sys.executable, "-c", _COUNTS, str(tmp_path)]) for _ in range(3)]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    # A lost update would use a number twice, a lost row would leave one out.
    assert _content(_log(tmp_path).rows()) == {f"n{number}": number for number in range(1, 25)}
    assert _log(tmp_path).rows()["seq"].to_pylist() == list(range(1, 25))


@pytest.mark.parametrize("garbage", ["not json", ""])
def test_a_log_that_cannot_be_read_is_one_sentence(tmp_path: Path, garbage: str) -> None:
    folder = tmp_path / "_pgwal/things/_delta_log"
    folder.mkdir(parents=True)
    (folder / "00000000000000000000.json").write_text(garbage)
    with pytest.raises(LakeError, match=r"^The lake cannot be used at .*PGWAL_LAKE") as caught:
        _log(tmp_path).rows()
    assert "\n" not in str(caught.value)


def test_a_file_in_the_place_of_the_lake_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "lake").write_text("")
    with pytest.raises(LakeError, match="Not a directory"):
        _log(tmp_path / "lake").rows()
    with pytest.raises(LakeError, match=r"Not a directory|File exists"):
        _log(tmp_path / "lake").append(lambda _: _rows(("a", 1)))
