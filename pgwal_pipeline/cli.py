"""`pgwal`: the pipeline's commands. Modules are imported inside the commands, so that `--help` answers at once."""

import atexit
import functools
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pgwal_pipeline.host import interrupts
from pgwal_pipeline.messages.printable import printable

if TYPE_CHECKING:
    from types import ModuleType

    from pgwal_pipeline.pipeline.reports import RunReport
    from pgwal_pipeline.settings import Settings
    from pgwal_pipeline.sources import Source
    from pgwal_pipeline.values.relation import TableName

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
_INTERRUPTION = "interrupted; what was complete is safe, and the next run goes on from there."
_CLEAN_SECONDS = 20.0  # for an interrupted command to unwind; if it is killed after that, the next run still goes on from where it was
_NAMED_SECONDS = 3.0
_DEMO_CLEAN_SECONDS = 120.0  # more than all its parts' timeouts together: killed earlier, the demo would leave its Postgres running
# What a command loads is no garbage. At Python's own thresholds the collector takes a tenth of the start to scan it.
_SELDOM = (2_000, 20, 100)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="pgwal-pipeline", prog_name="pgwal")
@click.option("--source", "_name", metavar="NAME", help="The source to work on, where the Dagster project of this folder has several.")
def main(_name: str | None) -> None:
    """Postgres change data capture into Delta Lake, run and shown by Dagster.

    Settings are PGWAL_* environment variables (see .env.example); a .env file in the working directory is read too. In a Dagster project
    they are those of its source.
    """
    from dotenv import load_dotenv

    gc.set_threshold(*_SELDOM)
    atexit.register(gc.freeze)  # no scan at exit either, which takes another fifth
    try:
        load_dotenv(".env")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8" if isinstance(error, UnicodeError) else error
        _fail(f"The file .env in the working directory cannot be read ({reason}); write lines such as PGWAL_SLOT=pgwal into it.", 2)


def _command(function: Callable[..., Any], clean_seconds: float | None = None) -> Callable[..., Any]:
    """Turn what a command raises into one sentence on stderr and an exit code. After a signal it has `clean_seconds` to end."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from pgwal_pipeline.messages.errors import PgwalError

        interrupted = _watch_signals(_CLEAN_SECONDS if clean_seconds is None else clean_seconds)
        try:
            return function(*args, **kwargs)
        except PgwalError as error:
            _fail(str(error), error.exit_code)
        except KeyboardInterrupt:
            _await_name(interrupted)
            _fail(_INTERRUPTION, _EXIT_CODES[interrupted[0] if interrupted else signal.SIGINT])
        except click.Abort:
            if interrupted:  # click raises Abort for a KeyboardInterrupt at a prompt
                _fail(_INTERRUPTION, _EXIT_CODES[interrupted[0]])
            raise
        except (click.ClickException, click.exceptions.Exit):
            raise
        except BaseException as error:
            if isinstance(error, SystemExit) or os.environ.get("PGWAL_DEBUG"):
                raise
            if interrupted:
                _fail(_INTERRUPTION, _EXIT_CODES[interrupted[0]])
            first_line = str(error).strip().splitlines()[:1]
            _fail(f"unexpected {type(error).__name__}: {' '.join(first_line)} (PGWAL_DEBUG=1 shows where).", 1)

    return wrapper


def _await_name(interrupted: list[signal.Signals]) -> None:
    """Wait until the watching thread has recorded which signal came; on a busy machine that takes a moment."""
    deadline = time.monotonic() + _NAMED_SECONDS
    while not interrupted and time.monotonic() < deadline:
        time.sleep(0.02)


def _watch_signals(clean_seconds: float) -> list[signal.Signals]:
    """Let SIGINT and SIGTERM interrupt the command; return the list to which received signals are added, in their order.

    After a signal the command has `clean_seconds` to unwind; then the process ends, even if it is stuck in a library. Dagster installs
    its own handlers while it executes a run, so signals are read from the wakeup descriptor, which no handler changes.
    """
    came: list[signal.Signals] = []
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch(_alive: object = writer) -> None:
        while not came:
            came.extend(signal.Signals(number) for number in reader.recv(1) if number in _EXIT_CODES)
        time.sleep(clean_seconds)
        print(f"pgwal: {_INTERRUPTION}", file=sys.stderr, flush=True)  # noqa: T201 - click may be locked by what is stuck
        os._exit(_EXIT_CODES[came[0]])

    def interrupt(number: int, _frame: object) -> None:
        came.append(signal.Signals(number))
        raise KeyboardInterrupt

    interrupts.on_lost(lambda _: signal.SIGINT)
    threading.Thread(target=watch, name="pgwal-signals", daemon=True).start()
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in _EXIT_CODES:
        signal.signal(number, interrupt)
    return came


def _fail(sentence: str, code: int) -> NoReturn:
    click.echo(f"pgwal: {printable(sentence)}", err=True)
    # The run's threads and the JVM must not keep a failed command alive.
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(code)


@contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Send what libraries print to stderr while the command works: stdout is for its answer alone."""
    saved = os.dup(1)
    sys.stdout.flush()
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def _answer(as_json: bool, answer: dict[str, Any], lines: Callable[[], Iterator[str]]) -> None:
    if as_json:
        click.echo(json.dumps(answer))
    else:
        for line in lines():
            click.echo(printable(line))


