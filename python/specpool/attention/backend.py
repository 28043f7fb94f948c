"""Which attention back ends there are, and what each can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specpool._core import Shape
from specpool.attention import flashinfer_backend
from specpool.attention.view import Attend
from specpool.errors import ConfigError
from specpool.memory.layer_kv import LayerKV

Start = Callable[[torch.device, torch.dtype, Sequence[LayerKV], str], Attend | None]


def _start_nothing(
    device: torch.device, dtype: torch.dtype, layers: Sequence[LayerKV], model_type: str
) -> None:
    """Torch's `attend` is there anyway, and does all."""


@dataclass(frozen=True, slots=True)
class BackEnd:
    """What an attention back end can do.

    Attributes:
        name: as `EngineConfig.attention` has it.
        reads_ragged_masks: one forward may hold prompts and trees (mixed chunks while drafting).
        reads_trees_on_pages: a tree's nodes may lie on pages of several slots.
        needs_host_lengths: the host must know every length before a forward: a round then waits for
            the lengths that the one before left on the device.
        runs_in_graphs: its forwards can be captured in CUDA graphs.
        start: (device, dtype, layers with KV, type of the model) -> the `attend` of the views of
            one engine, None = torch's. Raises `ConfigError` where it cannot do what they ask for.
    """

    name: str
    reads_ragged_masks: bool
    reads_trees_on_pages: bool
    needs_host_lengths: bool
    runs_in_graphs: bool = False
    start: Start = _start_nothing


BACK_ENDS = {
    "torch": BackEnd(
        "torch",
        reads_ragged_masks=True,
        reads_trees_on_pages=True,
        needs_host_lengths=False,
        runs_in_graphs=True,
    ),
    # It plans on the host, from lengths that the host must have: a replay would keep the plan of
    # the capture.
    "flashinfer": BackEnd(
        "flashinfer",
        reads_ragged_masks=True,
        reads_trees_on_pages=True,
        needs_host_lengths=True,
        runs_in_graphs=False,
        start=flashinfer_backend.start,
    ),
}


def back_end(name: str) -> BackEnd:
    """The back end of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in BACK_ENDS:
        raise ConfigError(f"attention must be one of {', '.join(BACK_ENDS)}, got {name!r}")
    return BACK_ENDS[name]


def check_trees(attention: BackEnd, page_size: int, shapes: Sequence[Shape]) -> None:
    """Raise `ConfigError` where the back end cannot read these shapes' trees on such pages."""
    trees = [shape for shape in shapes if shape.topk > 1]
    if not trees or page_size == 1 or attention.reads_trees_on_pages:
        return
    able = [name for name, each in BACK_ENDS.items() if each.reads_trees_on_pages]
    raise ConfigError(
        f"attention {attention.name!r} cannot read trees on pages, and page_size is {page_size}, "
        f"topk {trees[0].topk} ({trees[0]}): {', '.join(able)} can; or take page_size 1, or topk 1"
    )
