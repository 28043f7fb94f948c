"""Level `rows` on the real SGLang, on a CPU; `test_sglang.py` runs this in a new process.

Its scheduler loop runs on the fake model of `sglang_loop`. `SGLANG_LOOP_SETUPS=0` runs all setups.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache import common, memory_pool, radix_cache
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs
from sglang.srt.session import streaming_session
from sglang_accelerator import on_host
from sglang_grid import grid, own_end, parts
from sglang_loop import Loop, Outcome, Setup, proved, run, run_once

from specpool.plugins.sglang import drift, limits
from specpool.plugins.sglang.allocator import AllocatorError
from specpool.plugins.sglang.book import Book
from specpool.plugins.sglang.row_allocator import SpecpoolRowTokenAllocator

SETUPS = parts(grid([(3, 1, 4), (3, 4, 8)], (False,)), quick=4, full=12)
#: Those of the quick run: what is summed over set-ups has the same ones in every run.
QUICK = [param.values[0] for param in SETUPS if not param.marks]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def audited(loop: Loop) -> None:
    """Audit the ledger after each forward, and at the end see that all of it came back."""
    book, run_batch, finish = loop.req_to_token_pool.book, loop.run_batch, loop.finish

    def audit(batch: Any, **options: Any) -> Any:
        book.ledger.check()
        same_rows(loop, batch)
        return run_batch(batch, **options)

    def end() -> Outcome:
        outcome = finish()
        book.ledger.check()
        if book.ledger.lent_pages(0).size or book.ledger.free_pages(0) != book.allocator.num_pages:
            outcome.leaks.append("pages of the ledger are held at the end")
        return outcome

    loop.run_batch, loop.finish = audit, end


def same_rows(loop: Loop, batch: Any) -> None:
    """SGLang's table, lengths and protected prefixes are the ledger's."""
    book = loop.req_to_token_pool.book
    page_size, table = loop.setup.page_size, on_host(loop.req_to_token_pool.req_to_token).numpy()
    for req in batch.reqs:
        row, held = req.kv.req_pool_idx, int(book.ledger.allocated_len(0)[req.kv.req_pool_idx])
        pages = book.ledger.page_table(0)[row, : held // page_size]
        slots = pages[:, None] * page_size + np.arange(page_size)
        assert (table[row, :held] == slots.ravel()).all(), req.rid
        assert req.kv.kv_committed_len <= book.ledger.resolved_len[row], req.rid
        assert req.kv.cache_protected_len == book.ledger.protected_len(0)[row], req.rid


def target_faults(outcome: Outcome) -> list[str]:
    """Faults of the target's KV.

    The draft's KV of a turn's last token is that of another next token. It costs a draft, never a
    text, and is so in SGLang's own too.
    """
    return [fault for fault in outcome.faults if " draft slots wrongly" not in fault]


@pytest.mark.parametrize("setup", SETUPS)
def test_sglangs_loop_runs_on_the_ledger(setup: Setup) -> None:
    own = run_once(setup)
    outcome = run_once(replace(setup, level="rows"), prepare=audited)
    if (reason := own_end(own)) and outcome.error:
        assert own_end(outcome) == reason, outcome.error
        pytest.xfail(reason)
    assert not outcome.error, outcome.error
    assert outcome.leaks == []
    # Which requests run beside the sessions depends on how many are admitted.
    assert outcome.aborted == (outcome.crowded_out if setup.num_sessions else [])
    assert outcome.texts == outcome.expected
    assert target_faults(outcome) == []
    if not setup.num_sessions:  # what a session is asked depends on when its last turn ended
        assert outcome.texts == own.texts
        assert outcome.faults == []
    # Shorter reserves admit more requests, and one more may be too many in a single run.
    assert own.error or outcome.retracted <= own.retracted + 1


def test_no_more_retractions_than_sglangs_own() -> None:
    own = sum(run_once(setup).retracted for setup in QUICK)
    ours = sum(run_once(replace(setup, level="rows"), prepare=audited).retracted for setup in QUICK)
    assert 0 < ours <= own


def test_sessions_of_sglangs_own_read_kv_that_nobody_wrote() -> None:
    """So the law that ours do not is one that can fail."""
    setup = Setup(page_size=1, shape=(3, 1, 4), num_sessions=2, overlap=False, num_tokens=420,
                  num_requests=12)  # fmt: skip
    assert target_faults(run_once(setup)) != []
    assert target_faults(run_once(replace(setup, level="rows"), prepare=audited)) == []


def test_a_retraction_more_is_of_a_request_that_sglangs_own_lets_wait() -> None:
    """A row holds fewer slots after its first round, so SGLang admits a request earlier.

    It admits more than surely fits. With as many rows as its own memory runs, none is retracted.
    """
    setup = Setup(page_size=16, shape=(3, 1, 4), num_sessions=2, num_tokens=420, num_requests=12,
                  seed=17)  # fmt: skip
    own = run_once(setup)
    assert (own.error, own.retracted, own.most_running) == ("", 0, 6)
    for level in ("reserve", "rows"):
        outcome = run_once(replace(setup, level=level))
        assert (outcome.error, outcome.retracted, outcome.most_running) == ("", 1, 7)
        outcome = run_once(replace(setup, level=level, num_rows=own.most_running))
        assert (outcome.error, outcome.retracted, outcome.most_running) == ("", 0, 6)


CROWDED = Setup(level="rows", page_size=16, shape=(3, 1, 4), num_sessions=2, num_tokens=420,
                num_requests=12, seed=33)  # fmt: skip


def test_a_request_that_does_not_fit_beside_sessions_ends_as_in_sglangs_own() -> None:
    """Its own memory runs the same requests in another order, and this one's turn comes earlier."""
    own, outcome = run_once(replace(CROWDED, level="off")), run_once(CROWDED, prepare=audited)
    assert (own.error, own.aborted, outcome.error, outcome.leaks) == ("", [], "", [])
    assert outcome.aborted == outcome.crowded_out == ["11"]
    assert outcome.texts == outcome.expected


