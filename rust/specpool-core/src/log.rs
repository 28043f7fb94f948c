//! What a ledger records: calls, events, and their bytes.

pub mod argument;
pub mod call;
pub(crate) mod codec;
pub mod event_log;
pub(crate) mod log_header;
pub(crate) mod recorder;
