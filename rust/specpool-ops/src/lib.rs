//! Random operations on a ledger: what there is to work on, one operation from a few random bytes, and the call.
//!
//! Layers: `op, scene -> decode`. The core's own random tests, `specpool-check`, the fuzzers and the binding share it.
#![forbid(unsafe_code)]

pub mod decode;
pub mod op;
pub mod scene;
