"""The guides: their links lead somewhere, their commands exist, and what they list is what there is."""

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path

import click
import pytest
import yaml

from bench.__main__ import NAMES as BENCHMARKS
from bench.__main__ import main as bench
from pgwal_pipeline import definitions as code_location
from pgwal_pipeline import settings
from pgwal_pipeline.asset_specs import _CURRENT_COLUMNS, _RAW_COLUMNS, EQUALS_SOURCE_CHECK, FOLLOWED_CHECK, HEALTH_CHECK, SCHEMA_CHECK
from pgwal_pipeline.cli import main
from pgwal_pipeline.decode.types import _PLAIN
from pgwal_pipeline.known_tables import _lake_type
from pgwal_pipeline.pipeline.doctor import Check
from pgwal_pipeline.pipeline.reports import RunReport, SnapshotReport, TableComparison, WindowReport
from pgwal_pipeline.pipeline.status import status
from pgwal_pipeline.settings import PREFIX, Settings
from pgwal_pipeline.values.relation import PgType, TableName
from pgwal_pipeline_tests.decode.wire import array_of, numeric
from pgwal_pipeline_tests.project.guides import ROOT, anchors, broken_links, commands, guides, names, prose, read, section, shown, tables

GUIDES = [pytest.param(path, id=shown(path)) for path in guides()]
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md")


# Links and lines


@pytest.mark.parametrize("path", GUIDES)
def test_links_lead_somewhere(path: Path) -> None:
    assert broken_links(path, path.read_text()) == []


def test_a_broken_link_is_noticed() -> None:
    text = "# One `two` three\n\n[a](nowhere.md) [b](README.md#no-such) [c](#one-two-three) [d](#four) `[e](f)` [g](https://h)"
    assert broken_links(ROOT / "made-up.md", text) == ["nowhere.md", "README.md#no-such", "#four"]
    assert anchors("## What's new: 1.0 – a/b\n```\n# none\n```") == {"whats-new-10--ab"}


@pytest.mark.parametrize("path", GUIDES)
def test_lines_of_prose_wrap(path: Path) -> None:
    assert [line for line in prose(path.read_text()) if len(line) > 100] == []


@pytest.mark.parametrize("guide", ["README.md", "docs/README.md"])
def test_every_page_is_found(guide: str) -> None:
    text = read(guide)
    folder = "docs/" if guide == "README.md" else ""
    assert [page for page in PAGES if f"]({folder}{page})" not in text] == []


@pytest.mark.parametrize("path", GUIDES)
def test_files_of_code_that_are_named_exist(path: Path) -> None:
    named = {name for name in names(path.read_text()) if re.fullmatch(r"[\w./]+\.py", name)}
    folders = (ROOT, ROOT / "pgwal_pipeline", ROOT / "pgwal_pipeline_tests")
    assert {name for name in named if not any((folder / name).is_file() for folder in folders)} == set()


@pytest.mark.parametrize("path", GUIDES)
def test_variables_that_are_named_exist(path: Path) -> None:
    code = {match for folder in ("pgwal_pipeline", "pgwal_pipeline_tests") for file in (ROOT / folder).rglob("*.py")
            for match in re.findall(r'"(PGWAL_[A-Z_]+)"', file.read_text())}  # fmt: skip
    known = {PREFIX + name.upper() for name in Settings.model_fields} | code
    known |= {f"{PREFIX}{name.upper()}_FILE" for name in settings._SECRET}
    assert set(re.findall(r"PGWAL_[A-Z_]*[A-Z]", path.read_text())) - known == set()


# Commands


def wrong(command: str) -> str | None:
    """What is wrong with a command that a guide shows; None where it can be typed, or is none of those that are known here."""
    words = _words(command)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if not words:
        return None
    program, *rest = words
    if program.startswith(".venv/bin/"):
        program = program.removeprefix(".venv/bin/")
        if program != "python" and program not in {script.name for script in entry_points(group="console_scripts")}:
            return f"no program {program}"
    if program == "make":
        targets = re.findall(r"(?m)^([a-z-]+):", read("Makefile"))
        return next((f"no target {word}" for word in rest if word not in targets), None)
    if program == "pgwal":
        return _wrong_for(main, rest)
    if program == "python" and rest[:1] == ["-m"]:
        return _wrong_module(rest[1], rest[2:])
    if words[:2] == ["docker", "compose"]:
        return _wrong_service(rest[1:])
    return None


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # it is no command
        return []


def _wrong_for(command: click.Command, words: list[str]) -> str | None:
    context = click.Context(command, info_name="x", help_option_names=["-h", "--help"])
    if isinstance(command, click.Group) and words and not words[0].startswith("-"):
        if words[0] in ("…", "COMMAND", "[OPTIONS]"):
            return None
        found = command.get_command(context, words[0])
        return f"no command {words[0]}" if found is None else _wrong_for(found, words[1:])
    known = [parameter for parameter in command.get_params(context) if isinstance(parameter, click.Option)]
    options = {option for parameter in known for option in (*parameter.opts, *parameter.secondary_opts)}
    given = [word.strip("[]").split("=")[0] for word in words if re.match(r"\[?-", word)]
    unknown = [option for option in given if option not in options]
    if unknown:
        return f"no option {unknown[0]}"
    values = any(not parameter.is_flag for parameter in known)
    takes = any(isinstance(parameter, click.Argument) for parameter in command.params)
    others = [word for word in words if not re.match(r"\[?-", word) and word not in ("|", "[OPTIONS]")]
    return f"takes no {others[0]}" if others and not takes and not values else None


