"""A model of Postgres that shares no code with the merge: tables, transactions, what the stream says of them and what reads by chunks see.

A table is a dict from key to row, changed at commit; the events say what pgoutput would, with values left unsent at random as TOAST may be.
So the truth is what the dict holds, not what some other program makes of the events.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
from deltalake import write_deltalake

from pgwal_pipeline.lake.fold import ChunkSnapshot
from pgwal_pipeline.values.lsn import window_key

_CASES = 10_000
WINDOW_TIME = 1000
"""A window's length in the time of one case; no two cases ever commit at one LSN, as no two transactions do."""
WINDOW_BYTES = WINDOW_TIME * _CASES
KEYS = [*range(10), "infinity", "-infinity"]
"""The second key column's values; the last two are none that a date can hold."""

COLUMNS = ("case", "id", "n", "body", "tags", "at")
KEY = ("case", "id")
_MOVABLE = ("body", "tags")
_SOURCE = pa.schema(
    [
        ("case", pa.int32()),
        ("id", pa.date32()),
        ("n", pa.int32()),
        ("body", pa.string()),
        ("tags", pa.list_(pa.string())),
        ("at", pa.date32()),
    ]
)
_TEXT = pa.field("_pgwal_text", pa.map_(pa.string(), pa.string()))
RAW_SCHEMA = pa.schema(
    [
        *_SOURCE,
        ("_pgwal_op", pa.string()),
        ("_pgwal_commit_lsn", pa.int64()),
        ("_pgwal_ordinal", pa.int64()),
        ("_pgwal_xid", pa.int64()),
        ("_pgwal_committed_at", pa.timestamp("us", "UTC")),
        ("_pgwal_unchanged", pa.list_(pa.string())),
        _TEXT,
        ("_pgwal_window", pa.string()),
    ]
)
SNAPSHOT_SCHEMA = pa.schema([*_SOURCE, _TEXT, ("_pgwal_chunk", pa.string()), ("_pgwal_generation", pa.string())])

Row = dict[str, Any]
"""n, body, tags and at; a str in tags or at is Postgres's text of a value that its column cannot hold."""


@dataclass
class Read:
    """What a read of one chunk saw: its snapshot, and the rows of its keys as (key, row, LSN of the row's last event)."""

    snapshot: ChunkSnapshot
    rows: list[tuple[Any, Row, int | None]]


