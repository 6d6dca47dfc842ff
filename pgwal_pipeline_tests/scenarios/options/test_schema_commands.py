"""Schema policies and previews as a user meets them: by commands."""

import json
from pathlib import Path

from pgwal_pipeline_tests.commands import Commands
from pgwal_pipeline_tests.support import Source


def test_stop_preview_and_accept(source: Source, commands: Commands, connect_address: str, tmp_path: Path) -> None:
    source.sql("CREATE TABLE goods (id int PRIMARY KEY, n int); CREATE TABLE sales (id int PRIMARY KEY)")
    source.sql("INSERT INTO goods VALUES (1, 1); INSERT INTO sales VALUES (1)")
    options = tmp_path / "options.yaml"
    options.write_text("public.goods: {on_schema_change: stop}\n")
    commands.environment |= {"PGWAL_SPARK_REMOTE": connect_address, "PGWAL_TABLE_OPTIONS": str(options)}
    commands.json("sync")
    migration = tmp_path / "m.sql"
    migration.write_text("ALTER TABLE goods RENAME n TO m;\nALTER TABLE sales ADD x int;\n")
    code, out, _ = commands.run("preview", str(migration), "--json")
    assert code == 3
    found = json.loads(out)
    assert found.keys() == {"tables", "columns_lost", "warnings"}
    assert found["tables"]["public.goods"].keys() == {"read_again", "why", "bytes"}
    assert found["tables"]["public.goods"]["read_again"] is True
    assert found["tables"]["public.goods"]["bytes"] > 0
    assert found["tables"]["public.sales"]["read_again"] is False
    assert found["columns_lost"] == [{"asset": "current/public/goods", "column": "n", "source": "public.goods.n"}]
    code, out, _ = commands.run("preview", str(migration))
    assert code == 3
    assert "public.goods: read again" in out or "then be read again" in out
    assert "lost: column n of current/public/goods (from public.goods.n)" in out
    (tmp_path / "none.sql").write_text("ALTER TABLE sales ADD x int;")
    assert commands.run("preview", str(tmp_path / "none.sql"))[:2] == (0, "nothing is read again, and nothing is lost\n")
    (tmp_path / "bad.sql").write_text("ALTER TABLE nosuch ADD x int;")
    code, out, err = commands.run("preview", str(tmp_path / "bad.sql"), "--json")
    assert (code, out) == (1, "")
    assert err.endswith('bad.sql, line 1 fails in a copy of the source\'s structure: relation "nosuch" does not exist.\n')

    source.sql(migration.read_text() + "INSERT INTO goods VALUES (2, 2); INSERT INTO sales VALUES (2, 2)")
    code, out, err = commands.run("sync", "--json")
    assert code == 1
    assert "public.goods could not be published; the other tables were." in err
    assert "`pgwal accept 'public.goods'`" in err
    assert list(json.loads(out)["publish"]["tables"]) == ["public.sales"]
    shown = commands.json("status")["tables"]["public.goods"]
    assert (shown["state"], shown["options"]) == ("error", {"on_schema_change": "stop"})
    assert "column n is gone, column m integer is new" in shown["reason"]
    code, out, err = commands.run("accept", "public.nosuch")
    assert (code, out) == (1, "")
    assert "Table public.nosuch is not followed" in err
    assert commands.json("accept", "public.goods") == {
        "accepted": {"public.goods": {"changes": ["column n is gone", "column m integer is new"], "read_again": True}}
    }
    assert set(commands.json("sync")["publish"]["tables"]) == {"public.goods", "public.sales"}
    assert commands.json("verify")["equal"] is True

    # Accepted before any run has met the change.
    source.sql("ALTER TABLE goods ADD z int; INSERT INTO goods VALUES (3, 3, 3)")
    code, out, _ = commands.run("accept", "public.goods")
    assert (code, out) == (0, "public.goods: column z integer is new\n`pgwal sync` publishes them.\n")
    assert "public.goods" in commands.json("sync")["publish"]["tables"]
    assert commands.run("accept", "public.goods")[1].startswith("public.goods: nothing was kept back\n")
