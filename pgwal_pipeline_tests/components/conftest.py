from collections.abc import Iterator

import dagster as dg
import pytest

from pgwal_pipeline_tests.components.instances import dagster_instance


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dagster_instance() as instance:
        yield instance
