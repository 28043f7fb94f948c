"""`FusedLayers`: a model's small steps in fewer launches, while it runs over pages on a GPU.

transformers launches a kernel for every product and sum. A small kernel takes microseconds of a
round, whatever it computes, and there are dozens in each layer:

| step | launches | instead | found by |
|---|---|---|---|
| RMSNorm | 7 or 8 | 1: `torch.nn.functional.rms_norm` (Gemma's in 16 bits: 3) | `_fused_norm` |
| rotary embedding | 10 | 1: `kernels.rotate_heads` | `_Rotation` |
| silu of a gate, times the other half | 2 | 1: `kernels.gated_silu` | `fused_gate` |

What a module computes says whether it is fused, not its name: its own result for random numbers
must be the fused one's. A module that computes anything else runs as it is. Norms agree up to the
rounding of their dtype, since transformers rounds before it multiplies with the weight, and torch
only after it. Rotations agree to the bit, gates but for the last bit of an exponential function.

A CPU's forwards are not fused in this way: there a launch costs little. `PackedLayers` has its
gates.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from specpool import kernels

_ROTATE = "apply_rotary_pos_emb"  # transformers' name, in the file of each model type
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# How far two ways to a norm may be apart, relative to each number.
_APART_FLOAT32, _APART_ROUNDINGS = 1e-5, 2.0


class FusedLayers:
    """The fused forwards of a model's modules, which it takes on and off."""

    def __init__(self, model: nn.Module) -> None:
        """Find what can be fused in a model on a GPU; nothing changes yet."""
        self._forwards: list[tuple[nn.Module, MethodType]] = []
        rotating: dict[type, FunctionType | None] = {}
        for module in model.modules():
            if "forward" in module.__dict__:  # somebody else's
                continue
            forward = _fused_norm(module) or fused_gate(module)
            kind = type(module)
            if kind not in rotating:
                rotating[kind] = _with_rotation(kind.forward)
            rotated = rotating[kind]
            if forward is None and rotated is not None:
                forward = MethodType(rotated, module)
            if forward is not None:
                self._forwards.append((module, forward))

    def switch(self, *, on: bool) -> None:
        """Put the fused forwards in place, or the modules' own."""
        for module, forward in self._forwards:
            if on:
                module.forward = forward
            else:
                module.__dict__.pop("forward", None)


# --- norms --------------------------------------------------------------------------------------


def _fused_norm(module: nn.Module) -> MethodType | None:
    """Return the forward of a norm by root mean square; None if the module is not one."""
    weight, epsilon = module._parameters.get("weight"), _epsilon(module)
    if weight is None or epsilon is None or weight.ndim != 1 or hasattr(weight, "full_tensor"):
        return None
    if len(module._parameters) > 1 or module._modules or weight.dtype not in _DTYPES:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    with torch.inference_mode():
        for candidate in (
            partial(_norm, epsilon=epsilon),
            partial(_norm, epsilon=epsilon, scale=1.0 + weight.float()),  # Gemma
        ):
            if _computes_norm(module, weight, candidate):
                return MethodType(candidate, module)
    return None


def _epsilon(module: nn.Module) -> float | None:
    """Return the number that a norm adds to the mean square, under its usual names."""
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def _norm(module: nn.Module, x: Tensor, *, epsilon: float, scale: Tensor | None = None) -> Tensor:
    """Norm x [..., h] with the module's weight, or by float32 `scale` [h] in place of it."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    if x.dtype != weight.dtype:  # torch would do it step by step, too
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    if scale is None:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    return F.rms_norm(x.float(), weight.shape, scale, epsilon).to(x.dtype)


def _computes_norm(module: nn.Module, weight: Tensor, candidate: Callable[..., Tensor]) -> bool:
    """Return whether a candidate's result is that of the module, for rows of unlike sizes."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, len(weight), generator=generator) + 0.5
    rows = rows * torch.tensor([[1.0], [1e-3], [30.0]])
    x = rows.to(weight.device, weight.dtype)
    expected = _result(module, x)
    return expected is not None and _agrees(expected, candidate(module, x), _APART_ROUNDINGS)


# --- gated layers -------------------------------------------------------------------------------


