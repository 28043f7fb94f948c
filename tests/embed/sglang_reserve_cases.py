"""Level `reserve` on the real SGLang, on a CPU; `test_sglang.py` runs this in a new process."""

from __future__ import annotations

import functools
import itertools
import random
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache import allocation, allocation_sizing
from sglang.srt.mem_cache.allocator import paged, token
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import RuntimeContext, get_spec, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import eagle_utils, eagle_worker_common

from specpool.plugins import proof
from specpool.plugins.sglang import drift, reserve, reserve_proof

# Not names of this module: the plug-in loader rebinds those in every module.
OWN = {
    "lens": allocation_sizing.page_aligned_decode_alloc_lens,
    "estimate": ScheduleBatch._new_tokens_required_next_decode_spec_v2,
    "paged": paged.PagedTokenToKVPoolAllocator,
    "token": token.TokenToKVPoolAllocator,
}
SHAPES = [(1, 1, 2), (3, 1, 4), (5, 1, 6), (2, 2, 4), (5, 4, 8), (5, 8, 64), (1, 10, 10), (7, 3, 2)]
PAGE_SIZES = [1, 2, 3, 16, 64]


@pytest.fixture(autouse=True, scope="module")
def _plugin() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECPOOL_SGLANG", "reserve")
        load_plugins()


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's published settings of speculative decoding."""
    spec = SimpleNamespace(
        speculative_algorithm="EAGLE",
        speculative_adaptive=False,
        enable_multi_layer_eagle=False,
        max_speculative_num_draft_tokens=None,
    )
    disagg = SimpleNamespace(decoupled_spec_role="null")
    bags = {"spec": spec, "schedule": SimpleNamespace(page_size=1), "disagg": disagg}
    monkeypatch.setattr(RuntimeContext, "config_bag", lambda _, name: bags[name])
    parallel = SimpleNamespace(attn_dcp_size=1)
    monkeypatch.setattr(allocation_sizing, "get_parallel", lambda: parallel)
    spec.schedule, spec.disagg, spec.bags = bags["schedule"], disagg, bags
    return spec


def use(settings: SimpleNamespace, shape: tuple[int, int, int], page_size: int) -> None:
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    vars(settings).update(zip(names, shape, strict=True))
    settings.schedule.page_size = page_size


def request(committed: int, allocated: int, rounds: int) -> Any:
    kv = SimpleNamespace(kv_committed_len=committed, kv_allocated_len=allocated)
    return SimpleNamespace(kv=kv, decode_batch_idx=rounds)


