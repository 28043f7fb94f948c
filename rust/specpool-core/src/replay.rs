//! Reads a log back, and runs it again on a fresh ledger.

pub(crate) mod frames;
pub mod log_reader;
pub mod run;
