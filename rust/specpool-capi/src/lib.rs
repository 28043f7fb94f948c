//! The C interface of specpool (docs/c_api.md): `include/specpool.h` is made from these files.
//!
//! Files: `status` has the codes and the message of the last error; `handle` keeps pools and ledgers behind numbers;
//! `slice` reads the caller's arrays; `pool`, `ledger`, `state`, `lend`, `transfer`, `step` and `event` are the
//! calls.
//!
//! A handle is a number, not a pointer. So a handle that was destroyed is known as such, and two threads in one handle
//! are refused: neither is undefined behaviour. What no library can check is the size of the caller's arrays.

#![allow(clippy::doc_markdown, reason = "the comments become those of a C header")]

pub mod event;
mod handle;
pub mod ledger;
pub mod lend;
pub mod pool;
mod slice;
pub mod state;
pub mod status;
pub mod step;
pub mod transfer;

pub use event::*;
pub use ledger::*;
pub use lend::*;
pub use pool::*;
pub use state::*;
pub use status::*;
pub use step::*;
pub use transfer::*;
