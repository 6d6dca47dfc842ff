"""Look for planted values in all that a pipeline leaves behind."""

from pathlib import Path

from pgwal_pipeline_tests.octets import octets_in
from pgwal_pipeline_tests.pipelines import Pipeline


def assert_nowhere(pipeline: Pipeline, *values: str, said: str = "") -> None:
    """Fail where one of `values` stands in a file of the lake, or beside it, or in what was said."""
    assert_nowhere_in(Path(pipeline.settings.lake).parent, *values, said=said)


def assert_nowhere_in(folder: Path, *values: str, said: str = "") -> None:
    """Fail where one of `values` stands in a file in or below `folder`, or in what was said."""
    wanted = [form for value in values for form in (value.encode(), value.encode().hex().encode(), value.encode("utf-16-le"))]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    found = [str(path) for path in files if any(form in octets for octets in octets_in(path) for form in wanted)]
    assert not found, found
    assert [value for value in values if value in said] == []
