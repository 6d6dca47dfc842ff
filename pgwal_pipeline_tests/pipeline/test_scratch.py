"""A copy of a structure, and the statements that are tried in it."""

from pathlib import Path

import pytest

from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.pipeline.scratch import Refused, read_file, run, scratch_copy, statements
from pgwal_pipeline.postgres.structure import Column, Structure, Table
from pgwal_pipeline.values.relation import TableName


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" -- ; nothing\n/* ; /* ; */ ; */ ;", []),
        ("SELECT 1; \n SELECT 2", [(1, "SELECT 1"), (2, "SELECT 2")]),
        ("-- first\nSELECT ';''', E'\\';', \"a;\"\"b\";SELECT 3;", [(2, "SELECT ';''', E'\\';', \"a;\"\"b\""), (2, "SELECT 3")]),
        ("DO $a$ BEGIN; $$ ; END $a$; SELECT $1;", [(1, "DO $a$ BEGIN; $$ ; END $a$"), (1, "SELECT $1")]),
        ("SELECT a$b$c; SELECT 'x\n;' /* ; */ ;", [(1, "SELECT a$b$c"), (1, "SELECT 'x\n;' /* ; */")]),
        (
            "CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT CASE WHEN true THEN 1 END; SELECT 2; END; SELECT 3;",
            [(1, "CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT CASE WHEN true THEN 1 END; SELECT 2; END"), (1, "SELECT 3")],
        ),
        ("BEGIN; SELECT 1; END; COMMIT", [(1, "BEGIN"), (1, "SELECT 1"), (1, "END"), (1, "COMMIT")]),
        ("\\set x 1\nSELECT 1;", [(1, "\\set x 1"), (2, "SELECT 1")]),
        ("SELECT 'open", [(1, "SELECT 'open")]),
        ("DO $$ open", [(1, "DO $$ open")]),
    ],
)
def test_the_statements_of_a_file(text: str, expected: list[tuple[int, str]]) -> None:
    assert list(statements(text)) == expected


def _column(name: str, kind: str, generated: str = "", default: str | None = None) -> Column:
    return Column(name, kind, None, default, generated, "", False, True)


def test_what_the_server_here_lacks_is_replaced_and_named() -> None:
    odd = _column("area", "gis.shape(2)")
    made = _column("twice", "integer", "s", "public.missing(id)")
    table = Table(1, TableName("shop", "odd"), (_column("id", "integer"), odd, made), False, (), None, None)
    lost = Table(2, TableName("shop", "child"), (), False, ("shop.nosuch",), "FOR VALUES IN (1)", None)
    structure = Structure({"nosuch_gis": "gis"}, ("CREATE SCHEMA shop",), (table, lost), (), '"$user", shop')
    with scratch_copy(structure) as copy:
        types = copy.conn.execute(
            b"SELECT attname, atttypid::regtype::text, attgenerated FROM pg_attribute"
            b" WHERE attrelid = 'odd'::regclass AND attnum > 0 ORDER BY attnum"
        ).fetchall()
        assert types == [("id", "integer", ""), ("area", "text", ""), ("twice", "integer", "")]
        assert ["nosuch_gis" in copy.lacking[0], "shop.child" in copy.lacking[1], len(copy.lacking)] == [True, True, 2]
        with pytest.raises(Refused, match=r"^m\.sql, line 3 fails in a copy of the source's structure: column \"x\" of"):
            run(copy, "m.sql", "SELECT 1;\n\nALTER TABLE odd DROP x;")
        with pytest.raises(Refused, match=r"m\.sql, line 1: \\i is a command of psql"):
            run(copy, "m.sql", "\\i other.sql")
        run(copy, "m.sql", "BEGIN; ALTER TABLE odd DROP area;")
        assert "leaves a transaction open" in copy.lacking[-1]
        assert len(copy.conn.execute(b"SELECT 1 FROM pg_attribute WHERE attrelid = 'odd'::regclass AND attname = 'area'").fetchall()) == 1


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "m.sql").write_bytes(b"\xff\xfe")
    with pytest.raises(PgwalError, match="it is not UTF-8"):
        read_file(tmp_path / "m.sql")
