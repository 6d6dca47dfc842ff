"""The comparison of source and `current` while the source goes on."""

from typing import Any

import pytest

from pgwal_pipeline.messages.errors import SourceUnavailable
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import verify as verifies
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source


def test_a_table_truncated_while_it_is_compared_raises_no_false_alarm(
    source: Source, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1), (2)")
    pipeline.sync()
    copy_source = verifies._copy_source

    def after_a_truncate(*args: Any) -> str:
        source.sql("TRUNCATE t")
        return copy_source(*args)

    monkeypatch.setattr(verifies, "_copy_source", after_a_truncate)
    with pytest.raises(SourceUnavailable, match=r"public\.t was truncated or rewritten while it was compared"):
        verifies.verify(pipeline.settings, pipeline.spark, progress=Silent())
    monkeypatch.undo()
    assert verifies.verify(pipeline.settings, pipeline.spark, progress=Silent()).equal
