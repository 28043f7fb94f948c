"""What proves level `rows`: requests and sessions on SGLang's own functions, on a CPU.

SGLang's rows, allocator, radix tree and sessions stand on one side, ours on the other. Both sides
prefill, share prefixes, run rounds with one in flight, finish, retract and end turns, and what each
slot holds is known: a slot has the text that was written there last. Every row that a forward reads
must hold its own text, no slot may be lost, and the lengths and the prefixes that a request finds
must be the same. How many slots a row holds ahead is ours to choose, so that is not compared.
"""

from __future__ import annotations

import inspect
import itertools
import pkgutil
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.managers import io_struct, schedule_batch, schedule_policy
from sglang.srt.managers.scheduler_components import batch_result_processor
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache import (
    allocation,
    allocation_sizing,
    base_prefix_cache,
    common,
    memory_pool,
)
from sglang.srt.mem_cache import unified_radix_cache as radix_cache
from sglang.srt.mem_cache.allocator import paged, token
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session import streaming_session
from sglang.srt.session.session_controller import SessionController
from sglang.srt.speculative import eagle_utils
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from specpool.plugins import proof
from specpool.plugins.proof import Operation, Operations
from specpool.plugins.sglang import reserve_proof, row_allocator, row_pool, row_tree, rows

#: For each side, SGLang's own and ours. Not names of this module that its loader would rebind.
_POOLS = {"own": memory_pool.ReqToTokenPool, "ours": row_pool.SpecpoolRows}
_PAGED = {
    "own": paged.PagedTokenToKVPoolAllocator,
    "ours": row_allocator.SpecpoolRowAllocator,
}
_TOKEN = {
    "own": token.TokenToKVPoolAllocator,
    "ours": row_allocator.SpecpoolRowTokenAllocator,
}
_HOOKED: dict[str, Callable[..., Any]] = {
    target: inspect.unwrap(pkgutil.resolve_name(target)) for target in rows.HOOKS
}
#: The name of the parameter by which SGLang is told to keep a released row's tokens in the tree.
_KEEP = next(
    name
    for name in ("checkpoint", "is_insert")
    if name in inspect.signature(common.release_kv_cache).parameters
)
#: What rows, their lengths and their slots are called.
REPLACED = frozenset(
    """req_to_token req_pool_idx kv_allocated_len kv_committed_len cache_protected_len free_slots
    free_kv_row free_rows alloc_rows prefix_len""".split()
)
#: What the level does not serve, or leaves to SGLang: other devices, decoding without drafts, trees
#: that keep nothing or fewer tokens than a request has, and pages on several ranks.
UNSERVED = frozenset(
    {"is_npu", "is_none", "disable", "effective_cache_len", "rotation_tail_declined"}
)
#: What SGLang's own classes keep and ours do not.
LISTS = frozenset(
    """free_slots free_pages release_pages staged_pages num_staged_pages free_page_ids_group
    _release_page_ids""".split()
)
EPISODES = 6
SHAPES = [(1, 1, 2), (3, 1, 4), (2, 2, 4), (5, 4, 8)]
PAGE_SIZES = [1, 2, 4, 16]
NUM_ROWS = 5
#: Tokens of a request: up to so many of a prompt, of an answer, and of a turn.
MAX_PROMPT, MAX_ANSWER, MAX_TURN = 44, 20, 12
MAX_LEN = 4 * (MAX_PROMPT + MAX_ANSWER)
GARBAGE = -7


def difference() -> str | None:
    """Return the first thing in which SGLang's rows differ from what ours need; None if nothing.

    It takes less than `proof.SECONDS` of CPU.
    """
    for classes in (_POOLS, _PAGED, _TOKEN):
        line = proof.unlike_method(*classes.values()) or _wrong_inheritance(*classes.values())
        if line is not None:
            return line
    for target, function in _HOOKED.items():
        if target.rpartition(".")[2] not in row_tree.INSERTS:
            line = reserve_proof.unknown_parameters(function, rows.HOOKS[target])
            if line is not None:
                return line
    with _on_the_host():
        return proof.difference(_cases(), _functions(), REPLACED, UNSERVED, episodes=EPISODES)


