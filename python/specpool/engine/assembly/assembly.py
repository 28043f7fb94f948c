"""`assemble`: builds the parts below an engine: pools, worker, graphs, controller."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from specpool._core import Ledger, Shape
from specpool.capacity.layer_kv import LayerKV
from specpool.engine.assembly.calibration import Tour, calibrate
from specpool.engine.assembly.defaults import with_defaults
from specpool.engine.assembly.graph_plan import graph_sizes, round_kinds
from specpool.engine.assembly.ranked import agree_after, log_path
from specpool.engine.attention import BACK_ENDS, BackEnd, check_trees, start_back_end
from specpool.engine.attention.view import Attend
from specpool.engine.config import EngineConfig, WorkerName
from specpool.engine.draft import BlockDrafter, Drafter, EagleDrafter, LMDrafter
from specpool.engine.loop.busy_check import BusyCheck
from specpool.engine.loop.loop import Loop
from specpool.engine.memory.host.copies import HostMemory
from specpool.engine.memory.host.tier import HostTier
from specpool.engine.memory.kv_cache import KVCache
from specpool.engine.memory.pools import Pools, kv_budget, plan_pools
from specpool.engine.models import TargetModel
from specpool.engine.models.recurrent import RecurrentState
from specpool.engine.ranks.group import Ranks
from specpool.engine.ranks.journal import RankJournal
from specpool.engine.scheduler.config import SchedulerConfig
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.engine.shapes import BudgetController, Controller, CostController, controller_of
from specpool.engine.worker.followers import feature_layers
from specpool.engine.worker.graphs.capture import capture_on
from specpool.engine.worker.worker import Worker
from specpool.errors import ConfigError
from specpool.kernels.state_lanes import MAX_NODES

_log = logging.getLogger("specpool")


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts below an engine's scheduler, with the functions that put a scheduler on them.

    `config` has a batch and an overlap depth.
    """

    target: TargetModel
    drafters: Mapping[str, Drafter]  # by name; the first is of a request that names none
    config: EngineConfig
    shape: Shape  # for a request that names none
    max_context_len: int
    ledger: Ledger
    cache: KVCache
    kind: WorkerName  # which worker it is
    worker: Worker
    host: HostTier | None
    controller: Controller | None
    state: RecurrentState | None  # of the target's recurrent layers
    ranks: Ranks | None = None

    def scheduler_config(self) -> SchedulerConfig:
        """Return the options of a scheduler for these parts."""
        config, drafters, mixers = self.config, [*self.drafters.values()], self.target.mixers
        return SchedulerConfig(
            max_batch=self.ledger.max_batch,
            prefill_tokens=config.prefill_tokens,
            keeps_draft_kv=any(drafter.layers for drafter in drafters),
            reads_tokens=any(drafter.reads_tokens for drafter in drafters),
            trims_rounds=self.kind == "v1",
            headroom=config.headroom,
            max_idle=config.max_sessions,
            idle_pages=config.session_pages,
            prefix_cache=config.prefix_cache,
            goes_on_slowly=mixers is not None and not mixers.continues,
            forced_shape=forced_shape(config),
        )

    def loop(
        self, scheduler: Scheduler, *, busy_check: int, journal: RankJournal | None = None
    ) -> Loop:
        """Build a loop that runs the scheduler's steps.

        Args:
            scheduler: decides what runs.
            busy_check: the level of the busy check.
            journal: tells other ranks; None if each runs by itself.
        """
        config, ledger, cache = self.config, self.ledger, self.cache
        on_finding = config.on_finding
        return Loop(
            ledger,
            scheduler,
            self.worker,
            cache,
            BusyCheck(ledger, scheduler, cache, level=busy_check, on_finding=on_finding),
            overlap_depth=ledger.overlap_depth,
            mixed_chunks=config.mixed_chunks,
            host=self.host,
            journal=journal,
        )

    def calibrate(self) -> None:
        """Measure the rounds of each shape for a controller that chooses by cost."""
        if not isinstance(self.controller, CostController | BudgetController):
            return
        scheduler_config = replace(self.scheduler_config(), prefix_cache=False)
        tour = Tour(self.controller.candidates)
        calibrate(
            self.controller,
            tour,
            self.ledger,
            lambda: self.loop(
                Scheduler(self.ledger, scheduler_config, controller=tour), busy_check=0
            ),
            max_batch=self.ledger.max_batch,
            broadcast_first=float if self.ranks is None else self.ranks.broadcast_first,
        )
        if self.worker.graphs is not None:
            self.worker.graphs.restart()


