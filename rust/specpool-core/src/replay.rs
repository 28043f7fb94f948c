//! A log read back, and run again on a fresh ledger.

pub mod log_reader;
pub mod run;
