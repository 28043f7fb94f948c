"""`Mixers`: runs the recurrent mixers of a decoder by lanes, while all else sees flat tokens.

A mixer is the module that carries states from token to token. The probe notes which module runs
when the cache's states are updated, so no family is known by name. The forward of each mixer is
wrapped on the instance, and the class is untouched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specpool.capacity.state_sizes import StateBytes
from specpool.engine.models.device_lanes import DeviceLanes
from specpool.engine.models.gate import refusal
from specpool.engine.models.lane_forward import LaneForward
from specpool.engine.models.lane_states import LaneStates
from specpool.engine.models.recurrent import MixerSpec, bytes_of_mixers, paged_cache, states_in
from specpool.kernels.launch import runs_kernels

# Recorded inputs that a round reads again before they are folded, at most one less.
_FLUSH = 16

Mixer = tuple[nn.Module, MixerSpec]


class Mixers:
    """The wrapped mixers of a decoder.

    Attributes:
        modules: the mixers, in the order of their forwards.
        specs: what is kept of each.
        cache: the transformers cache for forwards of the decoder; it keeps nothing between them.
        continues: whether a mixer of several tokens may start from a state; if not, such tokens
            run one by one.
        has_kernels: whether every mixer can run `DeviceLanes`, by kernels.
    """

    def __init__(self, config: Any, mixers: Sequence[Mixer], device: torch.device) -> None:
        """Wrap the mixers, which are on `device`, until `close`."""
        self.specs = [spec for _, spec in mixers]
        self.cache, self.continues = paged_cache(config), True
        self.modules = [module for module, _ in mixers]
        forwards = [LaneForward.of(*mixer) for mixer in mixers] if runs_kernels(device) else [None]
        self._lane_forwards = [forward for forward in forwards if forward is not None]
        self.has_kernels = len(self._lane_forwards) == len(mixers)
        self._lanes: Sequence[LaneStates | DeviceLanes] = ()
        for number, module in enumerate(self.modules):
            module.forward = partial(self._forward, number, module.forward)

    @property
    def flush(self) -> int:
        """How many recorded inputs are worth a fold.

        A mixer pads a few tokens to a chunk, so it reads them beside the nodes at little cost. A
        fold costs another call. Mixers that run token by token should read none twice.
        """
        return _FLUSH if self.continues else 1

    @property
    def state_bytes(self) -> StateBytes:
        """What a row keeps of all mixers."""
        return bytes_of_mixers(self.specs, self.flush)

    def close(self) -> None:
        """Give the mixers their own forwards back. A second call does nothing."""
        for module in self.modules:
            module.__dict__.pop("forward", None)

    @contextlib.contextmanager
    def reading(self, lanes: Sequence[LaneStates | DeviceLanes]) -> Iterator[None]:
        """Let the mixers run from the states of these lanes within the block.

        Each part of `lanes` has the tokens that follow those of the part before.
        """
        self._lanes = lanes
        try:
            yield
        finally:
            self._lanes = ()

    def _forward(
        self, number: int, forward: Callable[..., Any], hidden_states: Tensor, *args: Any, **kw: Any
    ) -> Any:
        """Run a mixer on [1, T, width]. Outside of `reading` it runs as it is."""
        if not self._lanes:
            return forward(hidden_states, *args, **kw)

        def run(tokens: Tensor) -> Any:
            return forward(tokens, *args, **kw)

        sizes = [lanes.num_tokens for lanes in self._lanes]
        results = [
            self._run_kernels(number, lanes, tokens, args, kw)
            if isinstance(lanes, DeviceLanes)
            else self._run_groups(number, lanes, tokens, run)
            for lanes, tokens in zip(self._lanes, torch.split(hidden_states[0], sizes), strict=True)
        ]
        if len(results) == 1:
            return results[0]
        if isinstance(results[0], Tensor):
            return torch.cat(results, 1)
        return tuple(torch.cat(parts, 1) for parts in zip(*results, strict=True))

    def _run_groups(
        self, number: int, lanes: LaneStates, tokens: Tensor, forward: Callable[[Tensor], Any]
    ) -> Any:
        """Run a mixer on [T, width] by its own forward, a call for each group of equal lanes."""
        ring, slots = lanes.state.rings[number], lanes.state.slots[number]
        states = self.specs[number].states
        width = tokens.shape[1]
        outputs: list[list[Tensor]] = []  # [n, ...] each, in the order of `LaneStates.outputs`
        is_tensor = True

        def advance(inputs: Tensor, src: Tensor, *, at_once: bool) -> list[Tensor]:
            """Run [b, n, width] from copies of the states in slots `src`; return [b, n, ...]."""
            nonlocal is_tensor
            for spec, slot in zip(states, slots, strict=True):
                spec.put(self.cache, slot.index_select(0, src))
            columns = [inputs] if at_once else torch.split(inputs, 1, 1)
            results = [forward(column) for column in columns]
            is_tensor = isinstance(results[0], Tensor)
            parts = [(result,) if is_tensor else result for result in results]
            return [torch.cat(columns, 1) for columns in zip(*parts, strict=True)]

        for fold in lanes.folds:
            records = ring.index_select(0, fold.records).view(len(fold.src), -1, width)
            inputs = tokens.index_select(0, fold.tokens).view(len(fold.src), -1, width)
            at_once = self.continues or fold.is_fresh
            folded = advance(torch.cat([records, inputs], 1), fold.src, at_once=at_once)
            for spec, slot in zip(states, slots, strict=True):
                slot.index_copy_(0, fold.dst, spec.get(self.cache).to(slot.dtype))
            outputs.append([out[:, records.shape[1] :].flatten(0, 1) for out in folded])
        run = lanes.run
        if run is not None:
            records = ring.index_select(0, run.records)
            inputs = torch.cat([tokens, records]).index_select(0, run.inputs)
            inputs = inputs.view(len(run.src), -1, width)
            ran = advance(inputs, run.src, at_once=self.continues)
            outputs.append([out.flatten(0, 1) for out in ran])
            ring.index_copy_(0, run.places, tokens.index_select(0, run.recorded))
        for spec in states:
            spec.drop(self.cache)
        joined = [
            torch.cat(parts).index_select(0, lanes.outputs).unsqueeze(0)
            for parts in zip(*outputs, strict=True)
        ]
        return joined[0] if is_tensor else tuple(joined)

    def _run_kernels(
        self,
        number: int,
        lanes: DeviceLanes,
        tokens: Tensor,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        """Run a mixer on [T, width] in one call, records before tokens."""
        ring, slots = lanes.state.rings[number], lanes.state.slots[number]
        inputs = torch.cat([ring.index_select(0, lanes.records), tokens]).unsqueeze(0)
        output = self._lane_forwards[number].run(
            inputs, lanes.lanes, slots, self.cache, args, keywords
        )
        ring.index_copy_(0, lanes.places, tokens.index_select(0, lanes.recorded))
        first = len(lanes.records)
        if isinstance(output, Tensor):
            return output[:, first:]
        return tuple(part[:, first:] for part in output)


@contextlib.contextmanager
def tracing_mixers(decoder: Any, cache: Any, mixers: list[Mixer]) -> Iterator[None]:
    """Add to `mixers` those that run in the block, in one forward of the decoder on `cache`.

    Raises:
        ConfigError: a mixer runs twice in the forward, has no hidden states, or shares a layer's
            states with another.
    """
    running: list[nn.Module] = []
    inputs_of: dict[nn.Module, list[Any]] = {}  # the inputs of each call
    layers: dict[nn.Module, set[int]] = {}

    def enter(module: nn.Module, args: tuple[Any, ...], kw: dict[str, Any]) -> None:
        inputs_of.setdefault(module, []).append(kw.get("hidden_states", args[0] if args else None))
        running.append(module)

    def leave(*_: Any) -> None:
        running.pop()

    def note(update: Callable[..., Tensor], states: Tensor, layer_idx: int, **kw: Any) -> Tensor:
        layers.setdefault(running[-1], set()).add(layer_idx)
        return update(states, layer_idx, **kw)

    for name in ("update_conv_state", "update_recurrent_state"):
        setattr(cache, name, partial(note, getattr(cache, name)))
    hooks = [
        hook
        for module in decoder.modules()
        for hook in (
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        )
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    specs = states_in(cache)
    for module, its_layers in layers.items():
        name, inputs = type(module).__name__, inputs_of[module]
        shared = [other for other, theirs in layers.items() if theirs & its_layers]
        if len(inputs) != 1 or len(shared) != 1 or not isinstance(inputs[0], Tensor):
            raise refusal(
                decoder.config.model_type,
                f"its recurrent {name} ran {len(inputs)} times in one forward, with {len(shared)}"
                f" modules on the states of layers {sorted(its_layers)}; it must run once, alone,"
                " with hidden states",
            )
        states = tuple(spec for spec in specs if spec.layer in its_layers)
        mixers.append((module, MixerSpec(states, inputs[0].shape[-1], inputs[0].dtype)))
