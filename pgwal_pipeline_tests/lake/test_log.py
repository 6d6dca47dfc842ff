import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from pgwal_pipeline.lake import log
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.log import NEWEST, RowLog
from pgwal_pipeline.messages.errors import LakeError

_SCHEMA = pa.schema([("key", pa.string()), ("value", pa.int64())])


def _log(folder: Path | str, order: str | None = None) -> RowLog:
    return RowLog(Lake(str(folder)), "things", _SCHEMA, ["key"], order=order)


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


def _numbers(first: int, last: int) -> pa.Table:
    return _rows(*((f"k{number}", number) for number in range(first, last)))


def test_what_is_past_a_value_is_read_without_older_files(tmp_path: Path) -> None:
    writer = _log(tmp_path, "value")
    for first in range(0, 9000, 600):
        writer.append(lambda _, first=first: _numbers(first, first + 600), after=first)
    for number in range(9000, 9005):
        writer.append(lambda _, number=number: _numbers(number, number + 1), after=number)
    old = [name for name, file in writer._named.items() if file.order < 8000]
    assert len(old) > 1
    for name in old:
        (tmp_path / "_pgwal/things" / name).unlink()
    fresh = _log(tmp_path, "value")
    assert [value for value in fresh.rows(8990)["value"].to_pylist() if value > 8990] == list(range(8991, 9005))
    assert fresh.rows(NEWEST)["value"].to_pylist()[-1] == 9004
    fresh.append(lambda rows: _numbers(9005, 9006 if rows.num_rows < 5000 else 9005), after=9004)
    assert _log(tmp_path, "value").rows(9004)["value"].to_pylist()[-1] == 9005
    with pytest.raises(LakeError, match="damaged or gone"):
        fresh.rows()


@pytest.mark.parametrize("seed", range(6))
def test_what_is_past_a_value_is_the_same_as_in_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(log, "_TIERS", ((1 << 20, 6), (1 << 20, 40)))
    chance = random.Random(seed)
    writer, plain = _log(tmp_path, "value"), _log(tmp_path)
    top = 0
    for _ in range(40):
        match chance.randrange(8):
            case 0:
                first = chance.randint(0, top)
                writer.append(lambda _, first=first: _numbers(first, first + 1), after=first)  # an old row is replaced
            case 1 if top:
                gone = chance.randint(0, top)
                writer.rewrite(lambda rows, gone=gone: rows.filter(pc.field("value") != gone))
            case 2:
                plain.append(lambda _, top=top: _numbers(top, top + 2))  # a file without statistics of the order
                top += 2
            case _:
                more = chance.choice((1, 1, 1, 9, 50))
                writer.append(lambda _, top=top, more=more: _numbers(top, top + more), after=top)
                top += more
        everything = _log(tmp_path, "value").rows()
        for after in (chance.randint(-1, top), top - 2):
            found = _log(tmp_path, "value").rows(after)
            assert found.filter(pc.field("value") > after).equals(everything.filter(pc.field("value") > after)), f"seed {seed}"
        newest = _log(tmp_path, "value").rows(NEWEST)["value"].to_pylist()
        assert max(newest, default=None) == max(everything["value"].to_pylist(), default=None)


def test_a_log_that_many_append_to_names_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_TIERS", ((1 << 20, 6), (1 << 20, 40)))
    writer = _log(tmp_path, "value")
    for number in range(200):
        writer.append(lambda _, number=number: _numbers(number, number + 1), after=number)
    assert len(writer._named) <= 2 * log._MANY_FILES + 200 // 40
    assert _log(tmp_path, "value").rows().num_rows == 200


_APPENDS = """
import sys
import pyarrow as pa
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.log import RowLog
schema = pa.schema([("key", pa.string()), ("value", pa.int64())])
log = RowLog(Lake(sys.argv[1]), "things", schema, ["key"], order="value")
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    log.append(lambda _: pa.Table.from_pylist([{"key": f"k{number}", "value": number}], schema), after=number)
"""


def test_a_writer_killed_while_it_joins_files_leaves_all_rows(tmp_path: Path) -> None:
    def append(first: int, last: int, points: str) -> int:
        command = [sys.executable, "-c", _APPENDS, str(tmp_path), str(first), str(last)]
        return subprocess.run(command, env=os.environ | {"PGWAL_FAILPOINTS": points}, check=False).returncode

    assert append(0, 30, "ledger.in_join=kill") == -signal.SIGKILL
    reader = _log(tmp_path, "value")
    done = reader.rows()["value"].to_pylist()
    assert done == list(range(log._MANY_FILES + 1))
    assert append(len(done), 30, "ledger.in_join=kill@2") == -signal.SIGKILL
    done = _log(tmp_path, "value").rows()["value"].to_pylist()
    assert append(len(done), 30, "") == 0
    assert reader.rows()["value"].to_pylist() == list(range(30))
    assert len(reader._named) <= log._MANY_FILES + 1


def test_two_processes_that_append_and_join_lose_nothing(tmp_path: Path) -> None:
    limits = [("0", "30"), ("1000", "1030")]
    workers = [subprocess.Popen([sys.executable, "-c", _APPENDS, str(tmp_path), *of]) for of in limits]
    assert [worker.wait(60) for worker in workers] == [0, 0]
    assert sorted(_log(tmp_path, "value").rows()["value"].to_pylist()) == [*range(30), *range(1000, 1030)]


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
