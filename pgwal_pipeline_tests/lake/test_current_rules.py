"""Each rule of the merge by an example: what stood there, what the stream said, and what must stand there afterwards.

All examples are rows of one table (`case` is the first column of its key), so that one merge and one replacement try them all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from pgwal_pipeline.lake import isolation
from pgwal_pipeline.lake.current import Traits, merge, replace
from pgwal_pipeline_tests.lake.model import COLUMNS, KEY, KEYS, WINDOW_BYTES, WINDOW_TIME, Case, write_raw, write_snapshot
from pgwal_pipeline_tests.lake.publishing import GENERATION, merge_request, replace_request, rows_of

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("several_parts"), pytest.mark.usefixtures("either_size")]

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Step = tuple[Any, ...]
_XID = 5000
_FAR = date(2020, 1, 5)


def row(n: int, body: str | None = None, tags: Any = None, at: Any = None) -> dict[str, Any]:
    return {"n": n, "body": body, "tags": tags, "at": at}


def insert(key: Any, values: dict[str, Any]) -> list[Step]:
    return [("I", key, values, ())]


def update(key: Any, values: dict[str, Any], *unsent: str) -> list[Step]:
    return [("U", key, values, unsent)]


def delete(key: Any) -> list[Step]:
    return [("D", key, None, ())]


def move(key: Any, to: Any, values: dict[str, Any], *unsent: str) -> list[Step]:
    return [("K", key, None, ()), ("U", to, values, unsent)]


@dataclass(frozen=True)
class Example:
    """`before` and `after` are rows by key; `transactions` are lists of changes, and their places in the stream are as here."""

    name: str
    before: dict[Any, dict[str, Any]]
    transactions: Sequence[Sequence[list[Step]]]
    after: dict[Any, dict[str, Any]]


EXAMPLES = [
    Example("the newest change wins", {1: row(0)}, [[update(1, row(1)), update(1, row(2))], [update(1, row(3))]], {1: row(3)}),
    Example("an unsent value stays", {1: row(0, "old", ["t"])}, [[update(1, row(1), "body", "tags")]], {1: row(1, "old", ["t"])}),
    Example("null is a value that was sent", {1: row(0, "old")}, [[update(1, row(1, None))]], {1: row(1, None)}),
    Example("sent earlier in the batch", {1: row(0, "old")}, [[update(1, row(1, "new"))], [update(1, row(2), "body")]], {1: row(2, "new")}),
    Example("sent by the insert", {}, [[insert(1, row(1, "b", ["t"]))], [update(1, row(2), "body", "tags")]], {1: row(2, "b", ["t"])}),
    Example(
        "column by column",
        {1: row(0, "a", ["a"])},
        [[update(1, row(1, "b"), "tags")], [update(1, row(2, "", ["c"]), "body")]],
        {1: row(2, "b", ["c"])},
    ),
    Example("comes and goes", {}, [[insert(1, row(1))], [delete(1)]], {}),
    Example("goes", {1: row(0), 2: row(0)}, [[delete(1)]], {2: row(0)}),
    Example(
        "born again it has nothing of the old row",
        {1: row(0, "old")},
        [[delete(1), insert(1, row(1, None))], [update(1, row(2))]],
        {1: row(2, None)},
    ),
    Example(
        "born again and unsent then",
        {1: row(0, "old")},
        [[delete(1), insert(1, row(1, "new"))], [update(1, row(2), "body")]],
        {1: row(2, "new")},
    ),
    Example("a key change with all sent", {1: row(0, "a")}, [[move(1, 2, row(1, "b"))]], {2: row(1, "b")}),
    Example("a key change takes the value along", {1: row(0, "a", ["t"])}, [[move(1, 2, row(1), "body", "tags")]], {2: row(1, "a", ["t"])}),
    Example(
        "a chain",
        {1: row(0, "a")},
        [[move(1, 2, row(1), "body"), move(2, 3, row(2), "body")], [move(3, 4, row(3), "body")]],
        {4: row(3, "a")},
    ),
    Example(
        "sent on the way",
        {1: row(0, "a", ["t"])},
        [
            [move(1, 2, row(1, "b"), "tags")],
            [update(2, row(2), "body", "tags"), move(2, 3, row(3), "body", "tags")],
            [update(3, row(4), "body", "tags")],
        ],
        {3: row(4, "b", ["t"])},
    ),
    Example(
        "two rows swap keys by a third",
        {1: row(0, "one"), 2: row(0, "two")},
        [[move(1, 9, row(1), "body"), move(2, 1, row(2), "body"), move(9, 2, row(3), "body")]],
        {1: row(2, "two"), 2: row(3, "one")},
    ),
    Example("onto a key just deleted", {1: row(0, "one"), 2: row(0, "two")}, [[delete(2), move(1, 2, row(1), "body")]], {2: row(1, "one")}),
    Example("away and back", {1: row(0, "a")}, [[move(1, 2, row(1), "body")], [move(2, 1, row(2), "body")]], {1: row(2, "a")}),
    Example(
        "the old key is taken again",
        {1: row(0, "a")},
        [[move(1, 2, row(1), "body")], [insert(1, row(2, "b"))]],
        {1: row(2, "b"), 2: row(1, "a")},
    ),
    Example("moved, then deleted", {1: row(0, "a"), 3: row(0)}, [[move(1, 2, row(1), "body")], [delete(2)]], {3: row(0)}),
    Example(
        "inserted, moved, replaced",
        {},
        [[insert(1, row(1, "x"))], [move(1, 2, row(2), "body")], [insert(1, row(3, "y"))], [delete(2), move(1, 2, row(4), "body")]],
        {2: row(4, "y")},
    ),
    Example("a text goes with its value", {1: row(0, at="infinity")}, [[update(1, row(1, at=_FAR))]], {1: row(1, at=_FAR)}),
    Example(
        "a text stays with its unsent value",
        {1: row(0, tags="{{a}}", at="infinity")},
        [[update(1, row(1), "tags")]],
        {1: row(1, tags="{{a}}")},
    ),
    Example(
        "texts of several origins",
        {1: row(0, tags="{{a}}", at=_FAR)},
        [[update(1, row(1, "b", at="-infinity"), "tags")], [update(1, row(2, at="infinity"), "body", "tags")]],
        {1: row(2, "b", "{{a}}", "infinity")},
    ),
    Example("a text is replaced by a value", {1: row(0, tags="{{a}}")}, [[update(1, row(1, tags=["a"]))]], {1: row(1, tags=["a"])}),
    Example("a text moves to another key", {1: row(0, tags="{{a}}")}, [[move(1, 2, row(1), "tags")]], {2: row(1, tags="{{a}}")}),
    Example(
        "keys that their column cannot hold",
        {"infinity": row(0, "up", "{{u}}"), "-infinity": row(0, "down")},
        [[update("infinity", row(1), "body", "tags")], [insert(1, row(2)), move("-infinity", 5, row(3), "body")]],
        {"infinity": row(1, "up", "{{u}}"), 1: row(2), 5: row(3, "down")},
    ),
    Example(
        "to a key that its column cannot hold",
        {1: row(0, "a")},
        [[move(1, "infinity", row(1), "body")], [delete("infinity")], [insert("infinity", row(2))]],
        {"infinity": row(2)},
    ),
]


def _case(number: int, example: Example) -> Case:
    case = Case(number, Random(number))
    case.state = dict(example.before)
    case.read(KEYS, f"chunk-{number}", _XID, [])
    time = WINDOW_TIME
    for transaction in example.transactions:
        time += 600  # into the next window now and then
        for ordinal, change in enumerate(transaction):
            for op, key, values, unsent in change:
                sent = {
                    "op": op,
                    "id": key,
                    "row": values,
                    "unsent": list(unsent),
                    "lsn": case.lsn(time),
                    "ordinal": ordinal,
                    "xid": _XID + time,
                }
                case.events.append(sent)
    return case


def _by_example(path: Path) -> dict[int, dict[Any, dict[str, Any]]]:
    found: dict[int, dict[Any, dict[str, Any]]] = {}
    for full in rows_of(path):
        text = dict(full["_pgwal_text"] or ())
        assert full["_pgwal_text"] is None or text, "no text is null, not an empty map"
        key = text.pop("id", None) or full["id"].day - 1
        values = {name: text.pop(name, full[name]) for name in ("n", "body", "tags", "at")}
        assert not text, "a text without its value"
        found.setdefault(full["case"], {})[key] = values
    return found


def test_rules(spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All examples at once: merged into what stood there, and on top of a snapshot of what stood there."""
    cases = [_case(number, example) for number, example in enumerate(EXAMPLES)]
    write_raw(str(tmp_path / "raw"), cases)
    chunks = write_snapshot(str(tmp_path / "snapshot"), cases, GENERATION)
    nothing, followed = Traits(False, False, False), Traits(truncated=False)
    replace(spark, replace_request(tmp_path, WINDOW_BYTES, nothing, chunks, key=KEY, columns=COLUMNS))
    # As for many rows: with compiled code.
    monkeypatch.setattr(isolation, "_FEW_ROWS", -1)
    merge(spark, merge_request(tmp_path, WINDOW_BYTES, 10 * WINDOW_BYTES, followed, key=KEY, columns=COLUMNS))
    replace(spark, replace_request(tmp_path, 10 * WINDOW_BYTES, followed, chunks, key=KEY, columns=COLUMNS, current="replaced"))
    wanted = {example.name: example.after for example in EXAMPLES}
    for way in ("current", "replaced"):
        found = _by_example(tmp_path / way)
        assert {example.name: found.get(number, {}) for number, example in enumerate(EXAMPLES)} == wanted, way
