//! The ledger: rows, their pages in every group and the steps that use them (docs/contract.md, The ledger).
//!
//! Files: this one builds a ledger. `query` answers questions. `prepare` claims pages for a step. `life` launches,
//! resolves, completes, cancels and abandons steps. `release` cuts rows and gives them back. `share` puts rows on
//! common pages. `fold` moves their recurrent states. `cache` finds rows by their tokens. `lend` is for a cache
//! outside. `transfer` is for rows that move to another ledger. `snapshot` saves and restores the whole state.
//! `kv_events` tells a connector which KV is verified. `record` keeps the digest and the event log. `normal_form` is
//! for enumerations.
//!
//! A refused call changes nothing: every verb checks all that it can refuse before its first change.
//!
//! Memory is part of that. A verb that takes something (a row, pages, a place in a queue) asks for all the memory that
//! it needs before its first change. It also asks for the memory that undoing it and giving it back will need. So a
//! verb that gives back asks for none, and a process without memory can still drop what it has.

pub(crate) mod audit;
mod batch;
mod cache;
mod fold;
mod kv_events;
mod lend;
mod life;
mod normal_form;
mod prepare;
mod query;
mod quiet;
mod record;
mod release;
mod share;
mod snapshot;
mod transfer;

use crate::check::in_range;
use crate::error::{Error, Result};
use crate::ids::{Page, Row};
use crate::log::call::{Call, Given};
use crate::log::recorder::Recorder;
use crate::memory::with_room;
use crate::shape::Shape;
use crate::state::config::{LedgerConfig, MAX_ROWS};
use crate::state::delta::DeltaEntries;
use crate::state::group::{GroupState, Sizes};
use crate::state::page_copy::TailCopy;
use crate::state::prefix_index::PrefixIndex;
use crate::state::rows::Rows;
use crate::state::sizing::Policy;
use crate::state::state_group::StateSlots;
use crate::state::step::Steps;
pub(crate) use cache::MAX_SALT;
pub use cache::{Indexed, PrefixMatch, check_salt};
pub use kv_events::KvEvent;
pub use normal_form::PageNames;
pub use snapshot::Snapshot;
pub use transfer::PrefixRun;

/// Pages, rows and lengths, and the rules between them.
///
/// ```
/// use specpool_core::{Group, Layout, Ledger, LedgerConfig, Shape};
///
/// let group =
///     Group { name: "kv".into(), page_size: 4, num_pages: 64, hosts_drafts: true, layout: Layout::Dense, window: None, sink: 0 };
/// let chain = Shape::eagle(3, 1, 4)?;
/// let mut ledger = Ledger::new(LedgerConfig::new(vec![group], vec![chain], 2, 100))?;
///
/// let row = ledger.admit(Some("request-1"))?;
/// let prefill = ledger.prepare_extend(&[row.0], &[10], true)?;
/// ledger.launch(prefill.step)?;
/// ledger.complete(prefill.step)?;
///
/// let round = ledger.prepare_decode(&[row.0], &[1], true)?; // shape 1: the chain
/// ledger.launch(round.step)?;
/// ledger.resolve(round.step, &[3])?; // two drafts were right, and the bonus token
/// ledger.complete(round.step)?;
/// assert_eq!(ledger.resolved_len()[row.at()], 13);
///
/// ledger.finish(row)?;
/// assert_eq!(ledger.free_pages(0)?, 64);
/// ledger.check()?;
/// # Ok::<(), specpool_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Ledger {
    pub(crate) groups: Vec<GroupState>,
    pub(crate) shapes: Vec<Shape>,
    pub(crate) max_context_len: i32,
    pub(crate) max_batch: usize,
    pub(crate) overlap_depth: i32,
    pub(crate) policy: Policy,
    pub(crate) draft_kv: bool,
    /// Most tokens of one extend; `i32::MAX` if there is no limit.
    pub(crate) max_chunk: i32,
    pub(crate) sessions: bool,
    pub(crate) page_fencing: bool,
    /// The slots for recurrent state, if there are any.
    pub(crate) states: Option<StateSlots>,
    pub(crate) rows: Rows,
    pub(crate) steps: Steps,
    /// Page copies that wait for the next step prepared, in order.
    pub(crate) copies: Vec<TailCopy>,
    /// The prefixes with their ids, ascending.
    prefixes: Vec<(u64, share::Prefix)>,
    next_prefix: u64,
    pub(crate) index: PrefixIndex,
    /// How often the index gave up an entry, or a page below a window, to make room.
    num_evictions: u64,
    /// Snapshots taken so far.
    snapshots: u64,
    recorder: Recorder,
    /// Kept for its memory, which is enough for the lanes and copies of every step in flight.
    lanes: Vec<i32>,
    /// What a KV connector was told, once it asked.
    feed: Option<Box<kv_events::KvFeed>>,
    closed: bool,
}

