//! What a ledger or a block pool remembers of its calls: the running digest, and the event log if there is one.

use std::sync::Arc;

use crate::digest::Digest;
use crate::error::Result;
use crate::log::event_log::EventLog;
use crate::memory::room;

/// Bytes for which there is always room: a call without arrays, and its frame in the log.
const SMALL: usize = 256;

/// The digest and the log of one ledger or block pool. A clone has the digest and no log.
#[derive(Debug)]
pub(crate) struct Recorder {
    /// The hash over every state-changing call that succeeded, if it is kept.
    pub(crate) digest: Option<Digest>,
    pub(crate) log: Option<EventLog>,
    /// Kept for its memory: the call that is being noted, and its aside.
    pub(crate) bytes: Vec<u8>,
    pub(crate) aside: Vec<u8>,
}

impl Recorder {
    pub(crate) fn new(keeps_digest: bool) -> Self {
        let small = || if keeps_digest { Vec::with_capacity(SMALL) } else { Vec::new() };
        Self { digest: keeps_digest.then(Digest::new), log: None, bytes: small(), aside: small() }
    }

    /// Takes the memory to note a call with two arrays of `lanes` numbers and a tag, so that noting it cannot be
    /// refused later.
    pub(crate) fn make_room(&mut self, lanes: usize, tag: Option<&str>) -> Result<()> {
        if self.digest.is_none() {
            return Ok(());
        }
        let (call, aside) = (SMALL / 2 + 2 * lanes * size_of::<i32>(), SMALL / 2 + tag.map_or(0, str::len));
        self.bytes.clear();
        self.aside.clear();
        room(&mut self.bytes, call, "the note of a call")?;
        room(&mut self.aside, aside, "the note of a tag")?;
        self.log.as_mut().map_or(Ok(()), |log| log.make_room_for(call + aside))
    }

    /// Writes the gathered calls to the log, if there are many. Call it before anything is changed.
    pub(crate) fn flush_if_full(&mut self) -> Result<()> {
        self.log.as_mut().map_or(Ok(()), EventLog::make_room)
    }

    /// Writes the gathered calls to the log.
    pub(crate) fn sync(&mut self) -> Result<()> {
        self.log.as_mut().map_or(Ok(()), EventLog::flush)
    }

    /// Ends the log and writes it out.
    pub(crate) fn close(&mut self) -> Result<()> {
        match (&mut self.log, self.digest) {
            (Some(log), Some(digest)) => log.finish(digest),
            _ => Ok(()),
        }
    }

    /// A number that tells logs apart; `None` if nothing is recorded.
    pub(crate) fn log_identity(&self) -> Option<&Arc<()>> {
        self.log.as_ref().map(EventLog::identity)
    }
}

impl Clone for Recorder {
    fn clone(&self) -> Self {
        Self { digest: self.digest, ..Self::new(self.digest.is_some()) }
    }
}
