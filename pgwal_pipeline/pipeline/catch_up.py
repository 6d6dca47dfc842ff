"""The catch-up: a long backlog is cut into windows that are read side by side, each by a process of its own, and count all together.

The plan stands in the ledger before the first slot is made, and so does every window as soon as its files are durable. Whatever dies, the
next drain takes the windows that are there and reads the others again, with the same borders. Nothing of a plan counts before all of it
has been read: the tables are reviewed over all windows at once, and the frontier then passes all of them in one step.
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from deltalake import Schema

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake.fitting import first_misfit
from pgwal_pipeline.lake.ledger import Plan, Read, Window
from pgwal_pipeline.lake.stream_facts import StreamFacts
from pgwal_pipeline.messages.amounts import duration
from pgwal_pipeline.messages.errors import SourceRefused, SourceUnavailable
from pgwal_pipeline.pipeline.alterations import CatalogEntry
from pgwal_pipeline.pipeline.catch_up_process import CatchUpProcess
from pgwal_pipeline.pipeline.window_commit import DrainContext, commit_windows, open_stream, read_ahead, review
from pgwal_pipeline.postgres import copies
from pgwal_pipeline.postgres.copies import Room, SlotCopy
from pgwal_pipeline.postgres.dsn import on_this_machine
from pgwal_pipeline.postgres.slot_loss import seconds_to_loss
from pgwal_pipeline.postgres.stream import ReplicationStream
from pgwal_pipeline.values.lsn import format_lsn, window_key
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline.values.xid import Snapshot

_LEAST_WINDOW = 256 << 10  # bytes of WAL; less is not worth a process
_LEAST_BUDGET = 1 << 20  # bytes
_CORES_FOR_BOTH = 4  # with fewer that source and readers share, two windows took longer than one (`python -m bench catch_up`)


@dataclass(frozen=True, slots=True)
class Split:
    """Into how many windows a backlog is cut, and why into one where more were asked for."""

    windows: int
    reason: str | None = None


def windows_for(lag: int, threshold: int, slots: int, room: Room, cores: int) -> Split:
    """How many windows a backlog of `lag` bytes is worth, by PGWAL_CATCHUP_THRESHOLD and PGWAL_CATCHUP_SLOTS.

    At most one for each of this machine's `cores`, and besides the first no more than half of the slots and walsenders that are free (the
    first one's walsender is not counted among them yet).
    """
    wanted = min(slots, lag // _LEAST_WINDOW - 1)
    if lag < threshold or wanted < 1:
        return Split(1)
    if cores < 2:
        return Split(1, "this machine has one core, which a single reader keeps busy")
    extra = min(wanted, cores - 1, room.slots // 2, max(0, room.senders - 1) // 2)
    if extra < 1:
        return Split(
            1,
            f"the source has {room.slots} replication slots and {room.senders} walsenders free, of which a catch-up takes no more than "
            f"half; raise max_replication_slots and max_wal_senders for it, or set PGWAL_CATCHUP_SLOTS=0",
        )
    return Split(1 + extra)


def borders(start_lsn: int, end_lsn: int, windows: int) -> tuple[int, ...]:
    """The ends of `windows` windows of about equal WAL bytes that follow one another from `start_lsn` to `end_lsn`."""
    return tuple(start_lsn + (end_lsn - start_lsn) * number // windows for number in range(1, windows + 1))


def cores() -> int:
    """How many cores this process may keep busy, a container's limit included."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else max(1, min(count, round(int(quota) / int(period))))


