"""What became of the tables since the last look at the catalog: whether the stream still tells all of their rows.

Most that can happen to a table's definition is known from the stream. What is not makes its stored rows other than the stream says: a
default that old rows carry, a rewrite, a rename (the stream has names, not column numbers). Such a table is read again, by itself.
Nothing is taken from the catalog for a row of an earlier time; between that row and now there may have been more changes than these.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from pgwal_pipeline.decode.types import arrow_type
from pgwal_pipeline.lake.ledger import TableState
from pgwal_pipeline.postgres.storage import Storage
from pgwal_pipeline.relation import Relation


@dataclass(frozen=True, slots=True)
class Look:
    """A published table as the catalog shows it at one moment."""

    relation: Relation
    storage: Storage


def dropped(state: TableState, before: Storage, now: Storage) -> tuple[str, ...]:
    """The columns that the source has dropped since the table was first met, but those whose names have been taken again."""
    numbers = {column.number for column in now.columns}
    taken = {column.name.lower() for column in now.columns}
    gone = [column.name for column in before.columns if column.number not in numbers]
    return tuple(name for name in dict.fromkeys((*state.dropped, *gone)) if name.lower() not in taken)


def read_again(state: TableState, look: Look, reason: str, joined_xid: int | None = None) -> TableState:
    """The state of a table whose rows have to be read again before it can be published; its old `current` stays until then."""
    return replace(
        state,
        state="pending",
        reason=f"it is read again: {reason}",
        key=look.relation.key,
        relation=look.relation,
        storage=look.storage.to_json(),
        generation=None,
        reading=None,
        published=None,
        joined_xid=joined_xid,
    )


def republished(before: Storage, now: Storage) -> bool:
    """Whether the table may have been out of the publication for a while, or the publication have published less."""
    return before.membership != now.membership


def altered(known: Relation, before: Storage, look: Look, gone_names: Collection[str]) -> str | None:
    """Why the rows of a table cannot be known from the stream since it was altered; None where they can, or nothing was.

    `gone_names` are columns that the source dropped earlier, which `current` still has.
    """
    now, relation = look.storage, look.relation
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


def rewritten(before: Storage, now: Storage, truncated: Collection[int], has_ended: Callable[[int], bool]) -> tuple[str | None, Storage]:
    """Why rows changed that no message told of, None if none did; and the storage with the files as far as they are accounted for.

    `truncated` are the transactions (32 bits) whose TRUNCATE of the table the stream told of; a new file that was made by one of them is
    accounted for. One of a transaction that had not ended (`has_ended`) when the stream's end was chosen is left for the next look; a
    TRUNCATE that committed between the two is taken for a rewrite, and the table read again for nothing.
    """
    reason = None
    old = {file.oid: file for file in before.files}
    files = []
    for file in now.files:
        was = old.pop(file.oid, None)
        if was is None and file.attached:
            reason = "a partition was attached"
        if was is not None and was.node != file.node and file.xid not in truncated:
            if not has_ended(file.xid):
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