def written(root: int, shape: tuple[int, int, int], page_size: int) -> int:
    """The end of the slots of a round: `prepare_for_draft`'s drafts and tail copies, and verify."""
    num_steps, topk, num_draft_tokens = shape
    verified = root + num_draft_tokens
    if page_size == 1 or topk == 1:
        return max(verified, root + topk * num_steps)
    last_page = root % page_size
    num_new_pages = (last_page + num_steps + page_size - 1) // page_size
    start = root - last_page + (topk - 1) * num_new_pages * page_size
    # Whole pages are read, so the last branch's page must be the row's.
    return max(verified, start + num_new_pages * page_size)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_row_has_what_its_round_can_write_and_no_page_more(
    settings: SimpleNamespace, shape: tuple[int, int, int], page_size: int
) -> None:
    use(settings, shape, page_size)
    most = min(shape[0] + 1, shape[2])
    for committed, rounds in itertools.product(range(1, 3 * page_size + 2), (0, 1)):
        lens = allocation_sizing.page_aligned_decode_alloc_lens
        (now,), (after,), needed = lens(
            [request(committed, 0, rounds)], reserve=0, page_size=page_size
        )
        roots = range(committed, committed + (most if rounds else 0) + 1)
        end = max(written(root, shape, page_size) for root in roots)
        assert (now, after, needed) == (0, -(-end // page_size) * page_size, after)


@pytest.mark.parametrize("seed", range(10))
def test_the_estimate_is_what_the_round_takes(settings: SimpleNamespace, seed: int) -> None:
    rng = random.Random(seed)
    page_size, shape = rng.choice(PAGE_SIZES), rng.choice(SHAPES)
    use(settings, shape, page_size)
    # A row that was just filled ends inside a page.
    rows = [
        request(n := rng.randint(1, 200), n + rng.randint(0, 90), rng.randint(0, 2))
        for _ in range(9)
    ]
    now, after, _ = allocation_sizing.page_aligned_decode_alloc_lens(
        rows, reserve=0, page_size=page_size
    )
    pages = sum(-(-b // page_size) + (-a // page_size) for a, b in zip(now, after, strict=True))
    batch = object.__new__(ScheduleBatch)
    assert batch._new_tokens_required_next_decode_spec_v2(rows, page_size) == pages * page_size


def test_trees_take_half_of_sglangs_slots_and_chains_as_many(settings: SimpleNamespace) -> None:
    """Mean slots ahead of the committed length over all offsets, with a round in flight."""

    def ahead(shape: tuple[int, int, int], page_size: int) -> tuple[float, float]:
        use(settings, shape, page_size)
        rows = [request(n, 0, 1) for n in range(page_size, 2 * page_size)]
        committed = sum(row.kv.kv_committed_len for row in rows)
        reserved = allocation_sizing.get_alloc_reserve_per_decode()
        own = OWN["lens"](rows, reserve=reserved, page_size=page_size)
        ours = allocation_sizing.page_aligned_decode_alloc_lens(
            rows, reserve=reserved, page_size=page_size
        )
        return tuple((sum(lens[1]) - committed) / page_size for lens in (own, ours))

    own, ours = ahead((5, 8, 64), 64)
    assert ours <= own / 2, (own, ours)
    own, ours = ahead((5, 4, 8), 64)
    assert ours <= own / 2, (own, ours)
    own, ours = ahead((3, 1, 4), 16)
    assert ours == own


def test_what_is_not_plain_eagle_keeps_sglangs_reserve(settings: SimpleNamespace) -> None:
    use(settings, (5, 8, 64), 64)
    rows = [request(70, 70, 1)]
    lens = allocation_sizing.page_aligned_decode_alloc_lens
    own = OWN["lens"](rows, reserve=2048, page_size=64)
    assert lens(rows, reserve=2048, page_size=64) != own
    for change in (
        {"speculative_algorithm": "DFLASH"},
        {"speculative_adaptive": True},
        {"enable_multi_layer_eagle": True},
        {"decoupled_spec_role": "drafter"},
    ):
        where = settings.disagg if "decoupled_spec_role" in change else settings
        before = {name: getattr(where, name) for name in change}
        vars(where).update(change)
        if where is settings.disagg:  # written when settings are published: another object
            settings.bags["spec"] = SimpleNamespace(**vars(settings))
        assert lens(rows, reserve=2048, page_size=64) == own
        assert reserve._table(64) is None
        vars(where).update(before)
        settings.bags["spec"] = settings
        assert lens(rows, reserve=2048, page_size=64) != own


def test_the_table_follows_what_changes_in_place(settings: SimpleNamespace) -> None:
    use(settings, (3, 4, 8), 16)
    assert reserve._table(16) == reserve.slots_ahead(3, 4, 8, 16)
    assert reserve._table(64) == reserve.slots_ahead(3, 4, 8, 64)
    use(settings, (5, 8, 64), 64)
    assert reserve._table(64) == reserve.slots_ahead(5, 8, 64, 64)


def test_published_settings_are_another_object_and_their_leaves_are_its_own() -> None:
    arguments = {"model_path": "dummy", "device": "cpu", "attention_backend": "torch_native"}
    seen = []
    for _ in range(2):
        publish(ServerArgs(**arguments), role="scheduler")
        seen.append(get_spec())
        reserve._leaves(vars(seen[-1]))
        with seen[-1].override(speculative_num_steps=7):
            assert 7 in reserve._leaves(vars(seen[-1]))
    assert seen[0] is not seen[1]


def write_rows(
    rows: torch.Tensor,
    table: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
    *_: Any,
) -> None:
    """What SGLang's Triton kernel does, which needs a GPU."""
    taken = 0
    for row, low, high in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        table[row, low:high] = slots[taken : taken + high - low].int()
        taken += high - low


def test_sglangs_own_prepare_runs_on_it(settings: SimpleNamespace, monkeypatch: Any) -> None:
    """Its real path, with the rows and pages of both."""
    monkeypatch.setattr(allocation, "attention_backends", lambda: ("torch_native", "torch_native"))
    monkeypatch.setattr(allocation, "assign_req_to_token_pool_func", write_rows)
    page_size, num_rows = 4, 3
    use(settings, (3, 2, 4), page_size)
    pool = paged.PagedTokenToKVPoolAllocator(
        page_size * 60, page_size, torch.float16, "cpu", None, False
    )
    table = torch.zeros(num_rows, 96, dtype=torch.int32)
    requests = []
    for row, length in enumerate((5, 8, 11)):
        ends = torch.tensor([length])
        zero = torch.tensor([0])
        slots = pool.alloc_extend(zero, zero, ends, ends, torch.tensor([-1]), length)
        table[row, :length] = slots.int()
        requests.append(request(length, length, 0))
    rows = SimpleNamespace(req_to_token=table)
    cache = SimpleNamespace(
        token_to_kv_pool_allocator=pool,
        page_size=page_size,
        is_chunk_cache=lambda: True,
        is_tree_cache=lambda: False,
        supports_prefix_sharing=lambda: False,
    )
    batch = SimpleNamespace(
        reqs=requests,
        sampling_info=SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=False)),
        token_to_kv_pool_allocator=pool,
        req_to_token_pool=rows,
        req_pool_indices=torch.arange(num_rows),
        seq_lens_cpu=torch.tensor([5, 8, 11]),
        tree_cache=cache,
        device="cpu",
        hisparse_coordinator=None,
        maybe_evict_swa=lambda: None,
    )
    free = pool.available_size()
    estimate = object.__new__(ScheduleBatch)._new_tokens_required_next_decode_spec_v2(
        requests, page_size
    )
    eagle_utils.eagle_prepare_for_decode(batch)
    assert free - pool.available_size() == estimate
    for row, req in enumerate(requests):
        end = written(req.kv.kv_committed_len, (3, 2, 4), page_size)
        assert req.kv.kv_allocated_len == -(-end // page_size) * page_size
        slots = table[row, : req.kv.kv_allocated_len].tolist()
        assert 0 not in slots and len(set(slots)) == len(slots)
        assert all(slot % page_size == at % page_size for at, slot in enumerate(slots))


def test_this_sglang_is_accepted_within_three_seconds_of_cpu() -> None:
    start = time.thread_time()
    assert reserve_proof.difference() is None
    assert time.thread_time() - start < proof.SECONDS
    assert drift.differences("reserve") == []


def drafts_a_slot_later(own: Any) -> Any:
    def prepare_for_draft(draft: Any, pool: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        batch.seq_lens = batch.seq_lens + 1
        return own(draft, pool, batch, *rest, **named)

    return prepare_for_draft


def verifies_a_slot_more(own: Any) -> Any:
    def eagle_prepare_for_verify(tree: Any, *rest: Any) -> Any:
        tree.draft_token_num += 1
        return own(tree, *rest)

    return eagle_prepare_for_verify


def gives_another_a_page(own: Any) -> Any:
    def eagle_prepare_for_decode(batch: Any) -> None:
        own(batch)
        batch.reqs[0].kv.kv_allocated_len += batch.token_to_kv_pool_allocator.page_size

    return eagle_prepare_for_decode


def counts_no_round(own: Any) -> Any:
    def eagle_prepare_for_decode(batch: Any) -> None:
        own(batch)
        for req in batch.reqs:
            req.decode_batch_idx = 0

    return eagle_prepare_for_decode


def writes_a_column_later(own: Any) -> Any:
    @functools.wraps(own)  # the proof looks at the parameters
    def prepare_for_draft(*args: Any, **named: Any) -> Any:
        init_new = forward_batch_info.ForwardBatch.init_new

        def shifted(*args: Any, write_cols: Any = None, **named: Any) -> Any:
            if write_cols is not None:
                write_cols = slice(write_cols.start + 1, write_cols.stop + 1)
            return init_new(*args, write_cols=write_cols, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forward_batch_info.ForwardBatch, "init_new", shifted)
            return own(*args, **named)

    return prepare_for_draft


@pytest.mark.parametrize(
    ("plant", "module", "name", "expected"),
    [
        (counts_no_round, eagle_utils, "eagle_prepare_for_decode", "lengths, .* counts as "),
        (writes_a_column_later, eagle_worker_common, "prepare_for_draft", "writes, .* draft"),
        (drafts_a_slot_later, eagle_worker_common, "prepare_for_draft", "writes, .* draft"),
        (verifies_a_slot_more, eagle_utils, "eagle_prepare_for_verify", "writes, .* verify"),
        (
            gives_another_a_page,
            eagle_utils,
            "eagle_prepare_for_decode",
            "lengths, .*: a slot is of",
        ),
    ],
)
def test_what_a_round_does_otherwise_is_refused_with_the_operation(
    plant: Any, module: Any, name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, plant(getattr(module, name)))
    (line,) = drift.differences("reserve")
    assert re.match(rf"a round's {expected}", line), line
    assert drift.differences("pages") == []


def test_a_reserve_below_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation_sizing, "get_alloc_reserve_per_decode", lambda: 3)
    (line,) = drift.differences("reserve")
    assert "has_room" in line and line.endswith("gives False, ours True")
