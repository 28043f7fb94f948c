//! Writes an event log: a file of everything that a ledger did, from which it can be run again (`docs/event_log.md`).
//!
//! Pushing an event writes to memory and never fails. [`EventLog::make_room`] writes the memory to the file, and
//! [`EventLog::make_room_for`] asks for more memory. The ledger calls both before a verb changes anything. So a full
//! disk, or a machine without memory, refuses that call, and nothing is lost or half done.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::log::codec::put_varint;
use crate::log::log_header;
use crate::memory::room;
use crate::state::config::LedgerConfig;

/// Kinds of the last record, beside those of [`Call`](crate::log::call::Call).
pub(crate) const CLOSED: u8 = 0x7e;
pub(crate) const LIMIT: u8 = 0x7f;
/// Bytes of digest and checksum after each record.
pub(crate) const TRAILER_LEN: usize = 12;
/// Bytes of a last record.
const LAST_LEN: u64 = 2 + TRAILER_LEN as u64;
/// Bytes that gather in memory before they are written.
const FLUSH_AT: usize = 1 << 16;
/// Bytes behind those for which there is always room: a call without arrays or tag, and the frame of a longer one.
const SMALL: usize = 256;

/// The open end of an event log.
#[derive(Debug)]
pub struct EventLog {
    file: File,
    path: PathBuf,
    /// Bytes that are not written yet.
    buffer: Vec<u8>,
    /// Bytes in the file.
    written: u64,
    /// Most bytes of the file.
    limit: u64,
    /// Whether the last attempt to write failed. The next attempt then comes before anything else.
    is_stuck: bool,
    /// Whether the last record is pushed.
    is_over: bool,
    identity: Arc<()>,
    /// The process that opened the file. A forked child must not write the parent's bytes again.
    process: u32,
}

impl EventLog {
    /// Creates the file, or empties it, and writes the header. The file is locked until the log is finished or
    /// dropped.
    ///
    /// # Errors
    /// [`Error::Record`] when the file cannot be written, another ledger is writing it, or `limit` bytes are too few
    /// for the header.
    pub fn create(path: &Path, config: &LedgerConfig, limit: u64) -> Result<Self> {
        Self::with_header(path, log_header::encode(config), limit)
    }

    /// As [`create`](Self::create), of a log that begins with these bytes.
    pub(crate) fn with_header(path: &Path, mut header: Vec<u8>, limit: u64) -> Result<Self> {
        let least = header.len() as u64 + LAST_LEN;
        if limit < least {
            return Err(Error::Record(format!(
                "record_limit must be at least {least} bytes, the header of this ledger, got {limit}"
            )));
        }
        let file = create_locked(path)
            .map_err(|error| Error::Record(format!("cannot write the event log {}: {error}", path.display())))?;
        room(&mut header, FLUSH_AT + 2 * SMALL, "an event log")?;
        let mut log = Self {
            file,
            path: path.to_owned(),
            buffer: header,
            written: 0,
            limit,
            is_stuck: false,
            is_over: false,
            identity: Arc::new(()),
            process: std::process::id(),
        };
        log.flush()?;
        Ok(log)
    }

    /// A token that only this log has.
    pub(crate) fn identity(&self) -> &Arc<()> {
        &self.identity
    }

    /// Bytes of the log, whether written or in memory.
    #[must_use]
    pub fn num_bytes(&self) -> u64 {
        self.written + self.buffer.len() as u64
    }

    /// Writes the gathered bytes to the file, if there are many. Call it before anything is changed.
    ///
    /// # Errors
    /// [`Error::Record`] when the disk refuses. The unwritten bytes stay in memory, and the next call tries again.
    pub fn make_room(&mut self) -> Result<()> {
        if self.is_stuck || self.buffer.len() >= FLUSH_AT { self.flush() } else { Ok(()) }
    }

