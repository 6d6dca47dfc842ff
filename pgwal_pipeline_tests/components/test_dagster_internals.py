"""What the pipeline needs of Dagster's private parts is there: an upgrade that takes one away fails here first."""

import logging
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.definitions_load_context import DefinitionsLoadContext, DefinitionsLoadType
from dagster._core.definitions.metadata.metadata_value import CodeLocationReconstructionMetadataValue
from dagster._core.definitions.repository_definition.repository_definition import RepositoryLoadData
from dagster.components.utils.project_paths import get_code_server_metadata_key

from pgwal_pipeline.components.dagster_internals import configure_logging_once, loading, report_planned, state_is_missing


def test_a_process_without_a_place_for_state_gets_one() -> None:
    assert not DefinitionsLoadContext.is_set()
    with loading():
        assert DefinitionsLoadContext.is_set()
        assert not state_is_missing("any")
        with loading():  # one that is there is kept
            assert not state_is_missing("any")
    assert not DefinitionsLoadContext.is_set()


def test_state_that_a_code_server_did_not_hand_over_is_missing() -> None:
    handed_over = {get_code_server_metadata_key("there"): CodeLocationReconstructionMetadataValue("state")}
    data = RepositoryLoadData(reconstruction_metadata=handed_over)
    with DefinitionsLoadContext.scoped(DefinitionsLoadContext(DefinitionsLoadType.RECONSTRUCTION, data)):
        assert state_is_missing("absent")
        assert not state_is_missing("there")


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def test_a_run_does_not_ask_for_the_logging_handlers_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler, asked = _Kept(), []
    monkeypatch.setattr(dg.DagsterInstance, "get_yaml_python_handlers", lambda _: asked.append(True) or [handler])

    @dg.op
    def work(context: dg.OpExecutionContext) -> None:
        context.log.info("at work")

    @dg.job
    def one() -> None:
        work()

    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        configure_logging_once(instance)
        assert one.execute_in_process(instance=instance).success
    assert asked == [True]
    assert any("at work" in line for line in handler.said), "runs take the handlers from the method that is replaced"


def test_an_asset_that_is_announced_counts_as_in_progress_until_it_is_materialized(tmp_path: Path) -> None:
    key = dg.AssetKey("one")

    @dg.op
    def work(context: dg.OpExecutionContext) -> None:
        report_planned(context.instance, context.run, "work", [key])
        asked.append(requested())
        context.log_event(dg.AssetMaterialization(key))
        asked.append(requested())

    @dg.job
    def job() -> None:
        work()

    @dg.asset(deps=[key], automation_condition=dg.AutomationCondition.any_deps_in_progress())
    def waiting() -> None:
        """Requested while its dependency is in progress."""

    @dg.asset(key=key)
    def one() -> None:
        """The dependency."""

    def requested() -> int:
        return dg.evaluate_automation_conditions(dg.Definitions(assets=[one, waiting]), instance).total_requested

    asked: list[int] = []
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        assert job.execute_in_process(instance=instance).success
    assert asked == [1, 0]
