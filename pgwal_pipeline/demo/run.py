"""The demo: a shop on an embedded Postgres, the whole pipeline, and Dagster's UI to watch it. All data is in one folder."""

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import click

from pgwal_pipeline.demo.dagster_ui import DagsterUi, is_free, next_free_port
from pgwal_pipeline.demo.invariants import INVARIANTS, TABLES, broken_in_lake
from pgwal_pipeline.demo.processes import end_marked, end_programs, mark
from pgwal_pipeline.demo.shop import describe, is_seeded, seed
from pgwal_pipeline.demo.workload import Workload
from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.host import interrupts
from pgwal_pipeline.messages.errors import LakeError, PgwalError
from pgwal_pipeline.pipeline.as_of import find_publish
from pgwal_pipeline.pipeline.status import lag
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline.settings import Settings

FOLDER = Path(".demo")
UI_PORT = 3000
RATE = 20.0  # transactions a second

# Small, so that runs are frequent enough to watch.
_SETTINGS = {
    "PGWAL_TABLES": "shop.*",
    "PGWAL_LAG_THRESHOLD": "256kB",
    "PGWAL_MAX_STALENESS": "20s",
    "PGWAL_RAW_RETENTION": "1d",
    "PGWAL_MEMORY_BUDGET": "64MB",
}
_POSTGRES_SETTINGS = {"max_slot_wal_keep_size": "4GB", "max_wal_size": "512MB", "shared_buffers": "64MB", "jit": "off"}
_INSTANCE = Path(__file__).parents[1] / "instance.yaml"
_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
# Every run starts its own Spark and is short. With only Java's first-tier compiler and the serial collector it needs far less of a small
# machine.
_QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC"
_TOLD = {"STARTED": "has begun", "SUCCESS": "is done", "FAILURE": "has failed", "CANCELED": "was cancelled"}
_ASSETS = "__ASSET_JOB"  # what Dagster calls a run that is of no job: one that an automation condition asked for
_STATUS_EVERY = 60.0
_PATIENCE = 120.0  # seconds without a first publish before a message says so
_KEPT = (
    *("PGWAL_SPARK_MASTER", "PGWAL_SPARK_REMOTE", "PGWAL_SPARK_CONF", "PGWAL_SPARK_IDLE"),
    *("PGWAL_POSTGRES_BIN", "PGWAL_FAILPOINTS", "PGWAL_DEBUG"),
)


@dataclass(frozen=True)
class Place:
    """The demo's folder `root` and the paths in it."""

    root: Path

    @property
    def postgres(self) -> Path:
        """The data folder of the source."""
        return self.root / "postgres"

    @property
    def lake(self) -> Path:
        """The folder of the lake."""
        return self.root / "lake"

    @property
    def dagster_home(self) -> Path:
        """The folder of Dagster's instance."""
        return self.root / "dagster"

    @property
    def environment(self) -> Path:
        """A file of `NAME=value` lines that point `pgwal` at the demo."""
        return self.root / "env"

    @property
    def ui_log(self) -> Path:
        """The log of Dagster's processes."""
        return self.root / "dagster.log"