def fused_gate(module: nn.Module) -> MethodType | None:
    """Return the forward of a layer gated by silu; None if the module is none."""
    parts = [module._modules.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    activation = getattr(module, "act_fn", None)
    if not all(isinstance(part, nn.Linear) for part in parts) or not callable(activation):
        return None
    weight: Tensor = parts[0].weight  # type: ignore[union-attr,assignment]
    if weight.dtype not in _DTYPES or hasattr(weight, "full_tensor"):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    with torch.inference_mode():
        # Near 0 another activation is hard to tell from silu behind the matrices.
        x = torch.linspace(-9.0, 9.0, 99).to(weight.device, weight.dtype)
        expected = _result(activation, x)
        if expected is None or not _agrees(expected, F.silu(x), _APART_ROUNDINGS):
            return None
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(3, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
        expected = _result(module, x)
        if expected is None:
            return None
        if not _agrees(expected, _gated(module, x), _APART_ROUNDINGS, by_row=True):
            return None
    return MethodType(_gated, module)


def _gated(module: Any, x: Tensor) -> Tensor:
    """Run a gated layer on x [..., h]."""
    gate, up = module.gate_proj(x), module.up_proj(x)
    product = kernels.gated_silu(gate.flatten(0, -2), up.flatten(0, -2))
    down: Tensor = module.down_proj(product.view(gate.shape))
    return down


# --- rotary embedding ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Way:
    """How a function rotates heads, as arguments of `kernels.rotate_heads`."""

    rotary_dim: int
    is_rounded: bool

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q and k, [B, heads, n, D], by angles [B, n, W]."""
        outs = kernels.rotate_heads(
            q.transpose(1, 2).flatten(0, 1),
            k.transpose(1, 2).flatten(0, 1),
            cos.flatten(0, 1).contiguous(),
            sin.flatten(0, 1).contiguous(),
            rotary_dim=self.rotary_dim,
            is_rounded=self.is_rounded,
        )
        lanes, _, width, dim = q.shape
        q, k = (out.view(lanes, width, -1, dim).transpose(1, 2) for out in outs)
        return q, k


class _Rotation:
    """A function like transformers' `apply_rotary_pos_emb`, by one launch where that is the same.

    The first call with heads and angles of some sizes and dtypes finds out, by random numbers. It
    waits for the device, and is in the probe of a model, before any graph is captured.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._ways: dict[tuple[Any, ...], _Way | None] = {}

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **options: Any
    ) -> Any:
        """Rotate q and k, [B, heads, n, D], by angles [B, n, W]; see the original."""
        way = None
        if not others and not options and _fits(q, k, cos, sin):
            sizes = (q.shape[3], cos.shape[2], q.dtype, cos.dtype)
            if sizes not in self._ways:
                self._ways[sizes] = self._find_way(q, cos)
            way = self._ways[sizes]
        if way is None:
            return self._original(q, k, cos, sin, *others, **options)
        return way.rotate(q, k, cos, sin)

    def _find_way(self, q: Tensor, cos: Tensor) -> _Way | None:
        """Find out how heads like `q` are rotated by angles like `cos`; None if by no known way."""
        generator = torch.Generator().manual_seed(0)

        def like(wanted: Tensor, *shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(wanted.device, wanted.dtype)

        dim, width = q.shape[3], cos.shape[2]
        heads = like(q, 1, 2, 3, dim), like(q, 1, 1, 3, dim)
        angles = like(cos, 1, 3, width), like(cos, 1, 3, width)
        expected = _result(self._original, *heads, *angles)
        if not isinstance(expected, tuple) or len(expected) != 2:
            return None
        for rotary_dim in (width, 2 * width):
            if rotary_dim > dim or rotary_dim % 2:
                continue
            for is_rounded in (True, False):
                way = _Way(rotary_dim, is_rounded)
                if all(map(_agrees, expected, way.rotate(*heads, *angles))):
                    return way
        return None


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether `kernels.rotate_heads` takes such arguments."""
    return (
        q.ndim == k.ndim == 4
        and cos.ndim == 3
        and q.shape[2:] == k.shape[2:]
        and cos.shape == sin.shape
        and (q.shape[0], q.shape[2]) == tuple(cos.shape[:2])
        and k.shape[0] == q.shape[0]
        and q.dtype == k.dtype
        and q.dtype in _DTYPES
        and cos.dtype == sin.dtype
        and cos.dtype in (q.dtype, torch.float32)
    )


def _with_rotation(forward: Callable[..., Any]) -> FunctionType | None:
    """Return a class's forward with a `_Rotation` in it; None if it rotates nothing by that name.

    It is the same code with names of its own, so nothing changes for others who use the class.
    """
    function = forward
    while hasattr(function, "__wrapped__"):
        # transformers renames arguments, which callers within transformers give by their new names.
        if getattr(function, "__globals__", {}).get("__name__") != "transformers.utils.deprecation":
            return None
        function = function.__wrapped__
    if not isinstance(function, FunctionType) or _ROTATE not in function.__code__.co_names:
        return None
    original = function.__globals__.get(_ROTATE)
    if not callable(original):
        return None
    fused = FunctionType(
        function.__code__,
        {**function.__globals__, _ROTATE: _Rotation(original)},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    fused.__kwdefaults__ = function.__kwdefaults__
    return fused


def _result(function: Any, *arguments: Tensor) -> Any:
    """Return what a function or a module's forward makes of arguments; None if it refuses them.

    A model may call it in another way, and then sees its errors.
    """
    try:
        return getattr(function, "forward", function)(*arguments)
    except Exception:
        return None


def _agrees(
    result: Tensor, other: Tensor, num_roundings: float = 0.0, *, by_row: bool = False
) -> bool:
    """Return whether two results are the same, but for roundings of their dtype; NaN never is.

    `by_row` compares the lengths of rows in place of each number.
    """
    if not isinstance(result, Tensor) or result.shape != other.shape:
        return False
    if result.dtype != other.dtype:
        return False
    if not num_roundings:
        return torch.equal(result, other)
    apart = num_roundings * torch.finfo(result.dtype).eps
    if result.dtype == torch.float32:
        apart = _APART_FLOAT32
    size, difference = result.float(), result.float() - other.float()
    if by_row:
        size, difference = size.norm(dim=-1), difference.norm(dim=-1)
    return bool((difference.abs() <= apart * size.abs()).all())