def test_a_request_that_lost_slots_crowd_out_is_not_excused() -> None:
    def prepare(loop: Loop) -> None:
        book, run_batch = loop.req_to_token_pool.book, loop.run_batch

        def losing(batch: Any, **options: Any) -> Any:
            free = book.allocator.available_size()
            if batch.forward_mode.is_decode() and free:
                step = book.ledger.prepare_extend([book.ledger.admit()], [free]).step
                book.ledger.launch(step)
                book.ledger.complete(step)
            return run_batch(batch, **options)

        loop.run_batch = losing

    outcome = run(replace(CROWDED, num_sessions=0, num_requests=1), prepare=prepare)
    assert (outcome.aborted, outcome.crowded_out) == (["0"], []), outcome.error


BUSY = Setup(level="rows", shape=(3, 4, 8), num_tokens=900, num_requests=12, seed=1)


def unhooked(owner: Any, name: str) -> Callable[[Loop], None]:
    """SGLang's own function serves again."""

    def prepare(loop: Loop) -> None:
        setattr(owner, name, getattr(owner, name).__wrapped__)

    return prepare


def replaced(owner: str, name: str, function: Any) -> Callable[[Loop], None]:
    """A function of the plug-in does something else."""

    def prepare(loop: Loop) -> None:
        book = loop.req_to_token_pool.book
        found = {"book": book, "rows": book.pool, "pages": book.allocator}[owner]
        setattr(found, name, functools.partial(function, found))

    return prepare


def resolve_one_less(book: Any, accept_lens: Any) -> None:
    type(book).resolve(book, torch.clamp(accept_lens - 1, min=1))


def another_table(loop: Loop) -> None:
    book = loop.req_to_token_pool.book
    book.cells = np.zeros_like(book.cells)


def finish_nothing(rows: Any, indices: Any) -> None:
    pass


def release_nothing(pages: Any, ids: Any) -> None:
    if pages.book.duplicates is not None:
        pages.book.duplicates += ids.tolist()


