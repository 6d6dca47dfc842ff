"""The Markdown guides, read for tests: their sections, tables, links and commands."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (".", ".github", "docs", "deploy", "bench", "pgwal_pipeline_tests")

_FENCE = re.compile(r"(?ms)^[ ]*```(\w*)\n(.*?)^[ ]*```")
_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"(?m)^#{1,6} (.+)$")


def guides() -> list[Path]:
    """Every Markdown file of the project."""
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))


def shown(path: Path) -> str:
    """A guide's path from the project's root."""
    return str(path.relative_to(ROOT))


def read(name: str) -> str:
    """The text of the guide at a path from the project's root."""
    return (ROOT / name).read_text()


def section(text: str, title: str) -> str:
    """What stands under a heading, up to the next one of its level or a higher one."""
    found = re.search(rf"(?ms)^(##+) {re.escape(title)}\n(.*)", text)
    assert found is not None, title
    return re.split(rf"(?m)^#{{2,{len(found[1])}}} ", found[2])[0]


@dataclass(frozen=True)
class Table:
    """A Markdown table: the cells of its head, and of its rows."""

    head: list[str]
    rows: list[list[str]]


def tables(text: str) -> list[Table]:
    """The tables of a text, in their order."""
    found: list[Table] = []
    blocks = re.findall(r"(?m)(?:^[ ]*\|.*\n?)+", text)
    for block in blocks:
        head, _, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines())
        found.append(Table(head, rows))
    return found


def names(text: str) -> list[str]:
    """What stands between backticks."""
    return _SPAN.findall(text)


def prose(text: str) -> list[str]:
    """The lines of a text that are neither code nor a table's."""
    return [line for line in _FENCE.sub("", text).splitlines() if not line.lstrip().startswith("|")]


def blocks(text: str) -> list[tuple[str, str]]:
    """The blocks of code, each with its language."""
    return _FENCE.findall(text)


def anchors(text: str) -> set[str]:
    """What a link may name behind `#`, as GitHub makes it of headings."""
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in _HEADING.findall(_FENCE.sub("", text))}


def broken_links(path: Path, text: str) -> list[str]:
    """The links of a guide at `path` that lead to no file, or to no heading of one."""
    broken = []
    for link in _LINK.findall(_SPAN.sub("", _FENCE.sub("", text))):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if (file and not target.exists()) or (anchor and anchor not in anchors(text if target == path else target.read_text())):
            broken.append(link)
    return broken


def commands(text: str) -> Iterator[str]:
    """The lines of the blocks of code without a language, and what stands between backticks, each without a comment."""
    for language, block in blocks(text):
        if language in ("", "sh"):
            yield from (line.split("#", 1)[0].strip() for line in block.splitlines())
    yield from names(_FENCE.sub("", text))