def _source() -> "Source":
    """Return the source that `--source` names, else the only one. Raises SettingError."""
    from pgwal_pipeline.sources import choose

    return choose(click.get_current_context().find_root().params.get("_name"))


def _settings(source: "Source | None" = None) -> "Settings":
    from pgwal_pipeline.postgres.dsn import parse_dsn

    settings = (source or _source()).settings()
    if settings.source_dsn is not None:
        parse_dsn(settings.dsn)
    return settings


def _table_names(names: tuple[str, ...]) -> "list[TableName]":
    from pgwal_pipeline.messages.errors import SettingError
    from pgwal_pipeline.values.relation import TableName

    try:
        return [TableName.parse(name) for name in names]
    except ValueError as error:
        raise SettingError(f"{error}.") from None


_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, and nothing else there.")


def _run(as_json: bool, work: "Callable[[ModuleType, Settings, Source], RunReport]") -> None:
    """Run a command that goes through Dagster, print its report, and fail if a table could not be published.

    `work` gets the module `runs`, the settings and their source. Loading the module, and Dagster with it, takes a second, so the settings
    are checked first.
    """
    started = time.monotonic()
    with _quiet_stdout():
        source = _source()
        settings = _settings(source)
        from pgwal_pipeline import runs

        report = work(runs, settings, source)
    answer = report.to_json(time.monotonic() - started)
    _answer(as_json, answer, lambda: _report_lines(answer))
    if report.errors:
        tables = ", ".join(report.errors)
        reasons = " ".join(report.errors.values())
        _fail(f"{tables} could not be published; the other tables were. {reasons}", 1)
    if report.unread:
        _fail(f"{', '.join(report.unread)} could not be read yet; the rest was done. {next(iter(report.unread.values()))}", 1)


def _report_lines(answer: dict[str, Any]) -> Iterator[str]:
    for window in answer["windows"]:
        yield (
            f"drained  {window['start_lsn']} to {window['end_lsn']}: {window['changes']:,} changes in {window['transactions']:,} "
            f"transactions, {window['seconds']:.1f} s"
        )
    for snapshot in answer["snapshots"]:
        yield f"snapshot {snapshot['table']}: {snapshot['rows']:,} rows in {snapshot['chunks']} chunks, {snapshot['seconds']:.1f} s"
    publish = answer["publish"]
    if publish is not None:
        yield f"published {len(publish['tables'])} tables at {publish['lsn']}"
    for warning in answer["warnings"]:
        yield f"warning: {warning}"
    yield f"done in {answer['seconds']['total']:.1f} s"


@main.command()
@_json_option
@_command
def sync(as_json: bool) -> None:
    """Run the main job once: create what is missing, snapshot what needs it, drain to now, publish."""
    _run(as_json, lambda runs, settings, source: runs.sync(settings, source))


@main.command()
@_json_option
@_command
def drain(as_json: bool) -> None:
    """Read the slot into raw, and nothing else. Takes no snapshot."""
    _run(as_json, lambda runs, settings, source: runs.drain(settings, source))