class _Stop(BaseException):
    """SIGINT or SIGTERM arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_demo(folder: Path = FOLDER, *, rate: float = RATE, port: int = UI_PORT) -> int:
    """Run the demo in `folder` until SIGINT or SIGTERM; return the signal's exit code (130, 143).

    Data already in the folder is used again. The UI is on `port` of 127.0.0.1, or on the next free port. Raises PgwalError if something
    does not start; nothing is left running then.
    """
    place = Place(folder.absolute())
    with _signals_raise():
        try:
            with ExitStack() as stack:
                _run(place, rate, port, stack)
        except _Stop as stop:
            return _EXIT_CODES[signal.Signals(stop.number)]
    return 0


def _run(place: Place, rate: float, port: int, stack: ExitStack) -> None:
    place.root.mkdir(parents=True, exist_ok=True)
    stack.enter_context(_only_one(place))
    _say(f"All data of the demo is in {_short(place.root)}; remove that folder to start from scratch.")
    if end_marked(place.root, 5.0):
        _say("Ended processes left over from a demo that was killed.")
    postgres = _start_postgres(place, stack)
    _open_shop(postgres.dsn())
    workload = Workload(postgres.dsn(), rate=rate)
    workload.start()
    stack.callback(workload.stop)
    _say(f"The shop is open: about {rate:g} transactions a second.")
    settings, ui = _start_dagster(place, postgres, port, stack)
    watch = _Watch(postgres, workload, ui, settings)
    _say(f"Dagster's UI is on {ui.address}. Its sensors request all runs.")
    _await_first_publish(watch)
    _tell(place, ui, settings)
    while True:
        watch.pause(_STATUS_EVERY)
        _say(watch.status())


def _start_postgres(place: Place, stack: ExitStack) -> Postgres:
    fresh = not place.postgres.exists()
    port = _known_port(place)
    postgres = Postgres(place.postgres, settings=_POSTGRES_SETTINGS, port=port if port is not None and is_free(port) else None)
    _say(f"{'Creating' if fresh else 'Starting'} an embedded Postgres {postgres.installation.version} with wal_level=logical …")
    stack.callback(postgres.stop)
    postgres.start()
    return postgres


def _open_shop(dsn: str) -> None:
    with plain_session(dsn) as conn:
        if is_seeded(conn):
            describe(conn)
            _say("The shop's tables exist already; nothing is seeded.")
        else:
            _say(f"Seeded the shop: {seed(conn):,} rows in six tables of schema shop.")


def _start_dagster(place: Place, postgres: Postgres, wanted_port: int, stack: ExitStack) -> tuple[Settings, DagsterUi]:
    own = {
        "PGWAL_SOURCE_DSN": postgres.dsn(),
        "PGWAL_LAKE": str(place.lake),
        "DAGSTER_HOME": str(place.dagster_home),
        **_SETTINGS,
    }
    _write_environment(place, own)
    place.dagster_home.mkdir(exist_ok=True)
    shutil.copyfile(_INSTANCE, place.dagster_home / "dagster.yaml")
    environment = {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith("PG")} | own | mark(place.root)
    environment.setdefault("SPARK_SUBMIT_OPTS", _QUICK_JAVA)
    port = next_free_port(wanted_port)
    _say(f"Starting Dagster: webserver, daemon and code server{'' if port == wanted_port else f' (port {wanted_port} is taken)'} …")
    stack.callback(end_marked, place.root, 4.0)
    # Not in the project's folder: Dagster would read the .env there, which is for the user's own source.
    ui = DagsterUi(environment, port, place.ui_log, place.root)
    stack.callback(end_programs, [ui.program], 10.0)
    ui.await_answer()
    stack.callback(ui.end_active_runs, 8.0)
    stale = ui.end_stale_runs()
    if stale:
        _say(f"Marked {stale} run{'s' * (stale > 1)} of an earlier demo as cancelled.")
    return Settings.from_environment(environment), ui


def _await_first_publish(watch: "_Watch") -> None:
    """Wait for the first publish, and print a line for each run that begins or ends."""
    if watch.published() is not None:
        return
    _say("First publication, slot and snapshots, then drain and publish; Spark takes a minute or more on a small machine.")
    began = time.monotonic()
    while watch.published() is None:
        watch.pause(1.0)
        for line in watch.news():
            _say(line)
        if time.monotonic() - began > _PATIENCE:
            _say(f"No publish yet ({watch.runs()}); see {watch.ui.address}/runs. Still waiting.")
            began = time.monotonic()


def _tell(place: Place, ui: DagsterUi, settings: Settings) -> None:
    python = _short(Path(sys.executable))
    orders = find_publish(settings)["tables"]["shop.orders"]["path"]
    sql = "select status, count(*) orders, sum(total) total from orders group by status order by orders desc"
    query = (
        "import pyarrow as pa; from deltalake import DeltaTable as T, QueryBuilder as Q; "
        f"print(pa.table(Q().register('orders', T('{_short(Path(orders))}')).execute('{sql}').read_all()).to_pandas())"
    )
    _say("Every current table is at one LSN now, and moves on with each publish. See:")
    click.echo(f"""
      lineage     {ui.address}/asset-groups
      runs        {ui.address}/runs
      sensors     {ui.address}/automation
      marts       {ui.address}/locations/pgwal_pipeline/asset-groups/marts (four assets of group marts follow each publish by themselves)
      lake        {_short(place.lake)} (plain Delta tables; raw/ holds every change, current/ the tables as of the publish)
      logs        {_short(place.ui_log)}, {_short(place.postgres)}.log

    In another terminal, to point the commands at the demo:

      set -a; . {_short(place.environment)}; set +a
      {python} -m pgwal_pipeline.demo.invariants       # joins all tables at one LSN
      {Path(python).parent}/pgwal status
      {Path(python).parent}/pgwal verify

    or read a table with nothing but deltalake:

      {python} -c "{query}"

    Ctrl-C ends everything; the next start uses the same data.