@dataclass
class Case:
    """One small table, which is the rows of one value of `case` in a table of many."""

    number: int
    rng: random.Random
    key_changes: bool = True
    unchanged: bool = True
    state: dict[Any, Row] = field(default_factory=dict)
    changed_at: dict[Any, int] = field(default_factory=dict)
    events: list[Row] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    deleted: dict[Any, tuple[Row, int]] = field(default_factory=dict)
    """The rows that keys have lost, each as it was last, with the LSN of that."""
    _committed: dict[Any, Row] = field(default_factory=dict)
    _values: int = 0

    def fresh_row(self) -> Row:
        """A row whose values of variable length no other row ever has."""
        rng = self.rng
        return {
            "n": rng.randint(0, 99),
            "body": self._fresh("b") if rng.random() < 0.9 else None,
            "tags": rng.choice([[self._fresh("t")], [self._fresh("t"), None], "{{" + self._fresh("t") + "}}", None]),
            "at": rng.choice([date(2020, 1, rng.randint(1, 28)), "infinity", None]),
        }

    def _fresh(self, prefix: str) -> str:
        self._values += 1
        return f"{prefix}{self.number}-{self._values}"

    def lsn(self, time: int) -> int:
        """The LSN of this case's commit at `time`."""
        return time * _CASES + self.number % _CASES

    def transaction(self, time: int, xid: int) -> None:
        """Change some rows and commit."""
        steps: list[Callable[[list[Row]], None]] = [self._insert, self._update, self._update, self._update, self._delete, self._reborn]
        if self.key_changes:
            steps += [self._move, self._move, self._chain, self._swap, self._replace]
        said: list[Row] = []
        for _ in range(self.rng.randint(1, 3)):
            self.rng.choice(steps)(said)
        self._commit(said, time, xid)

    def truncate(self, time: int, xid: int) -> None:
        """Empty the table, between two other rows of one transaction."""
        said: list[Row] = []
        self._insert(said)
        self.state.clear()
        said.append({"op": "T", "id": None, "row": None, "unsent": [], "apart": 1})
        self._insert(said)
        self._update(said)
        self._commit(said, time, xid)

    def _commit(self, said: list[Row], time: int, xid: int) -> None:
        ordinal = self.rng.randint(0, 3)
        for event in said:
            ordinal += event.pop("apart")
            self._keep(event, self.lsn(time))
            self.events.append({**event, "lsn": self.lsn(time), "ordinal": ordinal, "xid": xid % 2**32})
            if event["op"] in "IU":
                self.changed_at[event["id"]] = self.lsn(time)

    def _keep(self, event: Row, lsn: int) -> None:
        """Follow which rows are there and which were there, by what is said of them."""
        rows, key = self._committed, event["id"]
        if event["op"] in "IU":
            rows[key] = event["row"]
            self.deleted.pop(key, None)
        ended = list(rows) if event["op"] == "T" else [key] if event["op"] in "DK" and key in rows else []
        for gone in ended:
            self.deleted[gone] = rows.pop(gone), lsn

    def begin(self, state: dict[Any, Row]) -> None:
        """Let the table have these rows from before everything, and know them where they are deleted."""
        self.state, self._committed = dict(state), dict(state)

    def read(self, keys: Iterable[Any], attempt: str, next_xid: int, running: Iterable[int]) -> None:
        """Read the rows of `keys` under a snapshot of now."""
        running = sorted(running)
        text = f"{running[0] if running else next_xid}:{next_xid}:{','.join(map(str, running))}"
        rows = [(key, dict(self.state[key]), self.changed_at.get(key)) for key in keys if key in self.state]
        self.reads.append(Read(ChunkSnapshot(attempt, text), rows))

    def unresolvable(self) -> dict[Any, set[str]]:
        """The columns, by key, whose present value was sent by no event and read by no chunk."""
        known = [event["row"][name] for event in self.events if event["op"] in "IU" for name in _MOVABLE if name not in event["unsent"]]
        known += [row[name] for read in self.reads for _, row, _ in read.rows for name in _MOVABLE]
        found = {key: {name for name in _MOVABLE if row[name] is not None and row[name] not in known} for key, row in self.state.items()}
        return {key: names for key, names in found.items() if names}

    def _some(self) -> Any:
        return self.rng.choice(list(self.state)) if self.state else None

    def _free(self) -> Any:
        return self.rng.choice([key for key in KEYS if key not in self.state] or [None])

    def _say(self, said: list[Row], op: str, key: Any, row: Row | None = None, unsent: Iterable[str] = (), *, apart: int = 1) -> None:
        said.append({"op": op, "id": key, "row": None if row is None else dict(row), "unsent": list(unsent), "apart": apart})

    def _insert(self, said: list[Row], key: Any = None) -> None:
        key = self._free() if key is None else key
        if key is not None:
            self.state[key] = self.fresh_row()
            self._say(said, "I", key, self.state[key])

    def _changed(self, row: Row) -> tuple[Row, list[str]]:
        """A new version of `row`, and the columns that did not change and are not sent."""
        fresh = self.fresh_row()
        kept = [name for name in row if self.rng.random() < 0.6]
        after = {name: row[name] if name in kept else fresh[name] for name in row}
        unsent = [name for name in _MOVABLE if name in kept and row[name] is not None and self.rng.random() < 0.8]
        return after, unsent if self.unchanged else []

    def _update(self, said: list[Row]) -> None:
        key = self._some()
        if key is not None:
            self.state[key], unsent = self._changed(self.state[key])
            self._say(said, "U", key, self.state[key], unsent)

    def _delete(self, said: list[Row]) -> None:
        key = self._some()
        if key is not None:
            del self.state[key]
            self._say(said, "D", key)

    def _reborn(self, said: list[Row]) -> None:
        key = self._some()
        if key is not None:
            del self.state[key]
            self._say(said, "D", key)
            self._insert(said, key)

    def _move(self, said: list[Row], key: Any = None, to: Any = None) -> Any:
        key = self._some() if key is None else key
        to = self._free() if to is None else to
        if key is None or to is None:
            return None
        row, unsent = self._changed(self.state.pop(key))
        self.state[to] = row
        self._say(said, "K", key)
        self._say(said, "U", to, row, unsent, apart=0)
        return to

    def _chain(self, said: list[Row]) -> None:
        key = None
        for _ in range(self.rng.randint(2, 5)):
            key = self._move(said, key)
            if key is not None and self.rng.random() < 0.3:
                self._update(said)
            if key not in self.state:
                return

    def _swap(self, said: list[Row]) -> None:
        """Two rows change keys by way of a third."""
        if len(self.state) < 2 or len(self.state) == len(KEYS):
            return
        one, other = self.rng.sample(list(self.state), 2)
        between = self._move(said, one)
        self._move(said, other, one)
        self._move(said, between, other)

    def _replace(self, said: list[Row]) -> None:
        """A row takes the key of one that is deleted."""
        if len(self.state) > 1:
            one, other = self.rng.sample(list(self.state), 2)
            del self.state[other]
            self._say(said, "D", other)
            self._move(said, one, other)