@main.command()
@_json_option
@_command
def publish(as_json: bool) -> None:
    """Merge raw into current, and nothing else. Works while the source is down."""
    _run(as_json, lambda runs, settings, source: runs.publish(settings, source))


@main.command()
@click.argument("tables", nargs=-1, metavar="TABLE...")
@click.option("--all", "every", is_flag=True, help="Every table. Also creates a lost or missing slot again.")
@_json_option
@_command
def resnapshot(tables: tuple[str, ...], every: bool, as_json: bool) -> None:
    """Read tables again from the source now, and publish them."""
    if every == bool(tables):
        raise click.UsageError("name the tables to read again, or --all.")
    names = None if every else _table_names(tables)
    _run(as_json, lambda runs, settings, source: runs.resnapshot(settings, names, source))


@main.command()
@click.argument("tables", nargs=-1, required=True, metavar="TABLE...")
@_json_option
@_command
def accept(tables: tuple[str, ...], as_json: bool) -> None:
    """Take the schema of tables that their option on_schema_change has kept back; the next publish has it."""
    with _quiet_stdout():
        settings, names = _settings(), _table_names(tables)
        from pgwal_pipeline.pipeline.accepting import accept as accepted

        answer = accepted(settings, names, warn=lambda text: click.echo(f"pgwal: {text}", err=True))

    def lines() -> Iterator[str]:
        for name, table in answer["accepted"].items():
            changes = ", ".join(table["changes"]) or "nothing was kept back"
            yield f"{name}: {changes}{'; it is read again' if table['read_again'] else ''}"
        yield "`pgwal sync` publishes them."

    _answer(as_json, answer, lines)


