"""Spark on executors in processes of their own (`local-cluster`) does everything heavy; a Connect server does so in many other tests."""

import json

import pytest

from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source

# In one process, for a cluster takes long to start: changes of rows, keys and columns between two runs, and a comparison at the end.
_ALL = """
import json
from pgwal_pipeline.pipeline import drain as drains, publish as publishes, snapshot as snapshots
from pgwal_pipeline.pipeline.verify import verify
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline.spark.session import spark_session

spark = spark_session(settings)
source = plain_session(settings.dsn)


def sync():
    drains.bootstrap(settings, progress=progress)
    if snapshots.needed(settings):
        snapshots.snapshot(settings, progress=progress, patience=settings.blocked_timeout)
    drains.drain(settings, progress=progress)
    return publishes.publish(settings, lambda: spark, progress=progress)


sync()
source.execute("UPDATE keyed SET v = v + 1 WHERE id % 7 = 0; UPDATE keyed SET id = id + 100000 WHERE id % 100 = 1")
source.execute("DELETE FROM keyed WHERE id % 10 = 3; DELETE FROM bag WHERE line LIKE '%5'")
source.execute("INSERT INTO bag SELECT 'x' FROM generate_series(1, 3)")
sync()
source.execute("ALTER TABLE keyed ADD more numeric(10,2), DROP body; TRUNCATE bag")
source.execute("INSERT INTO keyed (id, v, more) SELECT i, 0, i / 4.0 FROM generate_series(200001, 200500) i")
source.execute("INSERT INTO bag VALUES ('y'), ('y')")
sync()
executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
compared = verify(settings, lambda: spark, progress=progress)
print(json.dumps({"executors": executors, "equal": compared.equal, "tables": len(compared.tables)}))
"""


@pytest.mark.long
def test_everything_on_a_cluster(source: Source, pipeline: Pipeline) -> None:
    source.sql("CREATE TABLE keyed (id int PRIMARY KEY, v int, body text); CREATE TABLE bag (line text)")
    source.sql("ALTER TABLE bag REPLICA IDENTITY FULL")
    source.sql("INSERT INTO keyed SELECT i, 0, repeat('b', i % 50) FROM generate_series(1, 5000) i")
    source.sql("INSERT INTO bag SELECT 'line ' || i % 20 FROM generate_series(1, 200) i; ANALYZE")
    conf = {"spark.driver.memory": "1g", "spark.executor.memory": "700m", "spark.sql.shuffle.partitions": "2"}
    cluster = {"PGWAL_SPARK_MASTER": "local-cluster[2,1,1024]", "PGWAL_SPARK_CONF": json.dumps(conf)}
    done = pipeline.child(_ALL, environment=cluster, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["executors"] == 2
    assert said["equal"]
    assert said["tables"] == 2
    pipeline.assert_current("public.keyed", "public.bag")
