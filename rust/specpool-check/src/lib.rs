//! Evidence for the ledger. The real ledger runs over every interleaving of small cases (`prove`), and over random
//! operations on random configurations (`soak`). Beside it runs a model of the device, which writes and reads pages by
//! what it was launched with.
//!
//! Layers: `device -> connector -> world -> explore, progress -> proof`; `world -> soak`. The operations are `specpool-ops`'.
#![forbid(unsafe_code)]

pub mod cases;
pub mod connector;
pub mod device;
pub mod events;
pub mod explore;
mod model;
pub mod progress;
pub mod soak;
pub mod world;

pub use specpool_ops::{decode, pools, scene};