def lend_nothing(loop: Loop) -> None:
    unhooked(type(loop.tree_cache), "insert")(loop)


BROKEN = {
    "a result counts one token less": replaced("book", "resolve", resolve_one_less),
    "new cells are not written": another_table,
    "a row is not finished": replaced("rows", "free_rows", finish_nothing),
    "an eviction is not told": replaced("pages", "_drop", release_nothing),
    "a checkpoint is not told": lend_nothing,
}


REST = [pytest.param(name, marks=pytest.mark.full) for name in [*BROKEN][2:]]


@pytest.mark.parametrize("name", [*[*BROKEN][:2], *REST])
def test_the_laws_fail_without_one_guard(name: str) -> None:
    outcome = run(BUSY, prepare=BROKEN[name], seconds=20)
    kept = not outcome.error and not outcome.leaks and not outcome.faults
    assert not (kept and outcome.texts == outcome.expected)


def test_the_same_run_keeps_them() -> None:
    outcome = run(BUSY, prepare=audited)
    assert (outcome.error, outcome.leaks, outcome.faults) == ("", [], [])
    assert {"hit", "chunk", "decode"} <= outcome.seen


def test_a_picture_of_a_recorded_run_names_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECPOOL_SGLANG_RECORD", str(tmp_path / "run"))
    outcome = run(replace(BUSY, num_requests=2))
    assert not outcome.error, outcome.error
    (log,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "specpool", "inspect", str(log), "--at", "6"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (name,) = re.findall(r"A = row 1, (\w+):", shown)
    assert name in outcome.texts


def test_a_session_without_its_guard_claims_unwritten_kv() -> None:
    setup = Setup(level="rows", page_size=1, shape=(3, 1, 4), num_sessions=2, overlap=False,
                  num_tokens=420, num_requests=12)  # fmt: skip
    guard = "try_cache_finished_req"

    def broken(loop: Loop) -> None:
        unhooked(streaming_session.StreamingSession, guard)(loop)

    outcome = run(setup, prepare=broken)
    assert outcome.error or target_faults(outcome)


SERVED = {
    "speculative_algorithm": "EAGLE",
    "speculative_adaptive": False,
    "enable_multi_layer_eagle": False,
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"speculative_algorithm": None}, "decoding without drafts"),
        ({"speculative_algorithm": "DFLASH"}, "DFLASH places its drafts"),
        ({"speculative_adaptive": True}, "an adaptive shape"),
        ({"enable_multi_layer_eagle": True}, "several EAGLE layers"),
        ({"decoupled_spec_role": "drafter"}, "drafts from another process"),
        ({"disaggregation_mode": "decode"}, "PD disaggregation"),
        ({"enable_hierarchical_cache": True}, "HiCache"),
        ({"enable_lmcache": True}, "LMCache"),
        ({"enable_flexkv": True}, "FlexKV"),
        ({"enable_unified_cache_external_linker": True}, "an external linker"),
        ({"radix_cache_backend": "flexkv"}, "another radix cache"),
        ({"enable_hisparse": True}, "HiSparse"),
        ({"dllm_algorithm": "x"}, "a dLLM"),
        ({"dcp_size": 2}, "context parallel"),
        ({"enable_unified_memory": True}, "unified memory"),
    ],
)
def test_what_it_cannot_serve_has_one_reason(change: dict[str, Any], reason: str) -> None:
    arguments = {"decoupled_spec_role": "null", "disaggregation_mode": "null", "dcp_size": 1}
    settings = SimpleNamespace(**(SERVED | arguments))
    assert limits.reasons(settings, settings) == []
    assert all(hasattr(ServerArgs, name) for name in change), "SGLang has no such setting"
    vars(settings).update(change)
    (line,) = limits.reasons(settings, settings)
    assert line.startswith(reason)


def test_decoding_without_drafts_ends_the_process_with_the_reason() -> None:
    outcome = run(Setup(level="rows", num_requests=0))
    line = outcome.error.strip().splitlines()[-1]
    assert "SPECPOOL_SGLANG=rows leaves to SGLang: decoding without drafts claims slots" in line
    assert line.endswith(": use SPECPOOL_SGLANG=reserve or pages")


