from types import SimpleNamespace
from typing import cast

import dagster as dg
import pytest

from pgwal_pipeline.asset_specs import AssetNames, AssetSpecs
from pgwal_pipeline.components import maintenance
from pgwal_pipeline.components.source import CdcSource, StepContext
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.settings import Settings
from pgwal_pipeline_tests.components.instances import dagster_instance


def test_old_runs_are_deleted_past_one_that_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "_DELETED_AT_ONCE", 2)
    settings = Settings(lake="/lake")
    source = CdcSource("", settings, AssetSpecs(AssetNames(settings.slot), Lake(settings.lake)), ())

    @dg.job
    def work() -> None: ...

    ended, working = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.STARTED
    with dagster_instance() as instance:
        for status in (ended, working, dg.DagsterRunStatus.FAILURE, working, working, ended, dg.DagsterRunStatus.CANCELED):
            instance.create_run_for_job(work, tags={"pgwal/slot": source.tag}, status=status)
        of_another = instance.create_run_for_job(work, tags={"pgwal/slot": "another"}, status=ended)
        context = cast(StepContext, SimpleNamespace(instance=instance))
        assert maintenance._delete_old_runs(context, source, older_than=3600.0) == 0
        assert maintenance._delete_old_runs(context, source, older_than=-3600.0) == 4
        left = instance.get_runs()
        assert [run.status for run in left if run.run_id != of_another.run_id] == [working] * 3
        assert len(left) == 4
