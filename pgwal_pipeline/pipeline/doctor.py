"""Check everything that the pipeline needs, one thing after another."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pgwal_pipeline.lake.layout import Lake, require_writable
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.messages.errors import PgwalError, SettingError, SlotLost
from pgwal_pipeline.pipeline.applied_options import filters, require_fitting
from pgwal_pipeline.pipeline.bootstrap import require_agreement
from pgwal_pipeline.pipeline.registration import failing
from pgwal_pipeline.postgres import health
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.publication_shape import Wanted
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark.java import ensure_java
from pgwal_pipeline.spark.session import reach
from pgwal_pipeline.values.lsn import format_lsn


@dataclass(frozen=True)
class Check:
    """The result of one check: what was found, and how to fix it if `ok` is false."""

    name: str
    ok: bool
    found: str
    mend: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the check as `pgwal doctor --json` shows it."""
        return asdict(self)


def examine(environment: Mapping[str, str]) -> list[Check]:
    """Check settings, source, lake, Dagster's folder and Spark. Raises nothing for what it finds, and changes nothing."""
    try:
        settings = Settings.from_environment(environment)
        dsn = settings.dsn
    except SettingError as error:
        return [settings_cannot_be_read(error)]
    checks = [Check("settings", True, f"lake {settings.lake}, slot {settings.slot}, publication {settings.publication}")]
    checks += [
        Check(check.name, check.ok, check.found, check.mend)
        for check in health.doctor_checks(
            dsn, slot=settings.slot, publication=settings.publication, globs=settings.tables, wanted=_wanted(settings)
        )
    ]
    checks.append(_probe("lake", lambda: _lake(settings)))
    if all(check.ok for check in checks):  # else a check above has already reported the cause
        checks.append(_probe("agreement", lambda: _agreement(settings)))
    checks.append(_probe("followed", lambda: _tables(settings)))
    if settings.spark_catalog is not None:
        checks.append(_probe("catalog", lambda: _catalog(settings)))
    checks.append(_dagster(environment.get("DAGSTER_HOME") or ".dagster"))
    remote = settings.spark_remote
    checks.append(_probe("java", _java) if remote is None else _probe("spark", lambda: _spark(remote)))
    return checks


def settings_cannot_be_read(error: SettingError) -> Check:
    """Return the check of settings that cannot be read."""
    return Check("settings", False, str(error), "Set the variable as the message says; .env.example lists them all.")


def _wanted(settings: Settings) -> Wanted:
    """Return what is wanted of the tables, with the row filters that are in force as far as the lake can be read."""
    with suppress(PgwalError):
        return Wanted(settings.table_options, filters(Ledger(Lake(settings.lake)).tables()))
    return Wanted(settings.table_options)


def _probe(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except PgwalError as error:
        return Check(name, False, str(error), "Do what the message says, then run `pgwal doctor` again.")


def _lake(settings: Settings) -> Check:
    lake = Lake(settings.lake)
    require_writable(lake)
    ledger = Ledger(lake)
    source, frontier = ledger.source(), ledger.frontier()
    if source is None:
        return Check("lake", True, f"{lake.uri} is writable and new")
    for variable, was, now in (("SLOT", source.slot, settings.slot), ("PUBLICATION", source.publication, settings.publication)):
        if was != now:
            return Check("lake", False, f"{lake.uri} is fed by {variable.lower()} {was}, not {now}", f"Set PGWAL_{variable}={was}.")
    return Check(
        "lake", True, f"{lake.uri} holds database {source.database} up to {format_lsn(frontier) if frontier is not None else 'nothing yet'}"
    )


def _tables(settings: Settings) -> Check:
    """Check that no table is in error. Such a table does not stop the others, but makes `pgwal sync` end with 1."""
    states = {str(name): state for name, state in Ledger(Lake(settings.lake)).tables().items() if state.trouble is not None}
    failed = {name: state.trouble for name, state in states.items()}
    if not failed:
        return Check("followed", True, "no table is in error")
    reasons = " ".join(f"{name}: {reason}" for name, reason in failed.items())
    back = ", ".join(f"pgwal {'resnapshot' if state.held is None else 'accept'} '{name}'" for name, state in states.items())
    return Check("followed", False, f"{len(failed)} in error; the others go on. {reasons}", f"Fix the cause, then run {back}.")


def _catalog(settings: Settings) -> Check:
    """Check that the last publishes could register every table in the catalog. Nothing else waits for that."""
    failed = failing(settings, Ledger(Lake(settings.lake)))
    if not failed:
        return Check("catalog", True, f"no table is missing in {settings.spark_catalog}")
    reasons = " ".join(f"{location}: {reason}" for location, reason in sorted(failed.items()))
    return Check(
        "catalog",
        False,
        f"{len(failed)} tables are not registered in {settings.spark_catalog}; the lake has them. {reasons}",
        "Do what the messages say; PGWAL_SPARK_CATALOG and PGWAL_SPARK_CONF describe the catalog. Later publishes try it again.",
    )


def _agreement(settings: Settings) -> Check:
    """Check that source, slot, publication and lake belong together, as every drain does first."""
    try:
        with connect(settings.dsn) as conn:
            require_agreement(settings, conn)
            require_fitting(settings, conn, Ledger(Lake(settings.lake)))
    except SlotLost as loss:
        if settings.on_slot_loss == "stop":
            raise
        return Check("agreement", True, f"{loss} The next run does that by itself (PGWAL_ON_SLOT_LOSS=resnapshot).")
    return Check("agreement", True, "source, slot, publication and lake belong together")


def _dagster(folder: str) -> Check:
    """Check that Dagster's instance can be in `folder`, which the first run creates."""
    try:
        home = place = Path(folder).expanduser().absolute()
    except RuntimeError as error:
        return Check("dagster", False, f"DAGSTER_HOME cannot be {folder} ({error})", "Set DAGSTER_HOME to a folder that can be written to.")
    try:
        while not (place.exists() or place.is_symlink()):
            place = place.parent
        reason = None if place.is_dir() else f"{place} is not a folder"
        if reason is None and not os.access(place, os.W_OK | os.X_OK):
            reason = f"this user may not write to {place}"
    except OSError as error:
        reason = str(error.strerror)
    if reason is not None:
        return Check("dagster", False, f"DAGSTER_HOME cannot be {home} ({reason})", "Set DAGSTER_HOME to a folder that can be written to.")
    return Check("dagster", True, f"{home} is writable" if place == home else f"the first run creates {home}")


def _spark(address: str) -> Check:
    host, port = reach(address)
    return Check("spark", True, f"a Spark Connect server answers at {host}:{port}")


def _java() -> Check:
    found = ensure_java()
    return Check("java", True, f"JAVA_HOME {found.get('JAVA_HOME', 'as it is')}")
