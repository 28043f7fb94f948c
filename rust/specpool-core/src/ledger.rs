//! The ledger: rows, their pages in every group and the steps that use them (spec 4).
//!
//! Verbs by file: this one builds a ledger and answers queries; `prepare` claims pages for a step; `life` launches,
//! resolves, completes and cancels steps; `release` cuts rows and gives them back. A refused call changes nothing:
//! every verb checks all it can refuse before its first change.

mod life;
mod prepare;
mod release;

use crate::check::in_range;
use crate::delta::DeltaEntries;
use crate::error::{Error, Result};
use crate::group::{Group, GroupState, Sizes};
use crate::ids::{Page, Row};
use crate::page_pool::PageRecord;
use crate::page_table::PageTable;
use crate::rows::Rows;
use crate::shape::Shape;
use crate::sizing::Policy;
use crate::step::Steps;

/// What a ledger is built from.
#[derive(Debug, Clone)]
pub struct LedgerConfig {
    /// At least one; names are unique.
    pub groups: Vec<Group>,
    /// All shapes that may ever run. Shape 0 is put first when it is not.
    pub shapes: Vec<Shape>,
    /// Rows, besides row 0.
    pub num_rows: i64,
    /// L: tokens of the longest sequence, at least 2.
    pub max_context_len: i64,
    /// Most rows in one step; `None` means all.
    pub max_batch: Option<i64>,
    /// D: rounds that may be prepared before the previous one is resolved.
    pub overlap_depth: i64,
    /// How much is reserved for a round.
    pub policy: Policy,
    /// Slots of a row, per group; `None` takes the least that suffices.
    pub row_width: Option<Vec<i64>>,
    /// Whether drafting depends on draft KV (`drafted_len`).
    pub draft_kv: bool,
}

impl LedgerConfig {
    /// A synchronous ledger with the exact policy.
    #[must_use]
    pub fn new(groups: Vec<Group>, shapes: Vec<Shape>, num_rows: i64, max_context_len: i64) -> Self {
        Self {
            groups,
            shapes,
            num_rows,
            max_context_len,
            max_batch: None,
            overlap_depth: 0,
            policy: Policy::Exact,
            row_width: None,
            draft_kv: true,
        }
    }
}

/// What the ledger must know of a shape, worked out once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShapeFacts {
    /// A.
    pub(crate) max_accept_len: i32,
    /// It needs draft KV.
    pub(crate) drafts: bool,
}

/// Pages, rows and lengths, and the rules between them.
///
/// ```
/// use specpool_core::{Group, Layout, Ledger, LedgerConfig, Shape};
///
/// let group =
///     Group { name: "kv".into(), page_size: 4, num_pages: 64, hosts_drafts: true, layout: Layout::Dense };
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
    pub(crate) shape_facts: Vec<ShapeFacts>,
    pub(crate) max_context_len: i32,
    pub(crate) max_batch: usize,
    pub(crate) overlap_depth: i32,
    pub(crate) policy: Policy,
    pub(crate) draft_kv: bool,
    pub(crate) rows: Rows,
    pub(crate) steps: Steps,
}

/// Rows that a ledger may have: far more than any server runs, few enough to fit in memory.
const MAX_ROWS: i64 = 1 << 24;

