"""What tells the content of a table: versions that leave rows and columns as they are do not count."""

from pathlib import Path

import pytest
from deltalake import DeltaTable

from pgwal_pipeline.lake.standing import content_version
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline_tests.lake.contents import versions_of


def test_a_version_without_new_content_is_told_by_the_one_before(tmp_path: Path) -> None:
    told = versions_of(str(tmp_path / "t"))
    identity = DeltaTable(str(tmp_path / "t")).metadata().id
    assert told[:6] == [f"{identity}-{number}" for number in (0, 1, 1, 1, 4, 5)]
    assert told[6:] == [f"{identity}-5"] * len(told[6:])


def test_a_commit_that_the_log_has_no_longer_counts(tmp_path: Path) -> None:
    path = tmp_path / "t"
    versions_of(str(path))
    DeltaTable(str(path)).create_checkpoint()
    last = DeltaTable(str(path)).version()
    for number in range(last):
        (path / "_delta_log" / f"{number:020}.json").unlink()
    assert content_version(str(path), last).rsplit("-", 1)[1] in (str(last), str(last - 1))


def test_a_table_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LakeError):
        content_version(str(tmp_path / "none"), 3)
