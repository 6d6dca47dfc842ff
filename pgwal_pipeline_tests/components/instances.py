"""Instances of Dagster's, each in a folder of its own."""

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import dagster as dg


@contextmanager
def dagster_instance() -> Iterator[dg.DagsterInstance]:
    """A new instance. Its databases are copies: making them takes longer than most of what tests do there."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(_unused(), folder, dirs_exist_ok=True)
        with dg.instance_for_test(temp_dir=folder) as instance:
            yield instance


@cache
def _unused() -> str:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with dg.instance_for_test(temp_dir=folder) as instance:
        assert (instance.get_runs_count(), instance.get_asset_keys(), instance.all_instigator_state()) == (0, [], [])
    return folder
