"""Published tables in a catalog: a Hive metastore on embedded Derby, which lives in the warm engine's JVM."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pgwal_pipeline.lake.records import Registration
from pgwal_pipeline.pipeline import doctor
from pgwal_pipeline.pipeline.registration import Plan, Wanted, plan
from pgwal_pipeline.published.state import open_state
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark import engine
from pgwal_pipeline.spark.session import find_engine, spark_session
from pgwal_pipeline.values.catalog_name import CatalogPattern
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.connect_server import ConnectServer
from pgwal_pipeline_tests.pipeline.registering import LATER, Shop, hive, no_spark, told, tried_again
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source

_NOW = datetime(2026, 1, 31, tzinfo=UTC)
_PATTERN = CatalogPattern.parse("c.{schema}")


def _wanted(*tables: tuple[str, str], tried: str = "1", said: Mapping[str | None, str] | None = None) -> list[Wanted]:
    """Tables by name and location, both in schema s."""
    named = [(TableName("s", name), TableName("s", at)) for name, at in tables]
    return [Wanted(table, at, f"/lake/{at.name}", _PATTERN.of(table), tried, {} if said is None else said) for table, at in named]


def _known(*tables: tuple[str | None, str], **fields: Any) -> dict[TableName, Registration]:
    """What is registered: names, as of `_PATTERN`, by location."""
    comments = _wanted(("x", "x"))[0].digest
    values: dict[str, Any] = {"target": "t", "tried": "1", "comments": comments, **fields}
    return {TableName("s", at): Registration(TableName("s", at), None if name is None else f"c.s.{name}", **values) for name, at in tables}


def _named(work: Plan) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """The locations of a plan: those to be put, the entries to be removed, and what was refused."""
    put = [one.location.name for one in work.tables if one.location not in work.refused]
    return put, {at.name: str(name) for at, name in work.drop.items()}, {at.name: reason for at, reason in work.refused.items()}


def test_what_is_as_it_was_needs_nothing() -> None:
    assert plan(_wanted(("a", "a"), ("b", "b")), _known(("a", "a"), ("b", "b"), ("gone", "gone")), "t", _NOW) == Plan()


def test_what_is_new_or_made_anew_or_commented_on_is_put() -> None:
    known = _known(("a", "a"), ("b", "b"), ("c", "c"))
    wanted = [*_wanted(("a", "a")), *_wanted(("b", "b"), tried="2"), *_wanted(("c", "c"), said={None: "new"}), *_wanted(("d", "d"))]
    assert _named(plan(wanted, known, "t", _NOW)) == (["b", "c", "d"], {}, {})
    # Another catalog, or other settings of it: all of them, and what the other one has is left there.
    assert _named(plan(_wanted(("a", "a"), ("z", "b"), tried="2"), known, "other", _NOW)) == (["a", "b"], {}, {})


def test_comments_that_cannot_be_read_now_are_not_missed() -> None:
    (one,) = (replace(found, comments=None) for found in _wanted(("a", "a")))
    assert plan([one], _known(("a", "a")), "t", _NOW) == Plan()
    assert _named(plan([one], _known(("a", "a"), comments=None), "t", _NOW))[0] == []
    assert _named(plan(_wanted(("a", "a")), _known(("a", "a"), comments=None), "t", _NOW))[0] == ["a"]


def test_renamed_tables_leave_their_old_names_first() -> None:
    swapped = plan(_wanted(("b", "a"), ("a", "b"), tried="2"), _known(("a", "a"), ("b", "b")), "t", _NOW)
    assert _named(swapped) == (["a", "b"], {"a": "c.s.a", "b": "c.s.b"}, {})


def test_a_gone_table_keeps_its_entry_until_another_table_has_its_name() -> None:
    known = _known(("a", "a"), ("b", "b"))
    assert plan(_wanted(("b", "b")), known, "t", _NOW) == Plan()
    assert _named(plan(_wanted(("a", "b"), tried="2"), known, "t", _NOW)) == (["b"], {"a": "c.s.a", "b": "c.s.b"}, {})


def test_of_two_tables_with_one_name_the_one_that_has_it_keeps_it() -> None:
    both = _wanted(("A", "first"), ("a", "second"))
    assert _named(plan(both, {}, "t", _NOW)) == (["first"], {}, {"second": 'c.s.a is the entry of table s."A" already.'})
    assert _named(plan(both, _known(("a", "second")), "t", _NOW)) == ([], {}, {"first": "c.s.a is the entry of table s.a already."})


def test_what_failed_is_tried_again_when_it_is_due_or_wanted_otherwise() -> None:
    wanted = _wanted(("a", "a"))
    later = _known((None, "a"), error="no", failures=3, retry_at=_NOW + timedelta(seconds=9))
    assert plan(wanted, later, "t", _NOW) == Plan()
    assert _named(plan(wanted, later, "t", _NOW + timedelta(seconds=9)))[0] == ["a"]
    assert _named(plan(_wanted(("a", "a"), tried="2"), later, "t", _NOW))[0] == ["a"]


def test_a_catalog_that_fails_stops_no_publish(make_pipeline: Callable[..., Pipeline], source: Source, spark: Any) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY); INSERT INTO t VALUES (1)")
    pipeline = make_pipeline(spark_catalog="nowhere.lake")
    pipeline.spark = lambda: spark
    report = pipeline.sync()
    pipeline.assert_current("public.t", "public.u")
    assert report.errors == {}
    (warning,) = report.warnings
    assert warning.startswith("2 tables: public.t, public.u: not registered in the catalog. Schema nowhere.lake: Spark failed")
    assert set(report.unregistered) == {TableName("public", "t"), TableName("public", "u")}
    environment = pipeline.environment(PGWAL_SPARK_CATALOG="nowhere.lake", PGWAL_SPARK_CONF="")
    check = next(check for check in doctor.examine(environment) if check.name == "catalog")
    assert not check.ok
    assert "public.t: Schema nowhere.lake" in check.found
    source.sql("INSERT INTO t VALUES (2)")
    pipeline.drain()
    assert pipeline.publish().warnings == (warning,)
    pipeline.assert_current("public.t")
    # It waits now before it is tried again, and is still told.
    tried_again(pipeline, LATER, "t", "u", schema="public")
    pipeline.spark = no_spark
    assert pipeline.publish().warnings == (warning,)
    # With the setting taken away nothing is said, and nothing else is different.
    made = make_pipeline()
    made.settings = pipeline.settings.model_copy(update={"spark_catalog": None})
    made.spark = no_spark
    assert (made.publish().warnings, made.publish().unregistered) == ((), {})


@pytest.fixture
def in_connect_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While the test runs, pyspark's functions make columns for Connect."""
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    yield


