"""`python -m bench [NAME…]`: run the benchmarks, print the results and write them to `artifacts/bench.json`."""

from collections.abc import Callable

import click
from rich.console import Console

from bench.report import RESULTS, Result, save, show

NAMES = (
    "drain",
    "tables",
    "hash",
    "memory",
    "publish",
    "deep",
    "history",
    "snapshot",
    "first_reading",
    "catch_up",
    "windows",
    "latency",
    "published",
    "cores",
    "help",
)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option("--rounds", default=3, show_default=True, help="Rounds of each measurement; the result is the median.")
@click.option("--scale", default=1.0, show_default=True, help="A factor for all sizes; smaller than 1 for a quick try.")
def main(names: tuple[str, ...], rounds: int, scale: float) -> None:
    """Run the benchmarks called NAMES, or all of them.

    \b
    drain: 800,000 changes, against pg_recvlogical.
    tables: the same changes over 50 tables and in one.
    hash: the same changes with two of ten columns hashed, and without.
    memory: one transaction of 5 million rows and one of 1 million.
    publish: 100,000 changed keys into a million rows, against a hand-written MERGE.
    deep: 100,000 changed keys merged into tables of 1 to 30 million rows.
    history: 100,000 changed keys into a million rows, without a history and with ones of 1, 10 and 50 versions a row.
    snapshot: 3 million rows, against COPY.
    first_reading: 1,000 tables of 100 rows, and 300.
    catch_up: 2 GB of WAL in one, two and three windows, one round.
    windows: a drain, a publish and a status after 10 windows and after 10,000.
    latency: from a commit to `current` under `dagster dev`, 400 changes a second for five minutes, with the defaults and with
    PGWAL_MAX_STALENESS=1s.
    published: the changes of 100,000 keys of 10 million rows, and scans of that table against plain ones.
    cores: a publish of 100 tables on one core and on two.
    help: the time of `pgwal --help`.
    """  # noqa: D301 - click reads the backspace
    console = Console()
    for name in names or NAMES:
        result = _benchmark(name, rounds, scale)()
        show(console, result)
        save(result)
    console.print(f"Written to {RESULTS}.")


def _benchmark(name: str, rounds: int, scale: float) -> Callable[[], Result]:
    def size(count: int) -> int:
        return max(round(count * scale), 1000)

    match name:
        case "drain":
            from bench.drains import against_pg_recvlogical

            return lambda: against_pg_recvlogical(size(800_000), rounds)
        case "tables":
            from bench.drains import many_tables

            return lambda: many_tables(size(800_000), rounds)
        case "hash":
            from bench.drains import with_hashes

            return lambda: with_hashes(size(800_000), rounds)
        case "memory":
            from bench.memory import one_transaction

            return lambda: one_transaction((size(1_000_000), size(5_000_000)), rounds)
        case "publish":
            from bench.publishes import against_merge

            return lambda: against_merge(size(1_000_000), size(100_000), rounds)
        case "deep":
            from bench.deep import in_larger_tables

            return lambda: in_larger_tables(size(1_000_000), size(10_000_000), size(30_000_000), size(100_000), rounds)
        case "history":
            from bench.histories import by_length

            return lambda: by_length(size(1_000_000), size(100_000), rounds)
        case "snapshot":
            from bench.snapshots import against_copy

            return lambda: against_copy(size(3_000_000), rounds)
        case "first_reading":
            from bench.snapshots import many_small_tables

            return lambda: many_small_tables((round(300 * scale), round(1000 * scale)), rounds)
        case "catch_up":
            from bench.catch_up import in_windows

            return lambda: in_windows(size(2 << 30), 1)
        case "windows":
            from bench.windows import by_age

            return lambda: by_age((10, max(round(10_000 * scale), 1000)), max(rounds, 5))
        case "latency":
            from bench.latency import commit_to_visible

            return lambda: commit_to_visible(max(300 * scale, 30.0), ({}, {"PGWAL_MAX_STALENESS": "1s"}))
        case "published":
            from bench.published import against_plain_readers

            return lambda: against_plain_readers(size(10_000_000), size(100_000), rounds)
        case "cores":
            from bench.cores import one_and_two

            return lambda: one_and_two(max(round(100 * scale), 2), rounds)
        case _:
            from bench.startup import help_text

            return lambda: help_text(max(rounds, 5))


if __name__ == "__main__":
    main()
