//! Random operations on a ledger: what there is to work on, and one call from a few random bytes.
//!
//! Layers: `scene -> decode`. The core's own random tests, `specpool-check`, the fuzzers and the binding share it.
#![forbid(unsafe_code)]

pub mod decode;
pub mod pools;
pub mod scene;
