"""What one `verify` compares: all that the budget is enough for, then what was proven longest ago, and parts of large tables."""

from datetime import UTC, datetime, timedelta

from pgwal_pipeline.lake.records import Proof
from pgwal_pipeline.pipeline.proving import Candidate, choose, proven_part
from pgwal_pipeline.values.relation import TableName

NOW = datetime(2026, 1, 8, tzinfo=UTC)
WEEK = 7 * 86400.0


def candidate(name: str, rows: int, days: float | None = None, rate: int = 100_000) -> Candidate:
    """A table of which all was compared so many days ago, at so many rows a second; None: never."""
    table = TableName("public", name)
    at = None if days is None else NOW - timedelta(days=days)
    return Candidate(table, rows, Proof(table, "g", None if at is None else 1, at, rows=rows if at else 0, seconds=rows / rate, at=at))


def test_tables_for_which_the_budget_is_enough_are_compared_whole() -> None:
    found = choose([candidate("a", 1_000_000), candidate("b", 5_000_000, 1)], 300, WEEK, NOW)
    assert ([table.name for table in found.whole], found.parts, found.left) == (["a", "b"], {}, ())


def test_what_was_proven_longest_ago_comes_first() -> None:
    tables = [candidate("new", 9_000_000, 1), candidate("old", 9_000_000, 5), candidate("never", 9_000_000), candidate("small", 10, 2)]
    found = choose(tables, 300, WEEK, NOW)
    assert [table.name for table in found.whole] == ["never", "old", "small"]
    assert [table.name for table in found.left] == ["new"]


def test_large_tables_are_compared_in_parts_that_make_a_whole_within_the_period() -> None:
    daily = choose([candidate("large", 100_000_000, 1), candidate("small", 100)], 300, WEEK, NOW)
    part = daily.parts[TableName("public", "large")]
    assert 100_000_000 / 7 < part < 100_000_000 / 4
    assert part / 100_000 < 300
    assert daily.whole == (TableName("public", "small"),)
    # One that is too large for the budget, or was never compared, gets what there is.
    assert choose([candidate("large", 10_000_000_000, 1)], 300, WEEK, NOW).parts == {TableName("public", "large"): 30_000_000}
    assert 0 < choose([candidate("large", 1_000_000_000)], 300, WEEK, NOW).parts[TableName("public", "large")] <= 300 * 50_000


def test_a_round_proves_the_whole_table() -> None:
    proof = Proof(TableName("public", "t"), "g")
    first = proven_part(proof, 10, ("5",), False, 5, 1.0, NOW)
    assert (first.verified_through, first.proven_at, first.round_lsn, first.cursor) == (None, None, 10, ("5",))
    last = proven_part(first, 20, None, False, 5, 1.0, NOW)
    # What was compared first may have changed since.
    assert (last.verified_through, last.proven_at, last.round_lsn, last.cursor) == (10, NOW, None, None)
    later = proven_part(last, 30, ("5",), True, 5, 1.0, NOW + timedelta(days=1))
    assert (later.verified_through, later.proven_at, later.round_lsn, later.cursor) == (30, NOW, 30, ("5",))
    unseen = proven_part(later, 40, ("7",), False, 5, 1.0, NOW)
    assert (unseen.verified_through, unseen.round_lsn) == (30, 30)
    assert proven_part(unseen, 50, None, False, 5, 1.0, NOW).verified_through == 30
