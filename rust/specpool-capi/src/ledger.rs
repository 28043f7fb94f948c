//! `Ledger` for C: its configuration, its rows and what they share.

use std::ffi::c_char;
use std::path::Path;

use specpool_core::{Group, Layout, Ledger as Core, LedgerConfig, Policy, Row, Shape, StateGroup};

use crate::handle::{Table, guard};
use crate::slice::{given, has_room, optional, put, read, text, write};
use crate::state::StateGroupConfig;
use crate::status::{Outcome, Status, bad_argument};

pub(crate) static LEDGERS: Table<Core> = Table::new();

/// Pages, rows and lengths, and the rules between them (docs/contract.md). {0} is no ledger.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ledger {
    /// The number behind the handle.
    pub id: u64,
}

/// A group: layers that share one page table.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct GroupConfig {
    /// The name in errors.
    pub name: *const c_char,
    /// P: slots of a page.
    pub page_size: i64,
    /// Number of pages.
    pub num_pages: i64,
    /// Whether the draft model's branches lie in its rows.
    pub hosts_drafts: bool,
    /// Whether each branch has pages of its own (for readers of whole pages); false: dense.
    pub holey: bool,
    /// A query sees only the last `window` positions; 0: all of them.
    pub window: i64,
    /// Beside its window, a query sees the first `sink` positions; 0: none. Only a group with a window has them.
    pub sink: i64,
}

/// What one round of one row may do.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ShapeConfig {
    /// S: draft depth.
    pub num_steps: u32,
    /// K: branches.
    pub topk: u32,
    /// N: nodes verified, including the root.
    pub num_draft_tokens: u32,
}

/// What a ledger is built from. Start with specpool_ledger_config_default().
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LedgerSettings {
    /// The groups, at least one.
    pub groups: *const GroupConfig,
    /// Their number.
    pub num_groups: usize,
    /// All shapes that may ever run. Shape 0, a plain round of one token, is put first if it is not there.
    pub shapes: *const ShapeConfig,
    /// Their number.
    pub num_shapes: usize,
    /// Rows, besides row 0.
    pub num_rows: i64,
    /// L: tokens of the longest sequence.
    pub max_context_len: i64,
    /// Most rows in one step; 0: all.
    pub max_batch: i64,
    /// D: rounds that may be prepared before the previous one is resolved.
    pub overlap_depth: i64,
    /// Whether to reserve lo + (D+1) * W for a round, as SGLang does, instead of what it can write.
    pub double_buffer: bool,
    /// Whether drafting depends on draft KV.
    pub draft_kv: bool,
    /// Most tokens of one extend; 0: no limit.
    pub max_chunk: i64,
    /// Whether specpool_ledger_end_turn is used.
    pub sessions: bool,
    /// Whether freed pages wait for the launched steps that may touch them.
    pub page_fencing: bool,
    /// Whether a digest of the calls is kept.
    pub digest: bool,
    /// The file of the event log; NULL: none.
    pub record: *const c_char,
    /// Most bytes of the log.
    pub record_limit: u64,
    /// The state groups of a hybrid model; NULL: none.
    pub states: *const StateGroupConfig,
    /// Their number, at most 1.
    pub num_states: usize,
}

/// The state of a row.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RowInfo {
    /// r: tokens whose KV is final.
    pub resolved_len: i32,
    /// k: rounds prepared and not resolved.
    pub in_flight: i32,
    /// Draft KV is valid below this.
    pub drafted_len: i32,
    /// Counts the cuts and releases of the row.
    pub epoch: u64,
    /// Whether a request has the row.
    pub is_live: bool,
    /// Whether it is between two turns of a session.
    pub is_idle: bool,
    /// Whether a round may be prepared: an extend of the row has launched since it was admitted or cut.
    pub has_root: bool,
}

/// The state of a group: free + cached + fenced + held = num_pages.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct GroupInfo {
    /// Pages in all.
    pub num_pages: usize,
    /// Pages that hold nothing.
    pub num_free: usize,
    /// Pages that only the prefix index holds.
    pub num_cached: usize,
    /// Freed pages that a launched step may still touch.
    pub num_fenced: usize,
    /// Pages whose every holder is idle.
    pub num_reclaimable: usize,
    /// Columns of the page table.
    pub pages_per_row: usize,
    /// Slots of a row.
    pub row_width: i64,
}

