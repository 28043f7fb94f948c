"""SGLang's real scheduler loop with a fake model, with its own memory and on the plug-in's levels.

`test_sglang.py` runs this file in a new process. `SGLANG_LOOP_SETUPS=0` runs the whole grid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_grid import NUM_TOKENS, grid, own_end, parts
from sglang_loop import Loop, Outcome, Setup, run, run_once

from specpool import BlockPool

LEVELS = ["pages", "reserve"]
SETUPS = parts(grid(list(NUM_TOKENS), (False, True)), quick=4, full=8)
#: Those of the quick run: what is summed over set-ups has the same ones in every run.
QUICK = [param.values[0] for param in SETUPS if not param.marks]


def has_known_fault(setup: Setup) -> bool:
    """Whether SGLang itself reads KV that no forward wrote.

    A streaming session takes the whole turn for committed. With drafts, the turn's last token may
    have no KV (a stop inside a round), and the draft's KV of it is that of another next token.
    """
    return setup.num_sessions > 0 and setup.shape is not None


def check(setup: Setup, outcome: Outcome) -> None:
    """The laws of every run."""
    assert not outcome.error, outcome.error
    assert outcome.leaks == []
    # A request alone may not fit beside sessions, whose slots are never given up.
    assert outcome.aborted == (outcome.crowded_out if setup.num_sessions else [])
    assert outcome.texts == outcome.expected


def places(outcome: Outcome) -> list[str]:
    """Who read what wrongly, without the slots and what they held: two pools hand out others."""
    return [fault.partition(", slot ")[0] for fault in outcome.faults]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("setup", SETUPS)
def test_sglangs_own(setup: Setup) -> None:
    outcome = run_once(setup)
    if reason := own_end(outcome):
        pytest.xfail(reason)
    check(setup, outcome)
    assert {"extend", "decode", "chunk"} <= outcome.seen
    if outcome.faults and has_known_fault(setup):
        pytest.xfail("SGLang itself: a session's last token has no KV, or a draft's of another one")
    assert outcome.faults == []


def test_sglangs_own_ends_a_request_that_does_not_fit_beside_sessions() -> None:
    """So an end of that kind at a level need not be the level's."""
    setup = Setup(page_size=16, shape=(3, 1, 4), num_sessions=2, num_tokens=432, num_requests=6,
                  conservativeness=0.1, seed=230)  # fmt: skip
    outcome = run_once(setup)
    check(setup, outcome)
    assert outcome.aborted == outcome.crowded_out == ["5"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("setup", SETUPS)
def test_a_level_keeps_the_laws(setup: Setup, level: str) -> None:
    own, outcome = run_once(setup), run_once(replace(setup, level=level))
    if reason := own_end(own):
        if level == "pages" or outcome.error:
            assert own_end(outcome) == reason, outcome.error
            pytest.xfail(reason)
        own = outcome  # there is nothing to compare with
    check(setup, outcome)
    # What a session is asked depends on when its last turn ended.
    if level == "pages" or not setup.num_sessions:
        assert outcome.texts == own.texts
    # Shorter reserves admit more requests, and one more may be too many in a single run.
    assert outcome.retracted <= own.retracted + 1
    if level == "pages":  # the same pages: the same schedule
        assert (places(outcome), outcome.forwards) == (places(own), own.forwards)
        assert (outcome.retracted, outcome.slots_ahead) == (own.retracted, own.slots_ahead)
    elif not has_known_fault(setup):
        assert outcome.faults == []


@pytest.mark.parametrize("level", LEVELS)
def test_no_more_retractions_than_sglangs_own(level: str) -> None:
    own = sum(run_once(setup).retracted for setup in QUICK)
    ours = sum(run_once(replace(setup, level=level)).retracted for setup in QUICK)
    assert 0 < ours <= own


def _steal(loop: Loop) -> None:
    """Free a page of a running request behind its back, as a fault in the engine would."""
    run_batch, done = loop.run_batch, []

    def with_fault(batch: Any) -> Any:
        if not done and batch.forward_mode.is_decode() and len(batch.reqs) > 1:
            row = loop.req_to_token_pool.req_to_token[batch.reqs[0].kv.req_pool_idx]
            last = row[batch.reqs[0].kv.kv_committed_len - 1]
            loop.token_to_kv_pool_allocator.free(last[None].to(torch.int64))
            done.append(batch.reqs[0].rid)
        return run_batch(batch)

    loop.run_batch = with_fault


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("page_size", "shape"),
    [
        (1, None),
        (16, (3, 4, 8)),
        pytest.param(1, (3, 4, 8), marks=FULL),
        pytest.param(1, (3, 1, 4), marks=FULL),
        pytest.param(16, None, marks=FULL),
        pytest.param(16, (3, 1, 4), marks=FULL),
    ],
)
def test_a_free_too_many_names_the_requests(
    page_size: int, shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECPOOL_SGLANG_FAULTS", "raise")
    setup = Setup(
        level="pages", page_size=page_size, shape=shape, cache=False, num_tokens=NUM_TOKENS[shape]
    )
    outcome = run(setup, prepare=_steal)
    last = outcome.error.strip().splitlines()[-1]
    assert re.search(
        r"AllocatorError: .*block \d+.*; taken by alloc\w*, call \d+, for request \d+"
        r".*freed now by request \d+",
        last,
    ), outcome.error
    if shape is None:  # SGLang's own is silent
        assert run(replace(setup, level="off"), prepare=_steal).error == ""


@pytest.mark.parametrize("cache", [False, True])
def test_a_free_too_many_stops_nothing(
    cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own sums of its pool count the page too, or they would end the process."""
    monkeypatch.setenv("SPECPOOL_STATUS", str(tmp_path))
    setup = Setup(level="pages", shape=(3, 4, 8), cache=cache, num_tokens=NUM_TOKENS[3, 4, 8])
    outcome = run(setup, prepare=_steal)
    assert not outcome.error, outcome.error
    (path,) = tmp_path.glob("sglang-*.json")
    status = json.loads(path.read_text("utf-8"))
    (pool,) = status["pools"]
    assert (pool["quarantined"], status["wrong_frees"]) == (1, 1)
    (line,) = status["latest"]
    # The tree frees for nobody.
    assert line["owner"] and (cache or line["request"])
    assert line["caller"].startswith("sglang/srt/"), line
    assert Path(line["report"]).is_file()
    # Only the sum of this test's own loop misses it, at the end.
    size = setup.num_tokens // 16 * 16
    assert outcome.leaks == [f"{size - 16} of {size} slots are free"]


def test_a_log_of_the_loop_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPOOL_SGLANG_RECORD", str(tmp_path / "pages"))
    outcome = run(Setup(level="pages", shape=(3, 1, 4)))
    assert not outcome.error, outcome.error
    pools = [BlockPool.replay(log) for log in tmp_path.iterdir()]
    assert sum(calls for _, calls, _ in pools) > 100
    for pool, _, _ in pools:
        pool.check()
        assert len(pool.taken()) == 0


def _lost_frees(loop: Loop) -> None:
    loop.token_to_kv_pool_allocator.free_page_ids = lambda page_ids: None


def _shared_pages(loop: Loop) -> None:
    """The pool hands out pages that are held."""
    allocator = loop.token_to_kv_pool_allocator
    take, held = allocator._take, []

    def again(count: int, verb: int, counts: Any = None) -> Any:
        pages = take(count, verb, counts)
        if pages is not None and len(pages):
            held.append(pages.copy())
            if len(held) > 9:
                pages[0] = held[-9][0]
        return pages

    allocator._take = again


def _no_round_in_flight(loop: Loop) -> None:
    from specpool.plugins.sglang import reserve

    own = reserve.slots_ahead.__wrapped__
    reserve.slots_ahead = lambda *shape: (own(*shape)[0],) * 2


def _short_drafts(loop: Loop) -> None:
    from specpool.plugins.sglang import reserve

    reserve.slots_ahead = lambda *shape: ([0] * shape[-1],) * 2


@pytest.mark.parametrize(
    ("fault", "level"),
    [
        (_lost_frees, "pages"),
        (_shared_pages, "pages"),
        (_no_round_in_flight, "reserve"),
        (_short_drafts, "reserve"),
    ],
)
def test_a_broken_guard_is_seen(fault: Callable[[Loop], None], level: str) -> None:
    setup = Setup(level=level, shape=(3, 4, 8), cache=False, num_tokens=4096, num_requests=8)
    assert run_once(setup).faults == []
    outcome = run(setup, prepare=fault, seconds=10)
    assert outcome.faults or outcome.leaks or outcome.error
