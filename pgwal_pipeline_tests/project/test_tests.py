"""Who changes a module finds its tests: by its name, or in the table of the tests' guide."""

import ast
from pathlib import Path

from pgwal_pipeline_tests.project.guides import ROOT, names, read, section, tables

CODE, TESTS = ROOT / "pgwal_pipeline", ROOT / "pgwal_pipeline_tests"
SMALL = 60  # lines


def named() -> dict[str, list[str]]:
    """The tests of each module that the table names."""
    (table,) = tables(section(read("pgwal_pipeline_tests/README.md"), "Modules tested elsewhere"))
    return {module: names(row[1]) for row in table.rows for module in names(row[0])}


def own_tests(module: Path) -> Path:
    """Where the tests of a module stand that has a file of its name."""
    return TESTS / module.parent / f"test_{module.name}"


def test_each_module_has_tests_of_its_name_or_is_in_the_table() -> None:
    modules = [path.relative_to(CODE) for path in CODE.rglob("*.py") if path.stem not in ("__init__", "__main__")]
    without = {str(module) for module in modules if not own_tests(module).exists()}
    large = {name for name in without if len((CODE / name).read_text().splitlines()) > SMALL}
    assert sorted(large - named().keys()) == [], "give each test_<module>.py in its room, or a line in pgwal_pipeline_tests/README.md"
    assert sorted(named().keys() - without) == [], "these have tests of their name, or are no modules"


def test_the_tests_that_the_table_names_exist() -> None:
    assert [path for paths in named().values() for path in paths if not (TESTS / path).exists()] == []
    assert [module for module, paths in named().items() if not paths] == []


def test_nothing_is_imported_from_a_file_of_tests() -> None:
    """What two of them need is in a module of helpers."""
    found = []
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                wanted = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                wanted = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            ours = [name for name in wanted if name.startswith("pgwal_pipeline_tests.")]
            found += [f"{path.relative_to(TESTS)}: {name}" for name in ours if ".test_" in name]
    assert found == []
