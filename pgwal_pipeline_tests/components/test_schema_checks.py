"""The check `schema`, as definitions have it and as runs record it."""

from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from pgwal_pipeline.asset_specs import SCHEMA_CHECK, AssetNames
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.drain import bootstrap, next_target
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import window_key
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.components.instances import dagster_instance
from pgwal_pipeline_tests.components.projects import project, set_environment
from pgwal_pipeline_tests.support import Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GOODS = AssetNames("pgwal").current(TableName("public", "goods"))


def _verdicts(ran: dg.ExecuteInProcessResult) -> list[dg.AssetCheckEvaluation]:
    return [found for found in ran.get_asset_check_evaluations() if found.check_name == SCHEMA_CHECK]


def test_a_frozen_table_warns_with_the_difference(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: "SparkSession"
) -> None:
    assert spark is not None
    source.sql("CREATE TABLE goods (id int PRIMARY KEY, n int); CREATE TABLE others (id int PRIMARY KEY)")
    set_environment(monkeypatch, tmp_path, source.dsn, PGWAL_BUSY_TIMEOUT="1s")
    options = {"public.goods": {"on_schema_change": "freeze"}}
    settings = Settings.from_environment(table_options=options)
    shown: dict[dg.AssetKey, object] = {}
    with project(tmp_path, {"cdc": {"tables": options}}) as definitions, dagster_instance() as instance:

        def run(job: str) -> list[dg.AssetCheckEvaluation]:
            key = window_key(next_target(settings)) if job == "sync" else None
            if key is not None:
                instance.add_dynamic_partitions("wal_windows", [key])
            ran = definitions.resolve_job_def(job).execute_in_process(instance=instance, partition_key=key)
            for event in ran.get_asset_materialization_events():
                made = event.step_materialization_data.materialization
                shown[made.asset_key] = made.metadata.get("dagster/column_schema")
            return _verdicts(ran)

        graph = definitions.resolve_asset_graph()
        assert [check.asset_key for check in graph.asset_check_keys if check.name == SCHEMA_CHECK] == [GOODS]
        bootstrap(settings, progress=Silent())
        run("snapshot")
        assert run("sync") == []  # the first publish: it keeps its columns from here on
        source.sql("INSERT INTO goods VALUES (1, 1)")
        (right,) = run("sync")
        assert right.passed
        assert shown[GOODS] is None  # the definitions say it
        source.sql('ALTER TABLE goods ADD "odd | one" text, DROP n; INSERT INTO goods VALUES (2)')
        (found,) = run("sync")
        schema = shown[GOODS]
        assert isinstance(schema, dg.TableSchemaMetadataValue)
        assert [column.name for column in schema.schema.columns][:2] == ["id", "n"]
        source.sql("INSERT INTO others VALUES (1)")
        assert run("sync") == []  # nothing new
    assert (found.passed, found.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert "`pgwal accept 'public.goods'`" in (found.description or "")
    table = found.metadata["pgwal/columns"]
    assert isinstance(table, dg.MarkdownMetadataValue)
    assert (table.md_str or "").splitlines() == [
        "| column | accepted | at the source |",
        "|---|---|---|",
        "| `n` | `integer` | – |",
        "| `odd \\| one` | – | `text` |",
    ]
