"""Catch up: read a long backlog as windows side by side, each in a process of its own, and commit all of them together.

The plan is recorded in the ledger before the first slot is copied, and each window as soon as its files are durable. After a crash the next
drain keeps the windows that have been read and reads the others, with the same limits. No window is committed before all of them have been
read: the tables are reviewed over all windows at once, and the frontier then passes all of them in one step.
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
_CORES_FOR_BOTH = 4  # if source and readers share fewer, two windows took longer than one (`python -m bench catch_up`)


@dataclass(frozen=True, slots=True)
class Split:
    """The number of windows of a backlog; `reason` says why it is one although more were asked for."""

    windows: int
    reason: str | None = None


def windows_for(lag: int, threshold: int, slots: int, room: Room, cores: int) -> Split:
    """Return the number of windows for a backlog of `lag` bytes; `threshold` and `slots` are the settings of a catch-up.

    There is at most one window for each of `cores`. Besides the first, which reads the slot itself, they use at most half of the free slots
    and walsenders. `room` still includes the walsender of the first.
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
    """Return the end LSNs of `windows` windows of about equal size that follow one another from `start_lsn` to `end_lsn`."""
    return tuple(start_lsn + (end_lsn - start_lsn) * number // windows for number in range(1, windows + 1))


def cores() -> int:
    """Return how many cores this process may use, under a container's limit."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else max(1, min(count, round(int(quota) / int(period))))


def plan(ctx: DrainContext, start_lsn: int, end_lsn: int, ended: str) -> Plan | None:
    """Plan a catch-up and record the plan; None if the backlog is too short or there is no room, so that one reader does it all.

    `ended` is the text of a `pg_current_snapshot()` taken after `end_lsn` was chosen.
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
    """Read the windows of `plan` that have not been read, commit all of them, and confirm the slot.

    `before` are the catalog entries from before. Returns the windows and the catalog entries now; None, with the plan given up, if the slot
    cannot be copied and nothing has been read, so that one reader does it all. Raises any error of reading, also one in another process;
    windows that have been read by then are kept.
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
    """Have every window of the plan read and return the plan, with more windows if a connection broke in one.

    Returns None, with nothing read, if the plan is new and the slot cannot be copied.
    """
    ledger, settings = ctx.ledger, ctx.settings
    plan = _refined(ctx, plan)
    known = ledger.reads(plan)
    missing = [limits for limits in plan.ranges if window_key(limits[1]) not in known]
    if known and missing:
        ctx.progress.say(f"{len(known)} of {len(plan.ends)} windows have been read already; the others are read now.")
    extra = min(len(missing) - 1, windows_for(1 << 62, 0, settings.catchup_slots, copies.room(ctx.conn), cores()).windows - 1)
    budget = max(_LEAST_BUDGET, settings.memory_budget // (1 + max(0, extra)))
    with ExitStack() as stack:
        processes = [
            stack.enter_context(CatchUpProcess(settings, limits, budget, ctx.server_version, _stage(plan, limits), ctx.progress))
            for limits in missing[1 : 1 + max(0, extra)]
        ]
        refused = [process.failure for process in processes if not process.has_slot()]
        failpoints.hit("catch_up.ready")
        if refused and not known:
            ctx.warn(f"The backlog is drained by one reader alone, since the slot cannot be copied: {refused[0]}")
            return None
        try:
            if missing:
                _read_here(ctx, plan, missing[0], budget)
        except SourceUnavailable as error:
            # The other processes may still be connected: wait for them, so that their windows need not be read again.
            ctx.progress.say(f"{_stage(plan, missing[0]).capitalize()} was not read to its end: {error}")
        for process in processes:
            process.wait()
        for process in processes:
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
    """Cut windows in two whose reading broke off, record the plan, and return it."""
    refined = ctx.ledger.refined(plan)
    if refined != plan:
        ctx.ledger.record_plan(refined)
    return refined


def _read_here(ctx: DrainContext, plan: Plan, limits: tuple[int, int], budget: int, expected: Mapping[str, Schema] | None = None) -> None:
    """Read one window in this process and record that it has been read."""
    with _stream(ctx, plan, limits[0]) as stream:
        read = read_ahead(ctx, stream, limits, budget, stage=_stage(plan, limits), expected=expected)
    failpoints.hit("drain.after_files")
    ctx.ledger.record_read(read)
    failpoints.hit("catch_up.read_here")


def _stream(ctx: DrainContext, plan: Plan, start_lsn: int) -> ReplicationStream:
    """Return the stream of a window: the slot's own for the first, a copy's for a later one, since a copy skips WAL much faster."""
    settings = ctx.settings
    if start_lsn > plan.start_lsn:
        try:
            copy = SlotCopy.make(settings.dsn, settings.slot, blocked_timeout=settings.blocked_timeout, warn=ctx.warn)
            return copy.stream(settings.publication, start_lsn, server_version=ctx.server_version)
        except SourceRefused as refusal:
            ctx.progress.say(f"The slot itself is read from {format_lsn(start_lsn)} on, since it cannot be copied: {refusal}")
    return open_stream(ctx, start_lsn)


def _fitting(ctx: DrainContext, plan: Plan) -> list[Read]:
    """Return what has been read of all windows, in order; a window whose files do not fit those before it is read again first.

    They do not fit if a column is new in one window and has another type in a later one, which was read without knowing of it.
    """
    while True:
        known = ctx.ledger.reads(plan)
        reads = [known[window_key(end)] for _, end in plan.ranges]
        misfit = first_misfit(ctx.ledger.lake, [read.window.tables for read in reads])
        if misfit is None:
            return reads
        number, expected = misfit
        limits = plan.ranges[number]
        ctx.progress.say(f"{_stage(plan, limits).capitalize()} is read again: a column has another type in it than in an earlier one.")
        ctx.ledger.forget_read(reads[number].window)
        _read_here(ctx, plan, limits, ctx.settings.memory_budget, expected)


def _stage(plan: Plan, limits: tuple[int, int]) -> str:
    return f"window {plan.ranges.index(limits) + 1} of {len(plan.ends)}"


@dataclass(frozen=True, slots=True)
class DrainRate:
    """The rate of a drain and of its source: bytes of WAL drained, and bytes written meanwhile, in `seconds`.

    `left` are the bytes still unread at its end; `safe` are the bytes that may be written before the slot may be lost, None if unlimited.
    """

    drained: int
    written: int
    seconds: float
    left: int
    safe: int | None


def falling_behind(slot: str, pace: DrainRate, threshold: int) -> str | None:
    """Return the warning that a backlog of more than `threshold` bytes grows faster than it is drained; None if it does not."""
    if pace.left < threshold or pace.written <= pace.drained or pace.seconds <= 0:
        return None
    source, ours = pace.written / pace.seconds, pace.drained / pace.seconds
    seconds = seconds_to_loss(pace.safe, source - ours)
    if seconds is None:
        effect = f"the WAL that slot {slot} keeps fills the source's disk, since nothing limits it (max_slot_wal_keep_size would)"
    else:
        effect = f"slot {slot} is lost in about {duration(seconds)} at these rates (max_slot_wal_keep_size)"
    return (
        f"The backlog grows faster than it is drained: the source writes {source / 2**20:.1f} MB of WAL a second, {ours / 2**20:.1f} MB "
        f"are drained, and {effect}. Give the drain more cores and PGWAL_CATCHUP_SLOTS, or write less."
    )
