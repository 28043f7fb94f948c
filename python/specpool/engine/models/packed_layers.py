"""`PackedLayers`: linear layers through oneDNN's packed weights, for the row counts where it pays.

On a CPU torch multiplies by MKL, which is slow for a few dozen rows: 8 rows through a matrix of
768 x 3072 took three times as long as through oneDNN with a weight in its own order. Fewer rows
and prompts are as quick by MKL, except on processors that MKL does not favour: there two rows took
twice as long. The rows from `LEAST_ROWS` to `MOST_ROWS` are fixed, so that two starts give the same
text. Whether fewer and more are packed too is measured once, by a wide margin.

oneDNN also applies silu to a gate, and the gate to the other half, while a product is in the cache.

A packed weight is a second copy. It is made of the weight as it was then: a layer whose weight was
replaced or written to since (`Tensor._version`) runs as it is. A write through `Tensor.data`, which
torch does not count, is not seen; so only models that the engine has loaded itself are packed.
"""

from __future__ import annotations

import sys
import time
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from specpool.engine.models.fused_layers import fused_gate

#: Rows of the products that are packed on any processor, both included.
LEAST_ROWS, MOST_ROWS = 4, 64
#: Bytes of the smallest weight that is packed. A call of oneDNN costs microseconds by itself.
MIN_BYTES = 1 << 19
#: oneDNN's time over MKL's below which other numbers of rows are packed too. It is 1.0 to 1.2 where
#: MKL is at home, and 0.3 to 0.92 elsewhere.
_MAX_RATIO = 0.95


class PackedLayers:
    """The packed linear layers of a model on a CPU, which it takes on and off.

    Attributes:
        num_bytes: bytes of the packed weights.
    """

    def __init__(self, model: nn.Module, max_bytes: int) -> None:
        """Pack the float32 weights, at most `max_bytes`; nothing else changes yet."""
        self.num_bytes = 0
        self._layers: list[_PackedLayer] = []
        packed_weights: dict[int, Tensor] = {}  # by the weight's identity: layers may share one
        for module in filter(_can_pack, model.modules()):
            weight: Tensor = module.weight  # type: ignore[assignment]
            if id(weight) not in packed_weights:
                if self.num_bytes + weight.nbytes > max_bytes:
                    continue
                packed = _pack(weight)
                if packed is None:  # this build of torch, or this processor, cannot
                    return
                packed_weights[id(weight)] = packed
                self.num_bytes += weight.nbytes
            self._layers.append(_PackedLayer(module, packed_weights[id(weight)]))
        by_module = {layer.module: layer for layer in self._layers}
        self._gates: list[_PackedGate] = []
        for module in model.modules():
            gate, up = (
                by_module.get(getattr(module, f"{part}_proj", None)) for part in ("gate", "up")
            )
            if (
                gate is not None
                and up is not None
                and "forward" not in module.__dict__
                and fused_gate(module)
            ):
                self._gates.append(_PackedGate(module, gate, up))

    def __len__(self) -> int:
        return len(self._layers)

    def switch(self, *, on: bool) -> None:
        """Put the packed forwards in place, or the modules' own."""
        layers: list[_PackedLayer | _PackedGate] = [*self._layers, *self._gates]
        for layer in layers:
            if on:
                layer.module.forward = layer.forward
            else:
                layer.module.__dict__.pop("forward", None)


class _PackedLayer:
    """A linear layer with its packed weight."""

    def __init__(self, module: Any, packed: Tensor) -> None:
        self.module = module
        self.packed = packed
        self._least_rows, self._most_rows = packed_rows()
        self._weight: Tensor = module.weight
        self._width = self._weight.shape[1]
        self._version, self._address = self._weight._version, self._weight.data_ptr()

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., in] times the weight, plus the bias: [..., out]."""
        if self.serves(x):
            return _product(x, self.packed, self.module.bias)
        return F.linear(x, self.module.weight, self.module.bias)

    def serves(self, x: Tensor) -> bool:
        """Return whether the packed weight is for x [..., in]."""
        return (
            self._least_rows <= x.numel() // self._width <= self._most_rows
            and x.dtype == torch.float32
            and not torch.is_grad_enabled()
            and self._is_fresh(self.module.weight)
        )

    def _is_fresh(self, weight: Tensor) -> bool:
        """Return whether the module's weight is still the one that was packed."""
        return (
            weight is self._weight
            and weight._version == self._version
            and weight.data_ptr() == self._address
        )


class _PackedGate:
    """A layer gated by silu, whose gate and other half have packed weights."""

    def __init__(self, module: Any, gate: _PackedLayer, up: _PackedLayer) -> None:
        self.module = module
        self._gate, self._up = gate, up

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer on x [..., h]."""
        gate, up, module = self._gate, self._up, self.module
        if not gate.serves(x) or not up.serves(x):
            return type(module).forward(module, x)  # type: ignore[no-any-return]
        ops, gate_bias, up_bias = torch.ops.mkldnn, gate.module.bias, up.module.bias
        factor = ops._linear_pointwise(x, gate.packed, gate_bias, "swish", [], "")
        product = ops._linear_pointwise.binary(x, factor, up.packed, up_bias, "mul")
        down: Tensor = module.down_proj(product)
        return down


@cache
def packed_rows() -> tuple[int, int]:
    """Return the least and the most rows that are packed on this processor; takes some 50 ms."""
    # A single row waits for memory by either way, so two rows tell.
    least_rows = 1 if _is_quicker(torch.ones(4096, 512), num_rows=2) else LEAST_ROWS
    most_rows = sys.maxsize if _is_quicker(torch.ones(1024, 384), num_rows=128) else MOST_ROWS
    return least_rows, most_rows


def _is_quicker(weight: Tensor, num_rows: int) -> bool:
    """Return whether oneDNN is clearly quicker than MKL for so many rows."""
    x = torch.ones(num_rows, weight.shape[1])
    with torch.inference_mode():
        packed = _pack(weight)
        if packed is None:
            return False
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(9):  # in turns, so that other load slows both
            for is_packed in seconds:
                began = time.perf_counter()
                _product(x, packed, None) if is_packed else F.linear(x, weight)
                seconds[is_packed].append(time.perf_counter() - began)
    return min(seconds[True]) <= _MAX_RATIO * min(seconds[False])


def _can_pack(module: nn.Module) -> bool:
    """Return whether a module is a plain linear layer with a whole float32 weight on a CPU."""
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    weight = module.weight
    return (
        type(weight) is nn.Parameter
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and not weight.is_inference()  # torch counts no writes to it
        and weight.nbytes >= MIN_BYTES
    )


def _pack(weight: Tensor) -> Tensor | None:
    """Return a copy of a weight in oneDNN's order; None if there is no oneDNN."""
    try:
        with torch.inference_mode():
            packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    except (AttributeError, RuntimeError):
        return None
    return packed


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
