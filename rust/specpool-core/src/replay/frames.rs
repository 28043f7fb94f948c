//! Reads an event log frame by frame: its head, then each record's bytes and digest. Every frame is checked before it
//! is used. An error names the file, the record and its offset.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::log::codec::Bytes;
use crate::log::event_log::{self, CLOSED, LIMIT, TRAILER_LEN};
use crate::log::log_header::{self, VERSION};
use crate::replay::log_reader::LogEnd;

/// One record: its number from 1, where it begins in the file, its bytes, and the digest after it.
pub(crate) struct Frame {
    pub(crate) index: u64,
    pub(crate) offset: u64,
    pub(crate) body: Vec<u8>,
    pub(crate) digest: u64,
}

/// A log that is being read.
pub(crate) struct Frames {
    input: Box<dyn Read + Send + Sync>,
    /// The name of the log in errors.
    name: String,
    /// The number of the last record read.
    index: u64,
    /// Bytes read.
    offset: u64,
    digest: Digest,
    end: Option<LogEnd>,
    /// Why nothing more can be read, if that is so.
    broken: Option<Error>,
}

impl Frames {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let file =
            File::open(path).map_err(|error| Error::Record(format!("cannot read the event log {name}: {error}")))?;
        Ok(Self::new(name, Box::new(BufReader::new(file))))
    }

    pub(crate) fn from_bytes(bytes: Vec<u8>) -> Self {
        Self::new("in memory".into(), Box::new(std::io::Cursor::new(bytes)))
    }

    fn new(name: String, input: Box<dyn Read + Send + Sync>) -> Self {
        Self { input, name, index: 0, offset: 0, digest: Digest::new(), end: None, broken: None }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn end(&self) -> Option<LogEnd> {
        self.end
    }

    /// Reads the head, and returns its body. `others` are first bytes of another kind of log, and what it is.
    pub(crate) fn head(&mut self, magic: [u8; 8], others: (&[u8; 8], &str)) -> Result<Vec<u8>> {
        let first = self.read(0, magic.len() as u64)?;
        if first == others.0 {
            return Err(self.refusal(0, others.1));
        }
        if first != magic {
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
        Ok(body)
    }

    /// The next record, decoded by `decode`, whose error says what is wrong with the bytes; `None` at the end.
    pub(crate) fn next<T>(
        &mut self,
        decode: impl FnOnce(&Frame) -> std::result::Result<T, String>,
    ) -> Result<Option<(Frame, T)>> {
        match &self.broken {
            Some(error) => Err(error.clone()),
            None if self.end.is_some() => Ok(None),
            None => self.read_record(decode).inspect_err(|error| self.broken = Some(error.clone())),
        }
    }

    /// Notes that nothing more can be read because of `error`.
    pub(crate) fn stop(&mut self, error: Error) -> Error {
        self.broken = Some(error.clone());
        error
    }

    fn read_record<T>(
        &mut self,
        decode: impl FnOnce(&Frame) -> std::result::Result<T, String>,
    ) -> Result<Option<(Frame, T)>> {
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
        let frame = Frame { index: self.index, offset: at, body, digest: after.value() };
        let decoded = decode(&frame).map_err(|why| self.refusal(at, &format!("it is damaged: {why}")))?;
        Ok(Some((frame, decoded)))
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

    pub(crate) fn refusal(&self, at: u64, why: &str) -> Error {
        let what = if at == 0 { "its head".into() } else { format!("event {}", self.index + 1) };
        Error::Record(format!("event log {}, {what} at byte {at}: {why}", self.name))
    }
}
