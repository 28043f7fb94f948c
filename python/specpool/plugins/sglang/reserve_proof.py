"""What proves level `reserve`: rounds of EAGLE on SGLang's own functions, on a CPU.

Three things must be as ours takes them. A row grows to the lengths that our hook returns, and by
nothing else: with lengths of SGLang's size ours and SGLang's own give the same rows, slots and
estimates. A round writes the slots that the core lists for its shape. And what we reserve is never
more than SGLang's own, for which its rows have room. SGLang's kernels, which need a GPU, copy cells
of a row to a list and back; plain loops take their place.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from sglang.srt import server_args
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache import allocation, allocation_sizing
from sglang.srt.mem_cache.allocator import paged, token
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.speculative import eagle_utils, eagle_worker_common

from specpool._core import draft_write_slots
from specpool.plugins import proof
from specpool.plugins.proof import Operation, Operations
from specpool.plugins.sglang import pages_proof, reserve

_KERNELS = importlib.import_module("sglang.kernels.ops.speculative.cache_locs")
# Not names of this module that SGLang's loader would rebind.
_OWN: dict[str, Any] = {
    "paged": paged.PagedTokenToKVPoolAllocator,
    "token": token.TokenToKVPoolAllocator,
    "estimate": schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2,
}
#: Who sets the lengths of a round: SGLang's name, its function, and ours around it.
_LENS, _OWN_LENS, _OUR_LENS = (
    (
        "page_aligned_decode_alloc_lens",
        {"own": allocation_sizing.page_aligned_decode_alloc_lens},
        reserve.decode_alloc_lens,
    )
    if reserve.HAS_LENS
    else (
        "alloc_for_spec_decode",
        {"own": allocation.alloc_for_spec_decode},
        reserve.alloc_round,
    )
)
#: Calls that read SGLang's settings, each in the modules that name it; all of them read one object.
_SETTINGS = (
    *("spec", "server_args", "schedule", "parallel", "exec", "disagg", "kernel"),
    *("memory", "serving", "model", "observability"),
)
#: What the lengths, the slots and the accounts of a round are called.
REPLACED = frozenset(
    """kv_allocated_len kv_committed_len decode_batch_idx nxt_kv_lens nxt_kv_len num_needed_tokens
    double_alloc reserve page_aligned_decode_alloc_lens out_cache_loc move_kv_cache""".split()
)
EPISODES = 16
SHAPES = [(1, 1, 2), (3, 1, 4), (5, 1, 6), (2, 2, 4), (5, 4, 8), (5, 8, 64), (1, 10, 10), (7, 3, 2)]
PAGE_SIZES = [1, 2, 3, 16, 64]
ROW_WIDTH = 2048


def difference() -> str | None:
    """Return the first thing in which SGLang's rounds differ from ours; None if nothing.

    It takes less than `proof.SECONDS` of CPU.
    """
    functions: list[Callable[..., Any]] = [_OWN["estimate"], _OWN_LENS["own"]]
    for function, ours in zip(functions, [reserve.tokens_required, _OUR_LENS], strict=True):
        line = unknown_parameters(function, ours)
        if line is not None:
            return line
    functions += [
        eagle_utils.eagle_prepare_for_decode,
        eagle_utils.eagle_prepare_for_verify,
        allocation.alloc_for_spec_decode,
        eagle_worker_common.prepare_for_draft,
        eagle_worker_common.duplicate_prefix_tail_to_draft_branches,
    ]
    own_code = map(inspect.unwrap, functions)  # `history` may be around it already
    with on_the_host():
        return proof.difference(_cases(), own_code, REPLACED, episodes=EPISODES)


def longer_difference(times: int = 10) -> str | None:
    """Return the same of other seeds, that many times as long; for tests of the proof itself."""
    with on_the_host():
        return proof.first_difference(
            _cases(), episodes=times * EPISODES, seed=EPISODES, seconds=1e9
        )


def _cases() -> list[proof.Case]:
    return [LengthsCase(), WritesCase(), ReserveCase()]


def unknown_parameters(function: Callable[..., Any], ours: Callable[..., Any]) -> str | None:
    """Return how the parameters differ from those of ours behind the original and its object."""
    given, (_, *known) = (inspect.signature(part).parameters.values() for part in (function, ours))
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known)
    if (takes_any or len(given) == len(known)) and all(
        parameter.name in ("self", expected.name) and parameter.kind is expected.kind
        for parameter, expected in zip(given, known, strict=False)
        if expected.kind is not expected.VAR_KEYWORD
    ):
        return None
    names = [", ".join(parameter.name for parameter in part) for part in (given, known)]
    return f"{function.__qualname__} has the parameters ({names[0]}), ours ({names[1]})"


class LengthsSide:
    """Requests with rows, and an allocator of SGLang's; `hook` is whether ours gives the lengths.

    Args:
        page_size: of the allocator.
        reserves: slots beyond the committed ones, without and with a round in flight.
        hook: whether ours is around SGLang's functions.
        hisparse: whether a coordinator of HiSparse's is there.
    """

    def __init__(
        self, page_size: int, reserves: tuple[int, int], hook: bool, hisparse: bool
    ) -> None:
        self.page_size, self.reserves, self.hook = page_size, reserves, hook
        kind, lens = ("token", ()) if page_size == 1 else ("paged", (page_size,))
        num_slots = 60 * 16 * page_size
        self.allocator = _OWN[kind](num_slots, *lens, torch.float16, "cpu", None, False)
        self.coordinator = object() if hisparse else None
        if hisparse and page_size > 1:
            self.allocator.alloc_logical_only = self.allocator.alloc_extend
        self.table = torch.zeros((8, ROW_WIDTH), dtype=torch.int32)
        self.reqs: dict[int, Any] = {}
        self.num_calls = 0

    def admit(self, row: int, length: int) -> None:
        size = -(-length // self.page_size) * self.page_size
        self.table[row, :size] = self.allocator.alloc(size).int()
        kv = SimpleNamespace(kv_allocated_len=length)
        self.reqs[row] = SimpleNamespace(kv=kv, decode_batch_idx=0)
        self._holder(row).kv_committed_len = length

    def _holder(self, row: int) -> Any:
        req = self.reqs[row]
        return req.kv if hasattr(schedule_batch.ReqKvInfo, "kv_committed_len") else req

    def commit(self, row: int, count: int) -> None:
        self._holder(row).kv_committed_len += count

    def finish(self, row: int) -> None:
        held = -(-self.reqs.pop(row).kv.kv_allocated_len // self.page_size) * self.page_size
        if held:
            self.allocator.free(self.table[row, :held].long())
        self.table[row] = 0

    def estimate(self, rows: Sequence[int]) -> int:
        """Return the slots that a round of these rows takes, by SGLang's estimate or ours."""
        with self._hooked(rows):
            batch = object.__new__(schedule_batch.ScheduleBatch)
            reqs = [self.reqs[row] for row in rows]
            estimate = _OWN["estimate"]
            if self.hook:
                estimate = partial(reserve.tokens_required, estimate)
            return int(estimate(batch, reqs, self.page_size))

    def prepare(self, rows: Sequence[int], has_lens: bool) -> int:
        """Prepare a round of these rows; return the slots that it took.

        Args:
            rows: no two have unequally many rounds in flight.
            has_lens: whether the batch has its lengths on the host.
        """
        free = self.allocator.available_size()
        reqs = [self.reqs[row] for row in rows]
        lens = [self._holder(row).kv_committed_len for row in rows]
        cache = SimpleNamespace(
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page_size,
            is_chunk_cache=lambda: True,
            is_tree_cache=lambda: False,
            supports_prefix_sharing=lambda: False,
        )

        def count() -> None:
            self.num_calls += 1

        needs_penalties = SimpleNamespace(is_required=True)
        batch = SimpleNamespace(
            reqs=reqs,
            batch_size=lambda: len(reqs),
            sampling_info=SimpleNamespace(penalizer_orchestrator=needs_penalties),
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            req_pool_indices=torch.tensor(rows),
            seq_lens_cpu=torch.tensor(lens) if has_lens else None,
            tree_cache=cache,
            device="cpu",
            hisparse_coordinator=self.coordinator,
            maybe_evict_swa=count,
            cumulate_penalty_output_tokens=count,
        )
        rounds = [req.decode_batch_idx for req in reqs]
        with self._hooked(rows):
            eagle_utils.eagle_prepare_for_decode(batch)
        counted = [req.decode_batch_idx - count for req, count in zip(reqs, rounds, strict=True)]
        assert set(counted) == {1}, f"a round counts as {counted} in the rows"
        return int(free - self.allocator.available_size())

    @contextmanager
    def _hooked(self, rows: Sequence[int]) -> Iterator[None]:
        """Within it SGLang reserves as this side is told to, by its own code or by ours."""
        (is_in_flight,) = {self.reqs[row].decode_batch_idx > 0 for row in rows}
        size, lens = self.page_size, _OWN_LENS["own"]
        if self.hook:
            lens = partial(_OUR_LENS, lens)
        table = tuple(
            [-(-(offset + slots) // size) * size - offset for offset in range(size)]
            for slots in self.reserves
        )
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(reserve, "_table", lambda _: table))
            for module in (allocation_sizing, allocation, eagle_utils, schedule_batch):
                _patch_if_there(stack, module, _LENS, lens)
                if not self.hook:
                    own_reserve = partial(int, self.reserves[is_in_flight])
                    _patch_if_there(stack, module, "get_alloc_reserve_per_decode", own_reserve)
            yield

    def state(self) -> dict[str, Any]:
        lens = [
            (row, self._holder(row).kv_committed_len, req.kv.kv_allocated_len, req.decode_batch_idx)
            for row, req in self.reqs.items()
        ]
        held = [self.table[row, :allocated].tolist() for row, _, allocated, _ in lens]
        slots = [slot for row in held for slot in row]
        assert 0 not in slots and len(set(slots)) == len(slots), "a slot is of two rows, or of none"
        return {
            "the rows with their committed and allocated lengths and rounds": lens,
            "the slots of the rows": held,
            "the free tokens": self.allocator.available_size(),
            "the calls for penalties and sliding windows": self.num_calls,
        }


class LengthsCase:
    """Rows that are admitted, estimated, prepared for rounds, committed and finished."""

    name = "a round's lengths"

    def sides(self, rng: random.Random) -> tuple[LengthsSide, LengthsSide]:
        self.page_size = rng.choice(PAGE_SIZES[:4])
        shape = rng.choice(SHAPES)
        self.most = min(shape[0] + 1, shape[2])
        window = max(shape[0] * shape[1], shape[2]) + rng.randint(0, self.page_size)
        reserves = window, window + self.most
        hisparse = self.page_size > 1 and rng.random() < 0.2
        sides = [LengthsSide(self.page_size, reserves, hook, hisparse) for hook in (False, True)]
        return sides[0], sides[1]

    def operations(self, rng: random.Random) -> Operations:
        rounds: dict[int, int] = {}
        for _ in range(14):
            if len(rounds) < 3 or (rng.random() < 0.2 and len(rounds) < 7):
                row = next(row for row in range(1, 8) if row not in rounds)
                rounds[row] = 0
                yield Operation("admit", (row, rng.randint(1, 4 * self.page_size)))
            is_in_flight = rng.choice([bool(number) for number in rounds.values()])
            alike = [row for row, number in rounds.items() if bool(number) == is_in_flight]
            rows = rng.sample(alike, rng.randint(1, len(alike)))
            yield Operation("estimate", (rows,))
            yield Operation("prepare", (rows, rng.random() < 0.7))
            for row in rows:
                rounds[row] += 1
                if rng.random() < 0.8:
                    yield Operation("commit", (row, rng.randint(1, self.most)))
            if rng.random() < 0.2:
                row = rng.choice(rows)
                del rounds[row]
                yield Operation("finish", (row,))


class OwnWrites:
    """What SGLang's own functions write in a round, in rows of a table."""

    def __init__(self, table: torch.Tensor, page_size: int, shape: tuple[int, int, int]) -> None:
        self.table, self.page_size, self.shape = table, page_size, shape
        self.moves: list[Any] = []

    def _batch(self, rows: Sequence[int], roots: Sequence[int]) -> Any:
        return SimpleNamespace(
            forward_mode=forward_batch_info.ForwardMode.DECODE,
            seq_lens=torch.tensor(roots),
            seq_lens_cpu=torch.tensor(roots),
            req_pool_indices=torch.tensor(rows),
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool_allocator=SimpleNamespace(page_size=self.page_size),
            device="cpu",
            multimodal_inputs=[None] * len(rows),
            hisparse_coordinator=None,
            model_config=SimpleNamespace(vocab_size=10),
            mamba_track_indices=None,
            reqs=[],
        )

    def draft(self, rows: Sequence[int], roots: Sequence[int], is_cpu: bool, plan: bool) -> Any:
        """Return the slots of the drafts, row by row, and the moves of prefix tails."""
        steps, topk, num_draft_tokens = self.shape
        batch = self._batch(rows, roots)
        moves: list[tuple[list[int], list[int]]] = []
        runner = SimpleNamespace(
            token_to_kv_pool=SimpleNamespace(
                move_kv_cache=lambda dst, src: moves.append((src.tolist(), dst.tolist()))
            ),
            model_config=SimpleNamespace(model_is_mrope=False),
            spec_algorithm=SimpleNamespace(is_standalone=lambda: False),
        )
        named = {}
        if (
            "target_translator"
            in inspect.signature(eagle_worker_common.prepare_for_draft).parameters
        ):
            translator = SimpleNamespace(plan=lambda **_: object()) if plan else None
            named = {"target_translator": translator, "num_draft_tokens": num_draft_tokens}
        columns: list[slice | None] = []

        def new_forward(*_: Any, write_cols: slice | None = None, **__: Any) -> None:
            columns.append(write_cols)

        with (
            mock.patch.object(eagle_worker_common, "_is_cpu", is_cpu, create=True),
            mock.patch.object(forward_batch_info.ForwardBatch, "init_new", new_forward),
        ):
            eagle_worker_common.prepare_for_draft(
                SimpleNamespace(),
                batch.req_to_token_pool,
                batch,
                None,
                runner,
                topk,
                steps,
                **named,
            )
        slots = batch.out_cache_loc.reshape(len(rows), -1)
        (written,) = columns
        if written is not None:  # of a plan, which has the rest of verify's window too
            window = self.verify(rows, roots, False)
            assert slots.tolist() == window, "a plan's window is another than verify's"
            slots = slots[:, written]
        sources = [slot for part, _ in moves for slot in part]
        targets = [slot for _, part in moves for slot in part]
        return slots.tolist(), sorted(zip(sources, targets, strict=True))

    def verify(self, rows: Sequence[int], roots: Sequence[int], is_prepared: bool) -> Any:
        """Return the slots of the tree, row by row."""
        num_draft_tokens = self.shape[2]
        batch = self._batch(rows, roots)
        slots = None
        if is_prepared:
            ranges = [
                self.table[row, root : root + num_draft_tokens]
                for row, root in zip(rows, roots, strict=True)
            ]
            slots = torch.cat(ranges).long()
        tree = SimpleNamespace(
            draft_token=torch.zeros(len(rows) * num_draft_tokens, dtype=torch.int64),
            draft_token_num=num_draft_tokens,
            prepared_out_cache_loc=slots,
            prepared_mrope_positions=None,
            kv_loc_plan=None,
        )
        runner = SimpleNamespace(
            spec_algorithm=SimpleNamespace(is_standalone=lambda: False),
            decode_cuda_graph_runner=None,
        )
        worker = SimpleNamespace(model_runner=runner)
        eagle_utils.eagle_prepare_for_verify(tree, batch.req_to_token_pool, batch, worker)
        return batch.out_cache_loc.reshape(len(rows), num_draft_tokens).tolist()

    def state(self) -> dict[str, Any]:
        return {}


class CoreWrites(OwnWrites):
    """What the core lists for the same round; each slot must lie in what is reserved."""

    def draft(self, rows: Sequence[int], roots: Sequence[int], is_cpu: bool, plan: bool) -> Any:
        steps, topk, _ = self.shape
        arrays = [np.array(ints, np.int32) for ints in (rows, roots)]
        pages = (self.table[:, :: self.page_size] // self.page_size).numpy().astype(np.int32)
        slots = draft_write_slots(
            pages, self.page_size, *arrays, num_steps=steps, topk=topk, layout="holey"
        )
        moves = [move for lane in zip(rows, roots, strict=True) for move in self._moves(*lane)]
        return slots.reshape(len(rows), -1).tolist(), sorted(moves)

    def _moves(self, row: int, root: int) -> Iterator[tuple[int, int]]:
        """Yield the moves of a prefix's tail to each branch; the core has none for one step."""
        size, (steps, topk, _) = self.page_size, self.shape
        tail, pages_per_branch = root % size, -(-(root % size + steps) // size)
        for branch in range(1, topk if size > 1 else 1):
            for source in range(root - tail, root):
                target = source + branch * pages_per_branch * size
                assert target - root < reserve.slots_ahead(*self.shape, size)[0][tail]
                yield int(self.table[row, source]), int(self.table[row, target])

    def verify(self, rows: Sequence[int], roots: Sequence[int], is_prepared: bool) -> Any:
        return [
            self.table[row, root : root + self.shape[2]].tolist()
            for row, root in zip(rows, roots, strict=True)
        ]


class WritesCase:
    """Rounds of rows whose roots lie anywhere."""

    name = "a round's writes"

    def sides(self, rng: random.Random) -> tuple[OwnWrites, CoreWrites]:
        self.page_size, self.shape = rng.choice(PAGE_SIZES), rng.choice(SHAPES)
        size = self.page_size
        steps, topk, num_draft_tokens = self.shape
        publish(self.shape, size)
        pages_per_row = 2 + (3 * size + num_draft_tokens + topk * (steps + 2 * size)) // size
        pages = torch.tensor(rng.sample(range(1, 5 * pages_per_row), 4 * pages_per_row))
        slots = pages[:, None] * size + torch.arange(size)
        table = slots.reshape(4, -1).to(torch.int32)
        self.table = table
        return OwnWrites(table, size, self.shape), CoreWrites(table, size, self.shape)

    def operations(self, rng: random.Random) -> Operations:
        for _ in range(6):
            rows = rng.sample(range(4), rng.randint(1, 3))
            roots = [rng.randint(1, 3 * self.page_size) for _ in rows]
            yield Operation("draft", (rows, roots, rng.random() < 0.5, rng.random() < 0.5))
            yield Operation("verify", (rows, roots, rng.random() < 0.3))


class OwnReserve:
    """SGLang's own reserve at a shape and a page size."""

    def has_room(self, shape: tuple[int, int, int], page_size: int) -> bool:
        """Return whether what a round reserves here is at most SGLang's own, at each offset."""
        publish(shape, page_size)
        room = int(allocation_sizing.get_alloc_reserve_per_decode())
        return all(
            slots <= -(-(offset + room) // page_size) * page_size - offset
            for table in reserve.slots_ahead(*shape, page_size)
            for offset, slots in enumerate(table)
        )

    def state(self) -> dict[str, Any]:
        return {}


class EnoughReserve(OwnReserve):
    """What is needed of it: SGLang's rows have room for its own reserve, no more."""

    def has_room(self, shape: tuple[int, int, int], page_size: int) -> bool:
        return True


class ReserveCase:
    """Every shape at every page size."""

    name = "a round's reserve"

    def sides(self, rng: random.Random) -> tuple[OwnReserve, EnoughReserve]:
        return OwnReserve(), EnoughReserve()

    def operations(self, rng: random.Random) -> Operations:
        for shape, page_size in itertools.product(SHAPES, PAGE_SIZES):
            yield Operation("has_room", (shape, page_size))


def publish(shape: tuple[int, int, int], page_size: int) -> None:
    """Put a shape and a page size into `SETTINGS`."""
    num_steps, topk, num_draft_tokens = shape
    vars(SETTINGS).update(
        page_size=page_size,
        speculative_num_steps=num_steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=num_draft_tokens,
        max_speculative_num_draft_tokens=num_draft_tokens,
    )


class _Settings(SimpleNamespace):
    """SGLang's settings, all in one object and in those that it names; others by their default."""

    def __getattr__(self, name: str) -> Any:
        if name in ("kernel", "features", "mamba", "moe"):
            return self
        if name not in _DEFAULTS:
            raise AttributeError(f"SGLang has no setting {name}")
        return _DEFAULTS[name].default


_DEFAULTS = inspect.signature(server_args.ServerArgs).parameters
#: All that SGLang's functions read of its settings.
SETTINGS = _Settings(
    speculative_algorithm="EAGLE",
    speculative_adaptive=False,
    enable_multi_layer_eagle=False,
    decoupled_spec_role="null",
    attention_backend="torch_native",
    decode_attention_backend="torch_native",
    prefill_attention_backend="torch_native",
    attn_dcp_size=1,
    speculative_num_steps=1,
    speculative_eagle_topk=1,
    speculative_num_draft_tokens=2,
    max_speculative_num_draft_tokens=2,
    page_size=1,
)


@contextmanager
def on_the_host() -> Iterator[None]:
    """Within it SGLang reads `SETTINGS`, and loops take its kernels' places."""
    names: dict[str, Any] = {f"get_{name}": lambda: SETTINGS for name in _SETTINGS}
    names |= {
        "max_speculative_num_draft_tokens": lambda: SETTINGS.max_speculative_num_draft_tokens,
        "attention_backends": lambda: ("torch_native", "torch_native"),
        "assign_req_to_token_pool_func": _write_rows,
        "assign_draft_cache_locs_contiguous": _Kernel(),
        "assign_draft_cache_locs_contiguous_func": _read_drafts,
        # What a state-space model tracks is not a slot of KV.
        "prepare_mamba_track_for_verify": lambda _: None,
        "maybe_detect_oob": lambda *_: None,
    }
    with ExitStack() as stack:
        stack.enter_context(pages_proof.loops_for_kernels())
        for module in [*sys.modules.values()]:
            if getattr(module, "__name__", "").startswith(("sglang.", "specpool.plugins.sglang")):
                for name in names.keys() & vars(module).keys():
                    stack.enter_context(mock.patch.object(module, name, names[name]))
        # SGLang imports it on a CPU only.
        name = "assign_draft_cache_locs_contiguous_cpu"
        stack.enter_context(mock.patch.object(eagle_worker_common, name, _read_drafts, create=True))
        for name in ("assign_extend_cache_locs_func", "assign_extend_cache_locs_uniform_func"):
            _patch_if_there(stack, _KERNELS, name, _read_windows)
        # SGLang keeps what it imported at the first round.
        _patch_if_there(stack, eagle_utils, "_PREPARE_FOR_VERIFY_DEPS", None)
        batch = forward_batch_info.ForwardBatch
        stack.enter_context(mock.patch.object(batch, "init_new", lambda *_, **__: None))
        yield


def _patch_if_there(stack: ExitStack, module: ModuleType, name: str, value: Any) -> None:
    if hasattr(module, name):
        stack.enter_context(mock.patch.object(module, name, value))


def _write_rows(rows: Any, table: Any, starts: Any, ends: Any, slots: Any, num_rows: int) -> None:
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[taken : taken + end - start].int()
        taken += end - start
    assert taken == len(slots) and num_rows == len(rows)


def _read_drafts(rows: Any, table: Any, lens: Any, out: Any, *sizes: Any, **_: Any) -> None:
    topk, num_steps = sizes[-2:]
    ranges = [
        table[row, start : start + topk * num_steps]
        for row, start in zip(rows.tolist(), lens.tolist(), strict=True)
    ]
    out[:] = torch.cat(ranges)


def _read_windows(
    *, req_pool_indices: Any, req_to_token: Any, start_offset: Any, draft_token_num: int, **_: Any
) -> torch.Tensor:
    out = torch.empty(len(req_pool_indices) * draft_token_num, dtype=torch.int64)
    _read_drafts(req_pool_indices, req_to_token, start_offset, out, 1, draft_token_num)
    return out


class _Kernel:
    """A kernel that is called with a grid."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return _read_drafts
