//! The laws of the core, a file for each part, in one program: each program of its own is linked and run on its own.
//! What counts or refuses memory has its own allocator, and so stands beside this folder.
#![allow(unreachable_pub, reason = "the decoder is public where it lives")]

mod batch;
mod block_pool;
mod budget;
mod budget_guards;
mod config;
mod draft_cells;
mod event_log;
mod examples;
mod golden;
mod kept_states;
mod kit;
mod ledger;
mod lend;
mod life;
mod mask;
mod moves;
mod page_pool;
mod pages;
mod prefix_cache;
mod prefix_examples;
mod query;
mod replay;
mod sample;
mod sinks;
mod sizing;
mod slots;
mod snapshot;
mod states;
mod suffix;
mod transfer;
mod tree;
mod verify;
mod windows;

// The model and the decoder live with the proof and the soak run, which use them too. They are compiled in here, not
// linked as a dependency, so that testing a mutant of this crate needs only one small build.
#[path = "../../../specpool-ops/src/decode.rs"]
mod decode;
#[path = "../../../specpool-check/src/model/mod.rs"]
mod model;
#[path = "../../../specpool-ops/src/pools.rs"]
mod pools;
#[path = "../../../specpool-ops/src/scene.rs"]
mod scene;
