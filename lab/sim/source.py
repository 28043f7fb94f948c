"""`scenario`: makes the settings, requests, aborts and faults of a simulation from one seed.

A request's text and the number of correct drafts at each root depend on its arrival and the
position alone, not on the requests beside it. Samples share one prompt, and a request may begin
with a pinned text, or with some of an earlier request's prompt and output.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lab.sim.arrivals import Arrival
from lab.sim.settings import Settings
from specpool.capacity.group_sizes import Placement

FaultKind = Literal["launch", "result", "not_finite", "interrupt"]

_SHAPES = [(1, 1, 2), (3, 1, 4), (7, 1, 8), (2, 2, 4), (4, 4, 16), (5, 8, 32)]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one step.

    `launch`: the forward cannot be enqueued. `result`: the forward fails on the device.
    `not_finite`: the first lane's logits are not finite. `interrupt`: Ctrl-C before its results.
    """

    step: int
    kind: FaultKind


@dataclass(frozen=True, slots=True)
class Scenario:
    """The settings, requests and faults of one simulation."""

    seed: int
    settings: Settings
    arrivals: tuple[Arrival, ...]  # in the order of their turns
    faults: tuple[Fault, ...] = ()


def scenario(
    seed: int,
    *,
    talks_only: bool = False,
    mixes_drafters: bool = False,
    has_states: bool = False,
) -> Scenario:
    """Make the scenario of a seed; its pools are small, so that requests are retracted.

    With `talks_only` there are sessions in any case, and no samples, pins or stop strings. With
    `mixes_drafters` each request has its own drafter (see `Settings.mixes_drafters`). With
    `has_states` the target has recurrent layers, so there are no pins and no host tier.
    """
    rng = random.Random(seed)
    settings = _settings(rng)
    num_requests = rng.choice([8, 20, 40, 150])
    pace = rng.choice([0, 0, 1, 1, 5])  # turns between arrivals, on average
    aborts = rng.choice([0.0, 0.1, 0.4])
    has_priorities = rng.random() < 0.3
    longest = settings.max_context_len
    arrivals, turn = [], 0
    for request_id in range(1, num_requests + 1):
        turn += rng.randint(0, 2 * pace)
        prompt_len = rng.randint(1, rng.choice([4, 4, longest // 2, longest - 1]))
        max_len = min(prompt_len + rng.randint(1, rng.choice([3, longest, 2 * longest])), longest)
        arrivals.append(
            Arrival(
                request_id=request_id,
                turn=turn,
                prompt_len=prompt_len,
                max_len=max_len,
                stop_at=rng.randint(prompt_len, max_len + 4) if rng.random() < 0.5 else None,
                abort_after=rng.randint(0, 60) if rng.random() < aborts else None,
                shape=rng.randint(0, len(settings.shapes)),
                priority=rng.randint(0, 2) if has_priorities else 0,
                accept_rate=rng.choice([0.0, 0.5, 0.8, 1.0]),
            )
        )
    num_faults = rng.choice([0, 0, 2, 10])
    steps = sorted(rng.sample(range(1, 20 * num_requests), num_faults))
    kinds: list[FaultKind] = ["launch", "result", "result", "not_finite", "interrupt"]
    faults = tuple(Fault(step, rng.choice(kinds)) for step in steps)
    if not talks_only:
        arrivals = _share(random.Random(~seed), settings, arrivals)
    settings, arrivals = _begin_alike(random.Random(seed ^ 0xCAC4E), settings, arrivals)
    talks = random.Random(seed ^ 0x5E55)
    if talks.random() < 0.5 or talks_only:
        settings = replace(
            settings,
            max_sessions=talks.choice([1, 4, 16]),
            session_pages=talks.choice([None, None, 0, 8]),
        )
        arrivals = _talk(talks, arrivals)
    # No pins beside a window: the engine, not the scheduler, cuts a pin to whole pages.
    if talks.random() < 0.4 and not any(arrival.is_pin for arrival in arrivals):
        settings = _slide(talks, random.Random(seed ^ 0x51CC), settings)
    if talks.random() < 0.4:
        room = talks.choice([1.0, 1.0, 2.0, 8.0])
        host_pages = tuple(int(room * n) for n in settings.pages_per_row())
        copy_faults = talks.choice([0.0, 0.0, 0.3])
        settings = replace(settings, host_pages=host_pages, copy_faults=copy_faults)
    adapting = random.Random(seed ^ 0xADA)
    if settings.shapes and adapting.random() < 0.4:
        settings = replace(
            settings,
            adapts=adapting.choice(["ema", "dice", "budget"]),
            threshold_rounds=adapting.choice([0, 3]),
        )
        arrivals = [_adapt(adapting, arrival, arrivals) for arrival in arrivals]
    if mixes_drafters:
        settings, arrivals = _mix(random.Random(seed ^ 0xD4AF7), settings, arrivals)
    if has_states:
        flush = random.Random(seed ^ 0x57A7E).choice([1, 3, 16])
        settings = replace(settings, state_flush=flush, host_pages=(), copy_faults=0.0)
        arrivals = [replace(arrival, is_pin=False, unpin_after=None) for arrival in arrivals]
    return Scenario(seed, settings, tuple(arrivals), faults)


def _mix(
    rng: random.Random, settings: Settings, arrivals: Sequence[Arrival]
) -> tuple[Settings, list[Arrival]]:
    """Give each request a drafter of its own; the samples of a prompt have one drafter."""
    kinds: dict[int, tuple[bool, float]] = {}
    for arrival in arrivals:
        kind = rng.random() < 0.5, rng.choice([0.0, 0.0, 0.3, 1.0])
        kinds[arrival.request_id] = kinds.get(arrival.sample_of or 0, kind)
    mixed = []
    for arrival in arrivals:
        reads_tokens, doubts = kinds[arrival.request_id]
        mixed.append(replace(arrival, reads_tokens=reads_tokens, doubts=doubts))
    return replace(settings, mixes_drafters=True, reads_tokens=True), mixed


def _adapt(rng: random.Random, arrival: Arrival, arrivals: Sequence[Arrival]) -> Arrival:
    """Return the request, mostly without a shape of its own, perhaps with a jump in acceptance."""
    jumps = rng.random() < 0.5
    jump = rng.randint(arrival.prompt_len, arrival.max_len), rng.choice([0.0, 0.5, 0.9, 1.0])
    adapts, most_steps = rng.random() < 0.8, rng.choice([None, None, 0, 1, 3])
    if (
        arrival.is_pin
        or arrival.sample_of is not None
        or any(other.sample_of == arrival.request_id for other in arrivals)
    ):
        return arrival  # samples must stay equal, and a pin keeps its shape
    if arrival.session:
        return replace(arrival, adapts=adapts)
    return replace(
        arrival,
        adapts=adapts,
        most_steps=most_steps if adapts else None,
        jump=jump if jumps else None,
    )


def _slide(rng: random.Random, sinks: random.Random, settings: Settings) -> Settings:
    """Return the settings with a window, mostly with a sink.

    One more group has it, or, as with `EngineConfig(draft_window=)`, the draft group.
    """
    P = settings.page_sizes[0] if rng.random() < 0.7 else rng.choice([1, 3, 4, 16, 64])
    window = min(rng.choice([1, 2, 5, 16, 40]), settings.max_context_len - 1)
    sink = min(sinks.choice([0, 1, 2, 5, 17]), settings.max_context_len - window)
    is_draft = settings.hosts_drafts == (False, True) and sinks.random() < 0.8
    page_sizes, num_pages = (*settings.page_sizes, P), settings.num_pages
    if is_draft:
        page_sizes, num_pages = settings.page_sizes, num_pages[:1]
    settings = replace(
        settings, page_sizes=page_sizes, window=window, sink=sink, drafts_slide=is_draft
    )
    room = rng.choice([0.0, 0.0, 0.5, 3.0])
    least = settings.pages_per_row()[-1]
    return replace(settings, num_pages=(*num_pages, least + int(room * least)))


def _share(rng: random.Random, settings: Settings, arrivals: list[Arrival]) -> list[Arrival]:
    """Return the requests, in some scenarios with samples, pinned texts or stop strings."""
    samples, pins = rng.choice([0.0, 0.0, 0.2]), rng.choice([0.0, 0.0, 0.1, 0.5])
    stops = rng.choice([0.0, 0.3])
    shared: list[Arrival] = []
    pinned: list[Arrival] = []
    to_come = iter(arrivals)
    for arrival in to_come:
        if pinned and rng.random() < 0.7:
            arrival = _begin_with(rng, rng.choice(pinned), arrival, settings)
        if rng.random() < pins:
            pinned.append(_pin(rng, arrival, settings))
            shared.append(pinned[-1])
            continue
        shared.append(_stop(rng, arrival, stops))
        if rng.random() < samples:
            for _, other in zip(range(rng.choice([1, 3, 7])), to_come, strict=False):
                shared.append(_stop(rng, _sample(rng, arrival, other), stops))
    return shared


def _begin_alike(
    rng: random.Random, settings: Settings, arrivals: list[Arrival]
) -> tuple[Settings, list[Arrival]]:
    """Return both, mostly with a prefix cache: many requests then begin as an earlier one."""
    if rng.random() >= 0.6:
        return settings, arrivals
    settings = replace(settings, prefix_cache=True, forgets=rng.choice([0.0, 0.0, 0.02]))
    share, num_salts = rng.choice([0.3, 0.8, 1.0]), rng.choice([1, 1, 2, 3])
    if rng.random() < 0.2:  # nothing is shared but what samples and pins share
        return settings, arrivals
    firsts = {arrival.sample_of for arrival in arrivals}
    alike: list[Arrival] = []
    seen: list[Arrival] = []  # few, so that many requests begin with the same text
    for arrival in arrivals:
        is_free = not (arrival.is_pin or arrival.sample_of or arrival.request_id in firsts)
        if is_free and not arrival.origins:
            if seen and rng.random() < share:
                arrival = _begin_with(rng, rng.choice(seen), arrival, settings, has_output=True)
            salt = rng.choice(["", "a", "b"][:num_salts])
            arrival = replace(arrival, salt=salt)
            if len(seen) < 6 or rng.random() < 0.2:
                seen = [*seen[-5:], arrival]
        alike.append(arrival)
    return settings, alike


def _talk(rng: random.Random, arrivals: list[Arrival]) -> list[Arrival]:
    """Return the requests, some or all of them as turns of sessions."""
    share, num_sessions = rng.choice([0.5, 1.0, 1.0]), rng.choice([1, 4, 12])
    rewinds, forks = rng.choice([0.0, 0.2]), rng.choice([0.0, 0.2])
    short, seen = rng.random() < 0.7, list[int]()
    turned = []
    for arrival in arrivals:
        has_others = arrival.is_pin or arrival.sample_of is not None or arrival.origins
        if has_others or arrival.stop_text is not None or rng.random() >= share:
            turned.append(arrival)
            continue
        prompt_len = min(arrival.prompt_len, rng.choice([1, 3, 8])) if short else arrival.prompt_len
        session, fork_of = rng.randint(1, num_sessions), None
        if rng.random() < forks and seen:
            num_sessions += 1
            session, fork_of = num_sessions, rng.choice(seen)
        seen.append(session)
        num_new = min(arrival.max_len - arrival.prompt_len, rng.choice([1, 3, 12, 12, 100]))
        max_len = prompt_len + num_new
        stop_at = None if arrival.stop_at is None else rng.randint(prompt_len, max_len + 4)
        turned.append(
            replace(
                arrival,
                prompt_len=prompt_len,
                max_len=max_len,
                stop_at=stop_at,
                session=session,
                pause=rng.choice([0, 0, 1, 10]),
                rewind=rng.random() if rng.random() < rewinds else None,
                fork_of=fork_of,
                closes=rng.random() < 0.05,
            )
        )
    samples = {arrival.sample_of for arrival in turned}  # their first one stays unchanged
    by_id = {arrival.request_id: arrival for arrival in arrivals}
    used = samples | {n for arrival in turned for n, _ in arrival.origins}
    return [by_id[a.request_id] if a.request_id in used else a for a in turned]


def _begin_with(
    rng: random.Random,
    other: Arrival,
    arrival: Arrival,
    settings: Settings,
    *,
    has_output: bool = False,
) -> Arrival:
    """Return the request with a prompt that begins with some or all of another one's prompt.

    With `has_output`, the other one's output counts as part of its prompt.
    """
    own_len = min(arrival.prompt_len, settings.max_context_len - 1)
    text_len = other.prompt_len
    if has_output:
        ends = other.max_len if other.stop_at is None else min(other.stop_at, other.max_len)
        text_len = min(ends, settings.max_context_len - 1)
    shared_len = rng.choice([text_len, text_len, rng.randint(1, text_len)])
    prompt_len = rng.choice([shared_len, min(shared_len + own_len, settings.max_context_len - 1)])
    origins = tuple((n, min(end, shared_len)) for n, end in other.origins)
    num_new = arrival.max_len - arrival.prompt_len
    max_len = min(prompt_len + num_new, settings.max_context_len)
    return replace(
        arrival,
        prompt_len=prompt_len,
        max_len=max_len,
        stop_at=None if arrival.stop_at is None else rng.randint(prompt_len, max_len + 4),
        origins=(*origins, (other.request_id, shared_len)),
    )


def _pin(rng: random.Random, arrival: Arrival, settings: Settings) -> Arrival:
    """Return a request that pins the prompt, with the shape that `Engine.pin` takes."""
    return replace(
        arrival,
        max_len=arrival.prompt_len + 1,
        stop_at=None,
        shape=min(1, len(settings.shapes)),
        is_pin=True,
        unpin_after=rng.choice([None, rng.randint(0, 100)]),
    )


def _sample(rng: random.Random, first: Arrival, other: Arrival) -> Arrival:
    """Return another sample of the first request's prompt, with the other's number."""
    stops = first.stop_at is not None
    return replace(
        first,
        request_id=other.request_id,
        stop_at=rng.randint(first.prompt_len, first.max_len + 4) if stops else None,
        abort_after=other.abort_after,
        sample_of=first.request_id,
        origins=(*first.origins, (first.request_id, first.prompt_len)),
    )


def _stop(rng: random.Random, arrival: Arrival, rate: float) -> Arrival:
    """Return the request, perhaps with a stop string."""
    if rng.random() >= rate:
        return arrival
    ends = rng.randint(arrival.prompt_len, arrival.max_len + 4)
    return replace(arrival, stop_text=(ends, ends + rng.choice([0, 0, 1, 5])))


def _settings(rng: random.Random) -> Settings:
    placement: Placement = rng.choice(["split", "shared"])
    drafter = rng.choice(["eagle", "eagle", "ngram", "none"])
    page_size = rng.choice([1, 3, 4, 4, 16, 64])
    page_sizes = [page_size]
    if placement == "split" and drafter == "eagle":
        page_sizes.append(page_size if rng.random() < 0.7 else rng.choice([1, 3, 4, 16, 64]))
    shapes = rng.sample(_SHAPES, rng.randint(1, 3)) if drafter != "none" else []
    settings = Settings(
        page_sizes=tuple(page_sizes),
        num_pages=(),
        placement=placement,
        layout=rng.choice(["dense", "holey", "holey"]),
        policy="exact" if rng.random() < 0.8 else "double_buffer",
        shapes=tuple(shapes),
        keeps_draft_kv=drafter == "eagle",
        reads_tokens=drafter == "ngram",
        overlap_depth=rng.randint(0, 1),
        page_fencing=rng.random() < 0.8,
        max_batch=rng.choice([1, 3, 8, 8]),
        prefill_tokens=rng.choice([1, 5, 32, 32, 1024, 1024]),
        headroom=rng.choice([0, 0, 0, 8, 64]),
        max_context_len=rng.choice([8, 40, 100, 100]),
        is_late=rng.random() < 0.5,
    )
    room = rng.choice([0.0, 0.0, 0.0, 0.5, 3.0])
    num_pages = tuple(n + int(room * rng.random() * n) for n in settings.pages_per_row())
    return replace(settings, num_pages=num_pages)