@main.command()
@click.argument("file", metavar="FILE.sql", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_json_option
@_command
def preview(file: Path, as_json: bool) -> None:
    """Try a migration in a copy of the source's structure: what would be read again, what would be lost. Exit 3 for either."""
    with _quiet_stdout():
        source = _source()
        settings = _settings(source)
        from pgwal_pipeline.pipeline import preview as previews

        found = previews.preview(settings, file)
        from pgwal_pipeline.lineage import columns_lost

        lost, warnings = columns_lost(source.names(), previews.lost_columns(found))
    answer = found.to_json(lost, warnings)

    def lines() -> Iterator[str]:
        for name, table in answer["tables"].items():
            if table["why"] is not None:
                again = f"read again ({table['bytes']:,} bytes): " if table["read_again"] else ""
                yield f"{name}: {again}{table['why']}"
        for column in lost:
            yield f"lost: column {column['column']} of {column['asset']} (from {column['source']})"
        for warning in answer["warnings"]:
            yield f"warning: {warning}"
        if not lost and not any(table["why"] for table in answer["tables"].values()):
            yield "nothing is read again, and nothing is lost"

    _answer(as_json, answer, lines)
    if lost or any(table["read_again"] for table in answer["tables"].values()):
        raise SystemExit(3)


@main.command()
@_json_option
@_command
def status(as_json: bool) -> None:
    """Show where everything is: slot, frontier, last publish, every table. Works while the source is down."""
    from pgwal_pipeline.pipeline.status import status as read_status

    with _quiet_stdout():
        answer = read_status(_settings())

    def lines() -> Iterator[str]:
        slot = answer["slot"]
        yield "slot      " + (
            "missing, or the source is down"
            if slot is None
            else f"{slot['name']} confirmed {slot['confirmed_flush_lsn']}, {slot['lag_bytes']:,} bytes behind, WAL {slot['wal_status']}"
        )
        yield f"frontier  {answer['frontier'] or 'none yet'}"
        yield f"engine    {_engine_line(answer['engine'])}"
        publish = answer["publish"]
        yield "published " + ("nothing yet" if publish is None else f"{publish['lsn']} at {publish['published_at']}")
        for window in answer.get("windows", ()):
            done = "" if window["done_bytes"] is None else f", {window['done_bytes']:,} bytes read"
            yield f"window    {window['key']} {window['state']}{done}"
        for name, table in answer["tables"].items():
            rows = "" if table["rows"] is None else f"  {table['rows']:,} rows"
            options = f"  {json.dumps(table['options'], ensure_ascii=False)}" if table["options"] else ""
            yield f"  {table['state']:<12} {name}{rows}{options}{'  ' + table['reason'] if table['reason'] else ''}"

    _answer(as_json, answer, lines)


@main.command()
@click.argument("tables", nargs=-1, metavar="[TABLE...]")
@click.option("--all", "every", is_flag=True, help="Compare every table whole, however long it takes.")
@_json_option
@_command
def verify(tables: tuple[str, ...], every: bool, as_json: bool) -> None:
    """Compare every value of source and current at one LSN; brings current there first. Exit 1 on a difference."""
    with _quiet_stdout():
        if every and tables:
            raise click.UsageError("Name tables, or give --all, not both.")
        source = _source()
        settings, names = _settings(source), _table_names(tables) or None
        from pgwal_pipeline import runs

        answer, errors = runs.verify(settings, names, source, every=every)

    def lines() -> Iterator[str]:
        for name, table in answer["tables"].items():
            verdict = "equal" if table["equal"] else f"{table['missing']} missing, {table['extra']} extra, {table['different']} different"
            proof = answer["proofs"][name]
            yield f"{name}: {table['rows']:,} rows{'' if proof['whole'] else ' of it'}, {verdict}"
            yield from (f"  {_difference(one)}" for one in proof["differences"])
        if answer["left"]:
            yield f"left to a later run: {', '.join(answer['left'])}"
        yield f"{'equal' if answer['equal'] else 'different'} at {answer['lsn']}"

    _answer(as_json, answer, lines)
    different = [name for name, table in answer["tables"].items() if not table["equal"]]
    if different:
        _fail(f"{', '.join(different)} differ from the source; `pgwal resnapshot` reads them again.", 1)
    failed = {name: reason for name, reason in errors.items() if names is None or name in map(str, names)}
    if failed:
        _fail(f"{', '.join(failed)} could not be compared; the other tables were. {' '.join(failed.values())}", 1)


def _difference(row: Mapping[str, Any]) -> str:
    """A row that differs, for people. The value of a protected column is not shown."""
    key = ", ".join(f"{name} = {'(protected)' if value is None else value}" for name, value in row["key"].items())
    columns = f" in {', '.join(row['columns'])}" if row["columns"] else ""
    return f"{row['kind']}{columns}: the row with {key}"


@main.command("as-of")
@click.argument("when", default="latest", metavar="[latest|LSN|TIMESTAMP]")
@_json_option
@_command
def as_of(when: str, as_json: bool) -> None:
    """Show the newest publish at or before an LSN or a time, and the Delta versions of the tables there."""
    from pgwal_pipeline.pipeline.as_of import find_publish

    with _quiet_stdout():
        answer = find_publish(_settings(), when)

    def lines() -> Iterator[str]:
        yield f"{answer['lsn']} published at {answer['published_at']}"
        for name, table in answer["tables"].items():
            yield f"  {name}: version {table['version']} of {table['path']}"

    _answer(as_json, answer, lines)


@main.command()
@click.argument("sql", required=False, metavar="[SQL]")
@click.option("--tables", "list_tables", is_flag=True, help="List the published tables with their columns, instead of a query.")
@click.option(
    "--as-of",
    "when",
    default="latest",
    metavar="WHEN",
    help="The newest publish at or before an LSN or a time; before that, the histories.",
)
@_json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with a header.")
@_command
def query(sql: str | None, list_tables: bool, when: str, as_json: bool, as_csv: bool) -> None:
    """Answer one SELECT from the published tables, all at one LSN. Reads nothing else, and changes nothing."""
    if (sql is None) != list_tables:
        raise click.UsageError("give one SELECT, or --tables.")
    if as_json and as_csv:
        raise click.UsageError("choose one of --json and --csv.")
    with _quiet_stdout():
        from pgwal_pipeline.published import query as queries
        from pgwal_pipeline.published import written
        from pgwal_pipeline.published.past import state_as_of

        state = state_as_of(_settings(), when)
    style = "json" if as_json else "csv" if as_csv else "table"
    if sql is None:
        for line in written.tables(queries.table_columns(state), state.lsn, style):
            click.echo(line)
        return
    with queries.rows_of(state, sql) as rows:
        for text in written.rows(rows, state.lsn, style):
            click.echo(text, nl=False)


@main.command()
@_json_option
@_command
def doctor(as_json: bool) -> None:
    """Check everything the pipeline needs, and say how to fix what is wrong."""
    from pgwal_pipeline.messages.errors import SettingError
    from pgwal_pipeline.pipeline.doctor import examine, settings_cannot_be_read

    with _quiet_stdout():
        source = _source()
        try:
            checks = examine(source.environment())
        except SettingError as error:
            checks = [settings_cannot_be_read(error)]
    answer = {"ok": all(check.ok for check in checks), "checks": [check.to_json() for check in checks]}

    def lines() -> Iterator[str]:
        for check in checks:
            yield f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.found}"
            if not check.ok and check.mend:
                yield f"       {check.mend}"

    _answer(as_json, answer, lines)
    failed = [check.name for check in checks if not check.ok]
    if failed:
        _fail(f"the pipeline cannot run until this is fixed: {', '.join(failed)}.", 1)


