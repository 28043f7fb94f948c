"""Laws of the busy check: it finds a stray write within a turn, and reports nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import conftest
from specpool import ConfigError, CorruptState, Engine, SamplingParams, Shape
from specpool.engine.assets import corpus, resolve
from specpool.engine.config import EngineConfig
from specpool.engine.draft import EagleDrafter
from specpool.engine.loop.busy_check import MAX_FINDINGS
from specpool.engine.models import EagleHead, TargetModel
from specpool.engine.output import Chunk
from workload import HEADS, Workload, run_mixed

PROMPTS = corpus.prompts(5, 40)
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
P = 4


@pytest.fixture(scope="module")
def target() -> Iterator[TargetModel]:
    with TargetModel.from_pretrained(resolve("specpool/tiny"), dtype="float32") as model:
        yield model


@pytest.fixture(scope="module")
def heads(target) -> dict[str, EagleHead]:
    return {n: EagleDrafter.from_pretrained(resolve(n), target).head for n in HEADS}


@pytest.fixture(scope="module")
def texts(target) -> list[list[int]]:
    engine = Engine(target, config=EngineConfig(max_context_len=128))
    return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


def build(target: TargetModel, heads: dict[str, EagleHead], **options: Any) -> Engine:
    options = {"max_batch": 3, "max_context_len": 128, "prefix_cache": False, **options}
    config = EngineConfig(shape=Shape.eagle(3, 1, 4), page_size=P, **options)
    return Engine(target, EagleDrafter(heads[HEADS[0]]), config=config)


class Run:
    """Five requests on three rows, some turns on their way."""

    def __init__(self, engine: Engine, turns: int = 4) -> None:
        self.engine = engine
        # What is out of use never comes back: the proof that no page leaked is not for it.
        conftest._ENGINES.discard(engine)
        self.outputs: dict[int, Any] = {}
        self.numbers = [self.submit(prompt) for prompt in PROMPTS]
        for _ in range(turns):
            engine.turn()
        self.rows = {r.row: r.request_id for r in engine.core.scheduler.requests() if r.row}
        assert len(self.rows) == 3

    def submit(self, prompt) -> int:
        def heard(number, item) -> None:
            if not isinstance(item, Chunk):
                self.outputs[number] = item

        return self.engine.submit(prompt, PARAMS, on_item=heard)

    def finish(self) -> list[Any]:
        while self.engine.turn():
            pass
        return [self.outputs[number] for number in self.numbers]


def stray(view: np.ndarray, index: Any, value: int) -> None:
    """Write one element of memory that Python may only read."""
    place = np.ravel_multi_index(index if isinstance(index, tuple) else (index,), view.shape)
    data = np.array(value, view.dtype).tobytes()
    ctypes.memmove(view.ctypes.data + int(place) * view.itemsize, data, len(data))
    assert view[index] == value


@dataclass(frozen=True)
class Fault:
    """A stray write that concerns a row."""

    name: str
    level: int  # at which it is found
    plant: Callable[[Engine, int, int], None]  # on one row; another one is there
    says: str
    hits_other: bool = False  # the other row holds a page of it


def beyond(view_of: str, group: int, change: int) -> Callable[[Engine, int, int], None]:
    def plant(engine: Engine, row: int, other: int) -> None:
        view = getattr(engine.ledger, view_of)
        view = view(group) if callable(view) else view
        stray(view, row, int(view[row]) + change)

    return plant


def cell(page_of: Callable[[Engine, int], int]) -> Callable[[Engine, int, int], None]:
    def plant(engine: Engine, row: int, other: int) -> None:
        stray(engine.ledger.page_table(0), (row, 1), page_of(engine, other))

    return plant


def free_page(engine: Engine, other: int) -> int:
    states = engine.ledger.ownership_map(0)[0]
    return int(np.flatnonzero(states == 0)[-1])


def on_the_device(engine: Engine, row: int, other: int) -> None:
    engine.cache.tables[1][row, 2] += 1


FAULTS = [
    Fault("a cell names a free page", 2, cell(free_page), "which is free"),
    Fault("a cell names the sink", 2, cell(lambda engine, other: 0), "is page 0"),
    Fault("a cell names no page", 2, cell(lambda engine, other: -7), "is page -7"),
    Fault(
        "a cell names another row's page",
        2,
        cell(lambda engine, other: int(engine.ledger.page_table(0)[other, 1])),
        "which is owned, owner row",
        hits_other=True,
    ),
    Fault("a cell on the device", 2, on_the_device, "on the device"),
    Fault("allocated_len, a page more", 1, beyond("allocated_len", 0, P), "which is free"),
    Fault("allocated_len, a page less", 1, beyond("allocated_len", 1, -P), "beyond its end"),
    Fault("protected_len", 1, beyond("protected_len", 0, P), "below protected_len 4"),
    Fault("evicted_len", 1, beyond("evicted_len", 1, P), "evicted_len 4"),
    Fault("epoch", 1, beyond("epoch", 0, 1), "is at epoch"),
    Fault("resolved_len", 2, beyond("resolved_len", 0, 1), "hi"),
    Fault("in_flight", 2, beyond("in_flight", 0, 1), "in_flight"),
    Fault("drafted_len", 2, beyond("drafted_len", 0, 99), "drafted="),
    Fault(
        "a row given back behind the scheduler's back",
        1,
        lambda engine, row, other: engine.ledger.abort(row),
        "which is not live",
    ),
]
BY_NAME = {fault.name: fault for fault in FAULTS}
CASES = [(f.name, level) for f in FAULTS for level in (1, 2) if level >= f.level]


@pytest.mark.sample(3)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("name", "level"), CASES)
def test_a_stray_write_costs_its_request_and_no_other(target, heads, texts, name, level, depth):
    fault = BY_NAME[name]
    options = {"busy_check": level, "on_finding": "quarantine", "overlap_depth": depth}
    run = Run(engine := build(target, heads, **options))
    ledger = engine.ledger
    first, row, other = run.rows
    pages_before = ledger.page_table(0)[row].copy()
    newest = max(step for step, _, _ in [*ledger.steps(), (ledger.completed, "", "")])
    well_at = newest - 1  # the last turn began before its only step
    fault.plant(engine, row, other)
    engine.turn()

    about = [finding for finding in engine.findings if row in finding.rows]
    assert any(fault.says in finding.text for finding in about), engine.findings
    given_back = name.startswith("a row given back")
    hit = {run.rows[row], *([run.rows[other]] if fault.hits_other else [])}
    finding = next(finding for finding in about if fault.says in finding.text)
    report = str(finding)
    assert finding.row in (row, None) and f"row {row} ({run.rows[row]})" in report
    assert finding.well_at == well_at and report.endswith(f"all was well at step {well_at}")
    if not given_back:  # it has no pages then
        assert f"page {finding.page} of group {finding.group}: {finding.state}" in report
        assert f"for step {finding.birth_step}, last verb {finding.last_verb}" in report
    found = engine.stats().finding_ct
    for number, output, text in zip(run.numbers, run.finish(), texts, strict=True):
        if number in hit:
            assert output.finish_reason == "error"
            assert output.error.startswith("busy check: ") and "all was well" in output.error
        else:
            assert output.token_ids == text and output.finish_reason == "length"
    stats = engine.stats()
    assert stats.finding_ct == found == len(engine.findings)  # reported once
    assert stats.failed_ct == len(hit) and stats.finished_ct == 5 - len(hit)
    assert stats.num_quarantined_rows == (0 if given_back else len(hit))
    assert ledger.is_live(row) != given_back
    if not given_back:  # no other request gets its pages
        held = pages_before[pages_before > 0]
        states, owners, _ = ledger.ownership_map(0)
        assert (states[held] == 1).all() and (owners[held] == row).all()
        assert stats.groups[0].quarantined_pages >= len(held)
        assert not set(held) & set(ledger.page_table(0)[first].tolist())
    again = engine.generate(PROMPTS[:3], PARAMS)
    assert [output.token_ids for output in again] == texts[:3]


@pytest.mark.sample(2)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", BY_NAME)
def test_a_stray_write_is_found_where_pages_are_shared_with_the_prefix_cache(
    target, heads, texts, name, depth
):
    """Law: whatever the sharing hides of a row, the sums and counts still show that it is wrong."""
    fault = BY_NAME[name]
    options = {"busy_check": fault.level, "overlap_depth": depth, "prefix_cache": True}
    run = Run(engine := build(target, heads, **options))
    row, other, _ = run.rows
    fault.plant(engine, row, other)
    with pytest.raises(CorruptState, match="busy check: "):
        engine.turn()
    assert "error" in [output.finish_reason for output in run.finish()]
    again = engine.generate(PROMPTS[:3], PARAMS)
    assert [output.token_ids for output in again] == texts[:3]


@pytest.mark.sample(2)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", BY_NAME)
def test_a_stray_write_raises_where_that_is_asked_for(target, heads, texts, name, depth):
    fault = BY_NAME[name]
    run = Run(engine := build(target, heads, busy_check=fault.level, overlap_depth=depth))
    row, other, _ = run.rows
    fault.plant(engine, row, other)
    with pytest.raises(CorruptState, match=r"busy check: .*all was well at step") as error:
        engine.turn()
    assert fault.says in str(error.value) and f"row {row} ({run.rows[row]})" in str(error.value)
    reasons = [output.finish_reason for output in run.finish()]
    hit = 2 if fault.hits_other else 1
    assert reasons.count("error") == hit and reasons.count("abort") == 3 - hit
    assert reasons.count("length") == 2  # those that waited still do, and run
    again = engine.generate(PROMPTS[:3], PARAMS)
    assert [output.token_ids for output in again] == texts[:3]


@pytest.mark.parametrize("level", [1, 2])
def test_a_row_that_nobody_asked_for_is_left_alone(target, heads, texts, level):
    run = Run(engine := build(target, heads, busy_check=level, on_finding="quarantine"))
    done = run.finish()
    intruder = engine.ledger.admit("intruder")
    assert [o.token_ids for o in engine.generate(PROMPTS, PARAMS)] == texts
    assert [o.token_ids for o in done] == texts
    (finding,) = engine.findings
    assert finding.text == f"row {intruder} (intruder) is live, but nobody has it"
    assert finding.rows == (intruder,) and engine.stats().num_quarantined_rows == 1


@pytest.mark.parametrize("on_finding", ["raise", "quarantine"])
def test_what_concerns_no_row_raises_in_any_case(target, heads, on_finding, caplog):
    """It raises on every turn, but the finding is reported and counted once."""
    run = Run(engine := build(target, heads, busy_check=2, on_finding=on_finding))
    stray(engine.ledger.page_table(0), (0, 3), 5)
    with caplog.at_level(logging.ERROR, "specpool"):
        for _ in range(2):
            with pytest.raises(CorruptState, match="row 0 column 3 of group target is page 5"):
                engine.turn()
    told = [record for record in caplog.records if record.name == "specpool"]
    assert engine.stats().finding_ct == len(engine.findings) == len(told)
    assert all(
        str(finding) in record.message
        for finding, record in zip(engine.findings, told, strict=True)
    )
    stray(engine.ledger.page_table(0), (0, 3), 0)
    reasons = {output.finish_reason for output in run.finish()}
    assert reasons == {"error", "abort", "length"} or reasons == {"abort", "length"}


def test_a_prefix_that_nobody_pinned_raises(target, heads):
    run = Run(engine := build(target, heads, busy_check=1, on_finding="quarantine"))
    prefix = engine.ledger.pin_prefix(next(iter(run.rows)), 8)
    with pytest.raises(CorruptState, match=rf"the prefixes \[{prefix}\] are held, \[\] are pinned"):
        engine.turn()
    assert engine.ledger.prefixes == []  # everything that ran has ended, this too
    run.finish()


def test_a_pinned_texts_page_concerns_the_rows_that_share_it(target, heads, texts):
    """Two requests begin with the pinned text; one of its cells is overwritten."""
    engine = build(target, heads, busy_check=2, on_finding="quarantine")
    engine.pin(PROMPTS[0][:20])
    run = Run(engine)
    sharer = next(row for row in run.rows if engine.ledger.protected_len(0)[row])
    stray(engine.ledger.page_table(0), (sharer, 1), free_page(engine, 0))
    for number, output, text in zip(run.numbers, run.finish(), texts, strict=True):
        wrong = number == run.rows[sharer]
        assert output.finish_reason == ("error" if wrong else "length")
        assert wrong or output.token_ids == text


def test_without_rows_left_it_says_so(target, heads):
    options = {"busy_check": 1, "on_finding": "quarantine", "max_sessions": 0}
    run = Run(engine := build(target, heads, **options))
    for row in run.rows:
        stray(engine.ledger.epoch, row, 1 << 40)
    for _ in range(2):
        with pytest.raises(CorruptState, match="no request can run: 3 of 3 rows are out of use"):
            engine.turn()
    stats = engine.stats()
    assert (stats.num_quarantined_rows, stats.failed_ct, stats.num_waiting) == (3, 3, 2)
    for number in run.numbers[3:]:
        engine.abort(number)
    reasons = [output.finish_reason for output in run.finish()]
    assert reasons == ["error"] * 3 + ["abort"] * 2


def test_level_0_looks_at_nothing(target, heads, texts):
    run = Run(engine := build(target, heads))
    stray(engine.ledger.page_table(0), (0, 3), 5)
    assert [output.token_ids for output in run.finish()] == texts
    assert not engine.findings


def test_findings_are_bounded(target, heads):
    run = Run(engine := build(target, heads, busy_check=2))
    table = engine.ledger.page_table(0)
    for value in range(MAX_FINDINGS + 20):
        stray(table, (0, 0), value + 1)
        with pytest.raises(CorruptState):
            engine.turn()
    assert len(engine.findings) == MAX_FINDINGS < engine.stats().finding_ct
    stray(table, (0, 0), 0)
    run.finish()


# --- the options ----------------------------------------------------------------------------------


def test_the_level_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("SPECPOOL_BUSY_CHECK", raising=False)
    assert EngineConfig().busy_check == 0
    for text, level in (("", 0), ("0", 0), ("1", 1), ("2", 2)):
        monkeypatch.setenv("SPECPOOL_BUSY_CHECK", text)
        assert EngineConfig().busy_check == level
    assert EngineConfig(busy_check=1).busy_check == 1
    for text in ("3", "-1", "yes", "1.0", " 1"):
        monkeypatch.setenv("SPECPOOL_BUSY_CHECK", text)
        with pytest.raises(
            ConfigError, match=f"SPECPOOL_BUSY_CHECK must be 0, 1 or 2, got {text!r}"
        ):
            EngineConfig()
    with pytest.raises(ConfigError, match=r"busy_check must be an integer in \[0, 2\], got 3"):
        EngineConfig(busy_check=3)
    with pytest.raises(ConfigError, match="on_finding must be one of raise, quarantine, got 'cry'"):
        EngineConfig(busy_check=1, on_finding="cry")


# --- never a false alarm -------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(100, 124))
def test_random_workloads_raise_no_alarm(seed, target, heads):
    """Runs all drafters, tight pools, aborts, samples and pins: a false alarm would raise here."""
    work = Workload(seed)
    work.options["busy_check"] = 2
    engine, rng = work.tight(target, heads), work.rng
    params = [SamplingParams(max_new_tokens=n, n=rng.choice([1, 1, 3])) for n in work.news]
    pins = []
    with contextlib.suppress(ConfigError):  # a prompt that fills no page
        pins.append(engine.pin(work.prompts[0]))
    if work.shape is None:
        engine.generate(work.prompts, params)
    else:
        run_mixed(engine, work, [dataclasses.replace(p, n=1) for p in params])
        engine.generate(work.prompts, params)
    for pin in pins:
        engine.unpin(pin)
    assert not engine.findings and engine.stats().round_ct


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(12))
def test_failures_and_interrupts_raise_no_alarm(seed, target, heads, monkeypatch):
    rng = random.Random(seed)
    work = Workload(seed)
    work.options["busy_check"] = 2
    engine, forward = work.tight(target, heads), target.forward

    def unreliable(*args: Any, **options: Any) -> Any:
        if rng.random() < 0.05:
            raise rng.choice([RuntimeError("the device is gone"), KeyboardInterrupt()])
        return forward(*args, **options)

    monkeypatch.setattr(target, "forward", unreliable)
    for _ in range(6):
        with contextlib.suppress(KeyboardInterrupt):
            engine.generate(work.prompts, SamplingParams(max_new_tokens=15, n=2))
    assert not engine.findings


def test_a_delta_that_fails_half_way_raises_no_alarm(target, heads, texts, monkeypatch):
    """The contents of the device's tables are unknown until the next delta."""
    engine = build(target, heads, busy_check=2)
    working, calls = engine.cache.apply_delta, []

    def failing(step: int) -> None:
        working(step)
        calls.append(step)
        if len(calls) == 3:
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.cache, "apply_delta", failing)
    first = engine.generate(PROMPTS[:2], PARAMS)
    assert {output.finish_reason for output in first} == {"error"}
    assert [output.token_ids for output in engine.generate(PROMPTS, PARAMS)] == texts
    assert not engine.findings


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_while_a_text_is_pinned_leaves_no_prefix_behind(target, heads, when):
    engine = build(target, heads, busy_check=1)
    ledger, scheduler = engine.ledger, engine.core.scheduler

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(ledger, name)

        def pin_prefix(self, row: int, length: int) -> int:
            if when == "after":
                ledger.pin_prefix(row, length)
            raise KeyboardInterrupt

    scheduler.pins._ledger = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        engine.pin(PROMPTS[0])
    scheduler.pins._ledger = ledger
    assert ledger.prefixes == []
    assert len(engine.generate(PROMPTS[0], PARAMS)[0].token_ids) == 24
