"""The program that reads one window of a catch-up."""

import os
import subprocess
import sys

from pgwal_pipeline_tests.pipelines import MakePipeline
from pgwal_pipeline_tests.support import Source


def test_a_process_that_nobody_waits_for_ends_without_a_word(source: Source, make_pipeline: MakePipeline) -> None:
    """Its standard input has ended before it begins, as when the drain was interrupted just then."""
    settings = make_pipeline().settings
    command = [sys.executable, "-m", "pgwal_pipeline.pipeline.catch_up_worker", "1", "2", "180000", "1048576"]
    ended = subprocess.run(
        command, env=os.environ | settings.to_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode != 0
    assert (ended.stdout, ended.stderr) == ("", "")
