//! The record of a pool's calls: their bytes, the digest, the event log, and its replay (`docs/event_log.md`).

use std::borrow::Cow;
use std::path::Path;

use super::{BlockPool, BlockPoolConfig};
use crate::error::{Error, Result};
use crate::ledger::MAX_SALT;
use crate::log::argument::{Argument, Ints, SaltBytes, list};
use crate::log::codec::{Bytes, Decoded, put_bytes, put_int, put_ints, put_text, put_varint};
use crate::log::event_log::EventLog;
use crate::log::log_header::{self, BLOCK_MAGIC, MAGIC, setting};
use crate::replay::frames::{Frame, Frames};
use crate::replay::log_reader::LogEnd;

/// One successful call and its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum BlockCall<'a> {
    Take { count: usize, hold: Ints<'a> },
    Drop { blocks: Ints<'a>, after: Option<u64> },
    Put { anchor: Option<i32>, tokens: Ints<'a>, blocks: Ints<'a>, start: usize, salt: SaltBytes<'a> },
    Forget { salt: Option<SaltBytes<'a>> },
    Complete { step: u64 },
    Keep { blocks: Ints<'a> },
    Unkeep { blocks: Ints<'a> },
}

impl BlockCall<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::Take { .. } => "take",
            Self::Drop { .. } => "drop",
            Self::Put { .. } => "put",
            Self::Forget { .. } => "forget",
            Self::Complete { .. } => "complete",
            Self::Keep { .. } => "keep",
            Self::Unkeep { .. } => "unkeep",
        }
    }

    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Take { count, hold } => {
                out.push(1);
                put_varint(out, *count as u64);
                put_ints(out, hold);
            }
            Self::Drop { blocks, after } => {
                out.push(2 + u8::from(after.is_some()));
                put_ints(out, blocks);
                if let Some(step) = *after {
                    put_varint(out, step);
                }
            }
            Self::Put { anchor, tokens, blocks, start, salt } => {
                out.push(4 + u8::from(anchor.is_some()));
                if let Some(block) = *anchor {
                    put_int(out, block);
                }
                put_ints(out, tokens);
                put_ints(out, blocks);
                put_varint(out, *start as u64);
                put_bytes(out, salt);
            }
            Self::Forget { salt: Some(salt) } => {
                out.push(6);
                put_bytes(out, salt);
            }
            Self::Forget { salt: None } => out.push(7),
            Self::Complete { step } => {
                out.push(8);
                put_varint(out, *step);
            }
            Self::Keep { blocks } => {
                out.push(9);
                put_ints(out, blocks);
            }
            Self::Unkeep { blocks } => {
                out.push(10);
                put_ints(out, blocks);
            }
        }
    }

    /// The call, and the tag of a take or a drop.
    fn decode(bytes: &[u8]) -> Decoded<(BlockCall<'static>, Option<String>)> {
        let mut input = Bytes::new(bytes);
        let size = |value: u64| usize::try_from(value).map_err(|_| format!("a number of {value} is out of range"));
        // A run of equal numbers is short in the file, whatever its length. No binding takes a longer one.
        let max_entries = 1 << 24;
        let kind = input.byte()?;
        let call = match kind {
            1 => BlockCall::Take { count: size(input.varint()?)?, hold: input.ints(max_entries)? },
            2 => BlockCall::Drop { blocks: input.ints(max_entries)?, after: None },
            3 => BlockCall::Drop { blocks: input.ints(max_entries)?, after: Some(input.varint()?) },
            4 | 5 => BlockCall::Put {
                anchor: if kind == 5 { Some(input.int()?) } else { None },
                tokens: input.ints(max_entries)?,
                blocks: input.ints(max_entries)?,
                start: size(input.varint()?)?,
                salt: input.bytes(MAX_SALT).map(Cow::Owned)?,
            },
            6 => BlockCall::Forget { salt: Some(input.bytes(MAX_SALT).map(Cow::Owned)?) },
            7 => BlockCall::Forget { salt: None },
            8 => BlockCall::Complete { step: input.varint()? },
            9 => BlockCall::Keep { blocks: input.ints(max_entries)? },
            10 => BlockCall::Unkeep { blocks: input.ints(max_entries)? },
            _ => return Err(format!("there is no call of kind {kind}")),
        };
        let has_tag = kind <= 3 && !input.rest().is_empty();
        let tag = if has_tag { Some(input.text()?) } else { None };
        match input.rest().len() {
            0 => Ok((call, tag)),
            more => Err(format!("{more} bytes follow its call")),
        }
    }
}

