"""Launchers of the kernels on torch tensors, one file for each of `cuda/*.cu`.

Names and arguments are those of the CPU twins in `specpool.kernels.twins`. All tensors of a call
are on one device. On a CPU a launcher calls the twin on the tensors' memory (`with_twin`); its
slots are int64. (The twins of `gather_kv` and `scatter_kv`, in `specpool.kernels.twin_moves`, take
no `Fields`.) Outputs are given or allocated with torch. Every argument is checked before the
launch: a `ShapeError` names a wrong one, and nothing is written. Values on the device are not read.
Instead, a kernel maps an invalid row, position or page to the sink or skips it, so that it never
leaves tables and buffers.

The argument `hi` gives upper bounds, on the host, of lengths that only the device knows.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specpool.kernels.attend import attend_pages
    from specpool.kernels.fields import Fields
    from specpool.kernels.launch import prepare
    from specpool.kernels.layers import gated_silu, rotate_heads
    from specpool.kernels.masks import attention_bias, draft_visibility
    from specpool.kernels.moves import (
        compact_accepted,
        copy_pages,
        copy_parent_drafts,
        duplicate_prefix_tail,
        gather_kv,
        move_kv,
        scatter_kv,
        write_kv,
    )
    from specpool.kernels.paged_cells import PagedCells
    from specpool.kernels.reads import (
        advance_ancestors,
        branch_pages,
        draft_read_indices,
        read_capacity,
    )
    from specpool.kernels.sample import likeliest, sample_tokens, uniform
    from specpool.kernels.state_lanes import StateLanes
    from specpool.kernels.states import convolve_lanes, scan_lanes
    from specpool.kernels.tables import (
        apply_table_delta,
        apply_table_deltas,
        draft_write_slots,
        page_csr,
        slot_ranges,
        slots_at,
    )
    from specpool.kernels.tree import build_tree, check_tree, select_topk, verify_tree

# Imported at first use, because these modules import torch and `specpool.kernels.twins` does not.
_LAZY = {
    "Fields": "specpool.kernels.fields",
    "PagedCells": "specpool.kernels.paged_cells",
    "StateLanes": "specpool.kernels.state_lanes",
    "advance_ancestors": "specpool.kernels.reads",
    "apply_table_delta": "specpool.kernels.tables",
    "apply_table_deltas": "specpool.kernels.tables",
    "attend_pages": "specpool.kernels.attend",
    "attention_bias": "specpool.kernels.masks",
    "branch_pages": "specpool.kernels.reads",
    "build_tree": "specpool.kernels.tree",
    "check_tree": "specpool.kernels.tree",
    "compact_accepted": "specpool.kernels.moves",
    "convolve_lanes": "specpool.kernels.states",
    "copy_pages": "specpool.kernels.moves",
    "copy_parent_drafts": "specpool.kernels.moves",
    "draft_read_indices": "specpool.kernels.reads",
    "draft_visibility": "specpool.kernels.masks",
    "draft_write_slots": "specpool.kernels.tables",
    "duplicate_prefix_tail": "specpool.kernels.moves",
    "gated_silu": "specpool.kernels.layers",
    "gather_kv": "specpool.kernels.moves",
    "likeliest": "specpool.kernels.sample",
    "move_kv": "specpool.kernels.moves",
    "page_csr": "specpool.kernels.tables",
    "prepare": "specpool.kernels.launch",
    "read_capacity": "specpool.kernels.reads",
    "rotate_heads": "specpool.kernels.layers",
    "sample_tokens": "specpool.kernels.sample",
    "scan_lanes": "specpool.kernels.states",
    "scatter_kv": "specpool.kernels.moves",
    "select_topk": "specpool.kernels.tree",
    "slot_ranges": "specpool.kernels.tables",
    "slots_at": "specpool.kernels.tables",
    "uniform": "specpool.kernels.sample",
    "verify_tree": "specpool.kernels.tree",
    "write_kv": "specpool.kernels.moves",
}

__all__ = [
    "Fields",
    "PagedCells",
    "StateLanes",
    "advance_ancestors",
    "apply_table_delta",
    "apply_table_deltas",
    "attend_pages",
    "attention_bias",
    "branch_pages",
    "build_tree",
    "check_tree",
    "compact_accepted",
    "convolve_lanes",
    "copy_pages",
    "copy_parent_drafts",
    "draft_read_indices",
    "draft_visibility",
    "draft_write_slots",
    "duplicate_prefix_tail",
    "gated_silu",
    "gather_kv",
    "likeliest",
    "move_kv",
    "page_csr",
    "prepare",
    "read_capacity",
    "rotate_heads",
    "sample_tokens",
    "scan_lanes",
    "scatter_kv",
    "select_topk",
    "slot_ranges",
    "slots_at",
    "uniform",
    "verify_tree",
    "write_kv",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value