def test_settings_that_come_behind_the_row_pool_are_checked_with_the_ledger() -> None:
    rows = SimpleNamespace(req_to_token=torch.zeros((3, 64), dtype=torch.int32))
    unset = mock.patch.object(limits, "get_server_args", side_effect=ValueError("not set yet"))
    with mock.patch.object(Book, "latest", None), unset:
        book = Book(rows)
    late = SimpleNamespace(**(SERVED | {"speculative_adaptive": True}))
    with (
        mock.patch.multiple(limits, get_server_args=lambda: late, get_spec=lambda: late),
        pytest.raises(SystemExit, match="leaves to SGLang: an adaptive shape"),
    ):
        assert book.ledger


def test_a_model_with_states_or_windows_ends_the_process_with_the_reason() -> None:
    """Law: an allocator needs a row pool of its own; these have other rows, or two allocators."""

    def prepare(loop: Loop) -> None:
        made = functools.partial(SpecpoolRowTokenAllocator, 64, torch.float32, "cpu", None, False)
        with pytest.raises(SystemExit, match="leaves to SGLang: layers with windows have slots"):
            made()
        with (
            mock.patch.object(Book, "latest", None),
            pytest.raises(SystemExit, match="leaves to SGLang: rows that have recurrent states"),
        ):
            made()

    outcome = run(replace(BUSY, num_requests=1), prepare=prepare)
    assert not outcome.error, outcome.error


def test_errors_at_the_border_are_assertions() -> None:
    def prepare(loop: Loop) -> None:
        pages, book = loop.token_to_kv_pool_allocator, loop.req_to_token_pool.book
        before = book.ledger.state_hash()
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("not lent", lambda: pages.free_page_ids(torch.tensor([1]))),
            ("its pages are 1 to", lambda: pages.free(torch.tensor([1 << 30]))),
            ("not page-aligned", lambda: pages.free_segment(torch.tensor([3]), start_pos=3)),
            ("for no row", lambda: pages.alloc(16)),
            ("without drafts", lambda: pages.alloc_decode(None, None, None)),
            ("beam search", lambda: loop.req_to_token_pool.alloc_rows(1)),
            ("not admitted", lambda: loop.req_to_token_pool.free_rows([1])),
            ("was not launched", lambda: book.resolve(torch.ones(1, dtype=torch.int32))),
        ]
        for text, call in calls:
            with pytest.raises(AssertionError, match=text) as caught:
                call()
            assert isinstance(caught.value, AllocatorError)
        assert book.ledger.state_hash() == before

    outcome = run(replace(BUSY, num_requests=1), prepare=prepare)
    assert not outcome.error, outcome.error


def test_a_call_in_mid_flight_that_does_not_fit_changes_nothing() -> None:
    def prepare(loop: Loop) -> None:
        pages, book = loop.token_to_kv_pool_allocator, loop.req_to_token_pool.book
        run_batch, tried = loop.run_batch, loop.outcome.seen

        def trying(batch: Any, **options: Any) -> Any:
            if batch.forward_mode.is_decode() and len(batch.reqs) > 1:
                before = book.ledger.state_hash()
                for clear in (pages.clear, loop.req_to_token_pool.clear):
                    with pytest.raises(AllocatorError, match=r"clear with \d rounds in flight"):
                        clear()
                pages.free_group_begin()
                with pytest.raises(AllocatorError, match="clear inside a group of frees"):
                    pages.clear()
                pages.free_group_end()
                rows = np.array([req.kv.req_pool_idx for req in batch.reqs], np.int32)
                starts = book.ledger.resolved_len[rows] - 1
                starts[-1] += 2  # the first row would be cut, the last one has a hole
                with pytest.raises(AllocatorError, match="tokens, the batch begins at"):
                    book.extend(rows, starts, starts + 9)
                assert book.ledger.state_hash() == before
                tried.add("refused")
            return run_batch(batch, **options)

        loop.run_batch = trying

    outcome = run(BUSY, prepare=prepare)
    assert (outcome.error, outcome.faults, outcome.leaks) == ("", [], [])
    assert "refused" in outcome.seen


