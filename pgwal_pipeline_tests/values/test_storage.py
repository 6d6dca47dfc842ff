"""How a table's storage is kept in the ledger, over the versions of its form."""

import json

from pgwal_pipeline.values.storage import Storage, StoredColumn, StoredFile

STORAGE = Storage(
    columns=(StoredColumn(1, "id", 23, False), StoredColumn(3, 'ä"', 25, True)),
    files=(StoredFile(16384, 16390, 731), StoredFile(16400, 16400, 735, (736, 737), True)),
    membership=(5, 6, 7),
    shown=("id", 'ä"'),
)


def test_what_is_written_is_read_back() -> None:
    text = STORAGE.to_json()
    assert Storage.from_json(text) == STORAGE
    assert json.loads(text)["version"] == 2


def test_the_first_version_is_read() -> None:
    """A list without names; the oldest had neither `shown` nor what is known of attached partitions."""
    columns, files = [[1, "id", 23, False]], [[16384, 16390, 731, [736], True]]
    expected = Storage((StoredColumn(1, "id", 23, False),), (StoredFile(16384, 16390, 731, (736,), True),), (5, 6), ("id",))
    assert Storage.from_json(json.dumps([columns, files, [5, 6], ["id"]])) == expected
    oldest = Storage.from_json(json.dumps([columns, [[16384, 16390, 731, True]], [5, 6]]))
    assert oldest.files == (StoredFile(16384, 16390, 731),)
    assert oldest.shown == ()
