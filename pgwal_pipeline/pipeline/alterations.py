"""What became of the tables since the last look at the catalog: whether the stream still tells all of their rows.

Most that can happen to a table's definition is known from the stream. What is not makes its stored rows other than the stream says: a
default that old rows carry, a rewrite, a rename (the stream has names, not column numbers). Such a table is read again, by itself.
Nothing is taken from the catalog for a row of an earlier time; between that row and now there may have been more changes than these.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from pgwal_pipeline.decode.types import arrow_type
from pgwal_pipeline.lake.ledger import TableState
from pgwal_pipeline.lake.stream_facts import StreamFacts
from pgwal_pipeline.values.relation import Relation
from pgwal_pipeline.values.storage import Storage
from pgwal_pipeline.values.xid import Snapshot


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A published table as the catalog shows it at one moment."""

    relation: Relation
    storage: Storage


def dropped(state: TableState, before: Storage, now: Storage) -> tuple[str, ...]:
    """The columns that the source has dropped since the table was first met, but those whose names have been taken again."""
    numbers = {column.number for column in now.columns}
    taken = {column.name.lower() for column in now.columns}
    gone = [column.name for column in before.columns if column.number not in numbers]
    return tuple(name for name in dict.fromkeys((*state.dropped, *gone)) if name.lower() not in taken)


def read_again(state: TableState, entry: CatalogEntry, reason: str, joined_xid: int | None = None) -> TableState:
    """The state of a table whose rows have to be read again before it can be published; its old `current` stays until then."""
    return replace(
        state.mended(),
        state="pending",
        reason=f"it is read again: {reason}",
        key=entry.relation.key,
        relation=entry.relation,
        storage=entry.storage,
        generation=None,
        reading=None,
        published=None,
        joined_xid=joined_xid,
    )


def republished(before: Storage, now: Storage) -> bool:
    """Whether the table may have been out of the publication for a while, or the publication have published less."""
    return before.membership != now.membership


def altered(known: Relation, before: Storage, entry: CatalogEntry, gone_names: Collection[str]) -> str | None:
    """Why the rows of a table cannot be known from the stream since it was altered; None where they can, or nothing was.

    `gone_names` are columns that the source dropped earlier, which `current` still has.
    """
    now, relation = entry.storage, entry.relation
    if known.key != relation.key:
        return f"its key was ({', '.join(known.key)}) and is ({', '.join(relation.key)})"
    old = {column.number: column for column in before.columns}
    old_names = {column.name.lower() for column in before.columns}
    for column in now.columns:
        was = old.get(column.number)
        if was is not None and was.name != column.name:
            return f"its column {was.name} was renamed to {column.name}"
        if was is not None and was.type_oid != column.type_oid:
            return f"its column {column.name} has another type"
        if was is None and column.default_of_old:
            return f"its column {column.name} was added with a default, which the rows from before have too"
        if was is None and column.name.lower() in old_names | {name.lower() for name in gone_names}:
            return f"its column {column.name} was dropped and made anew"
        if was is None and _any_new_file(before, now):
            return f"its column {column.name} was added with a value for each row"
    types = {column.name: arrow_type(column.type) for column in known.columns}
    for column in relation.columns:
        if column.name not in types and any(column.name == stored.name for stored in before.columns):
            return f"its column {column.name} was not published before"
        if types.get(column.name, arrow_type(column.type)) != arrow_type(column.type):
            return f"its column {column.name} has another type"
    return None


def had_others_names(shown: Sequence[str], versions: Sequence[Relation], entries: Sequence[Relation]) -> bool:
    """Whether columns had each other's names for a while, or one had a name that another has had or got: their values are mixed up then.

    `shown` are the columns before the `versions` that the stream showed one after the other; in the last of `entries` are those of now. A
    column never changes its place, and one that was there and is there now has been there all the time.
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
    """Why rows changed that no message told of, None if none did; and the storage with the files as far as they are accounted for.

    A new file that was made by a transaction whose TRUNCATE of the table the stream told of is accounted for, unless a column was altered
    as well. One of a transaction that had not ended when the stream's end was chosen is left for the next look; a TRUNCATE that committed
    between the two is taken for a rewrite, and the table read again for nothing. So is a partitioned table that one transaction truncated
    and filled: if it then truncated a partition, that has left no trace.
    """
    reason = None
    old = {file.oid: file for file in before.files}
    attached = {xid for file in before.files for xid in file.attached}
    files = []
    if not old.keys() | {file.oid for file in now.files} >= {*facts.partitions.get(oid, ())}:
        reason = "a partition came and went"
    if oid in facts.refilled and all(file.oid != oid for file in now.files):
        reason = "it was truncated and filled in one transaction, which may have truncated a partition of it afterwards"
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
