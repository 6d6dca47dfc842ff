"""ARCHITECTURE and CONTRIBUTING are true to the code: what they list is what there is."""

import re
from typing import get_args

from pgwal_pipeline.lake import rows
from pgwal_pipeline.lake.faults import STAGES
from pgwal_pipeline.lake.ledger import LOGS
from pgwal_pipeline.lake.records import State, WindowState
from pgwal_pipeline_tests.project.guides import ROOT, names, read, section, tables

GUIDE = read("ARCHITECTURE.md")
CODE = ROOT / "pgwal_pipeline"
POINT = re.compile(r'failpoints\.hit\("([a-z_.]+)"\)')
PRIVATE = re.compile(
    r"""(?m)^from[ ](?!pgwal)\w+(?:\.\w+)*\._  # a private module of a library
    |noqa:[ ]SLF001(?![ ]-[ ]this[ ]module's[ ]own)  # a private attribute
    |^[ ]+instance\.\w+[ ]=  # something of Dagster's instance that is replaced
    |Seen[ ]in[ ]\d  # a module that keeps what a library does beyond its documentation""",
    re.VERBOSE,
)


def test_the_packages_and_their_imports_are_those_of_the_code() -> None:
    (table,) = tables(section(GUIDE, "Where to put what"))
    told = {names(row[0])[0]: set(names(row[2])) for row in table.rows}
    packages = {path.parent.name for path in CODE.glob("*/__init__.py")}
    imported = re.compile(rf"(?:from|import) pgwal_pipeline\.({'|'.join(packages)})\b")
    found = {name: {other for path in (CODE / name).rglob("*.py") for other in imported.findall(path.read_text())} for name in packages}
    assert told == {name: others - {name} for name, others in found.items()}


def test_the_states_are_those_of_the_ledger() -> None:
    of_tables, of_windows = tables(section(GUIDE, "States"))
    assert {names(row[0])[0] for row in of_tables.rows} == set(get_args(State))
    assert {names(row[0])[0] for row in of_windows.rows} == set(get_args(WindowState))
    for row in of_tables.rows:
        assert set(names(row[2])) <= set(get_args(State))


def test_the_failpoints_are_those_of_the_code() -> None:
    code = {point for path in CODE.rglob("*.py") for point in POINT.findall(path.read_text())}
    (table,) = tables(section(GUIDE, "Failpoints"))
    assert {name for row in table.rows for name in names(row[1])} == code


def test_the_stages_are_those_of_the_code() -> None:
    assert set(names(section(GUIDE, "Whose fault an error is").split("Its stages:")[1].split(".\n")[0])) == set(STAGES)


def test_the_ledgers_columns_are_those_of_the_code() -> None:
    schemas = {name: getattr(rows, name.upper()).names for name in LOGS}
    (table,) = tables(section(GUIDE, "The ledger"))
    found = {names(row[0])[0]: names(row[2]) for row in table.rows}
    found["reads"] = [*found["windows"], *found["reads"][1:]]
    assert found == schemas


def test_what_reaches_into_libraries_is_on_the_upgrades_checklist() -> None:
    (table,) = tables(section(read("CONTRIBUTING.md"), "Upgrades"))
    code = {str(path.relative_to(CODE)) for path in CODE.rglob("*.py") if PRIVATE.search(path.read_text())}
    assert {names(row[0])[0] for row in table.rows} == code
