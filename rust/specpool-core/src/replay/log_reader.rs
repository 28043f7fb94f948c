//! Reads an event log back (`docs/event_log.md`), record by record and without a ledger.
//!
//! Every record is checked before it is used. An error names the file, the record and its offset.

use std::path::Path;

use crate::error::{Error, Result};
use crate::log::call::Call;
use crate::log::codec::{Bytes, Decoded};
use crate::log::log_header::{self, BLOCK_MAGIC, MAGIC};
use crate::replay::frames::{Frame, Frames};
use crate::state::config::LedgerConfig;

/// How a log ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogEnd {
    /// The ledger was closed.
    Closed,
    /// The log reached its limit, and the ledger went on.
    Limit,
    /// The file ends without a last record: its writer still runs, or died.
    Open,
}

impl LogEnd {
    /// `"closed"`, `"limit"` or `"open"`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Limit => "limit",
            Self::Open => "open",
        }
    }
}

/// One call of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its number, from 1.
    pub index: u64,
    /// Where it begins in the file, in bytes.
    pub offset: u64,
    /// The call and its arguments.
    pub call: Call<'static>,
    /// The embedder's name for the request (admit, fork).
    pub tag: Option<String>,
    /// The snapshot that was taken or restored, else 0.
    pub snapshot: u64,
    /// The ledger's digest after it.
    pub digest: u64,
}

/// Reads a log record by record, and runs nothing.
pub struct LogReader {
    frames: Frames,
    config: LedgerConfig,
    made_by: String,
}

impl LogReader {
    /// Opens a file and reads its head.
    ///
    /// # Errors
    /// [`Error::Record`] when the file cannot be read, is no event log, is of another version,
    /// truncated or damaged.
    pub fn open(path: &Path) -> Result<Self> {
        Frames::open(path).and_then(Self::new)
    }

    /// Reads the log in `bytes`.
    ///
    /// # Errors
    /// As [`LogReader::open`].
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self> {
        Self::new(Frames::from_bytes(bytes))
    }

    fn new(mut frames: Frames) -> Result<Self> {
        let body = frames.head(MAGIC, (&BLOCK_MAGIC, "it is the log of a BlockPool: BlockPool.replay reads it"))?;
        let decoded = log_header::decode(&body);
        let (made_by, config) = decoded.map_err(|why| frames.refusal(0, &format!("its head is damaged: {why}")))?;
        Ok(Self { frames, config, made_by })
    }

    /// The configuration of the recorded ledger.
    #[must_use]
    pub fn config(&self) -> &LedgerConfig {
        &self.config
    }

    /// The name of the log in errors.
    #[must_use]
    pub fn name(&self) -> &str {
        self.frames.name()
    }

    /// The version of specpool that wrote the log.
    #[must_use]
    pub fn made_by(&self) -> &str {
        &self.made_by
    }

    /// How the log ends, once all is read.
    #[must_use]
    pub fn end(&self) -> Option<LogEnd> {
        self.frames.end()
    }

    /// Returns the next call, or `None` at the end.
    ///
    /// # Errors
    /// [`Error::Record`] when the file is truncated or damaged there, with the offset. Every
    /// later call returns the same error.
    pub fn next_record(&mut self) -> Result<Option<Record>> {
        let max_lanes =
            self.config.max_batch.map_or(self.config.num_rows, |max_batch| max_batch.min(self.config.num_rows));
        let max_lanes = usize::try_from(max_lanes).unwrap_or(0);
        let max_tokens = usize::try_from(self.config.max_context_len).unwrap_or(0);
        let pages = self.config.groups.iter().map(|group| usize::try_from(group.num_pages).unwrap_or(0));
        let limits = [max_lanes, max_tokens, pages.sum()];
        let next = self.frames.next(|frame| decode(&frame.body, limits))?;
        Ok(next.map(|(Frame { index, offset, digest, .. }, (call, tag, snapshot))| Record {
            index,
            offset,
            call,
            tag,
            snapshot,
            digest,
        }))
    }

    /// Notes that nothing more can be read because of `error`.
    pub(crate) fn stop(&mut self, error: Error) -> Error {
        self.frames.stop(error)
    }
}

/// The call of a record, its tag and its snapshot.
fn decode(
    body: &[u8],
    [max_lanes, max_tokens, max_pages]: [usize; 3],
) -> Decoded<(Call<'static>, Option<String>, u64)> {
    let (call, len) = Call::decode(body, max_lanes, max_tokens, max_pages)?;
    let mut aside = Bytes::new(&body[len..]);
    let (mut tag, mut snapshot) = (None, 0);
    if matches!(call, Call::Snapshot {} | Call::Restore {}) {
        snapshot = aside.varint()?;
    } else if call.is_tagged() && !aside.rest().is_empty() {
        tag = Some(aside.text()?);
    }
    match aside.rest().len() {
        0 => Ok((call, tag, snapshot)),
        more => Err(format!("{more} bytes follow its call")),
    }
}
