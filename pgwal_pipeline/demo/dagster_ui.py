"""Dagster's processes for the demo (`dagster dev`: webserver, daemon, code server), and the demo's GraphQL requests to them."""

import json
import socket
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pgwal_pipeline.demo.processes import Program
from pgwal_pipeline.host.spawn import free_port, port_free
from pgwal_pipeline.messages.errors import PgwalError

_START_SECONDS = 180.0
_ACTIVE = ("QUEUED", "NOT_STARTED", "STARTING", "STARTED", "CANCELING")

_WORKSPACE = """load_from:
  - python_module: {module_name: pgwal_pipeline.demo.definitions, location_name: pgwal_pipeline}
"""
_LOCATIONS = """{ workspaceOrError { ... on Workspace { locationEntries {
    name loadStatus locationOrLoadError { __typename ... on PythonError { message } }
} } } }"""
_RUNS = """query Runs($filter: RunsFilter) {
    runsOrError(filter: $filter, limit: 200) { ... on Runs { results { runId jobName status } } ... on PythonError { message } }
}"""
_END_RUNS = """mutation End($ids: [String!]!, $policy: TerminateRunPolicy!) {
    terminateRuns(runIds: $ids, terminatePolicy: $policy) { __typename }
}"""


def next_free_port(wanted: int) -> int:
    """Return `wanted` if nothing listens there on 127.0.0.1, else the next free port."""
    for port in range(wanted, min(wanted + 50, 65536)):
        if is_free(port):
            return port
    return free_port()


def is_free(port: int) -> bool:
    """Return whether nothing listens on `port` of 127.0.0.1."""
    with socket.socket() as probe:
        probe.settimeout(1)
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            return False
    return port_free(port)


class DagsterUi:
    """`dagster dev` on one port of 127.0.0.1, with the variables of `environment` (PGWAL_*, DAGSTER_HOME)."""

    def __init__(self, environment: Mapping[str, str], port: int, log_file: Path, folder: Path) -> None:
        """Start it in `folder`; `await_answer` waits until it is ready. Raises PgwalError if it cannot be started."""
        self.address = f"http://127.0.0.1:{port}"
        self.log_file = log_file
        self._started_at = time.time()
        workspace = folder / "workspace.yaml"
        workspace.write_text(_WORKSPACE)
        command = [sys.executable, "-m", "dagster", "dev", "-w", str(workspace), "-h", "127.0.0.1", "-p", str(port)]
        self.program = Program("Dagster", command, environment, log_file, folder)

    def await_answer(self) -> None:
        """Wait until the UI answers and the code location is loaded. Raises PgwalError if it fails to load, or not within 180 s."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            self.program.require_running()
            trouble = self._location_trouble()
            if trouble is None:
                return
            if time.monotonic() > deadline:
                raise PgwalError(
                    f"Dagster's UI on {self.address} was not ready within {_START_SECONDS:.0f} s ({trouble}); see {self.log_file}."
                )
            time.sleep(0.5)

    def end_stale_runs(self) -> int:
        """Mark runs of an earlier demo as cancelled, so that none seems to hold the slot; return how many."""
        stale = self._runs({"statuses": list(_ACTIVE), "createdBefore": self._started_at})
        self._end([run["runId"] for run in stale], "MARK_AS_CANCELED_IMMEDIATELY")
        return len(stale)

    def end_active_runs(self, seconds: float) -> None:
        """Interrupt the active runs and wait for them, at most `seconds`. Does nothing if the UI does not answer."""
        deadline = time.monotonic() + seconds
        try:
            active = [run["runId"] for run in self._runs({"statuses": list(_ACTIVE)})]
            self._end(active, "SAFE_TERMINATE")
            while time.monotonic() < deadline and self._runs({"statuses": list(_ACTIVE), "runIds": active}) and active:
                time.sleep(0.3)
        except PgwalError:
            return

    def list_runs(self) -> list[tuple[str, str, str]]:
        """Return id, job and status of the newest 200 runs created since this start, oldest first."""
        runs = self._runs({"createdAfter": self._started_at})
        return [(run["runId"], run["jobName"], run["status"]) for run in reversed(runs)]

    def count_runs(self) -> Counter[str]:
        """Count the runs of `list_runs` by status (SUCCESS, FAILURE, …)."""
        return Counter(status for _, _, status in self.list_runs())

    def _runs(self, selected: Mapping[str, Any]) -> list[dict[str, Any]]:
        answer = self._ask(_RUNS, {"filter": selected})["runsOrError"]
        if "results" not in answer:
            raise PgwalError(
                f"Dagster on {self.address} cannot list its runs: {answer.get('message', 'no reason given')}; see {self.log_file}."
            )
        return answer["results"]

    def _end(self, runs: list[str], policy: str) -> None:
        if runs:
            self._ask(_END_RUNS, {"ids": runs, "policy": policy})

    def _location_trouble(self) -> str | None:
        """Return None if the code location is loaded, else why it is not yet. Raises PgwalError if it failed to load."""
        try:
            entries = self._ask(_LOCATIONS, {})["workspaceOrError"].get("locationEntries", [])
        except PgwalError:
            return "the UI does not answer"
        for entry in entries:
            found = entry["locationOrLoadError"] or {}
            if found.get("__typename") == "PythonError":
                first_line = found["message"].strip().splitlines()[0]
                raise PgwalError(f"Dagster cannot load the definitions: {first_line}; see {self.log_file}.")
        return None if entries and all(entry["loadStatus"] == "LOADED" for entry in entries) else "its definitions are loading"

    def _ask(self, query: str, variables: Mapping[str, Any]) -> dict[str, Any]:
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.address}/graphql", body, {"Content-Type": "application/json"})  # noqa: S310 (our own http address)
        try:
            with urllib.request.urlopen(request, timeout=15) as answer:  # noqa: S310
                found = json.load(answer)
        except (OSError, ValueError) as error:
            raise PgwalError(f"Dagster's UI on {self.address} does not answer: {error}.") from error
        if found.get("errors"):
            raise PgwalError(f"Dagster's UI on {self.address} refused a request: {found['errors'][0].get('message')}.")
        return found["data"]
