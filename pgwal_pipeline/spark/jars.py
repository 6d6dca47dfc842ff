"""Download the jars that Spark needs besides its own: Delta Lake's, and those for S3 if the lake is there. The user's cache keeps them.

`python -m pgwal_pipeline.spark.jars [s3]` downloads them before they are needed; `make install` does that.

Ivy resolves them. It comes with Spark but is run without it, because a session that resolves packages asks the repositories at every start.
Artifacts that come with Spark (Hadoop, Parquet, Jackson …) are left out.

`DEFAULT_ARTIFACT_REPOSITORY` names another Maven repository, `spark.jars.ivySettings` in `PGWAL_SPARK_CONF` an Ivy settings file.
"""

import contextlib
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from pgwal_pipeline.host.cache import find_cached, held, user_cache
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.spark.java import find_java, trust_options

REPOSITORY_VARIABLE = "DEFAULT_ARTIFACT_REPOSITORY"
SETTINGS_CONF = "spark.jars.ivySettings"

_SCALA = "2.13"
# The version that Hadoop 3.5 was built with. Hadoop asks for all of the SDK in one jar of 686 MB, of which S3 needs a fiftieth.
_AWS_SDK = "2.35.4"
_UNWANTED = ("bundle", "wildfly-openssl")
_FETCH_SECONDS = 1800.0


def delta_packages() -> tuple[str, ...]:
    """Return the Maven coordinates of the Delta Lake that fits the installed Spark and delta-spark."""
    spark = ".".join(version("pyspark").split(".")[:2])
    return (f"io.delta:delta-spark_{spark}_{_SCALA}:{version('delta-spark')}",)


def s3_packages() -> tuple[str, ...]:
    """Return the Maven coordinates for `s3://`: Hadoop's S3A in Spark's Hadoop version, and the parts of Amazon's SDK that it uses."""
    sdk = (f"software.amazon.awssdk:{module}:{_AWS_SDK}" for module in ("s3", "s3-transfer-manager", "sts"))
    return (f"org.apache.hadoop:hadoop-aws:{_bundled()['hadoop-client-api']}", *sdk)


def cached(packages: Sequence[str]) -> tuple[Path, ...] | None:
    """Return the jars of `packages` in the cache, None if they were never downloaded."""
    folder = find_cached(_name(packages))
    return None if folder is None else tuple(sorted(folder.glob("*.jar")))


