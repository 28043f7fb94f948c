//! The state: pages, tables, rows, groups and prepared steps; and how many pages each needs.

pub mod config;
pub mod delta;
pub mod group;
mod indexed_pages;
pub(crate) mod kept_states;
pub(crate) mod lent_pages;
pub mod page_copy;
pub mod page_pool;
pub mod page_table;
pub(crate) mod prefix_index;
pub(crate) mod rows;
pub mod sizing;
pub mod state_group;
pub mod step;