/// A configuration of a synchronous ledger with the exact policy. The arrays must live until the ledger is made.
///
/// # Safety
/// The pointers are only kept here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_config_default(
    groups: *const GroupConfig,
    num_groups: usize,
    shapes: *const ShapeConfig,
    num_shapes: usize,
    num_rows: i64,
    max_context_len: i64,
) -> LedgerSettings {
    let plain = LedgerConfig::new(Vec::new(), Vec::new(), num_rows, max_context_len);
    LedgerSettings {
        groups,
        num_groups,
        shapes,
        num_shapes,
        num_rows,
        max_context_len,
        max_batch: 0,
        overlap_depth: plain.overlap_depth,
        double_buffer: plain.policy == Policy::DoubleBuffer,
        draft_kv: plain.draft_kv,
        max_chunk: 0,
        sessions: plain.sessions,
        page_fencing: plain.page_fencing,
        digest: plain.digest,
        record: std::ptr::null(),
        record_limit: 1 << 30,
        states: std::ptr::null(),
        num_states: 0,
    }
}

/// Makes an empty ledger.
///
/// # Safety
/// `config`, its arrays and `ledger` point to what is said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_create(config: *const LedgerSettings, ledger: *mut Ledger) -> Status {
    guard(|| unsafe {
        // SAFETY: the caller's promise; so in every call below.
        has_room("ledger", ledger, 1, 1)?;
        let config = given("config", config)?;
        let record = text("record", config.record)?;
        let built = settings(config)?;
        let made = match record {
            Some(path) => Core::recorded(built, Path::new(path), config.record_limit)?,
            None => Core::new(built)?,
        };
        put("ledger", Ledger { id: LEDGERS.insert(made) }, ledger)
    })
}

unsafe fn settings(config: &LedgerSettings) -> Outcome<LedgerConfig> {
    let mut groups = Vec::new();
    for group in unsafe { read("groups", config.groups, config.num_groups)? } {
        let Some(name) = (unsafe { text("the name of a group", group.name)? }) else {
            return bad_argument(format!("group {} has no name", groups.len()));
        };
        let layout = if group.holey { Layout::Holey } else { Layout::Dense };
        let &GroupConfig { page_size, num_pages, hosts_drafts, window, sink, .. } = group;
        let window = Some(window).filter(|&window| window != 0);
        groups.push(Group { name: name.into(), page_size, num_pages, hosts_drafts, layout, window, sink });
    }
    let mut states = Vec::new();
    for group in unsafe { read("states", config.states, config.num_states)? } {
        let Some(name) = (unsafe { text("the name of a state group", group.name)? }) else {
            return bad_argument(format!("state group {} has no name", states.len()));
        };
        let &StateGroupConfig { num_slots, flush, eager, .. } = group;
        states.push(StateGroup { name: name.into(), num_slots, flush, eager });
    }
    let shapes = unsafe { read("shapes", config.shapes, config.num_shapes)? };
    let shapes = shapes.iter().map(|shape| Shape::new(shape.num_steps, shape.topk, shape.num_draft_tokens));
    let plain = LedgerConfig::new(groups, shapes.collect::<Result<_, _>>()?, config.num_rows, config.max_context_len);
    Ok(LedgerConfig {
        max_batch: Some(config.max_batch).filter(|&limit| limit != 0),
        overlap_depth: config.overlap_depth,
        policy: if config.double_buffer { Policy::DoubleBuffer } else { Policy::Exact },
        draft_kv: config.draft_kv,
        max_chunk: Some(config.max_chunk).filter(|&limit| limit != 0),
        sessions: config.sessions,
        page_fencing: config.page_fencing,
        digest: config.digest,
        states,
        ..plain
    })
}

/// Destroys the ledger; an event log is closed.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_ledger_destroy(ledger: Ledger) -> Status {
    guard(|| LEDGERS.remove(ledger.id))
}