def plan(ctx: DrainContext, start_lsn: int, end_lsn: int, ended: str) -> Plan | None:
    """Cut the backlog if it is long enough and there is room, and write the plan down; None where one reader is to do it all.

    `ended` is what `pg_current_snapshot()` says now.
    """
    settings, lag = ctx.settings, end_lsn - start_lsn
    if settings.catchup_slots == 0 or lag < settings.catchup_threshold:
        return None
    free = cores()
    if free < _CORES_FOR_BOTH and not settings.catch_up_asked_for and on_this_machine(ctx.conn):
        cut = Split(1, f"the source runs on this machine too, and one reader keeps {free} cores busy; PGWAL_CATCHUP_SLOTS=2 asks for more")
    else:
        cut = windows_for(lag, settings.catchup_threshold, settings.catchup_slots, copies.room(ctx.conn), free)
    if cut.windows == 1:
        if cut.reason is not None:
            ctx.warn(f"The backlog of {lag:,} bytes is drained by one reader alone: {cut.reason}.")
        return None
    made = Plan(start_lsn, borders(start_lsn, end_lsn, cut.windows), ended)
    ctx.ledger.record_plan(made)
    failpoints.hit("catch_up.planned")
    ctx.progress.say(f"The backlog of {lag:,} bytes is drained in {cut.windows} windows side by side.")
    return made


def carry_out(
    ctx: DrainContext, plan: Plan, before: Mapping[TableName, CatalogEntry]
) -> tuple[tuple[Window, ...], dict[TableName, CatalogEntry]] | None:
    """Read the windows of `plan` that are not read yet, count all of them, and confirm the slot; the windows, and the last looks.

    `before` are the looks at the tables from before. None where the slot cannot be copied and nothing has been read yet: the plan is given
    up, and one reader is to do it all. Raises what reading raises, a window's own process included; what has been read by then stays read.
    """
    read = _read_all(ctx, plan)
    if read is None:
        ctx.ledger.record_plan(replace(plan, ends=()))
        return None
    plan = read
    reads = _fitting(ctx, plan)
    failpoints.hit("catch_up.all_read")
    found = review(ctx, before, StreamFacts.merged(read.facts for read in reads), Snapshot.parse(plan.ended))
    windows = commit_windows(ctx.ledger, [read.window for read in reads], ctx.warn)
    failpoints.hit("drain.before_confirm")
    copies.confirm_unread(ctx.conn, ctx.settings.dsn, ctx.settings.slot, plan.ends[-1], warn=ctx.warn)
    failpoints.hit("drain.after_confirm")
    return windows, found