impl Ledger {
    /// Builds an empty ledger.
    ///
    /// # Errors
    /// [`Error::Config`] that names the setting, its value and what is allowed.
    pub fn new(config: LedgerConfig) -> Result<Self> {
        let max_len = i64::from(i32::MAX);
        let num_rows = in_range("num_rows", config.num_rows, 1, MAX_ROWS)?;
        let max_context_len = in_range("max_context_len", config.max_context_len, 2, max_len)?;
        let max_batch = in_range("max_batch", config.max_batch.unwrap_or(num_rows), 1, num_rows)?;
        let overlap_depth = in_range("overlap_depth", config.overlap_depth, 0, max_len - 1)?;
        let max_chunk = config.max_chunk.map(|chunk| in_range("max_chunk", chunk, 1, max_len)).transpose()?;
        if config.groups.is_empty() {
            return Err(Error::Config("a ledger needs at least one group, got 0".into()));
        }
        for (at, group) in config.groups.iter().enumerate() {
            if config.groups[..at].iter().any(|other| other.name == group.name) {
                return Err(Error::Config(format!("two groups are called {:?}", group.name)));
            }
        }
        if config.states.len() > 1 {
            return Err(Error::Config(format!(
                "a ledger has at most one state group, which holds the states of all recurrent layers, got {}",
                config.states.len()
            )));
        }
        let states = config.states.into_iter().next();
        if let Some(states) = &states
            && config.groups.iter().any(|group| group.name == states.name)
        {
            return Err(Error::Config(format!("a group and the state group are called {:?}", states.name)));
        }
        let states = states.map(|states| StateSlots::new(states, num_rows, config.sessions)).transpose()?;
        let widths = match config.row_width {
            Some(widths) if widths.len() != config.groups.len() => {
                return Err(Error::Config(format!(
                    "row_width has {} entries for {} groups",
                    widths.len(),
                    config.groups.len()
                )));
            }
            Some(widths) => widths.into_iter().map(Some).collect(),
            None => vec![None; config.groups.len()],
        };
        let mut shapes = vec![Shape::NONE];
        for shape in config.shapes {
            // The fields are public, so a shape may never have passed the check.
            let shape = Shape::new(shape.num_steps, shape.topk, shape.num_draft_tokens)?;
            if shape != Shape::NONE {
                shapes.push(shape);
            }
        }
        let policy = config.policy;
        let sizes = Sizes {
            shapes: &shapes,
            num_rows,
            max_context_len,
            max_batch,
            overlap_depth,
            policy,
            max_chunk: max_chunk.unwrap_or(max_len).min(max_context_len),
            sessions: config.sessions,
        };
        let mut groups = with_room(config.groups.len(), "groups")?;
        for (group, width) in config.groups.into_iter().zip(widths) {
            groups.push(GroupState::new(group, &sizes, width)?);
        }
        let index = PrefixIndex::new(groups.iter().map(|group: &GroupState| group.page_size), max_context_len as i32);
        Ok(Self {
            groups,
            shapes,
            max_context_len: max_context_len as i32,
            max_batch: max_batch as usize,
            overlap_depth: overlap_depth as i32,
            policy,
            draft_kv: config.draft_kv,
            max_chunk: max_chunk.unwrap_or(max_len) as i32,
            sessions: config.sessions,
            page_fencing: config.page_fencing,
            states,
            rows: Rows::new(num_rows as usize, overlap_depth as usize + 1)?,
            steps: Steps::new(),
            copies: Vec::new(),
            prefixes: Vec::new(),
            next_prefix: 1,
            index,
            num_evictions: 0,
            snapshots: 0,
            recorder: Recorder::new(config.digest),
            lanes: Vec::new(),
            feed: None,
            closed: false,
        })
    }