/// Takes a free row: `tag` names the request in errors.
///
/// # Safety
/// `tag` is a text or NULL, `row` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_admit(ledger: Ledger, tag: *const c_char, row: *mut i32) -> Status {
    guard(|| unsafe {
        has_room("row", row, 1, 1)?;
        let tag = text("tag", tag)?;
        put("row", LEDGERS.with(ledger.id, |ledger| Ok(ledger.admit(tag)?))?.0, row)
    })
}

/// Takes a free row that begins with the KV of the longest indexed beginning of the tokens, up to `limit` of them (-1:
/// all but the last), and writes its length. With `needs_draft` only as far as draft KV is valid. O(tokens).
///
/// # Safety
/// The arrays have the lengths that are said; `row` and `len` point to numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_admit_cached(
    ledger: Ledger,
    tokens: *const i32,
    num_tokens: usize,
    salt: *const u8,
    salt_len: usize,
    limit: i64,
    needs_draft: bool,
    tag: *const c_char,
    row: *mut i32,
    len: *mut i32,
) -> Status {
    guard(|| unsafe {
        has_room("row", row, 1, 1)?;
        has_room("len", len, 1, 1)?;
        let (tokens, salt) = (read("tokens", tokens, num_tokens)?, read("salt", salt, salt_len)?);
        let (limit, tag) = (length_limit(limit)?, text("tag", tag)?);
        let (given, hit) = LEDGERS.with(ledger.id, |ledger| {
            let row = ledger.admit_cached(tokens, salt, limit, needs_draft, tag)?;
            Ok((row.0, ledger.resolved_len()[row.at()]))
        })?;
        put("row", given, row)?;
        put("len", hit, len)
    })
}

/// The length that specpool_ledger_admit_cached would give. It changes nothing. O(tokens).
///
/// # Safety
/// The arrays have the lengths that are said; `len` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_match_prefix(
    ledger: Ledger,
    tokens: *const i32,
    num_tokens: usize,
    salt: *const u8,
    salt_len: usize,
    limit: i64,
    needs_draft: bool,
    len: *mut i32,
) -> Status {
    guard(|| unsafe {
        let (tokens, salt) = (read("tokens", tokens, num_tokens)?, read("salt", salt, salt_len)?);
        let limit = length_limit(limit)?;
        let hit = LEDGERS.with(ledger.id, |ledger| Ok(ledger.match_prefix(tokens, salt, limit, needs_draft)?))?;
        put("len", hit.len, len)
    })
}

/// How many of the tokens, up to `limit` (-1: all but the last), have their KV in the prefix index, whatever the states
/// that it has: end an extend one token behind them and keep its lane, and the next text that begins with them finds its
/// state. O(tokens).
///
/// # Safety
/// The arrays have the lengths that are said; `len` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_known_prefix(
    ledger: Ledger,
    tokens: *const i32,
    num_tokens: usize,
    salt: *const u8,
    salt_len: usize,
    limit: i64,
    len: *mut i32,
) -> Status {
    guard(|| unsafe {
        let (tokens, salt) = (read("tokens", tokens, num_tokens)?, read("salt", salt, salt_len)?);
        let limit = length_limit(limit)?;
        put("len", LEDGERS.with(ledger.id, |ledger| Ok(ledger.known_prefix(tokens, salt, limit)?))?, len)
    })
}

/// The state slot that specpool_ledger_admit_cached would share, and the tokens that it contains; both 0 if there is none.
/// With these tokens less one as the next `limit` it walks the states of a text, from the longest on. O(tokens).
///
/// # Safety
/// The arrays have the lengths that are said; `slot` and `len` point to a number each.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_match_state(
    ledger: Ledger,
    tokens: *const i32,
    num_tokens: usize,
    salt: *const u8,
    salt_len: usize,
    limit: i64,
    slot: *mut i32,
    len: *mut i32,
) -> Status {
    guard(|| unsafe {
        has_room("slot", slot, 1, 1)?;
        has_room("len", len, 1, 1)?;
        let (tokens, salt) = (read("tokens", tokens, num_tokens)?, read("salt", salt, salt_len)?);
        let limit = length_limit(limit)?;
        let (indexed, held_len) = LEDGERS.with(ledger.id, |ledger| Ok(ledger.match_state(tokens, salt, limit)?))?;
        put("slot", indexed.0, slot)?;
        put("len", held_len, len)
    })
}

