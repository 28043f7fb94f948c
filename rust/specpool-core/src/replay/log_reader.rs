//! Reads an event log back (`docs/event_log.md`), record by record and without a ledger.
//!
//! Every record is checked before it is used. An error names the file, the record and its offset.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::log::call::Call;
use crate::log::codec::{Bytes, Decoded};
use crate::log::event_log::{self, CLOSED, LIMIT, TRAILER_LEN};
use crate::log::log_header::{self, MAGIC, VERSION};
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
    input: Box<dyn Read + Send + Sync>,
    /// The name of the log in errors.
    name: String,
    config: LedgerConfig,
    made_by: String,
    /// The digest of the last record read.
    index: u64,
    /// Bytes read.
    offset: u64,
    digest: Digest,
    end: Option<LogEnd>,
    /// Why nothing more can be read, if that is so.
    broken: Option<Error>,
}

impl LogReader {
    /// Opens a file and reads its head.
    ///
    /// # Errors
    /// [`Error::Record`] when the file cannot be read, is no event log, is of another version, truncated or damaged.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let file =
            File::open(path).map_err(|error| Error::Record(format!("cannot read the event log {name}: {error}")))?;
        Self::new(name, Box::new(BufReader::new(file)))
    }

    /// Reads the log in `bytes`.
    ///
    /// # Errors
    /// As [`LogReader::open`].
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self> {
        Self::new("in memory".into(), Box::new(std::io::Cursor::new(bytes)))
    }

    fn new(name: String, input: Box<dyn Read + Send + Sync>) -> Result<Self> {
        let config = LedgerConfig::new(Vec::new(), Vec::new(), 1, 2);
        let digest = Digest::new();
        let mut reader =
            Self { input, name, config, made_by: String::new(), index: 0, offset: 0, digest, end: None, broken: None };
        reader.read_head()?;
        Ok(reader)
    }

    /// The configuration of the recorded ledger.
    #[must_use]
    pub fn config(&self) -> &LedgerConfig {
        &self.config
    }

    /// The name of the log in errors.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The version of specpool that wrote the log.
    #[must_use]
    pub fn made_by(&self) -> &str {
        &self.made_by
    }

    /// How the log ends, once all is read.
    #[must_use]
    pub fn end(&self) -> Option<LogEnd> {
        self.end
    }

    fn read_head(&mut self) -> Result<()> {
        let magic = self.read(0, MAGIC.len() as u64)?;
        if magic != MAGIC {
            return Err(self.refusal(0, "it is no event log: its first bytes are not those of one"));
        }
        let version = self.varint(0)?;
        if version != VERSION {
            return Err(self.refusal(0, &format!("it has format version {version}, this specpool reads {VERSION}")));
        }
        let len = self.varint(0)?;
        let body = self.read(0, len)?;
        let checksum = self.read(0, 4)?;
        if checksum != log_header::checksum(&body).to_le_bytes() {
            return Err(self.refusal(0, "its head is damaged: the checksum differs"));
        }
        let decoded = log_header::decode(&body);
        (self.made_by, self.config) = decoded.map_err(|why| self.refusal(0, &format!("its head is damaged: {why}")))?;
        Ok(())
    }

    /// Returns the next call, or `None` at the end.
    ///
    /// # Errors
    /// [`Error::Record`] when the file is truncated or damaged there, with the offset. Every later call returns the
    /// same error.
    pub fn next_record(&mut self) -> Result<Option<Record>> {
        match &self.broken {
            Some(error) => Err(error.clone()),
            None if self.end.is_some() => Ok(None),
            None => self.read_record().inspect_err(|error| self.broken = Some(error.clone())),
        }
    }

    /// Notes that nothing more can be read because of `error`.
    pub(crate) fn stop(&mut self, error: Error) -> Error {
        self.broken = Some(error.clone());
        error
    }

    fn read_record(&mut self) -> Result<Option<Record>> {
        let at = self.offset;
        let Some(first) = self.read_some(at, 1)?.first().copied() else {
            self.end = Some(LogEnd::Open);
            return Ok(None);
        };
        let len = self.varint_after(at, first)?;
        let body = self.read(at, len)?;
        let trailer = self.read(at, TRAILER_LEN as u64)?;
        let (digest, checksum) = trailer.split_at(8);
        let after = Digest::from_value(u64::from_le_bytes(digest.try_into().unwrap_or_default()));
        if checksum != event_log::checksum(&body, self.digest, after).to_le_bytes() {
            return Err(self.refusal(at, "it is damaged: the checksum differs"));
        }
        self.end = match body[..] {
            [CLOSED] => Some(LogEnd::Closed),
            [LIMIT] => Some(LogEnd::Limit),
            _ => None,
        };
        if self.end.is_some() {
            let more = self.read_some(self.offset, 1)?.len();
            return if more == 0 { Ok(None) } else { Err(self.refusal(self.offset - 1, "bytes follow its end")) };
        }
        self.digest = after;
        self.index += 1;
        let max_lanes = self.config.max_batch.map_or(self.config.num_rows, |most| most.min(self.config.num_rows));
        let max_lanes = usize::try_from(max_lanes).unwrap_or(0);
        let max_tokens = usize::try_from(self.config.max_context_len).unwrap_or(0);
        let decoded =
            decode(&body, max_lanes, max_tokens).map_err(|why| self.refusal(at, &format!("it is damaged: {why}")))?;
        let (call, tag, snapshot) = decoded;
        Ok(Some(Record { index: self.index, offset: at, call, tag, snapshot, digest: after.value() }))
    }

    /// A number that begins at the reader's place.
    fn varint(&mut self, at: u64) -> Result<u64> {
        let first = self.read(at, 1)?[0];
        self.varint_after(at, first)
    }

    fn varint_after(&mut self, at: u64, first: u8) -> Result<u64> {
        let mut bytes = vec![first];
        while bytes.last().is_some_and(|byte| byte & 0x80 != 0) && bytes.len() < 10 {
            bytes.push(self.read(at, 1)?[0]);
        }
        Bytes::new(&bytes).varint().map_err(|why| self.refusal(at, &format!("it is damaged: {why}")))
    }

    /// Exactly `len` bytes of the record at `at`.
    fn read(&mut self, at: u64, len: u64) -> Result<Vec<u8>> {
        let bytes = self.read_some(at, len)?;
        if bytes.len() as u64 == len {
            return Ok(bytes);
        }
        Err(self.refusal(at, &format!("it is truncated: {len} more bytes are needed, {} are left", bytes.len())))
    }

    /// Reads up to `len` bytes; fewer only at the end of the file. It takes no more memory than there are bytes.
    fn read_some(&mut self, at: u64, len: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let outcome = self.input.by_ref().take(len).read_to_end(&mut bytes);
        self.offset += bytes.len() as u64;
        outcome.map_err(|error| self.refusal(at, &error.to_string()))?;
        Ok(bytes)
    }

    fn refusal(&self, at: u64, why: &str) -> Error {
        let what = if at == 0 { "its head".into() } else { format!("event {}", self.index + 1) };
        Error::Record(format!("event log {}, {what} at byte {at}: {why}", self.name))
    }
}

/// The call of a record, its tag and its snapshot.
fn decode(body: &[u8], max_lanes: usize, max_tokens: usize) -> Decoded<(Call<'static>, Option<String>, u64)> {
    let (call, len) = Call::decode(body, max_lanes, max_tokens)?;
    let mut aside = Bytes::new(&body[len..]);
    let (mut tag, mut snapshot) = (None, 0);
    match call {
        Call::Admit { .. } | Call::AdmitCached { .. } | Call::Fork { .. } if !aside.rest().is_empty() => {
            tag = Some(aside.text()?);
        }
        Call::Snapshot | Call::Restore => snapshot = aside.varint()?,
        _ => {}
    }
    match aside.rest().len() {
        0 => Ok((call, tag, snapshot)),
        more => Err(format!("{more} bytes follow its call")),
    }
}
