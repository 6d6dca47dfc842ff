"""What a publish asks for one `current` table, and how the commit that does it is known.

Every commit carries the LSN that it brings the table to (Delta's `txnAppId` and `txnVersion`), so the same work done again changes nothing.
"""

from dataclasses import dataclass
from datetime import datetime

from pgwal_pipeline.lake.fold import ANYTHING, ChunkSnapshot, Shape, Traits
from pgwal_pipeline.lake.standing import FENCE, open_current
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.relation import TableName


@dataclass(frozen=True, slots=True)
class MergeRequest:
    """Events of raw with `from_lsn <= commit LSN < to_lsn`, to be merged into a `current` table that stands at `from_lsn`.

    `key` is empty for a bag of rows. `columns` are the source's, in its order. `schema_json` is their Delta schema; without it they have
    the types of the tables in the lake. `rows` is how many events the ledger counts, 0 if unknown. With `keeps` deleted rows stay, marked.
    `arriving_json` is the schema of the same columns as they are in raw, where their types differ from those to be kept (`lake.frozen`).
    """

    table: TableName
    raw_path: str
    current_path: str
    key: tuple[str, ...]
    columns: tuple[str, ...]
    from_lsn: int
    to_lsn: int
    traits: Traits = ANYTHING
    schema_json: str | None = None
    rows: int = 0
    arriving_json: str | None = None
    keeps: bool = False

    @property
    def shape(self) -> Shape:
        """The table that is folded."""
        return Shape(self.table, self.key, self.columns, self.keeps)


@dataclass(frozen=True, slots=True)
class ReplaceRequest:
    """A `current` table to be built from the snapshot `generation` and the events with `from_lsn <= commit LSN < to_lsn` on top of it.

    Only the rows of `chunks` count at `snapshot_path`; `snapshot_lsn` becomes their `_pgwal_commit_lsn`. A bag of rows has been read under
    one snapshot. The raw table may not exist yet, and the snapshot table does not exist if no chunk held a row. `keep` are columns of the
    present `current` that the source has dropped: they stay, null in every row. `rows` is how many rows and events the ledger counts, 0 if
    unknown. With `keeps` the rows of the present `current` stay that the source has no longer, marked; those of which no deletion is known
    are deleted at `snapshot_lsn` and `read_at`. `clean`: the present `current` has no value that may not stay. `arriving_json` is as in
    `MergeRequest`. `order` is the order of the columns that `current` keeps, empty for the source's.
    """

    table: TableName
    raw_path: str
    current_path: str
    snapshot_path: str
    generation: str
    chunks: tuple[ChunkSnapshot, ...]
    snapshot_lsn: int
    key: tuple[str, ...]
    columns: tuple[str, ...]
    from_lsn: int
    to_lsn: int
    traits: Traits = ANYTHING
    schema_json: str | None = None
    rows: int = 0
    keep: tuple[str, ...] = ()
    arriving_json: str | None = None
    order: tuple[str, ...] = ()
    keeps: bool = False
    read_at: datetime | None = None
    clean: bool = True

    @property
    def shape(self) -> Shape:
        """The table that is folded."""
        return Shape(self.table, self.key, self.columns, self.keeps)


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The Delta version of `current` that holds the work, and how many rows were inserted, updated and deleted for it.

    After a TRUNCATE and for a replacement these are the rows that were written; 0 if the work had been done before.
    """

    version: int
    rows_changed: int


def reached(request: MergeRequest | ReplaceRequest) -> int:
    """The version that holds the work just committed. Raises LakeError if another publish has changed the table meanwhile.

    On an object store Spark checks whether a commit exists and then writes it: if two publishes do so at once, the slower one overwrites
    the other's commit.
    """
    table = open_current(request.current_path)
    mark = None if table is None else table.transaction_version(FENCE)
    if table is None or mark != request.to_lsn:
        lost = LakeError(
            f"{request.table}: another publish changed its current table at the same time, which stands at "
            f"{'no LSN' if mark is None else format_lsn(mark)} instead of {format_lsn(request.to_lsn)}; try again."
        )
        lost.transient = True
        raise lost
    return table.version()


def fence(lsn: int) -> dict[str, str]:
    """Return the write options with which a commit carries the LSN that it brings the table to."""
    return {"txnAppId": FENCE, "txnVersion": str(lsn)}
