"""CPU twins of specpool's kernels: draft tree, verify, sampling, slots, moves (docs/kernels.md).

Index functions take and return NumPy arrays, each one call into the Rust core (`specpool._core`,
where the stubs document them). Whatever touches KV is torch code and lives in
`specpool.kernels.twin_moves`, imported on its own.

Every function checks dtype, shape, contiguity and bounds first and raises `ShapeError`; nothing is
written then.
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