def test_a_checkpoint_of_which_the_tree_dropped_another_page_is_refused() -> None:
    def prepare(loop: Loop) -> None:
        book, core = loop.req_to_token_pool.book, loop.tree_cache.tree_core
        begin = core.begin_insert

        def dropping(parameters: Any) -> Any:
            book.duplicates.append(1)
            return begin(parameters)

        core.begin_insert = dropping

    outcome = run(BUSY, prepare=prepare)
    assert re.search(
        r"checkpoint of row \d+: the tree dropped pages \[1.*\], it had \[.*\] already",
        outcome.error,
    ), outcome.error


def test_a_grammar_that_keeps_nothing_leaves_the_round_counted() -> None:
    """SGLang's own length stays below the row's; the row goes with its request."""

    def prepare(loop: Loop) -> None:
        audited(loop)
        cut = {"left": 3}
        processor = type(loop.batch_result_processor)
        resolve = processor._resolve_spec_v2_tokens

        def with_grammar(self: Any, result: Any, batch: Any) -> Any:
            for req in batch.reqs:
                if cut["left"] and not req.finished() and len(req.output_ids) > 2:
                    cut["left"] -= 1
                    req.grammar = SimpleNamespace()
            result.grammar_retained_tokens = [[] for _ in batch.reqs]
            tokens = resolve(self, result, batch)
            for req in batch.reqs:
                if req.grammar is not None:
                    req.grammar = None
                    req.to_finish = schedule_batch.FINISH_ABORT("the grammar ended")
            return tokens

        processor.advance_grammar_fsm = lambda *_: None
        processor._resolve_spec_v2_tokens = with_grammar

    outcome = run(BUSY, prepare=prepare)
    assert not outcome.error, outcome.error
    assert (outcome.leaks, outcome.faults) == ([], [])
    assert sum(outcome.texts[rid] != outcome.expected[rid] for rid in outcome.texts) == 3


def test_tokens_of_no_row_are_not_inserted() -> None:
    def prepare(loop: Loop) -> None:
        key = radix_cache.RadixKey([3, 4, 5], None)
        parameters = InsertParams(key=key, value=torch.tensor([16, 17, 18]))
        with pytest.raises(AllocatorError, match="inserts 3 tokens of no row"):
            loop.tree_cache.insert(parameters)

    outcome = run(replace(BUSY, num_requests=1), prepare=prepare)
    assert not outcome.error, outcome.error


def test_this_sglang_is_known_at_this_level() -> None:
    assert proved("rows") == []


def steal(self: Any) -> Any:
    return self.free_slots.pop()


def free_nothing(self: Any, indices: Any) -> None:
    pass


def release_but_keep_the_lock(
    req: Any, *args: Any, release: Callable[..., None] = common.release_kv_cache, **options: Any
) -> None:
    lock = req.lock
    release(req, *args, **options)
    req.lock = lock


@pytest.mark.parametrize(
    ("owner", "name", "function", "line"),
    [
        (
            memory_pool.ReqToTokenPool,
            "steal",
            steal,
            "ReqToTokenPool.steal: ours inherits it, and has no free_slots",
        ),
        (memory_pool.ReqToTokenPool, "free_rows", free_nothing, "the free rows: "),
        (streaming_session.StreamingSession, "_trim_overshoot", lambda *_: None, "rows, seed "),
        (common, "_release_overallocated_kv_indices", lambda *_: None, "rows, seed "),
        (UnifiedRadixCache, "unlock", lambda *_: None, "slots are free when nobody is left"),
        (schedule_batch.ReqKvInfo, "mark_kv_released", lambda _: None, "request has KV"),
        (common, "release_kv_cache", release_but_keep_the_lock, "request has its lock"),
    ],
)
def test_an_sglang_that_does_otherwise_is_refused(
    owner: Any, name: str, function: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, function, raising=False)
    (difference,) = drift.differences("rows")
    assert line in difference