impl std::fmt::Display for BlockCall<'_> {
    /// Shows the call as it would be written: `take(2, hold=[5])`.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let verb = self.name();
        match self {
            Self::Take { count, hold } if hold.is_empty() => write!(formatter, "{verb}({count})"),
            Self::Take { count, hold } => write!(formatter, "{verb}({count}, hold={})", list(hold, "blocks")),
            Self::Drop { blocks, after: Some(step) } => {
                write!(formatter, "{verb}({}, after={step})", list(blocks, "blocks"))
            }
            Self::Drop { blocks, after: None } | Self::Keep { blocks } | Self::Unkeep { blocks } => {
                write!(formatter, "{verb}({})", list(blocks, "blocks"))
            }
            Self::Put { anchor, tokens, blocks, start, salt } => {
                let (tokens, blocks) = (list(tokens, "tokens"), list(blocks, "blocks"));
                write!(formatter, "{verb}({tokens}, {blocks}, start={start}{})", Argument::MaybeSalt(salt))?;
                anchor.map_or(Ok(()), |block| write!(formatter, " behind block {block}"))
            }
            Self::Forget { salt: Some(salt) } => write!(formatter, "{verb}(b\"{}\")", salt.escape_ascii()),
            Self::Forget { salt: None } => write!(formatter, "{verb}()"),
            Self::Complete { step } => write!(formatter, "{verb}({step})"),
        }
    }
}

/// A call of a log that has just run again. It is shown with what it gave: `take(2, hold=[5]) -> [6, 7]`.
#[derive(Debug)]
pub struct ReplayedCall<'a> {
    /// Its number in the log, from 1.
    pub index: u64,
    /// The tag of a take or a drop.
    pub tag: Option<&'a str>,
    call: &'a BlockCall<'a>,
    given: &'a [i32],
}

impl std::fmt::Display for ReplayedCall<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}", self.call)?;
        match self.given {
            [] => Ok(()),
            given => write!(formatter, " -> {}", list(given, "blocks")),
        }
    }
}

fn header(config: &BlockPoolConfig) -> Vec<u8> {
    log_header::head(BLOCK_MAGIC, |body| {
        for value in [config.num_blocks, config.block_size, config.first_id] {
            put_int(body, value as i32);
        }
        body.extend([u8::from(config.caching), u8::from(config.fencing)]);
    })
}

fn config(body: &[u8]) -> Decoded<BlockPoolConfig> {
    let mut input = Bytes::new(body);
    input.text()?;
    let config = BlockPoolConfig {
        num_blocks: setting(&mut input)?,
        block_size: setting(&mut input)?,
        first_id: setting(&mut input)?,
        caching: input.flag()?,
        fencing: input.flag()?,
        digest: true,
    };
    match input.rest().len() {
        0 => Ok(config),
        more => Err(format!("{more} bytes follow the configuration")),
    }
}

impl BlockPool {
    /// Builds a pool that records every call that changes it in the event log `path`, of at most `limit` bytes. At the
    /// limit the log ends and the pool goes on. The digest is kept.
    ///
    /// # Errors
    /// As [`BlockPool::new`]; [`Error::Record`] when the file cannot be written. If the gathered calls cannot be
    /// written later, any verb can be refused with this error.
    pub fn recorded(config: BlockPoolConfig, path: &Path, limit: u64) -> Result<Self> {
        let mut pool = Self::new(BlockPoolConfig { digest: true, ..config })?;
        pool.recorder.log = Some(EventLog::with_header(path, header(&config), limit)?);
        Ok(pool)
    }

    /// Runs a log again: returns the pool in its last state, how many calls it took, and how the log ends.
    ///
    /// # Errors
    /// [`Error::Record`] when the file is no log of a pool, is damaged, or when the replay does something else than
    /// the pool did; it names the call and its place.
    pub fn replay(path: &Path) -> Result<(Self, u64, LogEnd)> {
        let (pool, num_calls, end) = Self::replay_to(path, u64::MAX, |_| Ok(()))?;
        Ok((pool, num_calls, end.unwrap_or(LogEnd::Open)))
    }

