"""Ticks of this code location's sensors, as Dagster's daemon makes them in an instance."""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import dagster as dg
from dagster._core.definitions.definitions_load_context import DefinitionsLoadContext, DefinitionsLoadType
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.scheduler.instigation import TickData
from dagster._core.test_utils import create_test_daemon_workspace_context, freeze_time
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget
from dagster._daemon.sensor import execute_sensor_iteration

from pgwal_pipeline import definitions
from pgwal_pipeline.components import sensors

_LATER = 60.0  # seconds, more than any sensor's interval


@dataclass
class SensorDaemon:
    """The daemon's part that evaluates sensors, on a clock of its own: of Dagster's, not of the pipeline's."""

    instance: dg.DagsterInstance
    context: WorkspaceProcessContext
    now: float

    def tick(self) -> None:
        """Evaluate every sensor that is due; runs that are asked for are put into the queue, which nobody empties."""
        self.now += _LATER
        with freeze_time(self.now):
            for _ in execute_sensor_iteration(self.context, logging.getLogger("sensors"), None, None):
                pass

    def ticks(self, name: str) -> Sequence[TickData]:
        """What became of a sensor's ticks, the newest first."""
        (entry,) = self.context.create_request_context().get_code_location_entries().values()
        assert entry.code_location is not None, entry.load_error
        (repository,) = entry.code_location.get_repositories().values()
        sensor = repository.get_sensor(name)
        return [tick.tick_data for tick in self.instance.get_ticks(sensor.get_remote_origin_id(), sensor.selector_id)]


@contextmanager
def sensor_daemon(instance: dg.DagsterInstance, module: str = definitions.__name__, folder: str | None = None) -> Iterator[SensorDaemon]:
    """The sensors of a code location, `pgwal_pipeline.definitions`, in `instance`, with this process's environment.

    `folder` is where another `module` is found.

    Dagster keeps the state that it loads in a context of the process: afterwards it is as before, and the next test has none of it.
    """
    target = LoadableTargetOrigin(executable_path=sys.executable, module_name=module, working_directory=folder)
    origin = InProcessCodeLocationOrigin(target, location_name="pgwal_pipeline")
    with (
        patch.object(sensors, "_WATCHED", 0.0),  # nobody works on the runs that a tick would wait for
        DefinitionsLoadContext.scoped(DefinitionsLoadContext(DefinitionsLoadType.INITIALIZATION)),
        create_test_daemon_workspace_context(InProcessWorkspaceLoadTarget(origin), instance) as context,
    ):
        yield SensorDaemon(instance, context, time.time())
