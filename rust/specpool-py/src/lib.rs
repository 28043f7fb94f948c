//! `specpool._core`: the Python binding of `specpool-core`. It converts and checks array arguments, and does nothing
//! else. The names are those of the core.
//!
//! Its documentation is in `_core.pyi`: `doc!("Ledger.admit")` is the docstring of that method there.
#![allow(missing_docs, unreachable_pub, reason = "documented in _core.pyi, which stubtest checks")]
#![allow(clippy::doc_markdown, reason = "its documentation is Python's, not Markdown")]

include!(concat!(env!("OUT_DIR"), "/docs.rs"));

mod arrays;
mod attention;
mod block_pool;
mod budget;
mod decode;
mod errors;
mod finding;
mod group;
mod kernels;
mod ledger;
mod mask;
mod moves;
mod plan;
mod recording;
mod replay;
mod shape;
mod sizing;
mod slot_table;
mod slots;
mod snapshot;
mod state_group;
mod suffix;
mod tree;

#[doc = doc!("_core")]
#[pyo3::pymodule]
mod _core {
    #[pymodule_export]
    use super::attention::attend_pages;
    #[pymodule_export]
    use super::block_pool::BlockPool;
    #[pymodule_export]
    use super::budget::{choose_shapes, count_acceptance, expected_tokens};
    #[pymodule_export]
    use super::decode::decode_op;
    #[pymodule_export]
    use super::finding::Finding;
    #[pymodule_export]
    use super::group::Group;
    #[pymodule_export]
    use super::kernels::kernel_source;
    #[pymodule_export]
    use super::ledger::Ledger;
    #[pymodule_export]
    use super::mask::{attention_bias, attention_mask};
    #[pymodule_export]
    use super::moves::{checksum, gather_pages, move_slots, scatter_pages, scatter_slots};
    #[pymodule_export]
    use super::plan::Plan;
    #[pymodule_export]
    use super::replay::{Event, Replay};
    #[pymodule_export]
    use super::shape::Shape;
    #[pymodule_export]
    use super::sizing::{
        sizing_alloc_len_per_decode, sizing_most_window_pages, sizing_need_double_buffer, sizing_need_exact,
        sizing_next_allocated, sizing_pages_needed, sizing_row_headroom, sizing_row_width,
    };
    #[pymodule_export]
    use super::slot_table::{decode_into, launch_into, round_slots};
    #[pymodule_export]
    use super::slots::{
        advance_ancestors, apply_table_delta, branch_copy_moves, branch_pages, check_moves, check_slots, compact_moves,
        draft_read_indices, draft_visibility, draft_write_positions, draft_write_slots, page_csr, prefix_tail_moves,
        slot_ranges, slots_at,
    };
    #[pymodule_export]
    use super::snapshot::Snapshot;
    #[pymodule_export]
    use super::state_group::StateGroup;
    #[pymodule_export]
    use super::suffix::SuffixIndex;
    #[pymodule_export]
    use super::tree::{
        build_tree, find_broken_trees, organize, sample_margins, sample_tokens, select_topk, tree_from_parents,
        uniform, verify_tree,
    };

    use pyo3::prelude::*;
    use pyo3::types::PyTuple;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("KERNEL_FILES", PyTuple::new(module.py(), super::kernels::names())?)?;
        module.add("OP_BYTES", specpool_ops::decode::OP_BYTES)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
