"""A standby of a test's server."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline_tests.support import TEST_SETTINGS, Source, wait_for


@contextmanager
def standby_of(source: Source, data_dir: Path) -> Iterator[Source]:
    """A standby of `source`'s server, with the same database; removed afterwards."""
    primary = source.server
    _give_to_the_owner(primary.data_dir, primary.data_dir)
    program = primary.installation.bin / "pg_basebackup"
    command = [program, "-d", source.dsn, "-D", data_dir, "-X", "stream", "-c", "fast", "-R", "--no-sync"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    _give_to_the_owner(data_dir, primary.data_dir)
    standby = Postgres(data_dir, primary.installation, dict(TEST_SETTINGS))
    standby.start()
    followed = Source(standby, source.database, standby.dsn(source.database))
    try:
        yield followed
    finally:
        followed.close()
        standby.destroy()
        shutil.rmtree(data_dir, ignore_errors=True)


def _give_to_the_owner(folder: Path, like: Path) -> None:
    """As root the server runs as another user, who is to read every file."""
    if os.geteuid() == 0:
        owner = like.stat()
        for path in (folder, *folder.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def promoted(standby: Source) -> None:
    standby.sql("SELECT pg_promote(true, 30)")
    wait_for(lambda: not standby.value("SELECT pg_is_in_recovery()"), what="the promotion")


def caught_up(source: Source, standby: Source) -> None:
    target = source.value("SELECT pg_current_wal_flush_lsn()::text")
    wait_for(lambda: standby.value("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", target), what="the standby to follow")
