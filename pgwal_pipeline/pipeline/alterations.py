"""Compare two catalog entries of a table, to find whether the stream between them has every change of its rows.

Most changes of a definition can be followed in the stream. Some change stored rows without a message: a default that old rows get, a
rewrite, a rename (the stream has names, not column numbers). Such a table is read again, by itself. A row of an earlier time is never
completed from the catalog, since the definition may have changed more than once between that row and now.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from pgwal_pipeline.decode.types import column_type
from pgwal_pipeline.lake.ledger import TableState
from pgwal_pipeline.lake.stream_facts import StreamFacts
from pgwal_pipeline.values.relation import Relation
from pgwal_pipeline.values.storage import Storage
from pgwal_pipeline.values.table_options import EXCLUDED, NOTHING, Options
from pgwal_pipeline.values.xid import Snapshot

AGAIN = "it is read again: "
"""What the reason of such a table begins with."""


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A published table as the catalog shows it at one moment, with its options. `relation` is as these make it."""

    relation: Relation
    storage: Storage
    options: Options = NOTHING


def dropped(state: TableState, before: Storage, now: Storage) -> tuple[str, ...]:
    """Return the columns that the source has dropped since the table joined, except those whose names are in use again."""
    numbers = {column.number for column in now.columns}
    taken = {column.name.lower() for column in now.columns}
    gone = [column.name for column in before.columns if column.number not in numbers]
    return tuple(name for name in dict.fromkeys((*state.dropped, *gone)) if name.lower() not in taken)


def read_again(state: TableState, entry: CatalogEntry, reason: str, joined_xid: int | None = None) -> TableState:
    """Return the state of a table whose rows must be read again before it can be published; its old `current` stays until then."""
    return replace(
        state.without_error(),
        state="pending",
        reason=f"{AGAIN}{reason}",
        key=entry.relation.key,
        relation=entry.relation,
        storage=entry.storage,
        generation=None,
        reading=None,
        published=None,
        joined_xid=joined_xid,
    )


def begun_anew(state: TableState, entry: CatalogEntry, reason: str, first_new_xid: int) -> TableState:
    """Return the state of a table that is read again because other columns are protected: no layer may keep what it has.

    It is read once every transaction from before `first_new_xid` has ended, as raw will not have what those wrote.
    """
    kept = tuple(name for name in state.dropped if entry.options.treatment(name) != EXCLUDED)
    return replace(read_again(state, entry, reason, first_new_xid), dropped=kept, unclean=("raw", "snapshot", "current", "history"))


def protected_otherwise(state: TableState, entry: CatalogEntry) -> str | None:
    """Return how a column that the lake has is protected now, if not as it was; None if every one is as it was."""
    if state.relation is None:
        return None
    now = {column.name: column.protection for column in entry.relation.columns}
    for name in (*state.relation.column_names, *state.dropped):
        if entry.options.treatment(name) == EXCLUDED:
            return f"its column {name} is excluded now"
    for column in state.relation.columns:
        how = now.get(column.name, column.protection)
        if how != column.protection:
            arrives = "is not protected any more" if how is None else f"is protected now ({how.split(':')[0]})"
            both = how is not None and column.protection is not None
            return f"its column {column.name} {'is protected in another way now, or with another key' if both else arrives}"
    return None


def republished(before: Storage, now: Storage) -> bool:
    """Return whether some changes of the table may not have been published: it left the publication, or the publication was altered."""
    return before.membership != now.membership


def altered(known: Relation, before: Storage, entry: CatalogEntry, gone_names: Collection[str]) -> str | None:
    """Return how a table was altered if the stream does not have all of its rows since; None if it has, or if nothing was altered.

    `gone_names` are columns that the source dropped earlier and that `current` still has.
    """
    now, relation = entry.storage, entry.relation
    if known.key != relation.key:
        return f"its key changed from ({', '.join(known.key)}) to ({', '.join(relation.key)})"
    old = {column.number: column for column in before.columns}
    old_names = {column.name.lower() for column in before.columns}
    for column in now.columns:
        was = old.get(column.number)
        if entry.options.treatment(column.name) == EXCLUDED and (was is None or was.name == column.name):
            continue
        if was is not None and was.name != column.name:
            return f"its column {was.name} was renamed to {column.name}"
        if was is not None and was.type_oid != column.type_oid:
            return f"its column {column.name} has another type"
        if was is None and column.default_of_old:
            return f"its column {column.name} was added with a default, which older rows have too"
        if was is None and column.name.lower() in old_names | {name.lower() for name in gone_names}:
            return f"its column {column.name} was dropped and added again"
        if was is None and _any_new_file(before, now):
            return f"its column {column.name} was added and every row rewritten with a value for it"
    types = {column.name: column_type(column) for column in known.columns}
    for column in relation.columns:
        if column.name not in types and any(column.name == stored.name for stored in before.columns):
            return f"its column {column.name} was not published before"
        if types.get(column.name, column_type(column)) != column_type(column):
            return f"its column {column.name} has another type"
    return None


def swapped_names(shown: Sequence[str], versions: Sequence[Relation], entries: Sequence[Relation]) -> bool:
    """Return whether columns had each other's names, or a name passed from one column to another: raw then mixes their values.

    `shown` are the column names before `versions`, the definitions in the stream since, in order; the last of `entries` is the newest.
    A column never changes its place, and one that was there before and is there now was there all the time.
    """
    before, now = shown, entries[-1].column_names
    for version in versions:
        names = version.column_names
        if any(name in now and name not in names for name in before):
            return True
        if any(_in_other_order(names, others) for others in (before, *(entry.column_names for entry in entries))):
            return True
        before = names
    return False


def _in_other_order(some: Sequence[str], others: Sequence[str]) -> bool:
    return [name for name in some if name in others] != [name for name in others if name in some]


def rewritten(oid: int, before: Storage, now: Storage, facts: StreamFacts, ended: Snapshot | None) -> tuple[str | None, Storage]:
    """Return why rows changed without a message in the stream, None if none did; and the storage to record for the table.

    A new file is explained if the stream has a TRUNCATE of the table by the transaction that made the file, and no column was altered as
    well. One whose transaction had not ended when `ended` was taken is left for the next review: the storage has the old file. A TRUNCATE
    that `ended` sees and the stream does not have yet is taken for a rewrite, so that the table is read again without need. So is a
    partitioned table that one transaction truncated and filled: a TRUNCATE of a partition after that would leave no trace.
    """
    reason = None
    old = {file.oid: file for file in before.files}
    attached = {xid for file in before.files for xid in file.attached}
    files = []
    if not old.keys() | {file.oid for file in now.files} >= {*facts.partitions.get(oid, ())}:
        reason = "a partition was added and removed again"
    if oid in facts.refilled and all(file.oid != oid for file in now.files):
        reason = "one transaction truncated and filled it, and may have truncated one of its partitions afterwards"
    for file in now.files:
        was = old.pop(file.oid, None)
        if was is None and not attached.issuperset(file.attached):
            reason = "a partition was attached"
        if was is not None and was.attached != file.attached:
            reason = "a partition was detached and attached again"
        if was is not None and was.node != file.node and (file.altered or file.xid not in facts.truncated.get(oid, ())):
            if ended is None or not ended.sees(file.xid):
                files.append(was)
                continue
            reason = "it was rewritten"
        files.append(file)
    if old:
        reason = "a partition was detached or dropped"
    return reason, replace(now, files=tuple(files))


def _any_new_file(before: Storage, now: Storage) -> bool:
    nodes = {file.oid: file.node for file in before.files}
    return any(nodes.get(file.oid, file.node) != file.node for file in now.files)
