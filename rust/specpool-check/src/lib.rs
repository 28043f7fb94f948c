//! Evidence for the ledger. The real ledger runs over every interleaving of small cases (`prove`), and over random
//! operations on random configurations (`soak`). Beside it runs a model of the device, which writes and reads pages by
//! what it was launched with.
//!
//! Layers: `op, scene -> decode`; `device -> world -> explore, progress -> proof`; `decode, world -> soak`. The
//! binding and the core's own random tests use `decode` too.
#![forbid(unsafe_code)]

pub mod cases;
pub mod decode;
pub mod device;
pub mod events;
pub mod explore;
mod model;
pub mod op;
pub mod progress;
pub mod scene;
pub mod soak;
pub mod world;
