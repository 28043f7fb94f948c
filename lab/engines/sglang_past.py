"""`PastLoop`: SGLang's scheduler of releases 0.5.1 to 0.5.21, with a fake model, on a CPU.

Its own constructor makes its queues, trees, policies and checks; only the worker, the groups of
ranks, the sockets and the threads are replaced. Ranges of releases differ in what a worker takes
and gives back, and in how a scheduler is told its settings; that is asked for by name here.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo
from sglang.srt import server_args
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.managers import io_struct, scheduler, tp_worker
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.server_args import ServerArgs
from sglang_device import Device

from lab.engines.case import Case
from lab.engines.content import STOP, VOCABULARY
from lab.engines.device import Finding
from lab.engines.sglang_allocator import AllocatorPlayer
from lab.engines.sglang_past_accounts import PastAccounts, slots_of
from lab.engines.sglang_past_pools import loops_for_kernels, make_allocator, make_rows
from lab.engines.sglang_past_worker import PastDrafter, PastWorker
from lab.engines.sglang_player import (
    STUCK,
    Player,
    Tokenizer,
    adapter_name,
    adapter_of,
    in_a_fork,
    played,
    waiting_flags,
)
from lab.engines.shim import Hollow

#: Turns of the loop without a forward, while requests wait, after which nothing will run.
IDLE_TURNS = 300


#: Groups of ranks, of which each has one.
GROUPS = tuple(
    f"{name}_group"
    for name in ("world", "tp", "attn_tp", "attn_cp", "dcp", "pp", "moe_dp", "moe_ep", "moe_tp")
)
#: Until 0.5.3.post1 a thread overlaps: it is not run.
HAS_CLIENT = hasattr(scheduler, "TpModelWorkerClient")


def _nothing(_: Any) -> None:
    """A model is not of this kind."""


#: What asks a model's configuration for its kind; `hybrid_gdn_config` is that of the worker's.
KINDS_OF_MODELS = {
    "linear_attn_model_spec": _nothing,
    "mamba2_config": _nothing,
    "kimi_linear_config": _nothing,
    "hybrid_lightning_config": _nothing,
    "hybrid_gdn_config": lambda config: config.states,
    "uses_ssm_state": lambda config: config.states is not None,
}


class EndedError(Exception):
    """All has been sent and has ended."""


class PartlySaid(SimpleNamespace):
    """Settings of a model; those that nobody set are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class CpuStream:
    """The only stream: what is launched is done at once, in that order."""

    def __init__(self, **_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None:
        """Nothing is late."""

    wait_event = synchronize = wait_stream


class CpuEvent:
    """Has always happened."""

    def record(self, *_: Any, **__: Any) -> None:
        """Nothing is late."""

    wait = synchronize = record


class CpuModule:
    """What torch has for a device, of a CPU."""

    Event, Stream, CudaStream = CpuEvent, CpuStream, CpuStream

    @staticmethod
    def stream(_: Any) -> Any:
        """Run in the only stream."""
        return contextlib.nullcontext()

    StreamContext = stream

    @staticmethod
    def current_stream(*_: Any) -> CpuStream:
        """Return the only stream."""
        return CpuStream()

    @staticmethod
    def synchronize(*_: Any) -> None:
        """Nothing is late."""

    empty_cache = synchronize


def arguments(settings: dict[str, Any]) -> ServerArgs:
    """SGLang's settings of a case."""
    given: dict[str, Any] = {
        "model_path": "dummy",
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "page_size": settings["page"],
        "chunked_prefill_size": (
            settings["chunk"] and -(-settings["chunk"] // settings["page"]) * settings["page"]
        )
        or -1,
        "disable_overlap_schedule": not settings["overlap"] or HAS_CLIENT,
        "schedule_conservativeness": settings["conservativeness"],
        "enable_streaming_session": settings["sessions"] > 0,
        "max_running_requests": settings["rows"],
        "pp_max_micro_batch_size": settings["rows"],
        "skip_tokenizer_init": True,
        "watchdog_timeout": 1e9,
        "disable_radix_cache": False,
        "random_seed": 1,
        "mem_fraction_static": 0.5,
        "max_mamba_cache_size": 8,
    }
    if "rows_to_come" in settings:
        given |= {
            "disaggregation_mode": "decode",
            "disable_radix_cache": True,
            "num_reserved_decode_tokens": settings["reserved"],
        }
    if settings["shape"]:
        num_steps, topk, num_draft_tokens = settings["shape"]
        given |= {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": num_steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": num_draft_tokens,
        }
    given |= waiting_flags(settings)
    takes = inspect.signature(ServerArgs).parameters
    return ServerArgs(**{name: value for name, value in given.items() if name in takes})


def make_global(given: ServerArgs) -> None:
    """Let the process know its settings, and since 0.5.21 its rank."""
    context: Any = None
    with contextlib.suppress(ImportError):
        context = importlib.import_module("sglang.srt.runtime_context")
    if hasattr(context, "publish"):
        spawn_ranks = getattr(context, "SpawnRanks", None)
        ranks = {"ranks": spawn_ranks(world_rank=0, dp_rank=None, gpu_id=0)} if spawn_ranks else {}
        context.publish(given, role="scheduler", **ranks)
        if spawn_ranks:
            groups = {name: Group() for name in GROUPS if name in context._parallel_fields()}
            context.get_parallel().override_permanently(**groups)
    elif hasattr(server_args, "set_global_server_args_for_scheduler"):
        server_args.set_global_server_args_for_scheduler(given)


def described(*_: Any, **__: Any) -> Any:
    """The model's configuration, as far as a scheduler asks."""
    return PartlySaid(
        vocab_size=VOCABULARY,
        is_generation=True,
        is_encoder_decoder=False,
        is_multimodal=False,
        is_multimodal_chunked_prefill_supported=False,
        hf_eos_token_id={STOP},
        context_len=4096,
        num_key_value_heads=1,
        num_hidden_layers=1,
        hidden_size=1,
        dtype=torch.float16,
        hf_config=SimpleNamespace(architectures=["None"], model_type="none"),
        hf_text_config=SimpleNamespace(architectures=["None"], model_type="none", hidden_size=1),
    )


def replace() -> None:
    """Put stand-ins in the place of what needs a GPU, other processes, or a model's files."""
    torch._dynamo.config.disable = True
    vars(torch)["get_device_module"] = lambda *_: CpuModule
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    ServerArgs.__post_init__ = lambda *_: None
    ModelConfig.from_server_args = described
    for name in GROUPS:
        held = f"_{name.removesuffix('_group').upper()}"
        if hasattr(parallel_state, held):
            setattr(parallel_state, held, Group())
    tp_worker.TpModelWorker = scheduler.TpModelWorker = PastWorker
    for module in list(sys.modules.values()):
        if module.__name__.startswith("sglang.srt.") and hasattr(module, "get_zmq_socket"):
            vars(module)["get_zmq_socket"] = Group
    for name in (
        *("get_tp_group", "get_attention_tp_group", "get_attention_cp_group", "get_pp_group"),
        *("get_world_group", "create_scheduler_watchdog", "barrier"),
        *("get_available_gpu_memory", "initialize_mamba_selective_state_update_backend"),
        *("initialize_moe_config", "initialize_fp8_gemm_config", "initialize_fp4_gemm_config"),
        *("create_grammar_backend", "SchedulerMetricsCollector", "SchedulerProfilerManager"),
        *("get_resolved_model_impl", "bootstrap"),
    ):
        if hasattr(scheduler, name):
            setattr(scheduler, name, Group)
    with contextlib.suppress(ImportError):
        from sglang.srt.mem_cache import kv_cache_builder

        kv_cache_builder.get_resolved_model_impl = lambda *_: None
        for name, asked in KINDS_OF_MODELS.items():
            if hasattr(kv_cache_builder, name):
                setattr(kv_cache_builder, name, asked)
    with contextlib.suppress(ImportError):
        from sglang.srt.speculative import eagle_worker_v2

        eagle_worker_v2.EAGLEWorkerV2 = PastDrafter
    loops_for_kernels()


class Group(Hollow):
    """The only rank; also what stands for metrics and sockets."""

    is_last_rank = is_first_rank = True
    world_size, rank, rank_in_group = 1, 0, 0

    def __format__(self, _: str) -> str:
        return "0"

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class PastLoop(Scheduler):  # type: ignore[misc]
    """SGLang's scheduler over a fake model; `traffic` is told of each turn."""

    enable_fpm = False  # the reporter of metrics sets it

    def __init__(self, settings: dict[str, Any], seed: int) -> None:
        self.settings, self.seed = settings, seed
        self.traffic: Any = None
        self.num_forwards = 0
        self.last_forward = 0, 0  # how many there were, and the turn of the last one
        self.leaks: list[str] = []
        size = settings["num_tokens"] // settings["page"] * settings["page"]
        self.simulated = Device(size + settings["page"], settings["page"])
        given = arguments(settings)
        make_global(given)
        rows = make_rows(settings)
        self.is_decode_side = "rows_to_come" in settings
        if self.is_decode_side:
            from lab.engines import sglang_decode  # newer releases have other transfers

            sglang_decode.install(self)
            self.simulated.target = sglang_decode.DecodeMemory(len(self.simulated.target.held))
        PastWorker.stream = CpuStream()
        PastWorker.given = self, rows, make_allocator(settings, self.simulated)
        takes = inspect.signature(Scheduler.__init__).parameters
        ranks: dict[str, Any] = {
            name: 0 for name in takes if name.endswith("_rank") or name == "gpu_id"
        }
        if "dp_rank" in ranks:
            ranks["dp_rank"] = None
        super().__init__(given, Group(), **ranks)
        self.schedule_stream = self.default_stream = self.forward_stream = CpuStream()
        self._war_barrier_enabled = False
        if not hasattr(self, "model_worker"):  # until 0.5.2
            self.model_worker = self.draft_worker or self.tp_worker
        self.request_receiver = SimpleNamespace(recv_requests=self.recv_requests)  # since 0.5.13

    def init_tokenizer(self) -> None:
        """Nothing: prompts are tokens."""
        self.tokenizer = self.processor = None
        self._think_end_id = None
        self.is_generation = True

    def init_moe_gemm_config(self) -> None:
        """Nothing: no layers."""
        self.require_mlp_sync = False

    def init_moe_config(self) -> None:
        """Nothing: no layers."""

    def watchdog_thread(self) -> None:
        """Nothing: a case ends by its turns."""

    def recv_requests(self, **_: Any) -> list[Any]:
        """Let the traffic play its turn; end the loop when all of it is over."""
        self.traffic.turn()
        waits = len(self.waiting_queue) + self._num_queued() > 0
        if self.num_forwards != self.last_forward[0] or not waits:
            self.last_forward = self.num_forwards, self.traffic.tick
        elif self.traffic.tick - self.last_forward[1] > IDLE_TURNS:
            raise RuntimeError(f"{STUCK}: {len(self.waiting_queue)} requests wait")
        if self.traffic.is_over() and self.is_quiet():
            raise EndedError
        return []

    def _num_queued(self) -> int:
        """Return how many requests wait in queues of the decode side."""
        if not self.is_decode_side:
            return 0
        from lab.engines.sglang_decode import num_queued

        return num_queued(self)

    def is_quiet(self) -> bool:
        """Whether nothing runs, waits or is in flight."""
        return (
            not self._num_queued()
            and (self.running_batch is None or self.running_batch.is_empty())
            and not self.waiting_queue
            and self.chunked_req is None
            and not getattr(self, "result_queue", ())
            and (self.last_batch is None or self.last_batch.is_empty())
        )

    def run_batch(self, batch: Any, *args: Any, **given: Any) -> Any:
        """Count what runs, and let the worker see the batch that its input is made of."""
        self.num_forwards += 1
        self.tp_worker.batch = batch
        return super().run_batch(batch, *args, **given)

    def self_check_during_idle(self) -> None:
        """Nothing: the laws look, and SGLang's own checker ends the process."""

    on_idle = self_check_during_busy = self_check_during_idle


replace()


class PastPlayer(Player):
    """Plays verbs on an old release."""

    def make_loop(self) -> Any:
        """Return the scheduler; what it makes of a request is taken when it is queued."""
        loop: Any = PastLoop(self.case.settings, self.case.seed)
        self.arriving, self.is_evicted = 0, False
        queue = loop._add_request_to_queue

        def add(req: Any, *args: Any, **given: Any) -> None:
            if req.rid not in self.running:
                self.admit(req, self.arriving)
            queue(req, *args, **given)

        loop._add_request_to_queue = add
        loop.send_to_tokenizer = Tokenizer(self.running)
        if hasattr(loop, "ipc_channels"):
            object.__setattr__(loop.ipc_channels, "send_to_tokenizer", loop.send_to_tokenizer)
        return loop

    def make_accounts(self) -> PastAccounts:
        """Return accounts of pages and rows."""
        return PastAccounts(self.loop, adapter_of, self.hole_note)

    def run(self) -> None:
        """Run the event loop, then close and evict all."""
        loop = self.loop
        name = "event_loop_overlap" if loop.enable_overlap else "event_loop_normal"
        with contextlib.suppress(EndedError):
            getattr(loop, f"{name}_disagg_decode" if loop.is_decode_side else name)()
        self.close()
        evict_all(loop.tree_cache)
        self.is_evicted = True

    def leaks(self) -> list[str]:
        """Return what is not given back of recurrent states; the laws count the rest."""
        if "spare_states" not in self.case.settings or not self.is_evicted:
            return []
        rows = self.loop.req_to_token_pool
        pool = getattr(rows, "mamba_allocator", rows.mamba_pool)  # since 0.5.14
        free, size = pool.available_size(), pool.size
        return [] if free == size else [f"no request is left, and {free} of {size} states are free"]

    def slots(self) -> dict[str, Any]:
        """Return the records of sessions."""
        return slots_of(self.loop.tree_cache)

    def pause(self, mode: str) -> None:
        """Pause, as over HTTP."""
        if hasattr(self.loop, "pause_generation"):
            self.loop.pause_generation(io_struct.PauseGenerationReqInput(mode=mode))

    def resume(self) -> None:
        """Resume, as over HTTP."""
        if hasattr(self.loop, "pause_generation"):
            self.loop.continue_generation(io_struct.ContinueGenerationReqInput())

    def flush(self) -> bool:
        """Flush, as over HTTP."""
        return bool(self.loop.flush_cache())

    def arrive(
        self,
        name: str,
        tokens: list[int],
        most: int,
        session: str | None,
        adapter: int = 0,
        priority: int | None = None,
    ) -> None:
        """Hand a request to the scheduler's own entry."""
        given: dict[str, Any] = {
            "rid": name,
            "input_text": "",
            "input_ids": self.tokens_of(tokens),
            "mm_inputs": None,
            "sampling_params": self.sampling(most),
            "return_logprob": False,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "token_ids_logprob": None,
            "stream": False,
            "lora_id": adapter_name(adapter),
            "priority": priority,
            "session_params": session and io_struct.SessionParams(id=session),
            "input_embeds": None,
            "token_type_ids": None,
            "time_stats": Group(),
            "bootstrap_room": int(name),
        }
        kind = io_struct.TokenizedGenerateReqInput
        names = inspect.signature(kind).parameters
        self.arriving = adapter
        asked = kind(**{part: value for part, value in given.items() if part in names})
        self.loop.handle_generate_request(asked)

    def tokens_of(self, tokens: list[int]) -> Any:
        """Return tokens as this release keeps them: lists, arrays since 0.5.13."""
        annotation = io_struct.TokenizedGenerateReqInput.__annotations__["input_ids"]
        return array("q", tokens) if "array" in str(annotation) else tokens


def evict_all(tree: Any) -> None:
    """Drop what a tree has cached."""
    tree = getattr(tree, "inner", tree)
    sizes = {
        "num_tokens": tree.full_evictable_size()
        if hasattr(tree, "full_evictable_size") and not isinstance(tree, RadixCache)
        else tree.evictable_size()
    }
    for name, size in (
        ("swa_num_tokens", "swa_evictable_size"),
        ("mamba_num", "mamba_evictable_size"),
    ):
        with contextlib.suppress(AttributeError, NotImplementedError):
            sizes[name] = getattr(tree, size)()
    try:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams
    except ImportError:
        tree.evict(*[*sizes.values()][: len(inspect.signature(tree.evict).parameters)])
        if hasattr(tree, "evict_mamba"):
            tree.evict_mamba(sizes["mamba_num"])
        return
    names = inspect.signature(EvictParams).parameters
    tree.evict(EvictParams(**{name: size for name, size in sizes.items() if name in names}))


def run_sglang(case: Case) -> list[Finding]:
    """Run a case in a fork, whose settings nobody else sees; return what it broke."""
    if case.family == "allocator":
        return in_a_fork(lambda case: AllocatorPlayer(case).run(), case)
    return in_a_fork(lambda case: played(PastPlayer, case), case)
