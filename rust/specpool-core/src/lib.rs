//! specpool's core: pages, rows, lengths and the rules between them, for speculative decoding.
//!
//! Layers point one way. Every module may use `error`, `ids`, `verb`, `memory` and `check`:
//! - the ledger: `digest`, then `shape, layout -> sizing`, `page_pool, page_table -> delta`, `page_copy -> step`, then
//!   `group -> state_group -> config`, `group, state_group, step, rows, prefix_index -> ledger -> audit`;
//! - the block pool, for engines with rows of their own: `page_pool, prefix_index, recorder, frames -> block_pool`;
//! - the record of its calls: `codec -> argument -> call`,
//!   `config -> log_header -> event_log -> recorder -> ledger`, `event_log -> frames -> log_reader -> replay`;
//! - on plain arrays, for a forward: `layout, slots -> draft_cells`, `slots -> moves`, `mask`, `attention`;
//! - on plain arrays, for the tree: `tree -> verify`, `sample`, which never see pages;
//! - on plain arrays, for the shapes of a round: `acceptance`, `choose` in `budget`;
//! - on texts, for drafts: `suffix`.
//!
//! Start at [`Ledger`]: its example runs one request from its prefill to its end, and the less obvious verbs have
//! examples of their own. `cargo run --example scheduler` is a whole continuous-batching loop on a fake device.
#![forbid(unsafe_code)]

pub mod block_pool;
pub mod budget;
mod check;
pub mod digest;
pub mod error;
pub mod forward;
pub mod ids;
pub mod layout;
pub mod ledger;
pub mod log;
pub mod memory;
pub mod replay;
pub mod shape;
pub mod state;
pub mod suffix;
pub mod tree;
pub mod verb;

pub use block_pool::{BlockPool, BlockPoolConfig, BlockRecord, ReplayedCall};
pub use digest::Digest;
pub use error::{Error, Result};
pub use ids::{Page, Row};
pub use layout::Layout;
pub use ledger::audit::Finding;
pub use ledger::{Indexed, KvEvent, Ledger, PageNames, PrefixMatch, PrefixRun, Snapshot, check_salt};
pub use log::argument::Argument;
pub use log::call::{Call, Given};
pub use log::event_log::EventLog;
pub use replay::log_reader::{LogEnd, LogReader, Record};
pub use replay::run::{Replay, Snapshots};
pub use shape::Shape;
pub use state::config::LedgerConfig;
pub use state::delta::DeltaEntries;
pub use state::group::Group;
pub use state::page_copy::PageCopy;
pub use state::page_pool::{PagePool, PageRecord, PageState};
pub use state::page_table::PageTable;
pub use state::sizing::{Geometry, Policy, Reserve};
pub use state::state_group::{StateFolds, StateGroup};
pub use state::step::{Plan, StepKind, StepState};
pub use suffix::{Proposal, SuffixIndex};
pub use verb::Verb;

/// The example of the README is run with the others.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
