"""The Spark session: what it is told, and that Delta works in it on each kind of master."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable, QueryBuilder

from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark.session import spark_conf, spark_session
from pgwal_pipeline_tests.connect_server import ConnectServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def _merge(spark: "SparkSession", table: Path) -> None:
    """Make a Delta table whose times lie where Spark's defaults go wrong, and merge into it."""
    times = "timestamp'0001-01-01 00:00:00' as early, timestamp_ntz'9999-12-31 23:59:59.999999' as late"
    spark.sql(f"select id, id * 2 as value, {times} from range(100)").write.format("delta").save(str(table))
    changes = "(select id, -1 as value from range(10)) s"
    spark.sql(f"merge into delta.`{table}` t using {changes} on t.id = s.id when matched then update set value = s.value").collect()


def _check(table: Path) -> None:
    delta = DeltaTable(table)
    assert delta.metadata().configuration["delta.enableDeletionVectors"] == "true"
    found = QueryBuilder().register("t", delta).execute("select count(*) as n, sum(value) as total, min(early) as e, max(late) as l from t")
    row = {name: column[0].as_py() for name, column in zip(("n", "total", "e", "l"), found.read_all().columns, strict=True)}
    assert row["n"] == 100
    assert row["total"] == sum(2 * number for number in range(10, 100)) - 10
    assert row["e"] == datetime(1, 1, 1, tzinfo=UTC)
    assert row["l"] == datetime(9999, 12, 31, 23, 59, 59, 999999)


def test_merge_on_this_machine(spark: "SparkSession", tmp_path: Path) -> None:
    _merge(spark, tmp_path / "t")
    _check(tmp_path / "t")


def test_merge_on_a_connect_server(spark_connect: "SparkSession", tmp_path: Path) -> None:
    _merge(spark_connect, tmp_path / "t")
    _check(tmp_path / "t")


def test_the_process_has_one_session(spark: "SparkSession", spark_settings: Settings) -> None:
    assert spark_session(spark_settings).sparkContext is spark.sparkContext


def test_each_connect_server_has_a_session_of_its_own(connect_address: str, spark_settings: Settings) -> None:
    """Two lakes in one process have two engines. Both addresses are one server here."""
    addresses = (connect_address, connect_address.replace("127.0.0.1", "localhost"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        made = [spark_settings.model_copy(update={"spark_remote": address, "spark_conf": {}}) for address in addresses]
        one, other = (spark_session(settings) for settings in made)
        assert one is not other
        assert spark_session(made[0]) is one
        one.stop()
        assert other.range(3).count() == 3
        assert spark_session(made[0]).range(2).count() == 2
        for settings in made:
            spark_session(settings).stop()


def test_nothing_is_left_in_the_working_directory(spark: "SparkSession", tmp_path: Path) -> None:
    _merge(spark, tmp_path / "t")
    assert not Path("spark-warehouse").exists()


def test_absent_connect_server_is_named_at_once() -> None:
    settings = Settings(spark_remote="sc://127.0.0.1:9/;token=hidden")
    with pytest.raises(LakeError, match=r"127\.0\.0\.1:9 of PGWAL_SPARK_REMOTE cannot be reached") as caught:
        spark_session(settings)
    assert "hidden" not in str(caught.value)


def test_conf_on_this_machine() -> None:
    conf = spark_conf(Settings(), environment={}, cores=2, memory=24 << 30, jars=(Path("/jars/a b.jar"), Path("/jars/c.jar")))
    assert conf["spark.driver.memory"] == "6144m"
    assert conf["spark.sql.shuffle.partitions"] == "4"
    assert conf["spark.jars"] == "file:///jars/a%20b.jar,file:///jars/c.jar"
    assert conf["spark.sql.parquet.outputTimestampType"] == "TIMESTAMP_MICROS"
    assert conf["spark.sql.session.timeZone"] == "UTC"
    assert not any("s3" in name for name in conf)


@pytest.mark.parametrize(
    ("memory", "driver"), [(512 << 20, "512m"), (1 << 30, "512m"), (2 << 30, "1024m"), (4 << 30, "1024m"), (64 << 30, "8192m")]
)
def test_driver_memory_has_bounds(memory: int, driver: str) -> None:
    assert spark_conf(Settings(), environment={}, cores=2, memory=memory)["spark.driver.memory"] == driver


def test_conf_on_a_cluster_leaves_its_sizes_alone() -> None:
    conf = spark_conf(Settings(spark_master="spark://host:7077"), environment={}, cores=2, memory=24 << 30)
    assert not {"spark.driver.memory", "spark.sql.shuffle.partitions", "spark.driver.host"} & conf.keys()
    assert conf["spark.sql.extensions"] == "io.delta.sql.DeltaSparkSessionExtension"


def test_conf_counts_the_cores_of_a_local_cluster() -> None:
    conf = spark_conf(Settings(spark_master="local-cluster[3,2,1024]"), environment={}, cores=64, memory=8 << 30)
    assert conf["spark.sql.shuffle.partitions"] == "12"


def test_users_settings_win() -> None:
    conf = spark_conf(Settings(spark_conf={"spark.driver.memory": "3g", "spark.x": "y"}), environment={}, cores=2, memory=8 << 30)
    assert (conf["spark.driver.memory"], conf["spark.x"]) == ("3g", "y")


def test_conf_for_s3() -> None:
    aws = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9000",
        "AWS_REGION": "eu-west-1",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "key",
        "AWS_SESSION_TOKEN": "token",
    }
    conf = spark_conf(Settings(lake="s3://bucket/lake"), environment=aws, cores=2, memory=8 << 30)
    assert conf["spark.hadoop.fs.s3a.endpoint"] == "http://127.0.0.1:9000"
    assert conf["spark.hadoop.fs.s3a.endpoint.region"] == "eu-west-1"
    assert conf["spark.hadoop.fs.s3a.path.style.access"] == "true"
    assert conf["spark.hadoop.fs.s3a.connection.ssl.enabled"] == "false"
    assert conf["spark.hadoop.fs.s3.impl"] == "org.apache.hadoop.fs.s3a.S3AFileSystem"
    assert not {"key", "token"} & set(conf.values()), (
        "settings stand on the JVM's command line, where any user of the machine can read them"
    )


@pytest.mark.soak
def test_merge_on_executors_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(lake=str(tmp_path / "lake"), spark_master="local-cluster[2,1,1024]", spark_conf={"spark.driver.memory": "1g"})
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    with ConnectServer(settings, tmp_path / "server.log") as server:
        session = spark_session(settings.model_copy(update={"spark_remote": server.address}))
        _merge(session, tmp_path / "t")
        session.stop()
    _check(tmp_path / "t")
