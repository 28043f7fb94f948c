//! specpool's core: pages, rows, lengths and the rules between them, for speculative decoding.
//!
//! Layers point one way:
//! `error -> ids, shape -> sizing -> page_pool, page_table -> group, delta -> step -> ledger`, and
//! `slots` (row, position) -> slot beside them; `tree -> verify` never sees pages.
#![forbid(unsafe_code)]

mod check;
pub mod draft_cells;
pub mod error;
pub mod mask;
pub mod sample;
pub mod shape;
pub mod slots;
pub mod tree;
pub mod verify;

pub use error::{Error, Result};
pub use shape::Shape;
