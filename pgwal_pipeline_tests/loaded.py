"""What the processes of `children` begin with: what a run of the pipeline loads, Dagster's part and Spark Connect's included."""
# ruff: noqa: F401

import gc

import dagster._core.definitions.external_asset
import dagster._core.execution.execute_in_process
import dagster._core.storage.local_compute_log_manager
import dagster._core.storage.sqlite_storage
import dagster._core.workspace.context
import dagster._daemon.controller
import dotenv.main
import jinja2
import pyarrow.dataset
import pyarrow.pandas_compat
import pyspark.sql.connect.session
import tomlkit
import upath.implementations.local

import pgwal_pipeline.cli
import pgwal_pipeline.defs.executor
import pgwal_pipeline.lake.compare
import pgwal_pipeline.pipeline.doctor
import pgwal_pipeline.pipeline.publish
import pgwal_pipeline.pipeline.verify
import pgwal_pipeline.runs
import pgwal_pipeline.spark.session

# None of it is garbage, and looking through it would make each process write to all of these pages.
gc.freeze()