    /// Takes a free row. `tag` names the request in error messages and audits.
    ///
    /// The row is empty: its first `prepare_extend` gives it pages.
    ///
    /// # Errors
    /// [`Error::OutOfRows`], [`Error::OutOfMemory`].
    pub fn admit(&mut self, tag: Option<&str>) -> Result<Row> {
        self.gate()?;
        let row = self.next_free_row()?;
        self.recorder.make_room(0, tag)?;
        let kept_tag = self.rows.make_room(tag)?;
        self.rows.admit(kept_tag, self.steps.next());
        self.note(&Call::Admit {}, &Given::Row(row), tag);
        Ok(row)
    }

    /// Returns the pending table changes of every group, and notes them as taken for `step`.
    ///
    /// Take the delta between the launch of the step and its forward, and before any other call for its rows. It can
    /// be repeated until [`Ledger::ack_delta`]. An entry holds the cell's current value.
    ///
    /// # Errors
    /// [`Error::Order`] when the step is not in flight, [`Error::OutOfMemory`].
    ///
    /// # Examples
    /// ```
    #[doc = include_str!("ledger/example.txt")]
    /// // An engine keeps a copy of the page table on the device, and brings it up to date before each forward.
    /// let mut device = ledger.page_table(0)?.cells().to_vec();
    /// let width = ledger.page_table(0)?.pages_per_row();
    /// let plan = ledger.prepare_decode(&[row.0], &[1], true)?;
    /// ledger.launch(plan.step)?;
    /// for delta in ledger.take_delta(plan.step)? {
    ///     for ((&row, &column), &page) in delta.rows.iter().zip(&delta.columns).zip(&delta.pages) {
    ///         device[row as usize * width + column as usize] = page;
    ///     }
    /// }
    /// ledger.ack_delta(plan.step)?;
    /// assert_eq!(device, ledger.page_table(0)?.cells());
    /// # Ok::<(), specpool_core::Error>(())
    /// ```
    pub fn take_delta(&mut self, step: u64) -> Result<Vec<DeltaEntries>> {
        self.check_open()?;
        if self.steps.get(step).is_none() {
            return Err(Error::Order(format!("take_delta of step {step}: no such step is in flight")));
        }
        let mut taken = with_room(self.groups.len(), "table deltas")?;
        for group in &mut self.groups {
            taken.push(group.delta.entries(&group.table)?);
        }
        self.groups.iter_mut().for_each(|group| group.delta.taken(step));
        Ok(taken)
    }

    /// Hands each pending entry of the delta to `visit`, as group, row, column and page, and drops it: `take_delta` and
    /// `ack_delta` in one pass, for a copy of the table that lies on the host.
    ///
    /// # Errors
    /// [`Error::Order`] when the step is not in flight, or the ledger is closed.
    pub fn drain_delta(&mut self, step: u64, mut visit: impl FnMut(usize, Row, usize, Page)) -> Result<()> {
        self.check_open()?;
        if self.steps.get(step).is_none() {
            return Err(Error::Order(format!("drain_delta of step {step}: no such step is in flight")));
        }
        for (at, group) in self.groups.iter_mut().enumerate() {
            group.delta.drain(step, &group.table, |row, column, page| visit(at, row, column, page));
        }
        Ok(())
    }

    /// Acknowledges that the delta taken for `step` is applied or enqueued, and drops the entries that have not
    /// changed since. This covers the takes of older steps.
    ///
    /// # Errors
    /// [`Error::Order`] when nothing was taken for the step, or it is acknowledged already.
    pub fn ack_delta(&mut self, step: u64) -> Result<()> {
        self.check_open()?;
        if !self.groups[0].delta.has_take(step) {
            return Err(Error::Order(format!("ack_delta of step {step}: no delta of it is waiting")));
        }
        for group in &mut self.groups {
            group.delta.acknowledge(step);
        }
        Ok(())
    }
}
