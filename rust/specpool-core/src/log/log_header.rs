//! The head of an event log: what the file is, who wrote it, and the whole configuration of the ledger.

use crate::digest::Digest;
use crate::layout::Layout;
use crate::log::codec::{Bytes, Decoded, put_text, put_varint};
use crate::memory::room;
use crate::shape::Shape;
use crate::state::config::{LedgerConfig, MAX_ROWS};
use crate::state::group::Group;
use crate::state::sizing::Policy;
use crate::state::state_group::StateGroup;

/// The first bytes of a file. Some of them do not survive a transfer as text, which shows the damage.
pub(crate) const MAGIC: [u8; 8] = *b"\x89SPLOG\r\n";
/// Those of the log of a block pool.
pub(crate) const BLOCK_MAGIC: [u8; 8] = *b"\x89SPBLK\r\n";
/// The format that this version writes and reads.
pub(crate) const VERSION: u64 = 1;

/// Bits of a group's flags.
const IS_HOLEY: u8 = 1;
const HAS_SINK: u8 = 2;

/// `[magic][version][length][body][checksum]`.
pub(crate) fn encode(config: &LedgerConfig) -> Vec<u8> {
    head(MAGIC, |body| put_config(body, config))
}

/// The head of a log whose configuration `put` writes.
pub(crate) fn head(magic: [u8; 8], put: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut body = Vec::new();
    put_text(&mut body, env!("CARGO_PKG_VERSION"));
    put(&mut body);
    let mut header = magic.to_vec();
    put_varint(&mut header, VERSION);
    put_varint(&mut header, body.len() as u64);
    header.extend_from_slice(&body);
    header.extend_from_slice(&checksum(&body).to_le_bytes());
    header
}

pub(crate) fn checksum(body: &[u8]) -> u32 {
    let mut hash = Digest::new();
    hash.word(VERSION);
    hash.bytes(body);
    hash.value() as u32
}

/// Settings have any value that a `Ledger` accepts, and are never negative.
fn put_setting(out: &mut Vec<u8>, value: i64) {
    put_varint(out, value as u64);
}

/// 0 for none, else the value plus one.
fn put_optional(out: &mut Vec<u8>, value: Option<i64>) {
    put_varint(out, value.map_or(0, |value| value as u64 + 1));
}

fn put_config(out: &mut Vec<u8>, config: &LedgerConfig) {
    put_varint(out, config.groups.len() as u64);
    for group in &config.groups {
        put_text(out, &group.name);
        put_setting(out, group.page_size);
        put_setting(out, group.num_pages);
        out.push(group.hosts_drafts.into());
        let holey = if group.layout == Layout::Holey { IS_HOLEY } else { 0 };
        out.push(holey | if group.sink > 0 { HAS_SINK } else { 0 });
        put_optional(out, group.window);
        if group.sink > 0 {
            put_setting(out, group.sink);
        }
    }
    put_varint(out, config.shapes.len() as u64);
    for shape in &config.shapes {
        for field in [shape.num_steps, shape.topk, shape.num_draft_tokens] {
            put_varint(out, field.into());
        }
    }
    put_setting(out, config.num_rows);
    put_setting(out, config.max_context_len);
    put_optional(out, config.max_batch);
    put_setting(out, config.overlap_depth);
    out.push((config.policy == Policy::DoubleBuffer).into());
    let widths = config.row_width.as_deref().unwrap_or_default();
    put_varint(out, widths.len() as u64);
    for &width in widths {
        put_setting(out, width);
    }
    put_optional(out, config.max_chunk);
    for flag in [config.draft_kv, config.sessions, config.page_fencing] {
        out.push(flag.into());
    }
    // A ledger without states has the same head as before there were any.
    if !config.states.is_empty() {
        put_varint(out, config.states.len() as u64);
        for states in &config.states {
            put_text(out, &states.name);
            put_setting(out, states.num_slots);
            put_setting(out, states.flush);
            out.push(states.eager.into());
        }
    }
}

pub(crate) fn setting(input: &mut Bytes<'_>) -> Decoded<i64> {
    let value = input.varint()?;
    i64::try_from(value).map_err(|_| format!("a setting of {value} is out of range"))
}

fn optional(input: &mut Bytes<'_>) -> Decoded<Option<i64>> {
    setting(input).map(|value| value.checked_sub(1).filter(|&value| value >= 0))
}

/// Reads a list whose length the file states. Each entry takes at least one byte, so the length cannot exceed the
/// bytes that are left.
fn list<T>(input: &mut Bytes<'_>, mut read_entry: impl FnMut(&mut Bytes<'_>) -> Decoded<T>) -> Decoded<Vec<T>> {
    let len = input.varint()?;
    if len > input.rest().len() as u64 {
        return Err(format!("a list of {len} entries in {} bytes", input.rest().len()));
    }
    let mut entries = Vec::new();
    for _ in 0..len {
        room(&mut entries, 1, "a list").map_err(|error| error.to_string())?;
        entries.push(read_entry(input)?);
    }
    Ok(entries)
}

/// The version that wrote the log, and the ledger's configuration.
pub(crate) fn decode(body: &[u8]) -> Decoded<(String, LedgerConfig)> {
    let mut input = Bytes::new(body);
    let made_by = input.text()?;
    let config = config(&mut input)?;
    match input.rest().len() {
        0 => Ok((made_by, config)),
        more => Err(format!("{more} bytes follow the configuration")),
    }
}

fn config(input: &mut Bytes<'_>) -> Decoded<LedgerConfig> {
    let groups = list(input, |input| {
        let (name, page_size, num_pages) = (input.text()?, setting(input)?, setting(input)?);
        let (hosts_drafts, flags) = (input.flag()?, input.byte()?);
        if flags & !(IS_HOLEY | HAS_SINK) != 0 {
            return Err(format!("a group has flags of {flags}"));
        }
        let layout = if flags & IS_HOLEY == 0 { Layout::Dense } else { Layout::Holey };
        let window = optional(input)?;
        let sink = if flags & HAS_SINK == 0 { 0 } else { setting(input)? };
        Ok(Group { name, page_size, num_pages, hosts_drafts, layout, window, sink })
    })?;
    let shapes = list(input, |input| {
        let mut field = || u32::try_from(input.varint()?).map_err(|_| "a shape is out of range".to_owned());
        Ok(Shape { num_steps: field()?, topk: field()?, num_draft_tokens: field()? })
    })?;
    let (num_rows, max_context_len) = (setting(input)?, setting(input)?);
    if !(1..=MAX_ROWS).contains(&num_rows) {
        return Err(format!("num_rows must be in [1, {MAX_ROWS}], got {num_rows}"));
    }
    let mut config = LedgerConfig::new(groups, shapes, num_rows, max_context_len);
    config.max_batch = optional(input)?;
    config.overlap_depth = setting(input)?;
    config.policy = if input.flag()? { Policy::DoubleBuffer } else { Policy::Exact };
    config.row_width = Some(list(input, setting)?).filter(|widths| !widths.is_empty());
    config.max_chunk = optional(input)?;
    config.draft_kv = input.flag()?;
    config.sessions = input.flag()?;
    config.page_fencing = input.flag()?;
    config.digest = true;
    if !input.rest().is_empty() {
        config.states = list(input, |input| {
            let (name, num_slots, flush) = (input.text()?, setting(input)?, setting(input)?);
            Ok(StateGroup { name, num_slots, flush, eager: input.flag()? })
        })?;
    }
    Ok(config)
}
