"""`python -m pgwal_pipeline.demo`: the demo, as `pgwal demo` runs it. `… shop` runs only the shop, on the database of PGWAL_SOURCE_DSN."""

import signal
import threading
from pathlib import Path

import click

from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.postgres.connection import plain_session


@click.group(invoke_without_command=True)
@click.option("--folder", default=".demo", show_default=True, type=click.Path(path_type=Path), help="The folder for all data of the demo.")
@click.option("--rate", default=20.0, show_default=True, help="Transactions a second.")
@click.option("--port", default=3000, show_default=True, help="The UI's port; the next free one if it is taken.")
@click.pass_context
def main(context: click.Context, folder: Path, rate: float, port: int) -> None:
    """Run a small shop on an embedded Postgres with the whole pipeline and Dagster's UI. Ctrl-C ends it."""
    if context.invoked_subcommand is None:
        from pgwal_pipeline.demo.run import run_demo

        raise SystemExit(run_demo(folder, rate=rate, port=port))


@main.command()
@click.option("--rate", default=20.0, show_default=True, help="Transactions a second.")
def shop(rate: float) -> None:
    """Create the shop's tables in the database of PGWAL_SOURCE_DSN if they are missing, and change them until Ctrl-C."""
    import psycopg2

    from pgwal_pipeline.demo.shop import is_seeded, seed
    from pgwal_pipeline.demo.workload import Workload
    from pgwal_pipeline.settings import Settings

    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    dsn = Settings.from_environment().dsn
    try:
        with plain_session(dsn) as conn:
            click.echo("The shop exists already." if is_seeded(conn) else f"Seeded the shop: {seed(conn):,} rows.")
    except psycopg2.OperationalError as error:
        raise PgwalError(f"The shop's database cannot be reached: {str(error).splitlines()[0]}") from None
    workload = Workload(dsn, rate=rate)
    workload.start()
    while not ended.wait(60.0) and workload.error is None:
        click.echo(f"{workload.tally().transactions:,} transactions")
    workload.stop()
    if workload.error is not None:
        raise PgwalError(f"The shop's workload failed: {str(workload.error).splitlines()[0]}")


if __name__ == "__main__":
    try:
        main()
    except PgwalError as error:
        raise SystemExit(f"pgwal: {error}") from None