@main.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@_json_option
@_command
def drop(yes: bool, as_json: bool) -> None:
    """Drop our slots and our publication from the source; the lake stays."""
    from pgwal_pipeline.pipeline.drop import drop as drop_from_source

    with _quiet_stdout():
        settings = _settings()
    if not yes:
        click.confirm(
            f"Drop slot {settings.slot} and publication {settings.publication} (if it is ours) from the source?", abort=True, err=True
        )
    with _quiet_stdout():
        dropped = drop_from_source(settings)

    def lines() -> Iterator[str]:
        yield f"dropped {', '.join(dropped)}" if dropped else "nothing to drop"

    _answer(as_json, {"dropped": dropped}, lines)


@main.group()
def engine() -> None:
    """The warm Spark engine of this machine, which runs and commands share."""


@engine.command("status")
@_json_option
@_command
def show_engine(as_json: bool) -> None:
    """Show whether the engine for these settings is running."""
    from pgwal_pipeline.spark.session import engine_status

    with _quiet_stdout():
        answer = engine_status(_settings())
    _answer(as_json, answer, lambda: iter([_engine_line(answer)]))


@engine.command("start")
@_json_option
@_command
def start_engine(as_json: bool) -> None:
    """Start the engine, and wait until it takes sessions."""
    with _quiet_stdout():
        settings = _settings()
        from pgwal_pipeline.messages.errors import SettingError
        from pgwal_pipeline.spark.session import engine_status, spark_session, uses_engine

        if not uses_engine(settings):
            raise SettingError(
                "There is no engine for these settings: it needs a PGWAL_SPARK_MASTER such as local[*], a PGWAL_SPARK_IDLE above 0, and no "
                "PGWAL_SPARK_REMOTE."
            )
        spark_session(settings, say=lambda text: click.echo(text, err=True))
        answer = engine_status(settings)
    _answer(as_json, answer, lambda: iter([_engine_line(answer)]))


@engine.command("stop")
@_json_option
@_command
def stop_engine(as_json: bool) -> None:
    """End the engine now, also beneath runs that use it. The next run starts one again."""
    with _quiet_stdout():
        from pgwal_pipeline.spark.engine import stop
        from pgwal_pipeline.spark.session import engine_status, find_engine

        settings = _settings()
        folder = find_engine(settings)
        stopped = folder is not None and stop(folder)
        answer = {**engine_status(settings), "stopped": stopped}
    _answer(as_json, answer, lambda: iter(["stopped" if stopped else "not running"]))


def _engine_line(engine: dict[str, Any]) -> str:
    if not engine["running"]:
        return "not running"
    used = "" if engine["used_at"] is None else f", used last at {engine['used_at']}"
    return f"{engine['remote']}, process {engine['pid']}, since {engine['since']}{used}"


@main.command()
@functools.partial(_command, clean_seconds=_DEMO_CLEAN_SECONDS)
def demo() -> None:
    """Run a small shop on an embedded Postgres with the whole pipeline and Dagster's UI. Ctrl-C ends it."""
    from pgwal_pipeline.demo.run import run_demo

    raise SystemExit(run_demo())


if __name__ == "__main__":
    main()