""")


class _Watch:
    """Reports the state of the demo."""

    def __init__(self, postgres: Postgres, workload: Workload, ui: DagsterUi, settings: Settings) -> None:
        self._postgres, self._workload, self.ui, self._settings = postgres, workload, ui, settings
        self._last = (time.monotonic(), workload.tally().transactions)
        self._told: dict[str, str] = {}

    def pause(self, seconds: float) -> None:
        """Wait `seconds`. Raises PgwalError if Postgres, Dagster or the workload has ended by itself."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))
            self.ui.program.require_running()
            if not self._postgres.running:
                raise PgwalError(f"The demo's Postgres server has ended; see {self._postgres.log_file}.")
            if self._workload.error is not None:
                raise PgwalError(f"The shop's workload failed: {str(self._workload.error).splitlines()[0]}")

    def published(self) -> dict[str, Any] | None:
        """Return the newest publish as `pgwal as-of` prints it; None if a table of the shop is not in it yet."""
        try:
            publish = find_publish(self._settings)
        except LakeError:
            return None
        return publish if all(f"shop.{name}" in publish["tables"] for name in TABLES) else None

    def news(self) -> list[str]:
        """Return a line for each run that has begun or ended since the last call."""
        try:
            runs = self.ui.list_runs()
        except PgwalError:
            return []
        changed = [(run, job, status) for run, job, status in runs if status in _TOLD and self._told.get(run) != status]
        self._told |= {run: status for run, _, status in changed}
        return [f"  {'marts' if job == _ASSETS else job} {_TOLD[status]}{self._where(run, status)}" for run, job, status in changed]

    def _where(self, run: str, status: str) -> str:
        return f": {self.ui.address}/runs/{run}" if status == "FAILURE" else ""

    def runs(self) -> str:
        """Return how many runs are done, running and failed."""
        try:
            count = self.ui.count_runs()
        except PgwalError:
            return "runs: the UI does not answer"
        running = sum(count.values()) - count["SUCCESS"] - count["FAILURE"] - count["CANCELED"]
        return f"runs: {count['SUCCESS']} done, {running} running, {count['FAILURE']} failed"

    def status(self) -> str:
        """Return one line on transactions, lag, the newest publish and runs."""
        now, done = time.monotonic(), self._workload.tally().transactions
        rate = (done - self._last[1]) / max(now - self._last[0], 0.001)
        self._last = (now, done)
        return f"{done:,} transactions ({rate:.0f}/s) · {self._lag()} · {self._publish()} · {self.runs()}"

    def _lag(self) -> str:
        try:
            return f"slot {lag(self._settings).lag_bytes / 1024:,.0f} kB behind"
        except PgwalError as error:
            return str(error)

    def _publish(self) -> str:
        publish = self.published()
        if publish is None:
            return "nothing published yet"
        age = (datetime.now(UTC) - datetime.fromisoformat(publish["published_at"])).total_seconds()
        broken = sorted(name for name, rows in broken_in_lake(publish["tables"]).items() if rows)
        holds = f"BROKEN there: {', '.join(broken)}" if broken else f"all {len(INVARIANTS)} invariants hold there"
        return f"published {publish['lsn']} {age:.0f} s ago, {holds}"


def _write_environment(place: Place, variables: Mapping[str, str]) -> None:
    """Write the variables to a file for other terminals. It holds the server's password, so only its owner may read it."""
    place.environment.touch(mode=0o600)
    place.environment.write_text("".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items()))


def _known_port(place: Place) -> int | None:
    """Return the source's port at the last start, so that an open `psql` can reconnect; None if there was none."""
    try:
        found = re.search(r"127\.0\.0\.1:(\d+)/", place.environment.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


@contextlib.contextmanager
def _only_one(place: Place) -> Iterator[None]:
    """Lock the folder; the lock ends with the process. Raises PgwalError if another demo runs in it."""
    with (place.root / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PgwalError(f"A demo is already running in {place.root}; end that one first (Ctrl-C in its terminal).") from None
        yield


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Within the block, the first SIGINT or SIGTERM raises `_Stop`; later ones are ignored."""

    def stop(number: int, _frame: FrameType | None) -> None:
        for other in _EXIT_CODES:
            signal.signal(other, signal.SIG_IGN)
        click.echo()
        _say("Ending everything; this takes a few seconds …")
        raise _Stop(number)

    def lost(error: BaseException | None) -> int:
        for number in _EXIT_CODES:
            signal.signal(number, stop)
        return error.number if isinstance(error, _Stop) else signal.SIGINT

    before, hook = {number: signal.signal(number, stop) for number in _EXIT_CODES}, sys.unraisablehook
    interrupts.on_lost(lost)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    click.echo(f"{datetime.now():%H:%M:%S}  {text}")


def _short(path: Path) -> str:
    """Return the path relative to the working directory if it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
