//! Drafting: the tree of a round, its verification, and sampling. Nothing here sees pages.

pub mod build;
pub mod check;
pub mod sample;
pub mod verify;
