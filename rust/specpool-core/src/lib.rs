//! specpool's core: pages, rows, lengths and the rules between them, for speculative decoding.
//!
//! Layers point one way; everything may use `error`, `ids`, `memory` and `check`:
//! - the ledger: `digest`, then `shape, layout -> sizing`, `page_pool, page_table -> delta`, `page_copy -> step`, then
//!   `group -> config`, `group, step, rows -> ledger -> audit`;
//! - what it did: `codec -> event, call`, `config -> log_header -> event_log -> ledger -> log_reader -> replay`;
//! - on plain arrays, for a forward: `layout, slots -> draft_cells`, `slots -> moves`, `mask`, `attention`;
//! - on plain arrays, for the tree: `tree -> verify`, `sample`, which never see pages.
//!
//! Start at [`Ledger`], whose example runs one request from its prefill to its end; the less obvious of its verbs have
//! examples of their own. `cargo run --example scheduler` is a whole continuous-batching loop on a fake device.
#![forbid(unsafe_code)]

pub mod attention;
mod audit;
pub mod call;
mod check;
mod codec;
pub mod config;
pub mod delta;
pub mod digest;
pub mod draft_cells;
pub mod error;
pub mod event;
pub mod event_log;
pub mod group;
pub mod ids;
pub mod layout;
pub mod ledger;
mod log_header;
pub mod log_reader;
pub mod mask;
pub mod memory;
pub mod moves;
pub mod page_copy;
pub mod page_pool;
pub mod page_table;
pub mod replay;
mod rows;
pub mod sample;
pub mod shape;
pub mod sizing;
pub mod slots;
pub mod step;
pub mod tree;
pub mod verify;

pub use audit::Finding;
pub use call::Call;
pub use config::LedgerConfig;
pub use delta::DeltaEntries;
pub use digest::Digest;
pub use error::{Error, Result};
pub use event::Event;
pub use event_log::EventLog;
pub use group::Group;
pub use ids::{Page, Row};
pub use layout::Layout;
pub use ledger::{Ledger, PageNames, Snapshot};
pub use log_reader::{LogEnd, LogReader, Record};
pub use page_copy::PageCopy;
pub use page_pool::{PagePool, PageRecord, PageState, Verb};
pub use page_table::PageTable;
pub use replay::Replay;
pub use shape::Shape;
pub use sizing::{Geometry, Policy, Reserve};
pub use step::{Plan, StepKind, StepState};
