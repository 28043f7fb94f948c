"""CPU twins of specpool's kernels: draft tree, verify, sampling, slots, moves (docs/kernels.md).

Index functions take and return NumPy arrays. Each is one call into the Rust core; the stub
`_core.pyi` documents it. Functions that touch KV are torch code in `specpool.kernels.twin_moves`,
which this module does not import.

Every function first checks dtype, shape, contiguity and bounds. If a check fails, it raises
`ShapeError` and writes nothing.
"""

from specpool._core import (
    advance_ancestors,
    apply_table_delta,
    attention_bias,
    attention_mask,
    branch_copy_moves,
    branch_pages,
    build_tree,
    check_moves,
    compact_moves,
    draft_read_indices,
    draft_visibility,
    draft_write_positions,
    draft_write_slots,
    organize,
    page_csr,
    prefix_tail_moves,
    sample_margins,
    sample_tokens,
    select_topk,
    slot_ranges,
    slots_at,
    tree_from_parents,
    uniform,
    verify_tree,
)

__all__ = [
    "advance_ancestors",
    "apply_table_delta",
    "attention_bias",
    "attention_mask",
    "branch_copy_moves",
    "branch_pages",
    "build_tree",
    "check_moves",
    "compact_moves",
    "draft_read_indices",
    "draft_visibility",
    "draft_write_positions",
    "draft_write_slots",
    "organize",
    "page_csr",
    "prefix_tail_moves",
    "sample_margins",
    "sample_tokens",
    "select_topk",
    "slot_ranges",
    "slots_at",
    "tree_from_parents",
    "uniform",
    "verify_tree",
]
