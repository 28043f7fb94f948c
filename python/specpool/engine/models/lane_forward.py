"""`LaneForward`: a mixer's own forward over flat tokens, with its convolution and scan by kernels.

transformers' mixers call their convolution and their scan by names of their module, and all else in
their forward treats each token alone. So a copy of the forward that finds our functions under these
names runs all lanes at once. The class and its module are untouched.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from specpool import kernels
from specpool.engine.models.recurrent import MixerSpec
from specpool.kernels.state_lanes import StateLanes

_CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
_DELTA_RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_MAMBA2 = ("mamba2_chunk_scan", "mamba2_selective_state_update")


class LaneForward:
    """The forward of one mixer, whose lanes go on from states in slots, by the device's lengths."""

    def __init__(self, module: nn.Module, spec: MixerSpec, scan: str | None) -> None:
        """Copy the module's forward, which calls `scan`, or None if it only convolves."""
        forward: Any = inspect.unwrap(type(module).forward)
        scans: dict[str, Callable[..., Any]] = {
            _DELTA_RULES[0]: self._delta_rule,
            _MAMBA2[0]: self._mamba2,
        }
        # The forms for one token go on from a state of the cache, and `_NO_STATES` has none.
        names: dict[str, Any] = {_CONVOLUTIONS[0]: self._convolution}
        if scan is not None:
            names[scan] = scans[scan]
        self._function = FunctionType(
            forward.__code__,
            {**forward.__globals__, **names},
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        self._function.__kwdefaults__ = forward.__kwdefaults__
        self._module = module
        self._kinds = [state.kind for state in spec.states]
        self._lanes: StateLanes
        self._slots: dict[str, Tensor]  # by kind

    @classmethod
    def of(cls, module: nn.Module, spec: MixerSpec) -> LaneForward | None:
        """Return the forward of a mixer; None if it convolves or scans in another way."""
        forward: Any = inspect.unwrap(type(module).forward)
        if not isinstance(forward, FunctionType):
            return None
        called = {
            instruction.argval
            for instruction in dis.get_instructions(forward)
            if instruction.opname == "LOAD_GLOBAL"
        }
        kinds = sorted(state.kind for state in spec.states)
        for scans in (_DELTA_RULES, _MAMBA2, ()):
            wanted = ["conv", "recurrent"] if scans else ["conv"]
            if called.issuperset((*_CONVOLUTIONS, *scans)) and kinds == wanted:
                return cls(module, spec, scans[0] if scans else None)
        return None

    def run(
        self,
        inputs: Tensor,
        lanes: StateLanes,
        slots: Sequence[Tensor],
        cache: Any,
        args: Sequence[Any],
        keywords: dict[str, Any],
    ) -> Any:
        """Run the mixer, and fold its states.

        Args:
            inputs: [1, T, width], T of `lanes`.
            lanes: the sequences.
            slots: the mixer's states, each [num_slots + 1, ...].
            cache: among the arguments; it is left out.
            args: further arguments of the mixer's forward.
            keywords: likewise.

        Returns:
            The forward's outputs; those of records mean nothing.
        """
        self._lanes, self._slots = lanes, dict(zip(self._kinds, slots, strict=True))
        args = [_NO_STATES if arg is cache else arg for arg in args]
        keywords = {
            name: _NO_STATES if value is cache else value for name, value in keywords.items()
        }
        try:
            return self._function(self._module, inputs, *args, **keywords)
        finally:
            del self._lanes, self._slots

    def _convolution(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """Do the work of `causal_conv1d_fn` on [1, C, T]."""
        from transformers.activations import ACT2FN

        state = self._slots["conv"]
        convolved = kernels.convolve_lanes(hidden_states[0].T, weight, bias, state, self._lanes)
        if activation is not None:
            convolved = ACT2FN[activation](convolved)
        return convolved.T.unsqueeze(0)

    def _delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Do the work of `torch_chunk_gated_delta_rule` on [1, T, heads, width]."""
        scanned = kernels.scan_lanes(
            *(query[0], key[0], value[0]),
            g[0].float().exp().contiguous(),
            beta[0].float().contiguous(),
            self._slots["recurrent"],
            self._lanes,
            is_delta=True,
            is_normed=use_qk_l2norm_in_kernel,
            scale=query.shape[-1] ** -0.5,
        )
        return scanned.to(query.dtype).unsqueeze(0), None

    def _mamba2(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **_: Any,
    ) -> Any:
        """Do the work of `mamba2_chunk_scan` on [1, T, heads, width]."""
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = softplus(dt)
        steps = torch.clamp(dt[0], min=dt_limit[0], max=dt_limit[1]).float().contiguous()
        scanned = kernels.scan_lanes(
            *(C[0], B[0], hidden_states[0]),
            (A.float() * steps).exp(),
            steps,
            self._slots["recurrent"].transpose(2, 3),
            self._lanes,
            is_delta=False,
        )
        if D is not None:
            scanned = scanned + D.unsqueeze(1) * hidden_states[0].float()
        output = scanned.unsqueeze(0)
        return (output, None) if return_final_states else output


class _NoStates:
    """The cache of a text that begins: a mixer hands over its states, and they are not kept."""

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    def get_recurrent_state(self, *_: Any, **__: Any) -> None:
        return None

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return conv_states

    def update_recurrent_state(self, recurrent_states: None, *_: Any, **__: Any) -> None:
        return recurrent_states

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return False

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False


_NO_STATES = _NoStates()
