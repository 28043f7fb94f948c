//! A slow, plain model of the ledger, written from docs/contract.md. Every page is a number that is never used twice.
//! Its holders are found by asking every row and prefix. The refusals come in the documented order. The model shares
//! no code with the ledger except the reserve, which `tests/sizing.rs` proves.

#![allow(dead_code, reason = "two programs use it, each its own part")]

mod admission;
pub(crate) mod ask;
mod cuts;
mod index;
pub(crate) mod kept;
mod lend;
mod life;
mod pages;
mod prepare;
pub(crate) mod same;
pub(crate) mod states;
mod transfer;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use index::Entry;
use kept::Kept;
use specpool_core::{Geometry, LedgerConfig, Reserve};
use states::{Lapse, ModelFold, ModelStates, SlotId, State};

/// A page of the model. The tables tell which page of the ledger it is.
pub(crate) type PageId = u32;

/// Why the model refuses a call, with the numbers that the error must state.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of the ledger's errors")]
pub(crate) enum Refusal {
    OutOfPages {
        group: String,
        need: usize,
        free: usize,
        cached: usize,
        fenced: usize,
        reclaimable: usize,
    },
    OutOfRows {
        fenced: usize,
    },
    ContextEnd(Vec<usize>),
    StalePlan {
        row: usize,
    },
    Order,
    NotReady,
    DraftLag {
        row: usize,
        drafted: i64,
        resolved: i64,
        undrafted: i32,
    },
    Shape,
    PageState,
    Config,
    /// An outcome that no call may have.
    Never(String),
}

/// What a verb returns: a row, a step, a prefix or a length; 0 if it returns nothing.
pub(crate) type Outcome = Result<i64, Refusal>;

/// What the model must know of a group.
#[derive(Debug, Clone)]
pub(crate) struct ModelGroup {
    /// The name of the group in errors.
    pub(crate) name: String,
    /// P.
    pub(crate) page_size: i64,
    /// Number of pages.
    pub(crate) num_pages: usize,
    /// w.
    pub(crate) window: Option<i64>,
    /// First tokens that every query sees, whatever its window.
    pub(crate) sink: i64,
    /// The reserve of each shape.
    pub(crate) reserves: Vec<Reserve>,
}

/// A round in flight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Round {
    /// Its step.
    pub(crate) step: u64,
    /// Its A.
    pub(crate) most: i32,
    /// Whether it writes draft KV of what it accepts.
    pub(crate) writes_draft: bool,
    /// Whether its step is launched.
    pub(crate) launched: bool,
}

/// What a row or a prefix holds in one group.
#[derive(Debug, Clone, Default)]
pub(crate) struct Holding {
    /// a: slots up to the end of the last page.
    pub(crate) allocated: i64,
    /// p: slots of shared pages.
    pub(crate) protected: i64,
    /// e: slots below the window that left the table.
    pub(crate) evicted: i64,
    /// Column -> page, as in the table.
    pub(crate) table: BTreeMap<i64, PageId>,
    /// Column -> page, for the pages that the checkpoint keeps outside the table.
    pub(crate) kept: BTreeMap<i64, PageId>,
}

impl Holding {
    fn pages(&self) -> impl Iterator<Item = PageId> {
        self.table.values().chain(self.kept.values()).copied()
    }

    fn has_column(&self, column: i64) -> bool {
        self.table.contains_key(&column) || self.kept.contains_key(&column)
    }
}

/// One row.
#[derive(Debug, Clone, Default)]
pub(crate) struct ModelRow {
    /// Whether it is admitted and not given back.
    pub(crate) live: bool,
    /// r.
    pub(crate) resolved: i32,
    /// Draft KV is valid below this.
    pub(crate) drafted: i32,
    /// Oldest first.
    pub(crate) rounds: Vec<Round>,
    /// Bumped by every release.
    pub(crate) epoch: u64,
    /// Counts the requests that had the row.
    pub(crate) life: u64,
    /// Whether an extend has launched since the row was admitted or cut shorter.
    pub(crate) has_root: bool,
    /// r before the extend that is not launched.
    pub(crate) extend_from: Option<i32>,
    /// The last launched step that it took part in.
    pub(crate) last_launched: u64,
    /// Whether it is between two turns.
    pub(crate) idle: bool,
    /// The length of the last finished turn.
    pub(crate) checkpoint: Option<i32>,
    /// Its state; of 0 tokens before the first fold.
    pub(crate) state: State,
    /// The state that the checkpoint keeps.
    pub(crate) kept: Option<State>,
    /// Per group.
    pub(crate) groups: Vec<Holding>,
}