impl Ledger {
    /// Builds an empty ledger.
    ///
    /// # Errors
    /// [`Error::Config`] that names the setting, its value and what is allowed.
    pub fn new(config: LedgerConfig) -> Result<Self> {
        let most = i64::from(i32::MAX);
        let num_rows = in_range("num_rows", config.num_rows, 1, MAX_ROWS)?;
        let max_context_len = in_range("max_context_len", config.max_context_len, 2, most)?;
        let max_batch = in_range("max_batch", config.max_batch.unwrap_or(num_rows), 1, num_rows)?;
        let overlap_depth = in_range("overlap_depth", config.overlap_depth, 0, most - 1)?;
        if config.groups.is_empty() {
            return Err(Error::Config("a ledger needs at least one group, got 0".into()));
        }
        for (at, group) in config.groups.iter().enumerate() {
            if config.groups[..at].iter().any(|other| other.name == group.name) {
                return Err(Error::Config(format!("two groups are called {:?}", group.name)));
            }
        }
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
            // The fields are public: a shape may never have passed the check.
            let shape = Shape::new(shape.num_steps, shape.topk, shape.num_draft_tokens)?;
            if shape != Shape::NONE {
                shapes.push(shape);
            }
        }
        let policy = config.policy;
        let sizes = Sizes { shapes: &shapes, num_rows, max_context_len, max_batch, overlap_depth, policy };
        let groups = config
            .groups
            .into_iter()
            .zip(widths)
            .map(|(group, width)| GroupState::new(group, &sizes, width))
            .collect::<Result<Vec<_>>>()?;
        let shape_facts = shapes
            .iter()
            .map(|shape| ShapeFacts {
                max_accept_len: shape.max_accept_len() as i32,
                drafts: shape.num_steps > 0 || shape.num_draft_tokens > 1,
            })
            .collect();
        Ok(Self {
            groups,
            shapes,
            shape_facts,
            max_context_len: max_context_len as i32,
            max_batch: max_batch as usize,
            overlap_depth: overlap_depth as i32,
            policy,
            draft_kv: config.draft_kv,
            rows: Rows::new(num_rows as usize, overlap_depth as usize + 1)?,
            steps: Steps::new(),
        })
    }

    /// Takes a free row. `tag` names the request in error messages and audits.
    ///
    /// The row is empty: its first `prepare_extend` gives it pages.
    ///
    /// # Errors
    /// [`Error::OutOfRows`].
    pub fn admit(&mut self, tag: Option<&str>) -> Result<Row> {
        let refusal = Error::OutOfRows { num_rows: self.rows.num_rows(), fenced: self.rows.num_fenced() };
        self.rows.admit(tag).ok_or(refusal)
    }

    /// The pending table changes of every group, remembered as taken for `step`.
    ///
    /// Take it between the launch of the step and its forward, and before anything else is done to its rows. Can be
    /// repeated until [`Ledger::ack_delta`]; an entry holds the cell's value now.
    ///
    /// # Errors
    /// [`Error::Order`] when the step is not in flight.
    pub fn take_delta(&mut self, step: u64) -> Result<Vec<DeltaEntries>> {
        if self.steps.get(step).is_none() {
            return Err(Error::Order(format!("take_delta of step {step}: no such step is in flight")));
        }
        Ok(self.groups.iter_mut().map(|group| group.delta.take(step, &group.table)).collect())
    }

    /// The delta taken for `step` is applied, or enqueued for good: what has not changed since is dropped. It covers
    /// the takes of older steps.
    ///
    /// # Errors
    /// [`Error::Order`] when nothing was taken for the step, or it is acknowledged already.
    pub fn ack_delta(&mut self, step: u64) -> Result<()> {
        if !self.groups[0].delta.has_take(step) {
            return Err(Error::Order(format!("ack_delta of step {step}: no delta of it is waiting")));
        }
        for group in &mut self.groups {
            group.delta.acknowledge(step);
        }
        Ok(())
    }

    /// A group's index, checked.
    fn group(&self, group: usize) -> Result<&GroupState> {
        self.groups.get(group).ok_or_else(|| Error::Shape(format!("group {group} is not in 0..{}", self.groups.len())))
    }

    /// What the group was built from.
    ///
    /// # Errors
    /// [`Error::Shape`] when there is no such group; so in every query that takes one.
    pub fn group_spec(&self, group: usize) -> Result<&Group> {
        Ok(&self.group(group)?.spec)
    }

    /// Number of groups.
    #[must_use]
    pub fn num_groups(&self) -> usize {
        self.groups.len()
    }

    /// All shapes, shape 0 first.
    #[must_use]
    pub fn shapes(&self) -> &[Shape] {
        &self.shapes
    }

    /// Rows, besides row 0.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.rows.num_rows()
    }

    /// Rows that can be admitted now.
    #[must_use]
    pub fn num_free_rows(&self) -> usize {
        self.rows.num_free()
    }

    /// L.
    #[must_use]
    pub fn max_context_len(&self) -> i32 {
        self.max_context_len
    }

    /// Most rows in one step.
    #[must_use]
    pub fn max_batch(&self) -> usize {
        self.max_batch
    }

    /// D.
    #[must_use]
    pub fn overlap_depth(&self) -> i32 {
        self.overlap_depth
    }

    /// How much is reserved for a round.
    #[must_use]
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Whether drafting depends on draft KV.
    #[must_use]
    pub fn draft_kv(&self) -> bool {
        self.draft_kv
    }

    /// Slots of a row in the group.
    ///
    /// # Errors
    /// As [`Ledger::group_spec`].
    pub fn row_width(&self, group: usize) -> Result<i64> {
        Ok(self.group(group)?.row_width)
    }

    /// The group's page table.
    ///
    /// # Errors
    /// As [`Ledger::group_spec`].
    pub fn page_table(&self, group: usize) -> Result<&PageTable> {
        Ok(&self.group(group)?.table)
    }

    /// Pages of the group that can be handed out now.
    ///
    /// # Errors
    /// As [`Ledger::group_spec`].
    pub fn free_pages(&self, group: usize) -> Result<usize> {
        Ok(self.group(group)?.pool.num_free())
    }

    /// Pages of the group that were given back but that a launched step may still touch.
    ///
    /// # Errors
    /// As [`Ledger::group_spec`].
    pub fn fenced_pages(&self, group: usize) -> Result<usize> {
        Ok(self.group(group)?.pool.num_fenced())
    }

    /// The ownership map's line for a page: state, owner, birth step, last verb.
    ///
    /// # Errors
    /// [`Error::Shape`] when there is no such group or page.
    pub fn page_record(&self, group: usize, page: Page) -> Result<PageRecord> {
        let group = self.group(group)?;
        group.pool.record(page).ok_or_else(|| {
            Error::Shape(format!(
                "page {} is not in 1..={} of group {}",
                page.0,
                group.pool.num_pages(),
                group.spec.name
            ))
        })
    }

    /// `int32 [num_rows + 1]`: slots that each row holds in the group.
    ///
    /// # Errors
    /// As [`Ledger::group_spec`].
    pub fn allocated_len(&self, group: usize) -> Result<&[i32]> {
        Ok(&self.group(group)?.allocated)
    }

    /// `int32 [num_rows + 1]`: r, tokens whose KV is final (the new length from an extend's preparation on).
    #[must_use]
    pub fn resolved_len(&self) -> &[i32] {
        &self.rows.resolved
    }

    /// `int32 [num_rows + 1]`: k, rounds prepared and not resolved. `kv_committed_len` is r + k.
    #[must_use]
    pub fn in_flight(&self) -> &[i32] {
        &self.rows.in_flight
    }

    /// `int32 [num_rows + 1]`: draft KV is valid below it.
    #[must_use]
    pub fn drafted_len(&self) -> &[i32] {
        &self.rows.drafted
    }

    /// `uint64 [num_rows + 1]`: bumped by every release of the row (trim, retract, finish, abort).
    #[must_use]
    pub fn epoch(&self) -> &[u64] {
        &self.rows.epoch
    }

    pub(crate) fn page_error(&self, group: usize, record: PageRecord) -> Error {
        Error::PageState {
            group: self.groups[group].spec.name.clone(),
            page: record.page.at(),
            state: record.state.to_string(),
            owner: format!(
                "{} (since step {}, last {})",
                self.rows.describe(record.owner),
                record.birth_step,
                record.last_verb.name()
            ),
        }
    }
}
