"""SGLang's own scheduler, with a fake model, on a CPU: `run(setup)` returns what came of it.

`Loop` is SGLang's `Scheduler` with its two event loops, its batches, policy, radix cache, sessions,
retraction, result processing and memory checks. What it does not have is a process, a network, a
tokenizer and a model (`sglang_worker`). Each run is a forked child, so a run of SGLang's own and
one of the plug-in's at any level start from the same state and do not see each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import logging
import multiprocessing
import os
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import sglang_torch
import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_reserve_per_decode,
    get_req_to_token_extra_context_len,
)
from sglang.srt.mem_cache.allocator import paged, token
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_accelerator import Accelerator
from sglang_device import STOP, Device
from sglang_traffic import Traffic
from sglang_worker import EagleWorker, Worker

from specpool.plugins.sglang import drift

Shape = tuple[int, int, int]

#: Whether the tree also serves with its cache disabled. Before SGLang 0.5.22 another one does.
IS_DISABLED_BY_TREE = importlib.util.find_spec("sglang.srt.mem_cache.chunk_cache") is None

#: Turns of the loop without a forward, while requests wait, after which nothing will run.
IDLE_TURNS = 500
STUCK = "the loop is stuck"


@dataclasses.dataclass(frozen=True)
class Setup:
    """One run: the engine's settings and its traffic."""

    level: str = "off"
    page_size: int = 16
    shape: Shape | None = None  # EAGLE's (S, K, N); None decodes without drafts
    cache: bool = True
    overlap: bool = True
    num_tokens: int = 2048  # slots of the pool
    num_rows: int = 8
    chunk: int | None = 48  # tokens of prefill in a batch, rounded up to whole pages
    num_requests: int = 24
    num_sessions: int = 0
    most_prompt: int = 120
    most_answer: int = 60
    conservativeness: float = (
        0.3  # below 1 more requests run than surely fit, so some are retracted
    )
    spread: int = 3  # turns of the loop between two requests, on average; 0 sends all at once
    mixed: bool = False  # decode rows ride along with a chunk of prefill
    device: str = "cpu"  # or "cuda": the accelerator of `sglang_accelerator`, which is not there
    seed: int = 0
    server: tuple[tuple[str, Any], ...] = ()  # further settings of SGLang's server

    @property
    def chunk_size(self) -> int | None:
        """Tokens of prefill in a batch."""
        return self.chunk and -(-self.chunk // self.page_size) * self.page_size


@dataclasses.dataclass
class Outcome:
    """What came of a run."""

    texts: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    expected: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    faults: list[str] = dataclasses.field(default_factory=list)
    leaks: list[str] = dataclasses.field(default_factory=list)
    retracted: int = 0
    aborted: list[str] = dataclasses.field(default_factory=list)
    #: Those of them that SGLang's own memory could not have run either, beside the sessions.
    crowded_out: list[str] = dataclasses.field(default_factory=list)
    forwards: int = 0
    decodes: int = 0  # forwards that decode
    most_running: int = 0
    sum_running: int = 0  # running rows, summed over decodes
    slots_ahead: int = 0  # slots that rows hold beyond their committed tokens, likewise
    seen: set[str] = dataclasses.field(default_factory=set)  # what happened at all
    #: Waits for the accelerator, and copies that may wait, by who makes them.
    waits: Counter[str] = dataclasses.field(default_factory=Counter)
    pageable: Counter[str] = dataclasses.field(default_factory=Counter)
    error: str = ""

    @property
    def mean_decoding(self) -> float:
        """Mean rows of a forward that decodes."""
        return self.sum_running / max(1, self.decodes)


class Nothing:
    """Takes every call and every number; stands for metrics, profilers and sockets."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __add__(self, _: Any) -> Any:
        return self

    __radd__ = __iadd__ = __mod__ = __sub__ = __add__

    @contextlib.contextmanager
    def record(self, *_: Any) -> Iterator[None]:
        yield


class Stream:
    """The only stream: what is launched is done at once, in that order."""

    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...


class Event:
    def record(self, *_: Any, **__: Any) -> None: ...
    def synchronize(self) -> None: ...


class Host:
    """The device module of a CPU."""

    Event = Event


def arguments(setup: Setup) -> ServerArgs:
    """SGLang's settings of a run."""
    eagle: dict[str, Any] = {}
    if setup.shape is not None:
        num_steps, topk, num_draft_tokens = setup.shape
        eagle = {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": num_steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": num_draft_tokens,
        }
    return ServerArgs(
        model_path="dummy",
        device="cpu",
        attention_backend="torch_native",
        page_size=setup.page_size,
        chunked_prefill_size=setup.chunk_size or -1,
        disable_radix_cache=not setup.cache,
        disable_overlap_schedule=not setup.overlap,
        schedule_conservativeness=setup.conservativeness,
        enable_streaming_session=setup.num_sessions > 0,
        enable_mixed_chunk=setup.mixed,
        pp_max_micro_batch_size=setup.num_rows,
        **eagle,
        **dict(setup.server),
    )


def without_cache(parameters: CacheInitParams) -> Any:
    """The tree of a run without a cache, before SGLang 0.5.22."""
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
    from sglang.srt.session.streaming_session import StreamingSession

    return StreamingSession(ChunkCache(parameters))


class Loop(Scheduler):
    """SGLang's scheduler over a fake model, fed with seeded traffic."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.outcome = setup, Outcome()
        publish(self._arguments(), role="scheduler")
        self._init_memory()
        self._init_engine()
        self._init_parts()
        self.traffic = Traffic(self)
        self.last_forward = 0, 0  # how many there were, and the turn of the last one

    def _arguments(self) -> ServerArgs:
        return arguments(self.setup)

    def _init_memory(self) -> None:
        setup = self.setup
        size = setup.num_tokens // setup.page_size * setup.page_size
        self.max_req_len = setup.num_tokens
        self.simulated = Device(size + setup.page_size, setup.page_size)
        width = self.max_req_len + 4 + get_req_to_token_extra_context_len()
        pool = memory_pool.ReqToTokenPool(setup.num_rows, width, setup.device, False)
        settings = (torch.float16, setup.device, self.simulated.target, False)
        if setup.page_size == 1:
            allocator = token.TokenToKVPoolAllocator(size, *settings)
        else:
            allocator = paged.PagedTokenToKVPoolAllocator(size, setup.page_size, *settings)
        self.req_to_token_pool, self.token_to_kv_pool_allocator = pool, allocator
        parameters = CacheInitParams(
            disable=not setup.cache,
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=allocator,
            page_size=setup.page_size,
            is_eagle=setup.shape is not None,
            chunked_prefill_size=setup.chunk_size,
            tree_components=(ComponentType.FULL,),
        )
        self.tree_cache = (
            UnifiedRadixCache(parameters)
            if setup.cache or IS_DISABLED_BY_TREE
            else without_cache(parameters)
        )
        # SGLang takes another one, with a line in its log, if it cannot load the one it is told.
        tree_core = os.environ.get("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND")
        assert tree_core is None or self.tree_cache._tree_core_backend == tree_core
        self.max_total_num_tokens = size

    def _init_engine(self) -> None:
        setup = self.setup
        self.page_size, self.device, self.is_generation = setup.page_size, setup.device, True
        self.enable_overlap, self.enable_overlap_mlx = setup.overlap, False
        self.spec_algorithm = SpeculativeAlgorithm.from_string(
            None if setup.shape is None else "EAGLE"
        )
        if setup.shape is None:
            self.model_worker = Worker(self.simulated, setup.seed)
        else:
            self.model_worker = EagleWorker(self.simulated, setup.seed, setup.shape)
        self.tp_worker = self.model_worker
        self.draft_worker = None if setup.shape is None else self.model_worker
        self.model_config = SimpleNamespace(
            vocab_size=1000,
            is_encoder_decoder=False,
            is_multimodal=False,
            hf_eos_token_id={STOP},
            context_len=self.max_req_len,
            think_end_id=None,
            think_end_ids=None,  # before SGLang 0.5.20
            self_opened_think_start_ids=None,
        )
        self.pp_group = SimpleNamespace(is_last_rank=True)
        # Before SGLang 0.5.20, 0.5.21 and 0.5.22.
        self.request_receiver = SimpleNamespace(recv_requests=self.ingest_requests)
        self.ps = SimpleNamespace(pp_size=1, tp_size=1, dp_size=1)
        self.enable_dp_attention = self.enable_dynamic_chunking = False
        self.result_queue: deque[Any] = deque()
        self.max_running_requests = setup.num_rows
        self.max_prefill_tokens = 1 << 14
        for name in ("metrics_reporter", "profiler_manager", "load_publisher", "grammar_manager",
                     "ipc_channels", "dllm_manager", "kv_events_publisher", "output_streamer",
                     "metrics_collector", "load_inquirer"):  # fmt: skip
            setattr(self, name, Nothing())
        self.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False, grammar_queue=[])
        self.dp_attn_adapter = SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, **_: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
            drop_sync_wait_carry=lambda: None,
        )
        self.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, **_: batch)

    def _init_parts(self) -> None:
        self.disaggregation_mode = DisaggregationMode.NULL
        self.schedule_policy = "fcfs"
        for name in ("enable_priority_scheduling", "schedule_low_priority_values_first",
                     "abort_on_priority_when_disabled", "enable_hierarchical_cache",
                     "enable_hicache_storage", "enable_lmcache", "enable_lora", "enable_hisparse",
                     "enable_pdmux", "enable_unified_memory", "enable_fpm", "require_mlp_sync",
                     "enable_unified_cache_external_linker", "attn_dp_enabled", "is_hybrid_swa",
                     "enable_session_radix_cache", "is_hybrid_ssm", "_war_barrier_enabled",
                     "enable_decode_hicache"):  # fmt: skip
            setattr(self, name, False)
        for name in ("dllm_config", "decode_offload_manager", "hisparse_coordinator",
                     "scripted_scheduler_hook", "min_free_slots_delayer", "rust_server",
                     "scheduler_stage_metrics", "load_snapshot_writer", "dynamic_chunk_sizer",
                     "sliding_window_size", "full_tokens_per_layer", "swa_tokens_per_layer",
                     "priority_scheduling_preemption_threshold", "max_queued_requests",
                     "max_new_tokens_limit", "truncation_align_size", "lora_drainer",
                     "external_corpus_manager"):  # fmt: skip
            setattr(self, name, None)
        for name, value in self.setup.server:
            setattr(self, name, value)
        self._init_kinds()
        self.init_running_status()
        self.init_chunked_prefill_here()
        self.init_schedule_policy()
        self.init_streams_here()
        self.init_load_inquirer_here()
        self.init_batch_result_processor()
        self.init_pool_stats_observer()
        self.scheduler_stage_metrics = Nothing()
        self.init_invariant_checker()
        self.scheduler_stage_metrics = None

    def _init_kinds(self) -> None:
        """Nothing: all layers have full attention."""

    def init_chunked_prefill_here(self) -> None:
        self.chunked_prefill_size = self.setup.chunk_size
        self.prefill_decode_interval = self._prefill_decode_interval_remaining = 0
        self.prefill_decode_interval_min_bs = 0
        self.chunked_req = self._pending_chunked_abort_req = None
        self.is_mixed_chunk = self.setup.chunk is not None and self.setup.mixed

    def init_streams_here(self) -> None:
        self.device_module = torch.get_device_module(self.device) if self.device != "cpu" else Host
        self.schedule_stream = self.forward_stream = self.copy_stream = Stream()
        self.forward_stream_ctx = self.copy_stream_ctx = contextlib.nullcontext()
        self._confidence_budget_prepare = None
        self.enable_async_d2h_copy = False
        self.batch_record_buf, self.batch_record_ct = [None] * 2, 0
        self.future_map = self.spec_algorithm.create_future_map(
            self.device,
            self.req_to_token_pool,
            needs_cpu_seq_lens=True,
            needs_confidence_relay=False,
        )

    def init_load_inquirer_here(self) -> None:
        self._prev_step = self._prev_prefill_end_ts = self._pause_started_at = None
        self.total_prefill_uncached_tokens = self.total_prefill_busy_us = 0
        self.decode_moment_totals, self._pause_intervals = [0.0] * 6, []
        self._sched_idled = False
        self.processed_tokens_counter = 0

    # What a run does beside SGLang's loop.

    def ingest_requests(self, stop_at_pause: bool = False) -> list[Any]:
        """Feed the traffic; end the loop when all of it is over and the engine is idle."""
        self.traffic.turn()
        self._expect_progress()
        self.gracefully_exit = self.traffic.is_over() and self.is_idle()
        return []

    def _expect_progress(self) -> None:
        """End a loop that goes round while requests wait and nothing runs."""
        if self.outcome.forwards != self.last_forward[0] or not self.waiting_queue:
            self.last_forward = self.outcome.forwards, self.traffic.tick
        elif self.traffic.tick - self.last_forward[1] > IDLE_TURNS:
            free = self.token_to_kv_pool_allocator.available_size()
            free += self.tree_cache.evictable_size()
            raise RuntimeError(
                f"{STUCK}: {len(self.waiting_queue)} requests wait, {free} of "
                f"{self.max_total_num_tokens} slots are free or cached"
            )

    def is_idle(self) -> bool:
        """Whether nothing runs, waits or is in flight."""
        return (
            self.running_batch.is_empty()
            and not self.waiting_queue
            and self.chunked_req is None
            and not self.result_queue
            and (self.last_batch is None or self.last_batch.is_empty())
        )

    def on_idle(self) -> None:
        """SGLang's own sums of the pool, and of the rows, when nothing runs."""
        if self.is_idle():
            checker = self.invariant_checker
            leaks, messages = checker._check_all_pools(self.pool_stats_observer.get_pool_stats())
            if leaks:
                self.outcome.leaks += messages
            held = self.pool_stats_observer.session_held_req_count()
            if self.req_to_token_pool.available_size() + held != self.setup.num_rows:
                self.outcome.leaks.append(
                    f"{self.req_to_token_pool.available_size()} of {self.setup.num_rows} rows are "
                    f"free, {held} are of sessions"
                )

    def run_batch(self, batch: Any, **options: Any) -> Any:
        """Count what runs."""
        outcome = self.outcome
        outcome.forwards += 1
        if batch.forward_mode.is_decode():
            outcome.seen.add("decode")
            outcome.decodes += 1
            outcome.most_running = max(outcome.most_running, len(batch.reqs))
            outcome.sum_running += len(batch.reqs)
            for req in batch.reqs:
                outcome.slots_ahead += req.kv.kv_allocated_len - req.kv.kv_committed_len
        else:
            outcome.seen.add("extend")
            if batch.decoding_reqs:
                outcome.seen.add("mixed")
            for req in batch.reqs:
                matched = req.prefix_len if hasattr(req, "prefix_len") else len(req.prefix_indices)
                if matched and req.extend_batch_idx <= 1:
                    outcome.seen.add("hit")
            if batch.chunked_req is not None:
                outcome.seen.add("chunk")
        return super().run_batch(batch, **options)

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        self.outcome.retracted += is_retracted
        super()._add_request_to_queue(req, is_retracted)

    def send_abort_output(self, abort_req: Any, req: Any) -> None:
        """A request that does not fit even alone ends."""
        self.outcome.aborted.append(req.rid)
        if self._is_crowded_out(req):
            self.outcome.crowded_out.append(req.rid)
        self.traffic.running.pop(req.rid)

    def _is_crowded_out(self, req: Any) -> bool:
        """Whether the last request, whose slots were just given back, does not fit beside sessions.

        A session's slots are never given up. All others are free or cached now, and they are fewer
        than SGLang's own reserve takes for the request's next round.
        """
        free = self.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size()
        sessions = self.pool_stats_observer.session_held_tokens() + self.tree_cache.protected_size()
        length = len(req.origin_input_ids) + len(req.output_ids) - 1
        length += get_alloc_reserve_per_decode()
        needed = -(-length // self.page_size) * self.page_size
        return free + sessions == self.max_total_num_tokens and needed > free

    def _poll_timeout_aborts(self) -> list[Any]:
        return []

    def finish(self) -> Outcome:
        """Close the sessions, drop the cache, and see that every page and row came back."""
        self.traffic.close()
        self.on_idle()
        self.tree_cache.reset() if not self.setup.cache else self._evict_all()
        allocator, outcome = self.token_to_kv_pool_allocator, self.outcome
        if allocator.available_size() != self.max_total_num_tokens:
            outcome.leaks.append(
                f"{allocator.available_size()} of {self.max_total_num_tokens} slots are free"
            )
        if self.req_to_token_pool.available_size() != self.setup.num_rows:
            outcome.leaks.append(f"{self.req_to_token_pool.available_size()} rows are free")
        outcome.faults += self.simulated.faults
        for rid, text in self.model_worker.texts.items():
            if rid in outcome.aborted:
                continue
            outcome.expected[rid] = text.answer(self.traffic.most[rid])
        return outcome

    def _evict_all(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree_cache.evict(EvictParams(num_tokens=self.tree_cache.evictable_size()))


def run(
    setup: Setup, *, prepare: Callable[[Loop], None] | None = None, seconds: float = 60
) -> Outcome:
    """Run a setup in a forked child and return what came of it.

    Args:
        setup: the run.
        prepare: called in the child with the loop, before it runs; for hooks and broken guards.
        seconds: the most that it may take.
    """
    proved(setup.level)  # here, so that the children inherit it
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(setup, prepare, there))
    child.start()
    there.close()
    try:
        if not here.poll(seconds):
            child.kill()
            return Outcome(error=f"{setup} took more than {seconds} s")
        return here.recv()
    finally:
        child.join()


@functools.cache
def proved(level: str) -> list[str]:
    """What the proof finds at the load of a level: the same in each child."""
    return [] if level == "off" else drift.differences(level)


#: The same for the same arguments: files of tests share runs that change nothing.
run_once = functools.cache(run)


@contextlib.contextmanager
def accelerated(setup: Setup) -> Iterator[Accelerator | None]:
    """The accelerator of a run; None on a CPU."""
    if setup.device == "cpu":
        yield None
        return
    with Accelerator() as accelerator:
        accelerator.install()
        yield accelerator


def _child(setup: Setup, prepare: Callable[[Loop], None] | None, out: Any) -> None:
    logging.disable(logging.WARNING)
    outcome = Outcome()
    try:
        os.environ["SPECPOOL_SGLANG"] = setup.level
        os.environ["SPECPOOL_SGLANG_DRIFT"] = "exit"
        drift.differences = proved
        load_plugins()
        sglang_torch.install()
        with accelerated(setup) as accelerator:
            loop = Loop(setup)
            outcome = loop.outcome
            if accelerator is not None:
                outcome.waits, outcome.pageable = accelerator.waits, accelerator.pageable
                accelerator.serve(loop.model_worker)
            if prepare is not None:
                prepare(loop)
            (loop.event_loop_overlap if setup.overlap else loop.event_loop_normal)()
            outcome = loop.finish()
    except BaseException:
        outcome.error = traceback.format_exc()
    out.send(outcome)