def moment(lsn: int) -> datetime:
    """When the commit at that LSN was."""
    return datetime.fromtimestamp(lsn, UTC)


def _value(value: Any) -> Any:
    return None if isinstance(value, str) else value


def _plain(case: int, key: Any, row: Row | None, unsent: Iterable[str] = ()) -> Row:
    """The source's columns and `_pgwal_text` as the lake has them."""
    full: Row = {"n": None, "body": None, "tags": None, "at": None, **(row or {})}
    full |= dict.fromkeys(unsent)
    text = {name: full[name] for name in ("tags", "at") if isinstance(full[name], str)}
    if isinstance(key, str):
        text["id"] = key
    return {
        "case": case,
        "id": date(2000, 1, 1 + key) if isinstance(key, int) else None,
        "n": full["n"],
        "body": full["body"],
        "tags": _value(full["tags"]),
        "at": _value(full["at"]),
        "_pgwal_text": list(text.items()) or None,
    }


def write_raw(path: str, cases: Iterable[Case]) -> None:
    """Write the events as raw has them, in no order."""
    rows = []
    for case in cases:
        for event in case.events:
            end = (event["lsn"] // WINDOW_BYTES + 1) * WINDOW_BYTES
            plain = dict.fromkeys(_SOURCE.names) if event["op"] == "T" else _plain(case.number, event["id"], event["row"], event["unsent"])
            own = {"op": event["op"], "commit_lsn": event["lsn"], "ordinal": event["ordinal"], "xid": event["xid"]}
            own |= {"unchanged": event["unsent"] or None, "window": window_key(end), "committed_at": moment(event["lsn"])}
            rows.append({**plain, **{f"_pgwal_{name}": value for name, value in own.items()}})
    random.Random(0).shuffle(rows)
    write_deltalake(path, pa.Table.from_pylist(rows, RAW_SCHEMA), partition_by=["_pgwal_window"])


def write_snapshot(path: str, cases: Iterable[Case], generation: str) -> tuple[ChunkSnapshot, ...]:
    """Write what the chunks' reads saw, and rows of attempts that died and of another generation; returns the chunks that count."""
    rows, chunks = [], []
    for case in cases:
        for read in case.reads:
            chunks.append(read.snapshot)
            for key, row, _ in read.rows:
                plain = _plain(case.number, key, row)
                rows.append({**plain, "_pgwal_chunk": read.snapshot.attempt, "_pgwal_generation": generation})
                rows.append({**plain, "n": -1, "_pgwal_chunk": "died", "_pgwal_generation": generation})
                rows.append({**plain, "n": -2, "_pgwal_chunk": read.snapshot.attempt, "_pgwal_generation": "old"})
    write_deltalake(path, pa.Table.from_pylist(rows, SNAPSHOT_SCHEMA), partition_by=["_pgwal_generation"])
    return tuple(chunks)


def expected(cases: Iterable[Case], snapshot_lsn: int) -> dict[tuple[Any, ...], Row]:
    """The rows of `current`, by case and key."""
    rows = {}
    for case in cases:
        as_read = {key: at for read in case.reads for key, _, at in read.rows}
        for key, row in case.state.items():
            at = case.changed_at.get(key)
            seen = key in as_read and as_read[key] == at
            plain = _plain(case.number, key, row)
            text = None if plain["_pgwal_text"] is None else dict(plain["_pgwal_text"])
            rows[case.number, key] = {**plain, "_pgwal_text": text, "_pgwal_commit_lsn": snapshot_lsn if seen else at}
    return rows


def expected_deleted(cases: Iterable[Case]) -> dict[tuple[Any, ...], Row]:
    """The rows that a `current` which keeps them has besides, by case and key."""
    rows = {}
    for case in cases:
        for key, (row, lsn) in case.deleted.items():
            plain = _plain(case.number, key, row)
            text = None if plain["_pgwal_text"] is None else dict(plain["_pgwal_text"])
            marks = {"_pgwal_commit_lsn": lsn, "_pgwal_deleted_lsn": lsn, "_pgwal_deleted_at": moment(lsn)}
            rows[case.number, key] = {**plain, "_pgwal_text": text, **marks}
    return rows
