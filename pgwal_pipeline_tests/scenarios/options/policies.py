"""A table with an option `on_schema_change`, beside one without, and what the lake has of them."""

from typing import Any

import polars as pl

from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source

GOODS, SALES = TableName("public", "goods"), TableName("public", "sales")


def with_policy(pipeline: Pipeline, policy: str, table: str = "public.goods", **options: Any) -> Pipeline:
    """The same pipeline with that option for a table."""
    values = {**pipeline.settings.model_dump(exclude_unset=True), "table_options": {table: {"on_schema_change": policy, **options}}}
    return Pipeline(pipeline.source, type(pipeline.settings).from_environment({}, **values), pipeline.spark)


def make_tables(source: Source) -> None:
    source.sql("CREATE TABLE goods (id int PRIMARY KEY, name text, stock int, note text); CREATE TABLE sales (id int PRIMARY KEY, n int)")
    source.sql("INSERT INTO goods VALUES (1, 'ink', 5, 'a'), (2, 'pen', 7, 'b'); INSERT INTO sales VALUES (1, 1)")


def columns(pipeline: Pipeline, table: TableName = GOODS) -> list[str]:
    found = pl.read_delta(pipeline.lake.current(table)).columns
    return [name for name in found if not name.startswith("_pgwal_")]


def rows(pipeline: Pipeline, table: TableName = GOODS) -> list[tuple[Any, ...]]:
    return sorted(pl.read_delta(pipeline.lake.current(table)).select(columns(pipeline, table)).iter_rows())


def texts(pipeline: Pipeline, table: TableName = GOODS) -> dict[int, dict[str, str]]:
    frame = pl.read_delta(pipeline.lake.current(table))
    return {row["id"]: dict(row["_pgwal_text"]) for row in frame.iter_rows(named=True) if row["_pgwal_text"]}