def _read_all(ctx: DrainContext, plan: Plan) -> Plan | None:
    """Have every window of the plan read; the plan, which has more windows then where a connection broke off in one.

    None, and nothing done, where no copy of the slot can be had for a plan that is new.
    """
    ledger, settings = ctx.ledger, ctx.settings
    plan = _refined(ctx, plan)
    known = ledger.reads(plan)
    missing = [limits for limits in plan.ranges if window_key(limits[1]) not in known]
    if known and missing:
        ctx.progress.say(f"{len(known)} of {len(plan.ends)} windows were read before; the others are read now.")
    extra = min(len(missing) - 1, windows_for(1 << 62, 0, settings.catchup_slots, copies.room(ctx.conn), cores()).windows - 1)
    budget = max(_LEAST_BUDGET, settings.memory_budget // (1 + max(0, extra)))
    with ExitStack() as stack:
        crew = [
            stack.enter_context(CatchUpProcess(settings, limits, budget, ctx.server_version, _stage(plan, limits), ctx.progress))
            for limits in missing[1 : 1 + max(0, extra)]
        ]
        refused = [process.failure for process in crew if not process.has_slot()]
        failpoints.hit("catch_up.ready")
        if refused and not known:
            ctx.warn(f"The backlog is drained by one reader alone, for the slot cannot be copied: {refused[0]}")
            return None
        try:
            if missing:
                _read_here(ctx, plan, missing[0], budget)
        except SourceUnavailable as error:
            # The others may have kept their connections, and what they read is not to be read again.
            ctx.progress.say(f"{_stage(plan, missing[0]).capitalize()} broke off: {error}")
        for process in crew:
            process.wait()
        for process in crew:
            if process.failure is not None and not process.may_be_tried_again:
                raise process.failure
            if process.failure is not None:
                ctx.progress.say(str(process.failure))
    plan = _refined(ctx, plan)
    known = ledger.reads(plan)
    for limits in plan.ranges:
        if window_key(limits[1]) not in known:
            ctx.progress.say(f"{_stage(plan, limits).capitalize()} is read by this process now.")
            _read_here(ctx, plan, limits, settings.memory_budget)
    return plan


def _refined(ctx: DrainContext, plan: Plan) -> Plan:
    """The plan with what broke off cut from the rest, as the ledger has it from now on."""
    refined = ctx.ledger.refined(plan)
    if refined != plan:
        ctx.ledger.record_plan(refined)
    return refined


def _read_here(ctx: DrainContext, plan: Plan, limits: tuple[int, int], budget: int, expected: Mapping[str, Schema] | None = None) -> None:
    """Read one window in this process and write down that it has been read."""
    with _stream(ctx, plan, limits[0]) as stream:
        read = read_ahead(
            stream,
            ctx.settings,
            ctx.ledger,
            ctx.conn,
            limits,
            memory_budget=budget,
            progress=ctx.progress,
            stage=_stage(plan, limits),
            expected=expected,
        )
    failpoints.hit("drain.after_files")
    ctx.ledger.record_read(read)
    failpoints.hit("catch_up.read_here")


def _stream(ctx: DrainContext, plan: Plan, start_lsn: int) -> ReplicationStream:
    """The stream from one window on: the slot's own for the first, for a later one a copy's, which skips what lies before much faster."""
    settings = ctx.settings
    if start_lsn > plan.start_lsn:
        try:
            copy = SlotCopy.make(settings.dsn, settings.slot, blocked_timeout=settings.blocked_timeout, warn=ctx.warn)
            return copy.stream(settings.publication, start_lsn, server_version=ctx.server_version)
        except SourceRefused as refusal:
            ctx.progress.say(f"The slot itself is read from {format_lsn(start_lsn)} on, for it cannot be copied: {refusal}")
    return open_stream(ctx, start_lsn)


def _fitting(ctx: DrainContext, plan: Plan) -> list[Read]:
    """What has been read of all windows, in their order; one whose files do not fit after those before it is read again until it does.

    That is one in which a column has another type than in an earlier window that made it: neither knew of the other.
    """
    while True:
        known = ctx.ledger.reads(plan)
        reads = [known[window_key(end)] for _, end in plan.ranges]
        misfit = first_misfit(ctx.ledger.lake, [read.window.tables for read in reads])
        if misfit is None:
            return reads
        number, expected = misfit
        limits = plan.ranges[number]
        ctx.progress.say(f"{_stage(plan, limits).capitalize()} is read again: a column has another type there than in the one before.")
        ctx.ledger.forget_read(reads[number].window)
        _read_here(ctx, plan, limits, ctx.settings.memory_budget, expected)


def _stage(plan: Plan, limits: tuple[int, int]) -> str:
    return f"window {plan.ranges.index(limits) + 1} of {len(plan.ends)}"


@dataclass(frozen=True, slots=True)
class DrainRate:
    """How a drain kept up with its source: bytes of WAL drained and written meanwhile, in `seconds`.

    `left` are the bytes still unread at its end, `safe` those that may be written until the slot is in danger, None where nothing says so.
    """

    drained: int
    written: int
    seconds: float
    left: int
    safe: int | None


def falling_behind(slot: str, pace: DrainRate, threshold: int) -> str | None:
    """The warning that a backlog past `threshold` bytes grows faster than it is drained, and what comes of it; None if it does not."""
    if pace.left < threshold or pace.written <= pace.drained or pace.seconds <= 0:
        return None
    source, ours = pace.written / pace.seconds, pace.drained / pace.seconds
    seconds = seconds_to_loss(pace.safe, source - ours)
    if seconds is None:
        comes = f"nothing limits what slot {slot} keeps, so that it fills the source's disk (max_slot_wal_keep_size would limit it)"
    else:
        comes = f"slot {slot} is lost in about {duration(seconds)} at these rates (max_slot_wal_keep_size)"
    return (
        f"The backlog grows faster than it is drained: the source writes {source / 2**20:.1f} MB of WAL a second, {ours / 2**20:.1f} MB "
        f"are drained, and {comes}. Give the drain more cores and PGWAL_CATCHUP_SLOTS, or write less."
    )