def longer_difference(times: int = 10) -> str | None:
    """Return the same of other seeds, that many times as long; for tests of the proof itself."""
    with _on_the_host():
        return proof.first_difference(
            _cases(), episodes=times * EPISODES, seed=EPISODES, seconds=1e9
        )


def _cases() -> list[proof.Case]:
    return [RowsCase(False), RowsCase(True), reserve_proof.WritesCase()]


def _wrong_inheritance(own: type, ours: type) -> str | None:
    """Return the first method that ours has of SGLang's and that works on a list ours lacks."""
    for name in dir(own):
        function = inspect.getattr_static(own, name)
        if inspect.isfunction(function) and inspect.getattr_static(ours, name, None) is function:
            for used in sorted(LISTS & proof.names_of(function)):
                return f"{own.__name__}.{name}: ours inherits it, and has no {used}"
    return None


def _functions() -> list[Callable[..., Any]]:
    """Return SGLang's functions that must run, those behind our hooks and around them."""
    functions = [
        allocation.alloc_req_slots,
        allocation.alloc_token_slots,
        allocation.alloc_paged_token_slots_extend,
        common.release_kv_cache,
        common._release_overallocated_kv_indices,
        common.evict_from_tree_cache,
        *_HOOKED.values(),
        *(
            function
            for name, function in vars(_POOLS["own"]).items()
            if inspect.isfunction(function) and name not in vars(_POOLS["ours"])
        ),
        *(
            function
            for name, function in vars(streaming_session.StreamingSession).items()
            if inspect.isfunction(function) and not name.startswith("session_held")  # only count
        ),
    ]
    return list(
        {function.__code__: function for function in map(inspect.unwrap, functions)}.values()
    )