def ensure(packages: Sequence[str], say: Callable[[str], None], conf: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """Return the jars of `packages`, downloaded if the cache lacks them; `say` gets a line before a download.

    Of the Spark settings `conf` only `spark.jars.ivySettings` is used. Raises PgwalError if they cannot be downloaded.
    """
    found = cached(packages)
    if found is not None:
        return found
    with held("jars"):
        found = cached(packages)
        if found is None:
            say(f"Fetching {', '.join(packages)} for Spark; this happens once.")
            _fetch(packages, (conf or {}).get(SETTINGS_CONF))
            found = cached(packages)
    return found or ()


def spark_home() -> Path:
    """Return the folder of the installed Spark, with its programs in `bin` and jars in `jars`. Raises PgwalError without Spark."""
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise PgwalError("pyspark is not installed; install pgwal-pipeline again.")
    return Path(found.origin).parent


def _name(packages: Sequence[str]) -> str:
    """The folder of the jars inside the cache."""
    key = hashlib.sha256("\n".join((version("pyspark"), *packages)).encode()).hexdigest()[:12]
    return f"jars/{packages[0].split(':', 1)[1].replace(':', '-')}-{key}"


def _fetch(packages: Sequence[str], settings_file: str | None) -> None:
    target = user_cache() / _name(packages)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as name:
        scratch = Path(name)
        module = scratch / "ivy.xml"
        module.write_text(_module(packages, {*_bundled(), *_UNWANTED}))
        settings = Path(settings_file) if settings_file else scratch / "settings.xml"
        if settings_file is None:
            settings.write_text(_settings(os.environ.get(REPOSITORY_VARIABLE)))
        jars = scratch / "jars"
        jars.mkdir()
        spark = spark_home() / "jars"
        command = [
            str(find_java().home / "bin/java"),
            *trust_options(),
            *_proxy_options(),
            "-cp",
            os.pathsep.join(str(jar) for pattern in ("ivy-*.jar", "commons-cli-*.jar") for jar in spark.glob(pattern)),
            "org.apache.ivy.Main",
            *("-settings", str(settings), "-ivy", str(module), "-cache", str(scratch / "cache"), "-confs", "default"),
            *("-types", "jar", "bundle", "-retrieve", f"{jars}/[organisation]_[artifact]-[revision](-[classifier]).[ext]"),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False, stdin=subprocess.DEVNULL)
            said, failed = done.stdout + done.stderr, done.returncode != 0
        except subprocess.TimeoutExpired:
            said, failed = f"it was not done after {_FETCH_SECONDS:g} s", True
        if failed or not any(jars.iterdir()):
            raise PgwalError(
                f"The jars {', '.join(packages)} for Spark could not be fetched ({_reason(said)}); check the network, "
                f"name another Maven repository in {REPOSITORY_VARIABLE}, or an Ivy settings file as {SETTINGS_CONF} in PGWAL_SPARK_CONF."
            )
        with contextlib.suppress(OSError):  # another process was first
            jars.rename(target)


def _bundled() -> dict[str, str]:
    """The artifacts that come with Spark, with their versions."""
    matches = (re.fullmatch(r"(.+?)-(\d.*)\.jar", jar.name) for jar in (spark_home() / "jars").iterdir())
    return {match[1]: match[2] for match in matches if match is not None}


def _module(packages: Sequence[str], without: Collection[str]) -> str:
    """An Ivy file for `packages` with their dependencies, except the artifacts in `without`."""
    from xml.sax.saxutils import quoteattr

    lines = [
        '<ivy-module version="2.0">',
        '<info organisation="pgwal" module="jars"/>',
        '<configurations><conf name="default"/></configurations>',
    ]
    lines.append("<dependencies>")
    for package in packages:
        organisation, module, revision = (quoteattr(part) for part in package.split(":"))
        lines.append(f'<dependency org={organisation} name={module} rev={revision} conf="default->default"/>')
    lines += [f"<exclude org='*' module={quoteattr(artifact)} matcher='exact'/>" for artifact in sorted(without)]
    lines += ["</dependencies>", "</ivy-module>"]
    return "\n".join(lines)


def _settings(repository: str | None) -> str:
    """Ivy settings with one Maven repository: `repository`, or Maven Central."""
    from xml.sax.saxutils import quoteattr

    root = f" root={quoteattr(repository)}" if repository else ""
    return (
        '<ivysettings><settings defaultResolver="maven"/>'
        f'<resolvers><ibiblio name="maven" m2compatible="true"{root}/></resolvers></ivysettings>'
    )


def _proxy_options() -> list[str]:
    """Java's options for the proxy in `HTTPS_PROXY` and `HTTP_PROXY`, which Java does not read."""
    options = []
    for scheme in ("https", "http"):
        address = os.environ.get(f"{scheme}_proxy") or os.environ.get(f"{scheme.upper()}_PROXY")
        parts = urlsplit(address) if address else None
        if parts is not None and parts.hostname:
            options += [f"-D{scheme}.proxyHost={parts.hostname}", f"-D{scheme}.proxyPort={parts.port or 80}"]
    return options


def _reason(said: str) -> str:
    """The line of Ivy's output that best tells why it failed."""
    marks = ("UnknownHost", "not found", "PKIX", "timed out", "refused", "Exception", "ERROR", "unresolved", "for ")
    lines = [line.strip(" \t:") for line in said.splitlines()]
    for mark in marks:
        line = next((line for line in lines if mark in line), None)
        if line:
            return line[:200]
    return "Ivy printed nothing"


def main() -> None:
    """Download Delta's jars, and those for S3 too if the first argument is `s3`."""
    for packages in (delta_packages(), s3_packages()) if sys.argv[1:] == ["s3"] else (delta_packages(),):
        try:
            ensure(packages, lambda text: print(text, file=sys.stderr, flush=True))  # noqa: T201
        except PgwalError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
