"""The guides are true to the code: what they list is what there is."""

import re
from pathlib import Path
from typing import get_args

from pgwal_pipeline.lake import rows
from pgwal_pipeline.lake.faults import STAGES
from pgwal_pipeline.lake.ledger import LOGS
from pgwal_pipeline.lake.records import State, WindowState
from pgwal_pipeline.settings import PREFIX, Settings

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "ARCHITECTURE.md").read_text()
POINT = re.compile(r'failpoints\.hit\("([a-z_.]+)"\)')


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def rows_of(text: str) -> list[list[str]]:
    """The cells of the Markdown tables in `text`, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        row
        for number, row in enumerate(cells)
        if not set(row[0]) <= {"-"} and not (number + 1 < len(cells) and set(cells[number + 1][0]) <= {"-"})
    ]


def names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_states_are_those_of_the_ledger() -> None:
    found = [names(row[0])[0] for row in rows_of(section("States"))]
    assert sorted(found) == sorted([*get_args(State), *get_args(WindowState)])


def test_the_failpoints_are_those_of_the_code() -> None:
    code = {point for path in (ROOT / "pgwal_pipeline").rglob("*.py") for point in POINT.findall(path.read_text())}
    assert {name for row in rows_of(section("Failpoints")) for name in names(row[1])} == code


def test_the_settings_are_those_of_the_code() -> None:
    assert set(names(section("Settings"))) == {PREFIX + name.upper() for name in Settings.model_fields}


def test_the_stages_are_those_of_the_code() -> None:
    assert set(STAGES) <= set(names(section("Whose fault an error is")))


def test_the_ledgers_columns_are_those_of_the_code() -> None:
    schemas = {name: getattr(rows, name.upper()).names for name in LOGS}
    found = {names(row[0])[0]: names(row[2]) for row in rows_of(section("The ledger"))}
    found["reads"] = [*found["windows"], *found["reads"][1:]]
    assert found == schemas


def test_lines_of_prose_wrap_and_links_lead_somewhere() -> None:
    for guide in ("ARCHITECTURE.md", "CONTRIBUTING.md"):
        text = (ROOT / guide).read_text()
        prose = re.sub(r"(?ms)^```.*?^```", "", text).splitlines()
        assert [line for line in prose if len(line) > 100 and not line.startswith("|")] == []
        for path in re.findall(r"`((?:pgwal_pipeline|pgwal_pipeline_tests)/[\w/.]+)`", text):
            assert (ROOT / path).exists(), path