def assemble(
    target: TargetModel,
    named: Mapping[str, Drafter],
    config: EngineConfig,
    ranks: Ranks | None = None,
) -> Assembly:
    """Build the parts for loaded models. Nothing runs yet, except to capture graphs.

    Ranks that share the target build the same parts together.

    Raises:
        ConfigError: the configuration, the models and the memory do not fit together.
    """
    if target.closed:
        raise ConfigError("the target model has been closed: load it again")
    drafters = [*named.values()]
    draft_layers = [layer for drafter in drafters for layer in drafter.layers]
    layers = [*target.layer_kv, *draft_layers]
    attention, started = start_back_end(
        config.attention, target.device, target.dtype, layers, target.config.model_type
    )
    capture = capture_on(target.device)
    max_context_len = _context_len(config, target, named)
    sizes_of = partial(
        graph_sizes,
        attention=attention,
        has_capture=capture is not None,
        keeps_state=target.keeps_state,
    )
    kv_bytes = kv_budget(
        config,
        target.device,
        graph_layers=len(layers) if sizes_of(config) else 0,
        least=None if ranks is None else ranks.least,
        sharers=1 if ranks is None else ranks.num_sharers,
    )
    config = with_defaults(
        config,
        target.device,
        drafters,
        layers,
        itemsize=target.dtype.itemsize,
        max_context_len=max_context_len,
        kv_bytes=kv_bytes,
        states=target.state_bytes,
    )
    sizes = sizes_of(config)
    controller = _controller(config, sizes, ranks)
    shape = _shape(config, drafters, controller)
    shapes = _shapes(config, drafters, shape, controller)
    _check(config, target, drafters, attention, shapes)
    pools = _pools(config, target, draft_layers, shapes, max_context_len, kv_bytes, ranks)
    ledger, cache = pools.ledger, _cache(pools, layers, target, started.attend if started else None)
    target.capture(feature_layers(drafters))
    layout, first_layer = ledger.groups[pools.draft_group].layout, len(target.layer_kv)
    for drafter in drafters:
        drafter.attach(cache, first_layer, pools.draft_group, layout, shapes)
        first_layer += len(drafter.layers)
    state = _state(ledger, target)
    worker = Worker(
        target,
        drafters,
        cache,
        target_groups=pools.target_groups,
        shapes=ledger.shapes,
        max_context_len=max_context_len,
        attention=attention,
        state=state,
    )
    if capture is not None and sizes:
        kinds = round_kinds(config, sizes, drafters, shape)
        captured = worker.capture(capture, ledger, kinds, started).sizes
        if captured != sizes:  # only captured sizes decide a batch's range
            controller = _controller(config, captured, ranks)
    parts = Assembly(
        target=target,
        drafters=named,
        config=config,
        shape=shape,
        max_context_len=max_context_len,
        ledger=ledger,
        cache=cache,
        kind="v2" if config.worker == "auto" else config.worker,
        worker=worker,
        host=_host_tier(config, ledger, cache, state),
        controller=controller,
        state=state,
        ranks=ranks,
    )
    _log_changes(max_context_len, parts)
    return parts


def forced_shape(config: EngineConfig) -> Shape | None:
    """Return the chain that drafts forced spans; None if they have no shape of their own."""
    steps = config.forced_steps
    return Shape.eagle(steps, 1, steps + 1) if steps else None


def _controller(
    config: EngineConfig, graph_sizes: Sequence[int], ranks: Ranks | None
) -> Controller | None:
    """Build what chooses shapes, by rank 0's clock if there are ranks."""
    return controller_of(
        config.adaptive,
        initial=config.shape,
        graph_sizes=graph_sizes or None,
        clock=time.perf_counter if ranks is None else lambda: ranks.now,
    )


def _shape(
    config: EngineConfig, drafters: Sequence[Drafter], controller: Controller | None
) -> Shape:
    """Return the shape of a request that names none."""
    if config.shape is not None:
        return config.shape
    if controller is not None:
        return max(controller.candidates, key=lambda candidate: candidate.num_draft_tokens)
    return Shape.eagle(3, 1, 4) if drafters else Shape.none()


def _shapes(
    config: EngineConfig,
    drafters: Sequence[Drafter],
    shape: Shape,
    controller: Controller | None,
) -> list[Shape]:
    """Return all shapes that may run beside shape 0.

    Raises:
        ConfigError: there is no draft model for one of them.
    """
    shapes = [shape, *config.shapes, *(controller.candidates if controller else ())]
    for drafting in () if drafters else shapes:
        if drafting.num_draft_tokens > 1:
            raise ConfigError(f"{drafting} drafts, but there is no draft model")
    chain = forced_shape(config)
    return shapes if chain is None else [*shapes, chain]


