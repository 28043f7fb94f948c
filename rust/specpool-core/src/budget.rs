//! The budget (docs/adaptive.md): what each row's draft may give, and which shape each row of a round gets. Pure
//! functions over plain arrays. They never see a page, only how many each choice needs.

// Counts of rows, nodes and pages are far below 2^52, and prices that repeat repeat to the bit.
#![allow(clippy::cast_precision_loss, clippy::float_cmp)]

pub mod acceptance;
pub mod choose;