@pytest.mark.long
@pytest.mark.usefixtures("in_connect_mode")
def test_a_hive_metastore_in_the_warm_engine(make_pipeline: Callable[..., Pipeline], tmp_path: Path) -> None:
    made = make_pipeline(spark_catalog="spark_catalog.lake_{schema}", spark_idle=600, spark_master="local[2]", spark_conf=hive(tmp_path))
    Path(made.settings.lake).mkdir()
    folder = find_engine(made.settings)
    assert folder is not None
    try:
        session = spark_session(made.settings)
        made.spark = lambda: session
        told(Shop(made, session))
        # What is published is read in the engine too.
        first, newest = made.ledger.publishes()[0], open_state(made.settings)
        assert newest.spark("shop.orders").count() == 3
        assert newest.changes("shop.lines", since=format_lsn(first.lsn)).spark().count() == 0
        assert newest.changes("shop.orders", since=format_lsn(first.lsn)).spark().count() == 3  # it was read again
    finally:
        engine.stop(folder)
        shutil.rmtree(folder.path, ignore_errors=True)


@pytest.mark.soak
@pytest.mark.usefixtures("in_connect_mode")
def test_a_hive_metastore_behind_spark_connect(make_pipeline: Callable[..., Pipeline], tmp_path: Path) -> None:
    settings = Settings(lake=str(tmp_path / "lake"), spark_master="local[2]", spark_conf=hive(tmp_path), spark_idle=0)
    with ConnectServer(settings, tmp_path / "server.log") as server:
        made = make_pipeline(spark_catalog="spark_catalog.lake_{schema}", spark_remote=server.address)
        session = spark_session(made.settings)
        made.spark = lambda: session
        told(Shop(made, session))
        session.stop()


@pytest.mark.soak
def test_a_hive_metastore_in_a_session_of_its_own(source: Source, make_pipeline: Callable[..., Pipeline], tmp_path: Path) -> None:
    """In a process of its own: this one has a Spark already."""
    made = make_pipeline()
    code = f"""
from pgwal_pipeline_tests.pipeline.registering import Shop, told
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source
from pgwal_pipeline.spark.session import spark_session
session = spark_session(settings)
told(Shop(Pipeline(Source(None, "", {source.dsn!r}), settings, lambda: session), session))
"""
    more = {"PGWAL_SPARK_CATALOG": "spark_catalog.lake_{schema}", "PGWAL_SPARK_CONF": json.dumps(hive(tmp_path))}
    done = made.child(code, environment={**more, "PGWAL_BLOCKED_TIMEOUT": "20s"}, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert Path(tmp_path, "metastore").exists()
