"""Executes jobs of the code location in this process and in Dagster's instance. Loading this module loads Dagster."""

import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from yaml import YAMLError

from pgwal_pipeline.asset_specs import REPORT
from pgwal_pipeline.components.dagster_internals import configure_logging_once
from pgwal_pipeline.components.processes import process_tags
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.messages import progress
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.pipeline.status import publish_report
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.sources import Source
from pgwal_pipeline.values.lsn import format_lsn, window_key

_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
_CONFIGURED = {"snapshot": "take_snapshots", "verify": "verify_current"}

Part = Mapping[str, Any]


@contextmanager
def runner(settings: Settings, source: Source, home: Path, warnings: Sequence[str], terminal: progress.Progress) -> Iterator["Runner"]:
    """Give a runner of the source's jobs, in Dagster's instance in `home`. Raises PgwalError if that cannot be used."""
    logging.getLogger("dagster").setLevel(logging.CRITICAL)
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)  # it logs a KeyboardInterrupt, though it also passes it on
    with _instance(home) as instance:
        configure_logging_once(instance)
        yield Runner(settings, source, instance, warnings, terminal)


@event.listens_for(Engine, "connect")
def _write_without_waiting(connection: Any, _: object) -> None:
    """Let SQLite's commits not wait for the disk. A power cut may then lose the newest events of a run, and damages nothing."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = NORMAL")


class Runner:
    """Executes jobs of one source in one instance. `prepared` holds the warnings from before the first run.

    `progress` is the terminal, for messages that belong to no run.
    """

    def __init__(
        self,
        settings: Settings,
        source: Source,
        instance: dg.DagsterInstance,
        warnings: Sequence[str],
        progress: progress.Progress,
    ) -> None:
        self._settings = settings
        self._source = source
        self._definitions = source.load()
        self._instance = instance
        self.progress = progress
        self.prepared: Part = {"warnings": list(warnings)}

    def __call__(self, job_name: str, target: int | None = None, config: Mapping[str, Any] | None = None) -> list[Part]:
        """Run a job to its end, for the window that ends at the LSN `target` if given; return its steps' reports in their order.

        Raises the PgwalError that ended the run.
        """
        job = self._definitions.resolve_job_def(self._source.named(job_name))
        key = None if target is None else window_key(target)
        if key is not None and isinstance(job.partitions_def, dg.DynamicPartitionsDefinition) and job.partitions_def.name is not None:
            self._instance.add_dynamic_partitions(job.partitions_def.name, [key])
        ops = {"ops": {self._source.named(_CONFIGURED[job_name]): {"config": dict(config)}}} if config else {}
        try:
            result = job.execute_in_process(run_config={**_QUIET, **ops}, instance=self._instance, partition_key=key, tags=process_tags())
        except Exception as error:
            raise _cause(error) from error
        return [self._with_all_tables(part) for part in _parts(result.all_events)]

    def _with_all_tables(self, part: Part) -> Part:
        """Return a report with all tables of its publish, from the ledger: Dagster is told only of those that changed."""
        if not part.get("publish"):
            return part
        ledger, lsn = Ledger(Lake(self._settings.lake)), part["publish"]["lsn"]
        publish = ledger.publish()
        if publish is None or format_lsn(publish.lsn) != lsn:  # there has been another one since
            publish = next((publish for publish in ledger.publishes() if format_lsn(publish.lsn) == lsn), None)
        return part if publish is None else {**part, "publish": publish_report(publish).to_json()}


def _parts(events: Iterable[dg.DagsterEvent]) -> list[Part]:
    """Return the reports that the steps of a run recorded."""
    return [
        metadata[REPORT].value  # pyright: ignore[reportReturnType]
        for event in events
        if event.is_asset_observation and REPORT in (metadata := event.asset_observation_data.asset_observation.metadata)
    ]


def _cause(error: BaseException) -> BaseException:
    """Return the pipeline's own error behind what Dagster raised, or the error itself."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, PgwalError):
            return seen
        seen = seen.__cause__ or seen.__context__
    if isinstance(error, dg.Failure):
        return PgwalError(error.description or "The run failed.")
    return error


@contextmanager
def _instance(home: Path) -> Iterator[dg.DagsterInstance]:
    """Open Dagster's instance in `home`. Raises PgwalError if it cannot be opened, or if its databases fail within the block."""
    with ExitStack() as stack:
        try:
            instance = stack.enter_context(dg.DagsterInstance.get())
        except (dg.DagsterError, YAMLError, SQLAlchemyError) as error:
            raise _unusable(home, error) from error
        try:
            yield instance
        except SQLAlchemyError as error:
            raise _unusable(home, error) from error


def _unusable(home: Path, error: Exception) -> PgwalError:
    said = " ".join(str(error.orig if isinstance(error, DBAPIError) else error).split())[:200].rstrip(".")
    return PgwalError(
        f"Dagster's instance in {home} cannot be used ({said}): repair it, or move that folder away, which loses only the history "
        f"of the runs; what was drained and published is in the lake."
    )
