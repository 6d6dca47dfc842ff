"""The comparison of source and `current` while the source goes on."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from pgwal_pipeline.messages.errors import SourceUnavailable
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import verify as verifies
from pgwal_pipeline.pipeline.reports import VerifyReport
from pgwal_pipeline.pipeline.status import status
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source

T, S = TableName("public", "t"), TableName("public", "s")


def test_a_table_truncated_while_it_is_compared_raises_no_false_alarm(
    source: Source, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1), (2)")
    pipeline.sync()
    copy_source = verifies._copy_source

    def after_a_truncate(*args: Any) -> str:
        source.sql("TRUNCATE t")
        return copy_source(*args)

    monkeypatch.setattr(verifies, "_copy_source", after_a_truncate)
    with pytest.raises(SourceUnavailable, match=r"public\.t was truncated or rewritten while it was compared"):
        verifies.verify(pipeline.settings, pipeline.spark, progress=Silent())
    monkeypatch.undo()
    assert verifies.verify(pipeline.settings, pipeline.spark, progress=Silent()).equal


def _verify(pipeline: Pipeline, budget: float = 300) -> VerifyReport:
    settings = pipeline.settings.model_copy(update={"verify_budget": budget, "verify_every": 1.0})
    return verifies.verify(settings, pipeline.spark, progress=Silent())


def _edit(pipeline: Pipeline, table: TableName, column: str, row: int, value: Any, again: dict[str, Any] | None = None) -> None:
    """Change a value of the row with that id in a file of `current`, by hand; with `again` write it once more, with these values."""
    at = DeltaTable(pipeline.lake.current(table))
    for uri in at.file_uris():
        rows = pq.read_table(uri)
        plain = rows.to_pylist()
        if any(found["id"] == row for found in plain):
            changed = [{**found, column: value} if found["id"] == row else found for found in plain]
            changed += [{**found, **again} for found in plain if found["id"] == row and again is not None]
            pq.write_table(pa.Table.from_pylist(changed, rows.schema), uri)
            Path(uri).with_name(f".{Path(uri).name}.crc").unlink(missing_ok=True)


def test_what_is_proven_is_on_record_and_a_planted_difference_is_named(source: Source, pipeline: Pipeline) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, a text, b int); INSERT INTO t SELECT i, 'a', i FROM generate_series(1, 20) i")
    source.sql("CREATE TABLE s (id int PRIMARY KEY); INSERT INTO s VALUES (1)")
    pipeline.sync()
    before = status(pipeline.settings)["tables"]["public.t"]
    assert (before["verified_through"], before["proven_at"]) == (None, None)
    report = _verify(pipeline)
    shown = status(pipeline.settings)["tables"]["public.t"]
    assert shown["verified_through"] == format_lsn(report.lsn)
    assert shown["proven_at"] is not None
    assert report.to_json()["tables"]["public.t"] == {"equal": True, "rows": 20, "missing": 0, "extra": 0, "different": 0}
    assert report.to_json()["proofs"]["public.t"].items() >= {"whole": True, "differences": []}.items()
    _edit(pipeline, T, "b", 7, 70)
    found = _verify(pipeline)
    assert not found.equal
    assert found.tables[S].equal
    assert (found.tables[T].missing, found.tables[T].extra, found.tables[T].different) == (0, 0, 1)
    assert found.proofs[T].differences == ({"key": {"id": "7"}, "kind": "different", "columns": ["b"]},)
    assert status(pipeline.settings)["tables"]["public.t"]["verified_through"] == shown["verified_through"]
    assert status(pipeline.settings)["tables"]["public.s"]["verified_through"] == format_lsn(found.lsn)
    pipeline.resnapshot("public.t")
    assert status(pipeline.settings)["tables"]["public.t"]["verified_through"] is None
    assert _verify(pipeline).equal


def test_a_table_that_takes_longer_than_the_budget_is_proven_in_parts(source: Source, pipeline: Pipeline) -> None:
    """With a budget of a millisecond about fifty rows are compared at once."""
    source.sql("CREATE TABLE t (id int, k text, b int, PRIMARY KEY (id, k)); INSERT INTO t SELECT i, 'k', i FROM generate_series(1, 80) i")
    pipeline.sync()
    first = _verify(pipeline, 0.001)
    assert (first.equal, first.tables[T].rows) == (True, 50)
    assert (first.proofs[T].whole, first.proofs[T].verified_through) == (False, None)
    source.sql("UPDATE t SET b = 0 WHERE id = 70; DELETE FROM t WHERE id = 1; INSERT INTO t VALUES (81, 'k', 81)")
    second = _verify(pipeline, 0.001)
    assert second.tables[T].equal
    assert second.proofs[T].proven_at is not None
    proof = pipeline.ledger.proofs()[T]
    assert proof.cursor is None
    assert proof.verified_through is not None
    assert proof.verified_through < second.lsn
    # A round later all of it is compared again, and what changed since at once.
    source.sql("UPDATE t SET b = 1 WHERE id IN (60, 2); DELETE FROM t WHERE id = 61")
    third = _verify(pipeline, 0.001)
    assert third.tables[T].equal
    assert third.proofs[T].verified_through == third.lsn
    source.sql("UPDATE t SET b = 2 WHERE id = 3")
    pipeline.sync()
    _edit(pipeline, T, "b", 3, 33)  # changed since, before the part that is next
    _edit(pipeline, T, "k", 75, "x")  # in the part that is next
    found = _verify(pipeline, 0.001).proofs[T]
    assert {tuple(row["key"].values()): (row["kind"], row["columns"]) for row in found.differences} == {
        ("3", "k"): ("different", ["b"]),
        ("75", "k"): ("missing", []),
        ("75", "x"): ("extra", []),
    }
    assert pipeline.ledger.proofs()[T].verified_through == third.lsn
    pipeline.resnapshot("public.t")
    assert _verify(pipeline).equal
    _edit(pipeline, T, "id", 80, 80, again={"k": "z"})
    last = _verify(pipeline, 0.001)
    found = last.tables[T]
    assert (found.equal, found.missing, found.extra) == (False, 0, 1)
    assert last.proofs[T].differences == ({"key": {"id": "80", "k": "z"}, "kind": "extra", "columns": []},)