fn length_limit(limit: i64) -> Outcome<Option<i32>> {
    optional("limit", limit)?.map_or(Ok(None), |limit| match i32::try_from(limit) {
        Ok(limit) => Ok(Some(limit)),
        Err(_) => bad_argument(format!("limit must be less than 2^31, got {limit}")),
    })
}

/// Adds the row's tokens to the prefix index and writes how many the index knows. O(tokens).
///
/// # Safety
/// The arrays have the lengths that are said; `known`, which may be NULL, points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_index(
    ledger: Ledger,
    row: i32,
    tokens: *const i32,
    num_tokens: usize,
    salt: *const u8,
    salt_len: usize,
    known: *mut i32,
) -> Status {
    guard(|| unsafe {
        let (tokens, salt) = (read("tokens", tokens, num_tokens)?, read("salt", salt, salt_len)?);
        let len = LEDGERS.with(ledger.id, |ledger| Ok(ledger.index(Row(row), tokens, salt)?))?;
        if known.is_null() { Ok(()) } else { put("known", len, known) }
    })
}

/// Gives up what is indexed under the salt. Rows keep their pages.
///
/// # Safety
/// The array has the length that is said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_forget(ledger: Ledger, salt: *const u8, salt_len: usize) -> Status {
    guard(|| unsafe {
        let salt = read("salt", salt, salt_len)?;
        LEDGERS.with(ledger.id, |ledger| Ok(ledger.forget(Some(salt))?))
    })
}

/// Gives up everything that is indexed.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_ledger_forget_all(ledger: Ledger) -> Status {
    guard(|| LEDGERS.with(ledger.id, |ledger| Ok(ledger.forget(None)?)))
}

/// Takes a free row with the same tokens as `parent`: whole pages are shared, the tail is copied by the next step.
///
/// # Safety
/// `tag` is a text or NULL, `row` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_fork(
    ledger: Ledger,
    parent: i32,
    tag: *const c_char,
    row: *mut i32,
) -> Status {
    guard(|| unsafe {
        has_room("row", row, 1, 1)?;
        let tag = text("tag", tag)?;
        put("row", LEDGERS.with(ledger.id, |ledger| Ok(ledger.fork(Row(parent), tag)?))?.0, row)
    })
}

/// Holds the whole pages of the row's first `len` tokens, whatever becomes of the row.
///
/// # Safety
/// `prefix` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_pin_prefix(ledger: Ledger, row: i32, len: i32, prefix: *mut u64) -> Status {
    guard(|| unsafe {
        has_room("prefix", prefix, 1, 1)?;
        put("prefix", LEDGERS.with(ledger.id, |ledger| Ok(ledger.pin_prefix(Row(row), len)?))?, prefix)
    })
}

/// Lets go of a pinned prefix.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_ledger_release_prefix(ledger: Ledger, prefix: u64) -> Status {
    guard(|| LEDGERS.with(ledger.id, |ledger| Ok(ledger.release_prefix(prefix)?)))
}

/// Takes a free row on the first `len` tokens of a pinned prefix (-1: all).
///
/// # Safety
/// `tag` is a text or NULL, `row` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_admit_on(
    ledger: Ledger,
    prefix: u64,
    len: i64,
    tag: *const c_char,
    row: *mut i32,
) -> Status {
    guard(|| unsafe {
        has_room("row", row, 1, 1)?;
        let (len, tag) = (length_limit(len)?, text("tag", tag)?);
        put("row", LEDGERS.with(ledger.id, |ledger| Ok(ledger.admit_on(prefix, len, tag)?))?.0, row)
    })
}

/// Cuts the row to at most `len` tokens and writes how many it has then: feed tokens from there.
///
/// # Safety
/// `cut` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_trim(ledger: Ledger, row: i32, len: i32, cut: *mut i32) -> Status {
    guard(|| unsafe {
        has_room("cut", cut, 1, 1)?;
        put("cut", LEDGERS.with(ledger.id, |ledger| Ok(ledger.trim(Row(row), len)?))?, cut)
    })
}

/// Trims the row of a session that stays: its pages become reclaimable until its next prepare.
///
/// # Safety
/// `cut` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_end_turn(ledger: Ledger, row: i32, len: i32, cut: *mut i32) -> Status {
    guard(|| unsafe {
        has_room("cut", cut, 1, 1)?;
        put("cut", LEDGERS.with(ledger.id, |ledger| Ok(ledger.end_turn(Row(row), len)?))?, cut)
    })
}