/// A row's place in a step.
#[derive(Debug, Clone)]
pub(crate) struct Lane {
    /// The row.
    pub(crate) row: usize,
    /// Its epoch at the preparation.
    pub(crate) epoch: u64,
    /// The request that had the row then.
    pub(crate) life: u64,
    /// Its shape.
    pub(crate) shape: usize,
    /// The least position of the step's root.
    pub(crate) lo: i32,
    /// The greatest.
    pub(crate) hi: i32,
    /// r before the step.
    pub(crate) start: i32,
    /// `drafted_len` before the step.
    drafted: i32,
    /// Whether the row was between two turns before the step.
    idle: bool,
    /// a before the step, per group.
    pub(crate) allocated: Vec<i64>,
    /// What it does to the row's state.
    pub(crate) fold: ModelFold,
}

/// A tail that waits to be copied, or rides on a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Copy {
    /// The group's index.
    pub(crate) group: usize,
    /// The page that is read.
    pub(crate) src: PageId,
    /// The page that is written.
    pub(crate) dst: PageId,
    /// Slots to copy, from the first of the page.
    pub(crate) tokens: i64,
    /// Whose tail it is.
    pub(crate) row: usize,
    /// The request that had the row then.
    pub(crate) life: u64,
}

/// A step that is not over.
#[derive(Debug, Clone)]
pub(crate) struct ModelStep {
    /// Its number.
    pub(crate) step: u64,
    /// Prefill or round.
    pub(crate) is_extend: bool,
    /// Lanes of the batch.
    pub(crate) lanes: Vec<Lane>,
    /// The copies that ride on it.
    pub(crate) copies: Vec<Copy>,
    /// Whether it is launched.
    pub(crate) launched: bool,
    /// Whether it is resolved; an extend has nothing to resolve.
    pub(crate) resolved: bool,
    /// Whether its forward failed.
    pub(crate) abandoned: bool,
}

/// A pinned prefix.
#[derive(Debug, Clone)]
pub(crate) struct ModelPrefix {
    /// Tokens.
    pub(crate) len: i32,
    /// Draft KV is valid below this.
    pub(crate) drafted: i32,
    /// The slot of its state; 0 if there are no states.
    pub(crate) slot: SlotId,
    /// Per group.
    pub(crate) groups: Vec<Holding>,
}

/// The whole ledger.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    /// The groups, in the ledger's order.
    pub(crate) groups: Arc<[ModelGroup]>,
    /// Per shape: A, and whether it drafts.
    pub(crate) shapes: Arc<[(i32, bool)]>,
    pub(crate) states: Option<Arc<ModelStates>>,
    /// What soft marks and the index keep of the states.
    pub(crate) kept: Kept,
    /// The prefix index, by text.
    pub(crate) entries: BTreeMap<Vec<i32>, Entry>,
    /// A planted fault.
    pub(crate) lapse: Option<Lapse>,
    max_context_len: i32,
    max_batch: usize,
    max_chunk: i32,
    depth: usize,
    draft_kv: bool,
    sessions: bool,
    page_fencing: bool,
    /// `[num_rows + 1]`, row 0 is never live.
    pub(crate) rows: Vec<ModelRow>,
    /// Oldest first.
    pub(crate) steps: Vec<ModelStep>,
    /// By id.
    pub(crate) prefixes: BTreeMap<u64, ModelPrefix>,
    /// What a cache outside holds: (group, the ledger's name of the page) -> the page, and whether it has draft KV.
    pub(crate) lent: BTreeMap<(usize, i32), (PageId, bool)>,
    /// The next step's number.
    pub(crate) next_step: u64,
    next_prefix: u64,
    next_page: PageId,
    next_slot: SlotId,
    /// The last step up to which every step has finished on the device.
    pub(crate) completed: u64,
    cancelled: BTreeSet<u64>,
    /// Steps whose delta was taken and is not acknowledged.
    takes: BTreeSet<u64>,
    /// Copies that wait for the next step prepared, in order.
    pub(crate) pending: Vec<Copy>,
    /// The latest launched step of everyone who gave the page back, if it is not complete.
    fences: BTreeMap<(usize, PageId), u64>,
    /// The same for slots.
    slot_fences: BTreeMap<SlotId, u64>,
    /// Pages that had a second holder at some time.
    shared: BTreeSet<(usize, PageId)>,
    /// Rows that can be handed out; the last one is handed out first.
    free_rows: Vec<usize>,
    /// (fence, row), in the order in which they were given back.
    fenced_rows: Vec<(u64, usize)>,
}

