"""An archive of the classes that Spark loads (Java's class data sharing): with it a JVM does not read and check them all again.

Recorded once for an installation, beside it in `sys.prefix`; where there is none, or it does not fit any more, Spark starts as ever, only
slower. What the JVM demands of it: https://docs.oracle.com/en/java/javase/21/vm/class-data-sharing.html
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
# Java's own classes, and on top of them the others: a bundled Java comes without an archive of its own.
_BASE, _TOP = "java.jsa", "spark.jsa"
# A JVM to which the archive does not fit says so on its standard output.
_QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-Xlog:class+path=off")


def options(java: Java) -> list[str]:
    """Options with which `java` uses the archive; none where none was recorded for it."""
    folder = _folder(java)
    if not (folder / _TOP).exists():
        return []
    return [shlex.quote(f"-XX:SharedArchiveFile={folder / _BASE}:{folder / _TOP}"), *_QUIET]


@contextlib.contextmanager
def recorded(java: Java) -> Iterator[list[str]]:
    """Options with which a JVM records an archive when it ends; it is kept if that JVM is gone, and wrote one, at the end of the block.

    Archives of what was installed here before are removed. Raises PgwalError when there is nothing to keep, or no place for it.
    """
    target = _folder(java)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".recording-", dir=target.parent) as name:
            base, top = Path(name, _BASE), Path(name, _TOP)
            dump = [java.home / "bin/java", "-Xshare:dump", f"-XX:SharedArchiveFile={base}", *_QUIET]
            subprocess.run(dump, capture_output=True, check=True, stdin=subprocess.DEVNULL)
            archives = [shlex.quote(f"-XX:SharedArchiveFile={base}"), shlex.quote(f"-XX:ArchiveClassesAtExit={top}")]
            # It is over before what Java's second compiler makes would pay.
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
    """One for each Java, by its own files and not the links to them, and each Spark: a JVM takes none recorded with other files."""
    jars = spark_home() / "jars"
    release = java.home / "release"
    parts = (
        (java.home / "lib").resolve(),
        release.read_text() if release.is_file() else "",
        jars,
        version("pyspark"),
        jars.stat().st_mtime_ns,
    )
    return _PLACE / f"classes-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"