def _wrong_module(module: str, rest: list[str]) -> str | None:
    if importlib.util.find_spec(module) is None:
        return f"no module {module}"
    if module == "bench":
        unknown = [word for word in rest if not word.startswith("-") and not word.isdigit() and word not in BENCHMARKS]
        return f"no benchmark {unknown[0]}" if unknown else _wrong_for(bench, rest)
    return _wrong_for_pytest(rest) if module == "pytest" else None


def _wrong_for_pytest(words: list[str]) -> str | None:
    marks = {mark.partition(":")[0] for mark in tomllib.loads(read("pyproject.toml"))["tool"]["pytest"]["ini_options"]["markers"]}
    files = [word for word in words if word.startswith("pgwal_pipeline_tests/")]
    tests = [name for file in files if (ROOT / file).is_file() for name in re.findall(r"def (test_\w+)", read(file))]
    for before, word in zip(["", *words], words, strict=False):
        if before == "-m" and not set(re.findall(r"\w+", word)) <= {*marks, "and", "or", "not"}:
            return f"no mark {word}"
        if before == "-k" and not any(word in name for name in tests) and not re.fullmatch(r"pg\d+", word):
            return f"no test {word}"
    return next((f"no file {file}" for file in files if not (ROOT / file).exists()), None)


def _wrong_service(words: list[str]) -> str | None:
    services = yaml.safe_load(read("docker-compose.yaml"))["services"]
    for before, word in zip(["", *words], words, strict=False):
        if before == "exec" and word not in services:
            return f"no service {word}"
        if before == "--profile" and not any(word in service.get("profiles", ()) for service in services.values()):
            return f"no profile {word}"
    return wrong(" ".join(words[words.index("exec") + 2 :])) if "exec" in words else None


@pytest.mark.parametrize("path", GUIDES)
def test_commands_can_be_typed(path: Path) -> None:
    assert {command: said for command in commands(path.read_text()) if (said := wrong(command)) is not None} == {}


@pytest.mark.parametrize(
    "command",
    [
        "make nothing",
        "pgwal drian",
        "pgwal sync --al",
        "pgwal sync now",
        ".venv/bin/pgwal status --jason",
        ".venv/bin/pgval status",
        "A=b pgwal drian",
        "python -m pgwal_pipeline.nowhere",
        ".venv/bin/python -m bench nothing",
        ".venv/bin/python -m bench drain --laps 3",
        ".venv/bin/python -m pytest -m hard",
        ".venv/bin/python -m pytest -m 'not hard'",
        ".venv/bin/python -m pytest pgwal_pipeline_tests/test_nothing.py",
        ".venv/bin/python -m pytest pgwal_pipeline_tests/project/test_guides.py -k no_such_test",
        "docker compose exec nobody pgwal status",
        "docker compose exec code pgwal drian",
        "docker compose --profile none up",
    ],
)
def test_a_wrong_command_is_noticed(command: str) -> None:
    assert wrong(command) is not None


@pytest.mark.parametrize(
    "command",
    [
        "pgwal",
        "pgwal …",
        "pgwal -h",
        "pgwal --version",
        "pgwal verify 'public.\"A b\"'",
        "pgwal as-of [latest|LSN] --json",
        "make",
        "ls -l",
    ],
)
def test_a_right_command_is_not(command: str) -> None:
    assert wrong(command) is None


def described() -> Iterator[tuple[str, str]]:
    text = read("docs/commands.md")
    for name in re.findall(r"(?m)^## pgwal (\S+)$", text):
        yield name, section(text, f"pgwal {name}")


def test_the_commands_are_those_of_pgwal() -> None:
    assert sorted(name for name, _ in described()) == sorted(main.commands)


@pytest.mark.parametrize("name", sorted(main.commands))
def test_a_commands_usage_and_options_are_those_of_its_help(name: str) -> None:
    text, command = dict(described())[name], main.commands[name]
    usage = command.get_usage(click.Context(command, info_name=f"pgwal {name}")).removeprefix("Usage: ")
    assert f"```\n{usage}\n```" in text
    options = {", ".join(option.opts): option.help for option in command.params if isinstance(option, click.Option)}
    told = [row for table in tables(text) if table.head[0] == "option" for row in table.rows]
    assert {names(row[0])[0]: row[1] for row in told} == options


def json_fields(name: str) -> dict[str, list[str]]:
    """The fields of a command's JSON as the guide has them, each with the fields that stand in it."""
    (table,) = (table for table in tables(dict(described())[name]) if table.head[0] == "field")
    return {names(row[0])[0]: names(row[1]) for row in table.rows}