    /// Takes the memory for an event whose call and aside take `len` bytes. Call it before anything is changed. Small
    /// events have room in any case.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn make_room_for(&mut self, len: usize) -> Result<()> {
        if self.is_over { Ok(()) } else { room(&mut self.buffer, len + SMALL, "an event log") }
    }

    /// Pushes one record: the encoded call, its aside (not hashed), and the digest before and after. At the limit it
    /// pushes the last record instead, and nothing from then on.
    pub fn push(&mut self, call: &[u8], aside: &[u8], before: Digest, after: Digest) {
        if self.is_over {
            return;
        }
        let before_it = self.buffer.len();
        put_record(&mut self.buffer, call, aside, before, after);
        if self.num_bytes() + LAST_LEN > self.limit {
            self.buffer.truncate(before_it);
            self.push_last(LIMIT, before);
        }
    }

    fn push_last(&mut self, kind: u8, digest: Digest) {
        put_record(&mut self.buffer, &[kind], &[], digest, digest);
        self.is_over = true;
    }

    /// Ends the log and writes everything. In a forked child it does nothing, because the parent goes on writing the
    /// file, and an unlock here would unlock the parent's file too.
    ///
    /// # Errors
    /// [`Error::Record`] when the disk refuses; another call tries again.
    pub fn finish(&mut self, digest: Digest) -> Result<()> {
        if self.is_a_childs() {
            return Ok(());
        }
        if !self.is_over {
            self.push_last(CLOSED, digest);
        }
        self.flush()?;
        let _ = self.file.unlock(); // The next recorder may have the file.
        Ok(())
    }

    /// Whether the process was forked since the file was opened.
    fn is_a_childs(&self) -> bool {
        std::process::id() != self.process
    }

    /// Writes what waits in memory.
    ///
    /// # Errors
    /// [`Error::Record`] when the disk refuses; another call tries again.
    pub fn flush(&mut self) -> Result<()> {
        if self.is_a_childs() {
            self.buffer.clear();
            self.is_over = true;
            return Ok(());
        }
        let mut done = 0;
        let outcome = loop {
            if done == self.buffer.len() {
                break Ok(());
            }
            match self.file.write(&self.buffer[done..]) {
                Ok(0) => break Err("it takes no more bytes".to_owned()),
                Ok(len) => done += len,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Err(error.to_string()),
            }
        };
        self.buffer.drain(..done);
        self.written += done as u64;
        self.is_stuck = outcome.is_err();
        outcome.map_err(|error| {
            Error::Record(format!(
                "cannot write the event log {}: {error}; {} bytes are written, {} wait in memory",
                self.path.display(),
                self.written,
                self.buffer.len()
            ))
        })
    }
}

impl Drop for EventLog {
    /// Tries to write what is in memory, and ignores a failure. [`EventLog::finish`] reports it.
    fn drop(&mut self) {
        let _ = self.flush();
    }
}

/// Locks the file. Two ledgers that write one file would each destroy the other's log unnoticed.
fn create_locked(path: &Path) -> std::io::Result<File> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
    if file.metadata()?.is_file() {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                return Err(std::io::Error::other("another ledger is writing it (%p in the path is the process id)"));
            }
            // Some file systems have no locks.
            Err(TryLockError::Error(_)) | Ok(()) => file.set_len(0)?,
        }
    }
    Ok(file)
}

/// `[length][call, aside][digest][checksum]`; the length counts the call and what is beside it.
fn put_record(out: &mut Vec<u8>, call: &[u8], aside: &[u8], before: Digest, after: Digest) {
    put_varint(out, (call.len() + aside.len()) as u64);
    let from = out.len();
    out.extend_from_slice(call);
    out.extend_from_slice(aside);
    let checksum = checksum(&out[from..], before, after);
    out.extend_from_slice(&after.value().to_le_bytes());
    out.extend_from_slice(&checksum.to_le_bytes());
}

/// The checksum of one record and of its place in the log.
pub(crate) fn checksum(body: &[u8], before: Digest, after: Digest) -> u32 {
    let mut hash = Digest::new();
    hash.bytes(body);
    hash.word(before.value());
    hash.word(after.value());
    hash.value() as u32
}
