"""`PackedLayers`: linear layers through oneDNN's packed weights, for the row counts where it pays.

On a CPU torch multiplies by MKL, which is slow for some numbers of rows: 8 rows through a matrix of
768 x 3072 took three times as long as through oneDNN with a weight in its own order. For a single
row, and for long prompts on many processors, MKL is as quick or quicker. What is quicker depends on
the processor, the sizes and the number of threads, so it is measured for each shape of a weight.

A packed weight is a second copy. It is made of the weight as it was then: a layer whose weight was
replaced or written to since (`Tensor._version`) runs as it is. A write through `Tensor.data`, which
torch does not count, is not seen; so only models that the engine has loaded itself are packed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

#: Numbers of rows that are measured, in ascending order.
ROWS = (2, 4, 8, 16, 32, 64, 128, 512)
#: Bytes of the smallest weight that is packed. A call of oneDNN costs microseconds by itself.
MIN_BYTES = 1 << 20
#: The most that packed layers may take of MKL's time to be used.
_MAX_RATIO = 0.85
#: Rows up to which every shape is measured; beyond, until a product takes `_MAX_SECONDS`.
_FEW_ROWS, _MAX_SECONDS = 16, 2e-3
_PAIRS = 4


@dataclass(frozen=True, slots=True)
class RowRange:
    """Numbers of rows, both ends included; `most` None: without limit."""

    least: int
    most: int | None

    def __contains__(self, rows: int) -> bool:
        return self.least <= rows and (self.most is None or rows <= self.most)


class PackedLayers:
    """The packed linear layers of a model on a CPU, which it takes on and off.

    Attributes:
        num_bytes: bytes of the packed weights.
    """

    def __init__(self, model: nn.Module, max_bytes: int) -> None:
        """Pack float32 weights where that pays, at most `max_bytes`; nothing else changes yet.

        Measuring takes tens of milliseconds for each shape of weights of millions of numbers.
        """
        self.num_bytes = 0
        self._layers: list[_PackedLayer] = []
        ranges: dict[torch.Size, RowRange | None] = {}
        packed_weights: dict[int, Tensor] = {}  # by the weight's identity: layers may share one
        with torch.inference_mode():
            for module in model.modules():
                if not _can_pack(module):
                    continue
                weight: Tensor = module.weight  # type: ignore[assignment]
                packed = packed_weights.get(id(weight))
                if packed is None:
                    if self.num_bytes + weight.nbytes > max_bytes:
                        continue
                    if weight.shape in ranges and ranges[weight.shape] is None:
                        continue
                    packed = _pack(weight)
                    if packed is None:  # this build of torch, or this processor, cannot
                        return
                    if weight.shape not in ranges:
                        ranges[weight.shape] = quicker_rows(_ratios(weight, packed))
                rows = ranges[weight.shape]
                if rows is None:
                    continue
                if id(weight) not in packed_weights:
                    packed_weights[id(weight)] = packed
                    self.num_bytes += weight.nbytes
                self._layers.append(_PackedLayer(module, packed, rows))

    def __len__(self) -> int:
        return len(self._layers)

    def switch(self, *, on: bool) -> None:
        """Put the packed forwards in place, or the modules' own."""
        for layer in self._layers:
            if on:
                layer.module.forward = layer.forward
            else:
                layer.module.__dict__.pop("forward", None)


class _PackedLayer:
    """A linear layer with its packed weight."""

    def __init__(self, module: Any, packed: Tensor, rows: RowRange) -> None:
        self.module = module
        self._packed = packed
        self._least = rows.least  # plain integers: each product asks
        self._most = sys.maxsize if rows.most is None else rows.most
        self._weight: Tensor = module.weight
        self._width = self._weight.shape[1]
        self._version, self._address = self._weight._version, self._weight.data_ptr()

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., in] times the weight, plus the bias: [..., out]."""
        module = self.module
        if (
            self._least <= x.numel() // self._width <= self._most
            and x.dtype == torch.float32
            and not torch.is_grad_enabled()
            and self._is_fresh(module.weight)
        ):
            return _product(x, self._packed, module.bias)
        return F.linear(x, module.weight, module.bias)

    def _is_fresh(self, weight: Tensor) -> bool:
        """Return whether the module's weight is still the one that was packed."""
        return (
            weight is self._weight
            and weight._version == self._version
            and weight.data_ptr() == self._address
        )


def quicker_rows(ratios: Sequence[float]) -> RowRange | None:
    """Return the longest run of measured row counts for which packed weights pay; None if none do.

    Args:
        ratios: oneDNN's time over MKL's for the first of `ROWS`. What was not measured does not
            pay; if all were, the greatest stands for all numbers of rows beyond it.
    """
    best: tuple[int, int] = (0, 0)
    start = 0
    for end, ratio in enumerate(ratios, 1):
        if ratio > _MAX_RATIO:
            start = end
        elif end - start > best[1] - best[0]:
            best = (start, end)
    if best[0] == best[1]:
        return None
    return RowRange(ROWS[best[0]], None if best[1] == len(ROWS) else ROWS[best[1] - 1])


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
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _FEW_ROWS)
    except (AttributeError, RuntimeError):
        return None
    return packed


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def _ratios(weight: Tensor, packed: Tensor) -> list[float]:
    """Measure oneDNN's time over MKL's, by the number of rows, until a product takes long."""
    ratios = []
    for rows in ROWS:
        x = torch.ones(rows, weight.shape[1])
        plain_seconds, packed_seconds = [], []
        for _ in range(_PAIRS):  # in turns, so that other load slows both
            began = time.perf_counter()
            F.linear(x, weight)
            between = time.perf_counter()
            _product(x, packed, None)
            packed_seconds.append(time.perf_counter() - between)
            plain_seconds.append(between - began)
        ratios.append(min(packed_seconds) / min(plain_seconds))
        if rows >= _FEW_ROWS and min(plain_seconds) > _MAX_SECONDS:
            break
    return ratios
