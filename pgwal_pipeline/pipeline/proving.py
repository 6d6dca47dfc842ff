"""Choose what one `verify` compares, so that its time is bounded and each table is proven whole within PGWAL_VERIFY_EVERY.

Tables for which the budget is enough are compared whole each time. A table for which it is not is compared in parts, in rounds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from pgwal_pipeline.lake.records import Proof
from pgwal_pipeline.values.relation import TableName

_ROWS_A_SECOND = 50_000
"""How fast a table is compared of which nothing is known, about."""
_TELLING = 100_000
"""So many rows must have been compared for their time to say how fast a table is."""
_OVERHEAD = 1.0
"""Seconds that each table takes besides."""
_AHEAD = 1.5
"""Parts are so much larger than what the period asks for, as runs come late."""
_LEAST_SHARE = 0.25
"""The part of the budget that tables in parts get, however many small ones there are."""
_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A table that may be compared: its location, about how many rows it has, and how far it is proven."""

    table: TableName
    rows: int
    proof: Proof

    @property
    def seconds(self) -> float:
        """About how long comparing it whole takes."""
        known = self.proof.rows >= _TELLING and self.proof.seconds > 0
        return _OVERHEAD + self.rows * (self.proof.seconds / self.proof.rows if known else 1 / _ROWS_A_SECOND)


@dataclass(frozen=True, slots=True)
class Choice:
    """What one run compares: tables whole, and others in parts, each with about how many rows of it; what is `left` waits for another."""

    whole: tuple[TableName, ...]
    parts: Mapping[TableName, int]
    left: tuple[TableName, ...] = ()


def choose(candidates: Iterable[Candidate], budget: float, every: float, now: datetime) -> Choice:
    """Return what to compare within `budget` seconds; each table is to be proven whole within `every` seconds.

    What was proven longest ago comes first.
    """
    found = list(candidates)
    if sum(one.seconds for one in found) <= budget:
        return Choice(tuple(one.table for one in found), {})
    large = sorted((one for one in found if one.seconds > budget), key=lambda one: one.proof.at or _NEVER)
    rest = budget * (1 - (_LEAST_SHARE if large else 0))
    whole, left = [], []
    for one in sorted((one for one in found if one not in large), key=_proven):
        fits = one.seconds <= rest
        (whole if fits else left).append(one.table)
        rest -= one.seconds if fits else 0
    share = (budget * _LEAST_SHARE + rest) / max(1, len(large))
    return Choice(tuple(whole), {one.table: _part(one, share, every, now) for one in large}, tuple(left))


def _proven(one: Candidate) -> datetime:
    return one.proof.proven_at or _NEVER


def _part(one: Candidate, share: float, every: float, now: datetime) -> int:
    """About how many rows of a table to compare now: what its period asks for, but no more than its share of the budget takes."""
    since = every if one.proof.at is None else (now - one.proof.at).total_seconds()
    due = one.rows * min(1.0, _AHEAD * since / every)
    fast = one.rows / (one.seconds - _OVERHEAD)
    return max(1, round(min(due, fast * share)))


def proven_part(before: Proof, lsn: int, cursor: tuple[str, ...] | None, changed: bool, rows: int, seconds: float, now: datetime) -> Proof:
    """Return the proof of a table of which a part was compared, up to the key `cursor`, None for its end.

    `changed`: whether every key that changed since the proof before was compared too.
    """
    began = lsn if before.round_lsn is None else before.round_lsn
    through = lsn if changed and before.verified_through is not None else before.verified_through
    found = replace(before, verified_through=through, round_lsn=began, cursor=cursor, rows=rows, seconds=seconds, at=None)
    if cursor is not None:
        return found
    # What was compared early in the round may have changed since, unless that was compared as well.
    return replace(found, verified_through=began if through is None else max(began, through), proven_at=now, round_lsn=None)
