"""What the pipeline needs of Spark's private parts is there: an upgrade that takes one away fails here first."""

from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.errors import PySparkException

from pgwal_pipeline.spark.internals import cloned, java_trace

_SETTING = "spark.sql.shuffle.partitions"


@pytest.fixture(params=["spark", pytest.param("spark_connect", marks=pytest.mark.soak)])
def session(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_a_clone_has_the_settings_and_views_of_its_own(session: Any) -> None:
    before = session.conf.get(_SETTING)
    session.conf.set(_SETTING, "7")
    try:
        with cloned(session) as clone:
            assert clone.conf.get(_SETTING) == "7"
            clone.conf.set(_SETTING, "9")
            clone.range(3).createOrReplaceTempView("of_the_clone")
            assert clone.table("of_the_clone").localCheckpoint().count() == 3
            assert session.conf.get(_SETTING) == "7"
            assert not session.catalog.tableExists("of_the_clone")
    finally:
        session.conf.set(_SETTING, before)


def test_pyspark_holds_on_to_the_jvm_that_it_started(spark: Any) -> None:
    """Each installation ends such a JVM, when it has recorded what Spark loads; the tests' own is another process's."""
    gateway: Any = SparkContext._gateway
    assert hasattr(gateway, "proc")
    assert callable(gateway.shutdown)


def test_the_trace_of_an_error_is_found(session: Any) -> None:
    with pytest.raises((PySparkException, Py4JJavaError)) as raised:
        session.sql("SELECT raise_error('told by Java')").collect()
    assert "told by Java" in f"{raised.value}{java_trace(raised.value)}"
    assert "\tat " in f"{raised.value}{java_trace(raised.value)}" or "\n\tat" in str(raised.value)
