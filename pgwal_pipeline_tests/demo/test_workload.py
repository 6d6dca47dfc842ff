"""The demo's workload: it keeps the shop's invariants and its rate, and outlives its server."""

import time
from collections.abc import Callable

import psycopg2
import psycopg2.errors

from pgwal_pipeline.demo.invariants import INVARIANTS
from pgwal_pipeline.demo.shop import seed
from pgwal_pipeline.demo.workload import DEEDS, Workload
from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline_tests.demo.invariants_at_source import broken_at_source
from pgwal_pipeline_tests.support import Source, wait_for


def test_every_deed_keeps_the_invariants_under_load(source: Source) -> None:
    conn = source.connect()
    seed(conn, customers=40, products=24, orders=60)
    workload = Workload(source.dsn, rate=3000, threads=4, seed=1)
    workload.start()
    try:
        wait_for(lambda: len(workload.tally().done) == len(DEEDS) or workload.error, what="every deed to be done once", seconds=60)
        for _ in range(5):
            assert not any(broken_at_source(source).values())
    finally:
        assert workload.stop()
    assert workload.error is None
    assert not any(broken_at_source(source).values())
    assert len(INVARIANTS) == len(broken_at_source(source))


def test_the_rate_is_kept(source: Source) -> None:
    seed(source.connect(), customers=10, products=12, orders=30)
    workload = Workload(source.dsn, rate=50, threads=2, seed=1)
    workload.start()
    time.sleep(4)
    assert workload.stop()
    assert 100 <= workload.tally().transactions + workload.tally().rolled_back <= 300


def test_the_workload_outlives_its_server(make_server: Callable[..., Postgres]) -> None:
    server = make_server()
    with plain_session(server.dsn()) as conn:
        seed(conn, customers=10, products=12, orders=30)
    workload = Workload(server.dsn(), rate=200, seed=1)
    workload.start()
    try:
        wait_for(lambda: workload.tally().transactions > 20, what="the first transactions")
        server.kill()
        wait_for(lambda: not workload.tally().connected, what="the workload to notice")
        before = workload.tally().transactions
        server.start()
        wait_for(lambda: workload.tally().transactions > before + 20, what="business to go on")
    finally:
        begin = time.monotonic()
        assert workload.stop()
    assert time.monotonic() - begin < 20
    assert workload.error is None


def test_an_error_of_another_kind_ends_the_workload_and_is_kept(source: Source) -> None:
    workload = Workload(source.dsn, rate=200, threads=1)
    workload.start()
    wait_for(lambda: workload.error, what="the error")
    assert isinstance(workload.error, psycopg2.errors.UndefinedTable)
    assert workload.stop()