    /// As [`replay`](Self::replay), but it stops after `max_calls` calls, and calls `visit` after each. There is no end if it
    /// stopped before the log's.
    ///
    /// # Errors
    /// As [`replay`](Self::replay), and what `visit` returns.
    pub fn replay_to(
        path: &Path,
        max_calls: u64,
        mut visit: impl FnMut(&ReplayedCall<'_>) -> Result<()>,
    ) -> Result<(Self, u64, Option<LogEnd>)> {
        let mut frames = Frames::open(path)?;
        let body = frames.head(BLOCK_MAGIC, (&MAGIC, "it is the log of a Ledger: specpool replay reads it"))?;
        let config = config(&body).map_err(|why| frames.refusal(0, &format!("its head is damaged: {why}")))?;
        let mut pool = Self::new(config)?;
        let mut num_calls = 0;
        while num_calls < max_calls
            && let Some((frame, (call, tag))) = frames.next(|frame| BlockCall::decode(&frame.body))?
        {
            let differs = |why: String| {
                let Frame { index, offset, .. } = frame;
                let (name, verb) = (frames.name(), call.name());
                Error::Record(format!(
                    "event log {name}, event {index} ({verb}) at byte {offset}: the replay differs: {why}"
                ))
            };
            let tag = tag.as_deref();
            let given = pool.run(&call, tag).map_err(|error| differs(format!("it is refused: {error}")))?;
            let digest = pool.digest().unwrap_or_default();
            if digest != frame.digest {
                return Err(differs(format!("the digest is {digest:016x}, the log has {:016x}", frame.digest)));
            }
            num_calls = frame.index;
            visit(&ReplayedCall { index: num_calls, tag, call: &call, given: &given })?;
        }
        Ok((pool, num_calls, frames.end()))
    }

    /// Makes the call; returns the blocks that it gives.
    fn run(&mut self, call: &BlockCall<'_>, tag: Option<&str>) -> Result<Vec<i32>> {
        match call {
            BlockCall::Take { count, hold } => return self.take(*count, hold, tag),
            BlockCall::Put { anchor, tokens, blocks, start, salt } => {
                return self.put_behind(*anchor, tokens, blocks, *start, salt);
            }
            BlockCall::Drop { blocks, after } => self.drop_by(blocks, *after, tag),
            BlockCall::Forget { salt } => self.forget(salt.as_deref()),
            BlockCall::Complete { step } => self.complete(*step),
            BlockCall::Keep { blocks } => self.keep(blocks),
            BlockCall::Unkeep { blocks } => self.unkeep(blocks),
        }
        .map(|()| Vec::new())
    }

    /// The running hash over all calls that changed the pool and the blocks that they gave, if it is kept.
    #[must_use]
    pub fn digest(&self) -> Option<u64> {
        self.recorder.digest.map(crate::Digest::value)
    }

    /// Writes the calls that wait in memory to the log, if there is one; its file can then be read up to this call.
    ///
    /// # Errors
    /// [`Error::Record`] when the log cannot be written; another call tries again.
    pub fn sync(&mut self) -> Result<()> {
        self.recorder.sync()
    }

    /// Ends the pool's work: the log is written out, and verbs are refused from now on. Queries stay. A second call
    /// has no further effect.
    ///
    /// # Errors
    /// [`Error::Record`] when the log cannot be written; another call tries again.
    pub fn close(&mut self) -> Result<()> {
        self.is_closed = true;
        self.recorder.close()
    }

    /// Checks, at the start of every verb, that the pool is open and that there is room for its record.
    pub(super) fn gate(&mut self) -> Result<()> {
        if self.is_closed {
            return Err(Error::Order("the pool is closed".into()));
        }
        self.recorder.flush_if_full()
    }

    /// Notes a call that succeeded, and the blocks that it gave.
    pub(super) fn note(&mut self, call: &BlockCall<'_>, given: &[i32], tag: Option<&str>) {
        let Some(before) = self.recorder.digest else { return };
        let recorder = &mut self.recorder;
        recorder.bytes.clear();
        call.encode(&mut recorder.bytes);
        let mut after = before;
        after.bytes(&recorder.bytes);
        after.ints(given);
        if let Some(log) = &mut recorder.log {
            recorder.aside.clear();
            if let Some(tag) = tag {
                put_text(&mut recorder.aside, tag);
            }
            log.push(&recorder.bytes, &recorder.aside, before, after);
        }
        recorder.digest = Some(after);
    }
}