def _check(
    config: EngineConfig,
    target: TargetModel,
    drafters: Sequence[Drafter],
    attention: BackEnd,
    shapes: Sequence[Shape],
) -> None:
    """Raise `ConfigError` if these shapes cannot be drafted or verified with the options."""
    check_trees(attention, config.page_size, shapes)
    if target.mixers is not None and target.mixers.has_kernels:
        for shape in shapes:
            if shape.topk > 1 and shape.num_draft_tokens > MAX_NODES:
                raise ConfigError(
                    f"{shape} has {shape.num_draft_tokens} nodes, and the kernels for recurrent "
                    f"layers take trees of at most {MAX_NODES}"
                )
    if config.draft_window is not None and not any(drafter.layers for drafter in drafters):
        raise ConfigError(
            f"draft_window {config.draft_window} is of draft KV, and no draft keeps any: leave it "
            "out"
        )
    for drafter in drafters:
        if isinstance(drafter, BlockDrafter) and config.forced_steps >= drafter.head.block_size:
            size = drafter.head.block_size
            raise ConfigError(
                f"forced_steps must be at most {size - 1}, what a block of {size} tokens drafts, "
                f"got {config.forced_steps}"
            )
    if config.mixed_chunks and drafters and not attention.reads_ragged_masks:
        able_names = [name for name, back_end in BACK_ENDS.items() if back_end.reads_ragged_masks]
        raise ConfigError(
            f"mixed_chunks while drafting needs a back end that reads ragged masks "
            f"({', '.join(able_names)}), attention is {attention.name!r}"
        )


def _context_len(config: EngineConfig, target: TargetModel, named: Mapping[str, Drafter]) -> int:
    """Return the most tokens of a sequence; a draft model may have fewer positions.

    Raises:
        ConfigError: more tokens are asked for than the target has positions.
    """
    limit, reason = target.max_context_len, target.context_reason
    asked = config.max_context_len
    if asked is not None:
        if asked > limit:
            raise ConfigError(
                f"max_context_len {asked} is above the model's {limit} positions"
                + (f": {reason}" if reason else "")
            )
        return asked
    longest = limit
    for name, drafter in named.items():
        if isinstance(drafter, LMDrafter) and drafter.max_context_len < longest:
            longest = drafter.max_context_len
            reason = f"the draft model {name} has {longest} positions, the target {limit}"
    if reason:
        _log.warning("max_context_len is %d: %s", longest, reason)
    return longest


def _log_changes(longest: int, parts: Assembly) -> None:
    """Log, in a line each, where this engine departs from its configuration.

    `longest` is the most tokens of a sequence.
    """
    for name, drafter in parts.drafters.items():
        if isinstance(drafter, EagleDrafter | BlockDrafter):
            made_for = drafter.head.config.max_position_embeddings
            if made_for < longest:
                _log.info(
                    "draft head %s was made for %d positions, a sequence may have %d tokens: "
                    "beyond them it may propose worse",
                    name,
                    made_for,
                    longest,
                )


def _pools(
    config: EngineConfig,
    target: TargetModel,
    draft_layers: Sequence[LayerKV],
    shapes: Sequence[Shape],
    max_context_len: int,
    kv_bytes: int,
    ranks: Ranks | None,
) -> Pools:
    """Build the ledger, on all ranks the same one."""
    pools = plan_pools(
        config,
        target.layer_kv,
        draft_layers,
        shapes=shapes,
        max_context_len=max_context_len,
        dtype=target.dtype,
        device=target.device,
        kv_bytes=kv_bytes,
        states=target.state_bytes,
        least=None if ranks is None else ranks.least,
        record=None if ranks is None else log_path(ranks),
    )
    if ranks is not None:
        agree_after(ranks, pools.ledger)
    return pools


def _cache(
    pools: Pools, layers: Sequence[LayerKV], target: TargetModel, attend_with: Attend | None
) -> KVCache:
    """Build the KV buffers of all layers on the target's device."""
    return KVCache(
        pools.ledger,
        layers,
        pools.layer_groups,
        dtype=target.dtype,
        device=target.device,
        attend_with=attend_with,
    )


def _state(ledger: Ledger, target: TargetModel) -> RecurrentState | None:
    """Build the state slots and rings of the target's mixers; None if it has none."""
    if target.mixers is None:
        return None
    return RecurrentState(
        target.mixers.specs,
        num_slots=ledger.states[0].num_slots,
        num_rows=ledger.num_rows,
        ring_len=ledger.state_ring_len(0),
        device=target.device,
    )


def _host_tier(
    config: EngineConfig, ledger: Ledger, cache: KVCache, state: RecurrentState | None
) -> HostTier | None:
    """Build the host tier; None if the configuration gives it no memory."""
    if not config.host_bytes:
        return None
    memory = HostMemory(
        ledger, cache, config.host_bytes, [] if state is None else state.slot_buffers
    )
    return HostTier(ledger, memory, policy=config.offload)
