"""The list of attention back ends, and what each can read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specpool._core import Shape
from specpool.capacity.layer_kv import LayerKV
from specpool.engine.attention.flashinfer import backend as flashinfer_backend
from specpool.engine.attention.graph_recorder import Started
from specpool.errors import ConfigError

AUTO = "auto"
"""The name that leaves the choice to the engine."""

_log = logging.getLogger("specpool")

Start = Callable[[torch.device, torch.dtype, Sequence[LayerKV], str], Started | None]


def _start_nothing(
    device: torch.device, dtype: torch.dtype, layers: Sequence[LayerKV], model_type: str
) -> None:
    """Return None: torch's `attend` needs no start and refuses no layer."""


@dataclass(frozen=True, slots=True)
class BackEnd:
    """An attention back end and what it can do.

    Attributes:
        name: its name in `EngineConfig.attention`.
        reads_ragged_masks: one forward may hold prompts and trees (mixed chunks while drafting).
        reads_trees_on_pages: a tree's nodes may lie on pages of more than one slot.
        needs_host_lengths: outside a graph, the host must know every length before a forward. A
            round then waits until the previous round's lengths are on the host.
        runs_in_graphs: its forwards can be captured in CUDA graphs.
        start: (device, dtype, layers with KV, model type) -> the back end of one engine; None means
            torch's, which needs no start. It raises `ConfigError` if it cannot serve these layers.
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
    # flashinfer plans on the host. Within graphs it plans from upper bounds of the lengths.
    "flashinfer": BackEnd(
        "flashinfer",
        reads_ragged_masks=True,
        reads_trees_on_pages=True,
        needs_host_lengths=True,
        runs_in_graphs=True,
        start=flashinfer_backend.start,
    ),
}


def back_end(name: str) -> BackEnd:
    """Return the back end of a name.

    Raises:
        ConfigError: no back end has this name.
    """
    if name not in BACK_ENDS:
        names = ", ".join([AUTO, *BACK_ENDS])
        raise ConfigError(f"attention must be one of {names}, got {name!r}")
    return BACK_ENDS[name]


def start_back_end(
    name: str, device: torch.device, dtype: torch.dtype, layers: Sequence[LayerKV], model_type: str
) -> tuple[BackEnd, Started | None]:
    """Start the back end of a name for one engine; log one line that says which one runs.

    Args:
        name: of a back end; "auto" = flashinfer on a CUDA device if it can serve these layers, else
            torch.
        device: where the pages lie.
        dtype: of keys and values.
        layers: the layers with KV.
        model_type: the model's, for messages.

    Returns:
        The back end and what it started; None means torch's, which needs no start.

    Raises:
        ConfigError: no back end has this name, or it cannot serve these layers.
    """
    why = ""
    if name == AUTO:
        name = "torch"
        if device.type == "cuda":
            try:
                chosen = BACK_ENDS["flashinfer"]
                started = chosen.start(device, dtype, layers, model_type)
                _log.info("attention: flashinfer")
                return chosen, started
            except ConfigError as error:
                why = f" ({error})"
    chosen = back_end(name)
    started = chosen.start(device, dtype, layers, model_type)
    _log.info("attention: %s%s", name, why)
    return chosen, started


def check_trees(attention: BackEnd, page_size: int, shapes: Sequence[Shape]) -> None:
    """Raise `ConfigError` if the back end cannot read these shapes' trees at this page size."""
    trees = [shape for shape in shapes if shape.topk > 1]
    if not trees or page_size == 1 or attention.reads_trees_on_pages:
        return
    able_names = [name for name, candidate in BACK_ENDS.items() if candidate.reads_trees_on_pages]
    raise ConfigError(
        f"attention {attention.name!r} cannot read trees on pages, and page_size is {page_size}, "
        f"topk {trees[0].topk} ({trees[0]}): {', '.join(able_names)} can; or take page_size 1, or "
        "topk 1"
    )
