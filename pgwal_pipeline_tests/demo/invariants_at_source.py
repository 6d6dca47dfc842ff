"""The shop's invariants, asked of the source."""

from pgwal_pipeline.demo.invariants import INVARIANTS, TABLES
from pgwal_pipeline_tests.support import Source


def broken_at_source(source: Source) -> dict[str, int]:
    """Offending rows by invariant, each asked in one statement of the source."""
    tables = {name: f"shop.{name}" for name in TABLES}
    return {rule.name: len(source.sql(rule.sql.format_map(tables))) for rule in INVARIANTS}