def test_the_json_of_a_run_is_as_described() -> None:
    found, report = json_fields("sync"), RunReport().to_json(0.0)
    assert list(found) == list(report)
    assert found["seconds"] == list(report["seconds"])
    assert found["windows"] == list(WindowReport("", 0, 0, 0, 0, 0, {}).to_json())
    assert found["snapshots"] == list(SnapshotReport(TableName("a", "b"), 0, 0, 0, 0.0).to_json())


def test_the_json_of_other_commands_is_as_described(tmp_path: Path) -> None:
    assert [field for field in json_fields("status") if field != "windows"] == list(status(Settings(lake=str(tmp_path))))
    verify, doctor = (names(dict(described())[name].rsplit("The JSON has", 1)[1]) for name in ("verify", "doctor"))
    assert verify == ["lsn", "equal", "tables", *(field.name for field in fields(TableComparison))]
    assert doctor == ["ok", "checks", *(field.name for field in fields(Check))]


# Settings, types, what Dagster has, benchmarks


def test_the_settings_are_those_of_the_code() -> None:
    given = {names(row[0])[0]: names(row[1]) for row in tables(read("docs/settings.md"))[0].rows}
    assert set(given) == {PREFIX + name.upper() for name in Settings.model_fields} | {"DAGSTER_HOME"}
    defaults = {name: default[0] for name, default in given.items() if default}
    assert defaults.keys() == {
        PREFIX + name.upper()
        for name, field in Settings.model_fields.items()
        if field.default_factory is None and field.default is not None
    } | {"DAGSTER_HOME"}
    assert Settings.from_environment(defaults) == Settings(lake=str(Path("lake").absolute()))


def test_our_columns_are_those_of_the_assets() -> None:
    for title, columns in (("Columns of raw", _RAW_COLUMNS), ("Columns of current", _CURRENT_COLUMNS)):
        (table,) = tables(section(read("docs/lake.md"), title))
        assert [(names(name)[0], kind) for name, kind, _ in table.rows] == [(name, kind) for name, kind, _ in columns]


_OIDS = {
    "bool": 16, "int2": 21, "int4": 23, "int8": 20, "float4": 700, "float8": 701, "oid": 26, "money": 790, "date": 1082, "timestamp": 1114,
    "timestamptz": 1184, "bytea": 17, "text": 25, "varchar": 1043, "char": 1042, "name": 19, "json": 114, "jsonb": 3802, "xml": 142,
    "uuid": 2950, "time": 1083, "timetz": 1266, "interval": 1186, "bit": 1560, "inet": 869, "cidr": 650, "macaddr": 829, "tsvector": 3614,
    "citext": 90_001, "hstore": 90_002, "vector": 90_003,
}  # fmt: skip


def test_the_types_are_those_of_the_decoder() -> None:
    """Each type that the table names, and each that the decoder knows."""
    (table,) = tables(section(read("docs/lake.md"), "Types"))
    types = {name: PgType(oid, -1, name) for name, oid in _OIDS.items()} | {"numeric": numeric(), "numeric(p,s)": numeric(12, 2)}
    told: dict[str, str] = {}
    for postgres, delta in table.rows:
        found, kinds = names(postgres), [kind.split(",", 1)[0] if kind.startswith("string") else kind for kind in delta.split(" · ")]
        told |= dict(zip(found, kinds if len(kinds) == len(found) else kinds * len(found), strict=True))
    assert told.keys() == types.keys()
    assert {oid for name, oid in _OIDS.items() if told[name] != "string"} == _PLAIN.keys()
    assert {name: _lake_type(types[name]).replace("(12,2)", "(p,s)") for name in told} == told
    assert _lake_type(array_of(types["int4"])) == "array<integer>"


def test_what_dagster_has_is_as_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE", "PGDATABASE", "PGWAL_SOURCE_DSN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    repository = code_location.defs().get_repository_def()
    text = read("docs/dagster.md")
    told = {title: [[names(row[0])[0], *row[1:]] for row in tables(section(text, title))[0].rows]
            for title in ("Jobs", "Sensors and schedules", "Checks")}  # fmt: skip
    assert sorted(row[0] for row in told["Jobs"]) == sorted(name for name in repository.job_names if not name.startswith("__"))
    sensors = [(sensor.name, "sensor") for sensor in repository.sensor_defs]
    schedules = [(schedule.name, "schedule") for schedule in repository.schedule_defs]
    assert sorted((row[0], row[1]) for row in told["Sensors and schedules"]) == sorted(sensors + schedules)
    assert [row[0] for row in told["Checks"]] == [HEALTH_CHECK, FOLLOWED_CHECK, SCHEMA_CHECK, EQUALS_SOURCE_CHECK]


def test_the_benchmarks_are_those_that_run() -> None:
    assert [names(row[0])[0] for row in tables(read("docs/benchmarks.md"))[0].rows] == list(BENCHMARKS)