def _keys(tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return what the KV of each position holds: it depends on all tokens up to there."""
    key, keys = 1, []
    for number in tokens:
        key = hash((key, number))
        keys.append(key)
    return np.array(keys, np.int64)


def _next_token(tokens: Sequence[int]) -> int:
    """Return what the model says behind these tokens."""
    return 3 + int(_keys(tokens)[-1]) % 3


class RowsSide:
    """Requests on SGLang's functions, with its own rows or with ours.

    Args:
        kind: "own" or "ours".
        page_size: of the allocator.
        num_pages: of the allocator.
        shape: of the rounds, (S, K, N).
        is_tight: whether evictions depend on how many slots rows hold.
        has_cache: whether the tree keeps anything.
    """

    def __init__(
        self,
        kind: str,
        page_size: int,
        num_pages: int,
        shape: tuple[int, int, int],
        is_tight: bool,
        has_cache: bool,
    ) -> None:
        self.kind, self.page_size, self.shape, self.is_tight = kind, page_size, shape, is_tight
        self.size = num_pages * page_size
        self.pool = _POOLS[kind](NUM_ROWS, 2 * MAX_LEN + 512, "cpu", False)
        settings = torch.float16, "cpu", None, False
        self.allocator = (
            _TOKEN[kind](self.size, *settings)
            if page_size == 1
            else _PAGED[kind](self.size, page_size, *settings)
        )
        parameters = CacheInitParams(
            disable=not has_cache,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            is_eagle=True,
            chunked_prefill_size=None,
            tree_components=(ComponentType.FULL,),
        )
        self.tree = _tree(parameters)
        self.sessions = SessionController(self.tree)
        self.held = np.zeros(self.size + page_size, np.int64)
        self.reqs: dict[str, Any] = {}
        #: The length on the device of each running request, and what the device has said for it,
        #: whether or not the host knows.
        self.lens: dict[str, int] = {}
        self.said: dict[str, list[int]] = {}
        self.rounds: deque[tuple[Any, Any]] = deque()

    # What SGLang's scheduler does.

    def send(self, name: str, tokens: Sequence[int], max_new_tokens: int) -> None:
        parameters = SamplingParams(max_new_tokens=max_new_tokens, temperature=0)
        parameters.normalize(None)
        self.reqs[name] = schedule_batch.Req(
            name, "", array("q", tokens), parameters, vocab_size=1000
        )

    def turn(
        self, name: str, session_id: str, tokens: Sequence[int], max_new_tokens: int
    ) -> list[int]:
        """Begin a session's turn; return its prompt."""
        if self.sessions.get(session_id) is None:
            self.open(session_id)
        session = self.sessions.get(session_id)
        parameters = SamplingParams(max_new_tokens=max_new_tokens, temperature=0)
        parameters.normalize(None)
        asked = io_struct.TokenizedGenerateReqInput(
            rid=name,
            input_text="",
            input_embeds=None,
            token_type_ids=None,
            input_ids=array("q", tokens),
            mm_inputs=None,
            sampling_params=parameters,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            session_params=io_struct.SessionParams(id=session_id),
        )
        req = self.reqs[name] = session.create_req(asked, None, 1000)
        return list(req.origin_input_ids)

    def prefill(self, names: Sequence[str], cuts: Sequence[bool]) -> tuple[Any, ...]:
        """Prefill some requests, or a page of each that is to be cut.

        Returns:
            How many tokens of each were there already; who has more to prefill; and who has ended.
        """
        serving = [self.reqs[name] for name in names]
        starts, partial = [], []
        for req, is_cut in zip(serving, cuts, strict=True):
            if req.rid in self.lens:
                req.init_next_round_input()
            else:
                req.init_next_round_input(self.tree)
                self._lock(req)
            start = _prefix_len(req)
            starts.append(start)
            end, full = start + self.page_size, len(req.full_untruncated_fill_ids)
            if is_cut and end < full:
                partial.append(req.rid)
            _set_end(req, end if is_cut and end < full else full)
        batch = self._batch(serving)
        ends = [len(req.get_fill_ids()) for req in serving]
        batch.prefix_lens = starts
        batch.extend_lens = [end - start for start, end in zip(starts, ends, strict=True)]
        batch.extend_num_tokens = sum(batch.extend_lens)
        batch.seq_lens = batch.seq_lens_cpu = torch.tensor(ends)
        slots, rows_device, rows_host = allocation.alloc_for_extend(batch)
        assert rows_device.tolist() == rows_host.tolist()
        taken = 0
        for req, row, start, end in zip(serving, rows_host.tolist(), starts, ends, strict=True):
            req.is_retracted = False
            keys = _keys(req.full_untruncated_fill_ids[:end])
            own_slots = slots[taken : taken + end - start].numpy()
            taken += end - start
            assert self.pool.req_to_token[row, start:end].tolist() == own_slots.tolist()
            self._write(own_slots, keys[start:])
            self.lens[req.rid] = end
            self._read(req, end)
            if req.rid not in partial:
                req.output_ids.append(_next_token(req.full_untruncated_fill_ids))
                req.update_finish_state()
            self._keep(req, req.rid in partial)
        known = [
            None if self.is_tight or req.session is not None else start
            for req, start in zip(serving, starts, strict=True)
        ]
        return known, partial, [req.rid for req in serving if req.finished()]

    def launch(self, names: Sequence[str], accept_lens: Sequence[int]) -> None:
        """Prepare a round, and run it on the device."""
        serving = [self.reqs[name] for name in names]
        batch = self._batch(serving)
        row_ids = [req.kv.req_pool_idx for req in serving]
        batch.req_pool_indices = batch.req_pool_indices_cpu = torch.tensor(row_ids)
        batch.seq_lens = batch.seq_lens_cpu = torch.tensor(
            [req.kv.kv_committed_len for req in serving]
        )
        batch.sampling_info = SimpleNamespace(
            penalizer_orchestrator=SimpleNamespace(is_required=False)
        )
        needed = batch.new_tokens_required_next_decode()
        free = self.allocator.available_size() + self.tree.evictable_size()
        eagle_utils.eagle_prepare_for_decode(batch)
        left = self.allocator.available_size() + self.tree.evictable_size()
        assert free - left <= needed, f"a round takes {free - left} slots, {needed} were estimated"
        num_draft_tokens = self.shape[2]
        tokens = torch.zeros((len(serving), num_draft_tokens), dtype=torch.int64)
        for lane, (req, accepted) in enumerate(zip(serving, accept_lens, strict=True)):
            length, row = self.lens[req.rid], self._row(req)
            text = list(req.origin_input_ids) + self.said[req.rid]
            assert length + num_draft_tokens <= req.kv.kv_allocated_len
            self._read(req, length)
            self._write(row[length : req.kv.kv_allocated_len], GARBAGE)
            for _ in range(accepted):
                text.append(_next_token(text))
            self._write(row[length : length + accepted], _keys(text)[length : length + accepted])
            said = text[length + 1 : length + 1 + accepted]
            tokens[lane, :accepted] = torch.tensor(said)
            self.said[req.rid] += said
            self.lens[req.rid] = length + accepted
        result = GenerationBatchResult(
            logits_output=None,
            next_token_ids=tokens.reshape(-1),
            accept_lens=torch.tensor(accept_lens, dtype=torch.int32),
            speculative_num_draft_tokens=num_draft_tokens,
        )
        self.rounds.append((batch, result))

    def land(self) -> list[str]:
        """Process the result of the oldest round; return who has ended."""
        batch, result = self.rounds.popleft()
        was_over = [req.is_retracted or req.finished() for req in batch.reqs]
        processor = batch_result_processor.SchedulerBatchResultProcessor
        said = processor._resolve_spec_v2_tokens(_PROCESSOR, result, batch)
        ended = []
        for req, tokens, is_over in zip(batch.reqs, said, was_over, strict=True):
            if is_over:
                continue
            req.output_ids.extend(tokens)
            req.update_finish_state(len(tokens))
            if req.finished():
                ended.append(req.rid)
                self._release(req, True)
        return ended

    def retract(self, name: str) -> None:
        req = self.reqs[name]
        self._release(req, False)
        req.reset_for_retract()

    def abort(self, name: str) -> None:
        req = self.reqs[name]
        req.to_finish = schedule_batch.FINISH_ABORT("")
        req.update_finish_state(0)
        self._release(req, True)

    def evict(self, num_tokens: int) -> None:
        self.tree.evict(base_prefix_cache.EvictParams(num_tokens=num_tokens))

    def open(self, session_id: str) -> None:
        self.sessions.open(
            io_struct.OpenSessionReqInput(
                capacity_of_str_len=1 << 20, session_id=session_id, streaming=True
            )
        )

    def close(self, session_id: str) -> None:
        self.sessions.close(io_struct.CloseSessionReqInput(session_id=session_id))

    def end(self) -> None:
        """Evict all of the tree: every slot and row is free then, so no lock was kept."""
        self.evict(self.tree.evictable_size())
        if self.kind == "ours":
            self.pool.book.ledger.check()
        slots, num_rows = int(self.allocator.available_size()), int(self.pool.available_size())
        assert slots == self.size, f"{slots} of {self.size} slots are free when nobody is left"
        assert num_rows == NUM_ROWS, f"{num_rows} of {NUM_ROWS} rows are free when nobody is left"

    def _lock(self, req: Any) -> None:
        if hasattr(schedule_policy.PrefillAdder, "_req_inc_lock_ref"):
            adder = SimpleNamespace(tree_cache=self.tree, is_hybrid_swa=False)
            schedule_policy.PrefillAdder._req_inc_lock_ref(adder, req)
        else:
            req.lock = self.tree.lock(req.last_node)

    def _batch(self, serving: list[Any]) -> Any:
        return schedule_batch.ScheduleBatch(
            reqs=serving,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree,
            device="cpu",
            spec_algorithm=SpeculativeAlgorithm.from_string("EAGLE"),
        )

    def _keep(self, req: Any, is_chunked: bool) -> None:
        """After a prefill: keep what was prefilled in the tree, or end the request."""
        self.said[req.rid] = list(req.output_ids)
        if req.finished():
            self._release(req, True)
        elif hasattr(common, "checkpoint_kv_cache"):
            common.checkpoint_kv_cache(req, self.tree)
        else:
            common.maybe_cache_unfinished_req(req, self.tree, chunked=is_chunked)

    def _release(self, req: Any, is_kept: bool) -> None:
        common.release_kv_cache(req, self.tree, **{_KEEP: is_kept})
        del self.lens[req.rid]
        assert req.kv.req_pool_idx is None and req.kv.is_kv_released, "a released request has KV"
        assert getattr(req, "lock", None) is None, "a released request has its lock"  # since 0.5.22

    # What its device holds.

    def _row(self, req: Any) -> npt.NDArray[np.int64]:
        row: npt.NDArray[np.int64] = self.pool.req_to_token[req.kv.req_pool_idx].numpy()
        return row.astype(np.int64)

    def _write(self, slots: npt.NDArray[np.int64], keys: Any) -> None:
        assert (slots >= self.page_size).all(), "a forward writes to the padding page"
        assert len(set(slots.tolist())) == len(slots), "a forward writes a slot twice"
        self.held[slots] = keys

    def _read(self, req: Any, length: int) -> None:
        if self.kind == "own" and req.session is not None:
            return  # a turn's last token has no KV
        tokens = [*req.origin_input_ids, *self.said.get(req.rid, req.output_ids)][:length]
        wrong = np.flatnonzero(self.held[self._row(req)[:length]] != _keys(tokens))
        assert not len(wrong), f"position {wrong[0]} of {length} holds another text"

    def state(self) -> dict[str, Any]:
        records = {id(req.kv): req.kv for req in self.reqs.values()}
        records |= {id(slot.kv): slot.kv for slot in _sessions_of(self.tree).slots.values()}
        held = [kv for kv in records.values() if kv.req_pool_idx is not None]
        slots = sum(
            -(-kv.kv_allocated_len // self.page_size) * self.page_size - kv.cache_protected_len
            for kv in held
        )
        sizes = int(self.tree.evictable_size()), int(self.tree.protected_size())
        free = int(self.allocator.available_size())
        total = free + sum(sizes) + slots
        assert total == self.size, f"{free} free, {sizes} in the tree, {slots} held: of {self.size}"
        is_alike = not self.is_tight
        return {
            "the free rows": int(self.pool.available_size()),
            "the tokens in the tree": sum(sizes) if is_alike else None,
            "the tokens, lengths and protected lengths of requests": [
                (
                    name,
                    list(req.output_ids),
                    req.kv.kv_committed_len if req.session is None else None,
                    req.kv.cache_protected_len if is_alike and req.session is None else None,
                )
                for name, req in self.reqs.items()
                if name in self.lens
            ],
        }


#: What SGLang's function for a result asks besides: nothing of it concerns rows.
_PROCESSOR = SimpleNamespace(
    metrics_reporter=SimpleNamespace(snapshot_spec_decode_metrics=lambda *_: None),
    model_worker=SimpleNamespace(on_verify_complete_cpu=lambda *_, **__: None),
    advance_grammar_fsm=lambda *_: None,
)


def _prefix_len(req: Any) -> int:
    return req.prefix_len if hasattr(req, "prefix_len") else len(req.prefix_indices)


def _set_end(req: Any, end: int) -> None:
    if hasattr(req, "set_extend_range"):
        req.set_extend_range(_prefix_len(req), end)
    else:
        req.extend_end = end


def _tree(parameters: CacheInitParams) -> Any:
    """Return the tree that SGLang makes of the parameters."""
    if parameters.disable and not row_tree.HAS_PREFIX_SLOTS:
        from sglang.srt.mem_cache.chunk_cache import ChunkCache

        return streaming_session.StreamingSession(ChunkCache(parameters))
    return radix_cache.UnifiedRadixCache(parameters)


def _sessions_of(tree: Any) -> streaming_session.StreamingSession:
    is_outside = isinstance(tree, streaming_session.StreamingSession)
    return tree if is_outside else tree.session


class RowsCase:
    """Requests and sessions; in a tight pool each allocation may evict, and there is no session."""

    def __init__(self, is_tight: bool) -> None:
        self.is_tight = is_tight
        self.name = "rows in a tight pool" if is_tight else "rows"

    def sides(self, rng: random.Random) -> tuple[RowsSide, RowsSide]:
        self.page_size, self.shape = rng.choice(PAGE_SIZES), rng.choice(SHAPES)
        reserve_proof.publish(self.shape, self.page_size)
        max_len = MAX_PROMPT + MAX_ANSWER + self.shape[2] if self.is_tight else MAX_LEN
        self.max_live = 3 if self.is_tight else NUM_ROWS
        room = max_len + int(allocation_sizing.get_alloc_reserve_per_decode())
        num_pages = self.max_live * (2 + room // self.page_size) * (1 if self.is_tight else 3)
        settings = num_pages, self.shape, self.is_tight, rng.random() < 0.75
        sides = [RowsSide(kind, self.page_size, *settings) for kind in ("own", "ours")]
        return sides[0], sides[1]

    def operations(self, rng: random.Random) -> Operations:
        self.rng = rng
        self.stems = [
            [rng.randint(3, 5) for _ in range(MAX_PROMPT - MAX_PROMPT // 4)] for _ in range(3)
        ]
        self.numbers = itertools.count()
        #: Those that wait, those whose prefill is not whole, those that run, and those in flight.
        self.waiting: list[str] = []
        self.partial: list[str] = []
        self.running: list[str] = []
        self.rounds: list[list[str]] = []
        #: The session of each turn that has not ended, and the first turn of each session.
        self.busy: dict[str, str] = {}
        self.opened: dict[str, str] = {}
        self.turns = {} if self.is_tight else {"a": 5, "b": 5}
        for _ in range(16):
            for part, chance in ((self._send, 0.7), (self._prefill, 0.7), (self._rare, 0.2)):
                if rng.random() < chance:
                    yield from part()
            for _ in range(rng.randint(1, 3)):
                yield from self._round()
        while self.waiting or self.partial or self.running or self.rounds:
            yield from self._prefill()
            yield from self._round()
        if not self.is_tight:
            yield from self._short_sessions()
            for session_id in ("a", "b", "c", "d"):
                yield Operation("close", (session_id,))
        yield Operation("end")

    def _short_sessions(self) -> Operations:
        """A session whose second turn begins behind one token, and one without a turn.

        That turn is prefilled beside a request that begins behind none.
        """
        first, second, request = (str(next(self.numbers)) for _ in range(3))
        yield Operation("turn", (first, "c", [3], 1))
        yield Operation("prefill", ([first], [False]))
        yield Operation("turn", (second, "c", [4], 1))
        yield Operation("send", (request, [6], 1))
        yield Operation("prefill", ([request, second], [False, False]))
        yield Operation("open", ("d",))

    def _send(self) -> Operations:
        rng, name = self.rng, str(next(self.numbers))
        idle = [key for key, left in self.turns.items() if left and key not in self.busy.values()]
        if idle and rng.random() < 0.7:
            session_id = rng.choice(idle)
            self.turns[session_id] -= 1
            self.busy[name] = session_id
            if session_id not in self.opened:
                self.opened[session_id] = name
            tokens = [rng.randint(3, 5) for _ in range(rng.randint(1, MAX_TURN))]
            yield Operation("turn", (name, session_id, tokens, rng.randint(1, MAX_TURN // 2)))
        else:
            stem = rng.choice(self.stems)
            end = [rng.randint(3, 5) for _ in range(rng.randint(1, MAX_PROMPT // 4))]
            tokens = stem[: rng.randint(1, len(stem))] + end
            yield Operation("send", (name, tokens, rng.randint(1, MAX_ANSWER)))
        self.waiting.append(name)

    def _prefill(self) -> Operations:
        rng = self.rng
        # A session's row is one between its turns, too.
        num_rows = NUM_ROWS - 2 if self.turns else self.max_live
        live = [*self.partial, *self.running]
        room = num_rows - sum(name not in self.busy for name in live)
        plain = [name for name in self.waiting if name not in self.busy][: max(0, room)]
        ready = [*self.partial, *plain, *(name for name in self.waiting if name in self.busy)]
        if not ready:
            return
        names = rng.sample(ready, rng.randint(1, len(ready)))
        # A chunk is cut only where a prefix ends alike: without evictions, and not behind a turn.
        cuts = [
            not self.is_tight
            and (name not in self.busy or name in self.opened.values())
            and name not in self.partial
            and rng.random() < 0.5
            for name in names
        ]
        partial, ended = (yield Operation("prefill", (names, cuts)))[1:]
        self.waiting = [name for name in self.waiting if name not in names]
        self.partial = [name for name in self.partial if name not in names] + partial
        self.running += [name for name in names if name not in partial and name not in ended]
        self._forget(ended)

    def _round(self) -> Operations:
        rng = self.rng
        if self.running and len(self.rounds) < 2:
            names = rng.sample(self.running, rng.randint(1, len(self.running)))
            max_accepted = min(self.shape[0] + 1, self.shape[2])
            accept_lens = [rng.choice([max_accepted, rng.randint(1, max_accepted)]) for _ in names]
            yield Operation("launch", (names, accept_lens))
            self.rounds.append(names)
        if self.rounds and (len(self.rounds) == 2 or rng.random() < 0.6):
            yield from self._land()

    def _land(self) -> Operations:
        ended = yield Operation("land")
        self.rounds.pop(0)
        self._forget(ended)

    def _forget(self, ended: Sequence[str]) -> None:
        self.running = [name for name in self.running if name not in ended]
        for name in ended:
            self.busy.pop(name, None)

    def _rare(self) -> Operations:
        rng = self.rng
        kind = rng.choice(["evict", "retract", "abort"])
        if kind == "evict":
            yield Operation("evict", (rng.randint(1, 60),))
            return
        plain = [name for name in self.running if kind == "abort" or name not in self.busy]
        if not plain:
            return
        name = rng.choice(plain)
        yield Operation(kind, (name,))
        self.running.remove(name)
        while self.rounds:
            yield from self._land()
        if kind == "retract":
            self.waiting.append(name)
        else:
            self.busy.pop(name, None)


def _by_side(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the hook around it for objects on our side."""

    def run(*args: Any, **named: Any) -> Any:
        holders = (holder for part in args for holder in (part, getattr(part, "cache", None)))
        pools = (getattr(holder, "req_to_token_pool", None) for holder in holders)
        pool = next(pool for pool in pools if pool is not None)
        if isinstance(pool, row_pool.SpecpoolRows):
            return hook(original, *args, **named)
        return original(*args, **named)

    return run


@contextmanager
def _on_the_host() -> Iterator[None]:
    """Within it SGLang runs on a CPU, and each side has its functions."""
    with reserve_proof.on_the_host(), ExitStack() as stack:
        for target, hook in rows.HOOKS.items():
            holder, _, name = target.rpartition(".")
            patched = _by_side(_HOOKED[target], hook)
            stack.enter_context(mock.patch.object(pkgutil.resolve_name(holder), name, patched))
        yield