/// Takes everything from a row whose request will come back later.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_ledger_retract(ledger: Ledger, row: i32) -> Status {
    guard(|| LEDGERS.with(ledger.id, |ledger| Ok(ledger.retract(Row(row))?)))
}

/// Takes everything from a row whose request is done.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_ledger_finish(ledger: Ledger, row: i32) -> Status {
    guard(|| LEDGERS.with(ledger.id, |ledger| Ok(ledger.finish(Row(row))?)))
}

/// Takes everything from a row whose request was given up.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_ledger_abort(ledger: Ledger, row: i32) -> Status {
    guard(|| LEDGERS.with(ledger.id, |ledger| Ok(ledger.abort(Row(row))?)))
}

/// Writes the row's line of the page table, and how many columns it has. Page 0 means none.
///
/// # Safety
/// `pages` has room for `capacity` entries; `count` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_row_pages(
    ledger: Ledger,
    group: usize,
    row: i32,
    pages: *mut i32,
    capacity: usize,
    count: *mut usize,
) -> Status {
    guard(|| unsafe {
        has_room("count", count, 1, 1)?;
        LEDGERS.with(ledger.id, |ledger| {
            check_row(ledger, row)?;
            let line = ledger.page_table(group)?.row(Row(row));
            put("count", line.len(), count)?;
            write("pages", line, pages, capacity)
        })
    })
}

pub(crate) fn check_row(ledger: &Core, row: i32) -> Outcome {
    if row < 1 || row as usize > ledger.num_rows() {
        return bad_argument(format!("row {row} is not in 1..={}", ledger.num_rows()));
    }
    Ok(())
}

/// The state of a row. O(1).
///
/// # Safety
/// `info` points to the structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_row(ledger: Ledger, row: i32, info: *mut RowInfo) -> Status {
    guard(|| unsafe {
        let state = LEDGERS.with(ledger.id, |ledger| {
            check_row(ledger, row)?;
            let at = row as usize;
            Ok(RowInfo {
                resolved_len: ledger.resolved_len()[at],
                in_flight: ledger.in_flight()[at],
                drafted_len: ledger.drafted_len()[at],
                epoch: ledger.epoch()[at],
                is_live: ledger.is_live(Row(row)),
                is_idle: ledger.idle()[at],
                has_root: ledger.has_root(Row(row)),
            })
        })?;
        put("info", state, info)
    })
}

/// The state of a group. O(1).
///
/// # Safety
/// `info` points to the structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_group(ledger: Ledger, group: usize, info: *mut GroupInfo) -> Status {
    guard(|| unsafe {
        let state = LEDGERS.with(ledger.id, |ledger| {
            Ok(GroupInfo {
                num_pages: ledger.group_spec(group)?.num_pages as usize,
                num_free: ledger.free_pages(group)?,
                num_cached: ledger.cached_pages(group)?,
                num_fenced: ledger.fenced_pages(group)?,
                num_reclaimable: ledger.reclaimable_pages(group)?,
                pages_per_row: ledger.page_table(group)?.pages_per_row(),
                row_width: ledger.row_width(group)?,
            })
        })?;
        put("info", state, info)
    })
}

/// The digest of the calls; 0 without one.
///
/// # Safety
/// `digest` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_digest(ledger: Ledger, digest: *mut u64) -> Status {
    guard(|| unsafe { put("digest", LEDGERS.with(ledger.id, |ledger| Ok(ledger.digest().unwrap_or(0)))?, digest) })
}

/// Audits the ledger: SPECPOOL_CORRUPT with the first finding. O(pages).
#[unsafe(no_mangle)]
pub extern "C" fn specpool_ledger_check(ledger: Ledger) -> Status {
    guard(|| LEDGERS.with(ledger.id, |ledger| Ok(ledger.check()?)))
}

/// Ends the event log and writes it out. Verbs are refused from then on.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_ledger_close(ledger: Ledger) -> Status {
    guard(|| LEDGERS.with(ledger.id, |ledger| Ok(ledger.close()?)))
}
