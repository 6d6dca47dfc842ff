import pyarrow as pa
import pytest

from pgwal_pipeline.lake.parquet import plain_tables


def test_text_beyond_what_one_array_holds_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgwal_pipeline.lake.parquet._MOST_TEXT", 1000)
    texts = ["é" * length for length in (10, 200, 900, 0, 30)] + [None]
    rows = pa.table({"text": pa.array(texts).cast(pa.string_view()).slice(1), "number": range(5)})
    pieces = list(plain_tables(rows, pa.schema([("text", pa.string()), ("number", pa.int64())])))
    assert len(pieces) > 1
    assert all(piece.num_rows == 1 or piece["text"].nbytes < 1500 for piece in pieces)
    assert pa.concat_tables(pieces).to_pylist() == rows.to_pylist()
