"""A table with values that are planted, and a pipeline with options for it."""

import hashlib
import hmac
from typing import Any

from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source

KEY = "the key of these tests"
TABLE = TableName("public", "people")


def hashed(value: str, key: str = KEY) -> str:
    return hmac.new(key.encode(), value.encode(), hashlib.sha256).hexdigest()


def with_options(pipeline: Pipeline, options: dict[str, Any], key: str = KEY) -> Pipeline:
    """The same pipeline under other options."""
    settings = type(pipeline.settings).from_environment(
        {}, **{**pipeline.settings.model_dump(exclude_unset=True), "table_options": {"public.people": options}, "hash_key": key}
    )
    return Pipeline(pipeline.source, settings, pipeline.spark)


def make_people(source: Source) -> None:
    source.sql(
        "CREATE TABLE people (id int PRIMARY KEY, name text, ssn text, email text, phone varchar(20), born date, note text);"
        "INSERT INTO people VALUES (1, 'Ann', 'SSN-planted-1', 'planted-1@mail', '+41 planted 1234', '1970-01-01', 'n'),"
        " (2, 'Bob', 'SSN-planted-2', NULL, '1234', '-infinity', NULL)"
    )


ALL = {"exclude": ["ssn"], "hash": ["email", "bor*"], "mask": {"phone": "last4"}}