impl Model {
    /// The model of a ledger that was built from `config`, whose shapes begin with shape 0.
    pub(crate) fn new(config: &LedgerConfig) -> Self {
        let num_rows = config.num_rows as usize;
        let groups: Arc<[ModelGroup]> = (config.groups.iter())
            .map(|group| {
                let geometry = Geometry::new(group.page_size, group.hosts_drafts, group.layout).unwrap();
                let depth = config.overlap_depth;
                ModelGroup {
                    name: group.name.clone(),
                    page_size: group.page_size,
                    num_pages: group.num_pages as usize,
                    window: group.window,
                    sink: group.sink,
                    reserves: Reserve::for_shapes(geometry, &config.shapes, config.policy, depth).unwrap(),
                }
            })
            .collect();
        let row = ModelRow { groups: vec![Holding::default(); groups.len()], ..ModelRow::default() };
        let facts = |shape: &specpool_core::Shape| {
            let drafts = shape.num_steps > 0 || shape.num_draft_tokens > 1;
            ((shape.num_steps + 1).min(shape.num_draft_tokens) as i32, drafts)
        };
        Self {
            shapes: config.shapes.iter().map(facts).collect(),
            states: ModelStates::of(config).map(Arc::new),
            kept: Kept::default(),
            entries: BTreeMap::new(),
            lapse: None,
            max_context_len: config.max_context_len as i32,
            max_batch: config.max_batch.unwrap_or(config.num_rows) as usize,
            max_chunk: config.max_chunk.map_or(i32::MAX, |most| most as i32),
            depth: config.overlap_depth as usize,
            draft_kv: config.draft_kv,
            sessions: config.sessions,
            page_fencing: config.page_fencing,
            rows: vec![row; num_rows + 1],
            steps: Vec::new(),
            prefixes: BTreeMap::new(),
            lent: BTreeMap::new(),
            next_step: 1,
            next_prefix: 1,
            next_page: 1,
            next_slot: 0,
            completed: 0,
            cancelled: BTreeSet::new(),
            takes: BTreeSet::new(),
            pending: Vec::new(),
            fences: BTreeMap::new(),
            slot_fences: BTreeMap::new(),
            shared: BTreeSet::new(),
            free_rows: (1..=num_rows).rev().collect(),
            fenced_rows: Vec::new(),
            groups,
        }
    }

    /// The row, if it is admitted.
    fn live(&self, row: i32) -> Result<usize, Refusal> {
        let at = usize::try_from(row).map_err(|_| Refusal::Shape)?;
        if self.rows.get(at).is_some_and(|row| row.live) { Ok(at) } else { Err(Refusal::Shape) }
    }

    fn check_batch(&self, rows: &[i32], len: usize) -> Result<Vec<usize>, Refusal> {
        if rows.is_empty() || rows.len() > self.max_batch || rows.len() != len {
            return Err(Refusal::Shape);
        }
        let known = rows.iter().map(|&row| self.live(row)).collect::<Result<Vec<_>, _>>()?;
        let distinct: BTreeSet<usize> = known.iter().copied().collect();
        if distinct.len() == known.len() { Ok(known) } else { Err(Refusal::Shape) }
    }

    pub(crate) fn is_stale(&self, step: &ModelStep) -> bool {
        !step.launched && step.lanes.iter().any(|lane| self.rows[lane.row].epoch != lane.epoch)
    }

    fn any_stale(&self) -> bool {
        self.steps.iter().any(|step| self.is_stale(step))
    }

    /// Rows that can be admitted.
    pub(crate) fn num_free_rows(&self) -> usize {
        self.free_rows.len()
    }
}
