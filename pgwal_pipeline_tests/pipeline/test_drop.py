"""What is taken off the source: what is ours, and nothing else."""

import pytest

from pgwal_pipeline.messages.errors import SourceRefused
from pgwal_pipeline.pipeline.drop import drop
from pgwal_pipeline_tests.pipelines import MakePipeline
from pgwal_pipeline_tests.support import Source

SLOTS = "SELECT slot_name::text, plugin::text FROM pg_replication_slots WHERE slot_name = %s"


def test_ours_goes_once(source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    pipeline.drain()
    assert drop(pipeline.settings) == [f"slot {pipeline.settings.slot}", f"publication {pipeline.settings.publication}"]
    assert source.sql(SLOTS, pipeline.settings.slot) == []
    assert drop(pipeline.settings) == []


def test_a_publication_that_somebody_else_made_stays(source: Source, make_pipeline: MakePipeline) -> None:
    source.sql("CREATE PUBLICATION theirs FOR ALL TABLES")
    pipeline = make_pipeline(publication="theirs")
    pipeline.drain()
    assert drop(pipeline.settings) == [f"slot {pipeline.settings.slot}"]
    assert source.value("SELECT pubname::text FROM pg_publication") == "theirs"


def test_a_slot_of_somebody_else_stays(source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    pipeline.drain()
    name = pipeline.settings.slot
    source.drop_slot(name)
    source.sql("SELECT pg_create_logical_replication_slot(%s, 'test_decoding')", name)
    with pytest.raises(SourceRefused, match="test_decoding"):
        drop(pipeline.settings)
    assert source.sql(SLOTS, name) == [(name, "test_decoding")]
    source.drop_slot(name)
    source.sql("SELECT pg_create_physical_replication_slot(%s)", name)
    with pytest.raises(SourceRefused, match="physical"):
        drop(pipeline.settings)
    assert source.sql(SLOTS, name) == [(name, None)]
    source.drop_slot(name)
    assert drop(pipeline.settings) == [f"publication {pipeline.settings.publication}"]
