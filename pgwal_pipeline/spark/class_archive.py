"""Make and use an archive of the classes that Spark loads (Java's class data sharing), so that a JVM need not read and check them again.

The archive is recorded once per installation, in `sys.prefix`. Without it, or if it does not fit any more, Spark works but starts slower.
What the JVM requires of it: https://docs.oracle.com/en/java/javase/21/vm/class-data-sharing.html
"""

import contextlib
import hashlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.spark.jars import spark_home
from pgwal_pipeline.spark.java import Java

_PLACE = Path(sys.prefix, "var", "pgwal_pipeline")
# Java's own classes, and on top of them the others: the bundled Java comes without an archive of its own classes.
_BASE, _TOP = "java.jsa", "spark.jsa"
# Otherwise a JVM that the archive does not fit prints a warning to its standard output.
_QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-Xlog:class+path=off")


def options(java: Java) -> list[str]:
    """Return the options with which `java` uses the archive, empty if none was recorded for it."""
    folder = _folder(java)
    if not (folder / _TOP).exists():
        return []
    return [shlex.quote(f"-XX:SharedArchiveFile={folder / _BASE}:{folder / _TOP}"), *_QUIET]


@contextlib.contextmanager
def recorded(java: Java) -> Iterator[list[str]]:
    """Yield the options with which a JVM records an archive when it ends; keep the archive after the block.

    The JVM must have ended by the end of the block. Archives of earlier installations are removed. Raises PgwalError if the JVM wrote no
    archive or the archive's folder cannot be written.
    """
    target = _folder(java)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".recording-", dir=target.parent) as name:
            base, top = Path(name, _BASE), Path(name, _TOP)
            dump = [java.home / "bin/java", "-Xshare:dump", f"-XX:SharedArchiveFile={base}", *_QUIET]
            subprocess.run(dump, capture_output=True, check=True, stdin=subprocess.DEVNULL)
            archives = [shlex.quote(f"-XX:SharedArchiveFile={base}"), shlex.quote(f"-XX:ArchiveClassesAtExit={top}")]
            # The JVM ends before Java's second compiler would pay off.
            yield [*archives, "-XX:TieredStopAtLevel=1", *_QUIET]
            if not top.exists():
                raise PgwalError(f"Java {java.version} in {java.home} recorded no archive of Spark's classes.")
            for old in target.parent.glob("classes-*"):
                shutil.rmtree(old, ignore_errors=True)
            target.mkdir()
            base.rename(target / _BASE)
            top.rename(target / _TOP)
    except (OSError, subprocess.SubprocessError) as error:
        raise PgwalError(f"An archive of Spark's classes cannot be made in {target.parent} ({error}).") from None


def _folder(java: Java) -> Path:
    """The archive's folder, one per Java (by its real files, not the links to them) and Spark: a JVM refuses archives of other files."""
    jars = spark_home() / "jars"
    release = java.home / "release"
    parts = (
        (java.home / "lib").resolve(),
        release.read_text() if release.is_file() else "",
        jars,
        version("pyspark"),
        int(jars.stat().st_mtime),  # layers of images keep whole seconds
    )
    return _PLACE / f"classes-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"
