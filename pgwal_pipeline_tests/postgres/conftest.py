from collections.abc import Iterator

import pytest

from pgwal_pipeline.postgres import dsn
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline_tests.support import Source


@pytest.fixture
def conn(source_matrix: Source) -> Iterator[Connection]:
    """A session on each major version at hand, one after the other."""
    with dsn.connect(source_matrix.dsn) as connection:
        yield connection


@pytest.fixture
def plain_role(source_matrix: Source) -> Iterator[str]:
    """An ordinary role that may log in and owns nothing."""
    source_matrix.sql("drop role if exists plain_role")
    source_matrix.sql("create role plain_role login")
    yield "plain_role"
    source_matrix.sql("drop owned by plain_role; drop role plain_role")
