from pgwal_pipeline_tests.support import Source


def test_source(source: Source) -> None:
    assert source.value("show wal_level") == "logical"


def test_matrix(source_matrix: Source) -> None:
    source_matrix.sql("select pg_create_logical_replication_slot('a', 'pgoutput')")
    source_matrix.connect()
