//! What the operation decoder must know about a ledger: its rows, steps and prefixes, in plain arrays.

use specpool_core::{Ledger, Row, StepKind, StepState};

/// A row as the decoder sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SceneRow {
    /// Whether it is admitted.
    pub live: bool,
    /// r, tokens.
    pub resolved: i32,
    /// k, rounds.
    pub in_flight: i32,
    /// Whether an extend has launched since the row was admitted or cut.
    pub has_root: bool,
    /// The least p of all groups.
    pub protected: i32,
}

/// A step that is not over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SceneStep {
    /// Its number.
    pub step: u64,
    /// Prefill or round.
    pub is_extend: bool,
    /// Its state.
    pub state: StepState,
    /// Whether it has finished on the device.
    pub is_complete: bool,
    /// `[b]`: each lane's row.
    pub rows: Vec<i32>,
    /// `[b]`: each lane's shape.
    pub shapes: Vec<i32>,
}

/// The part of a ledger's state that decides which operations can succeed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scene {
    /// L, tokens.
    pub max_context_len: i32,
    /// D.
    pub overlap_depth: i32,
    /// Most tokens of one extend.
    pub max_chunk: i32,
    /// Most rows in one step.
    pub max_batch: usize,
    /// Whether `end_turn` can succeed.
    pub has_sessions: bool,
    /// Whether the verbs of the prefix index are among the operations. Reading a ledger leaves it as it is.
    pub has_index: bool,
    /// Whether extends may keep the states of their lanes.
    pub keeps_states: bool,
    /// Whether the verbs for a prefix cache outside are.
    pub has_loans: bool,
    /// Whether those for rows that move to another ledger are.
    pub has_moves: bool,
    /// Per shape: A.
    pub max_accept_lens: Vec<i32>,
    /// `[num_rows + 1]`; row 0 is never live.
    pub rows: Vec<SceneRow>,
    /// Oldest first.
    pub steps: Vec<SceneStep>,
    /// Ids and lengths.
    pub prefixes: Vec<(u64, i32)>,
    /// Per group: P.
    pub page_sizes: Vec<i32>,
    /// Q, the least common multiple of the page sizes.
    pub span: i32,
    /// Per group: the pages that are lent to a cache outside.
    pub lent: Vec<Vec<i32>>,
}

fn gcd(a: i32, b: i32) -> i32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Q, the least common multiple of the page sizes.
#[must_use]
pub fn span(ledger: &Ledger) -> i32 {
    let specs = (0..ledger.num_groups()).filter_map(|group| ledger.group_spec(group).ok());
    specs.map(|spec| spec.page_size as i32).fold(1, |span, size| span / gcd(span, size) * size)
}

impl Scene {
    /// The scene of a ledger.
    #[must_use]
    pub fn of(ledger: &Ledger) -> Self {
        let mut scene = Self::default();
        scene.read(ledger);
        scene
    }

    /// Looks at the ledger again, and reuses the memory.
    pub fn read(&mut self, ledger: &Ledger) {
        self.max_context_len = ledger.max_context_len();
        self.overlap_depth = ledger.overlap_depth();
        self.max_chunk = ledger.max_chunk().unwrap_or(self.max_context_len);
        self.max_batch = ledger.max_batch();
        let has_window = |group| ledger.group_spec(group).is_ok_and(|spec| spec.window.is_some());
        self.has_sessions = ledger.sessions() || !(0..ledger.num_groups()).any(has_window);
        self.max_accept_lens.clear();
        self.max_accept_lens.extend(ledger.shapes().iter().map(|shape| shape.max_accept_len() as i32));
        let (resolved, in_flight) = (ledger.resolved_len(), ledger.in_flight());
        let protected = |at: usize| move |group: usize| ledger.protected_len(group).map_or(0, |lens| lens[at]);
        self.rows.clear();
        self.rows.extend((0..=ledger.num_rows()).map(|at| {
            let row = Row(at as i32);
            SceneRow {
                live: ledger.is_live(row),
                resolved: resolved[at],
                in_flight: in_flight[at],
                has_root: ledger.has_root(row),
                protected: (0..ledger.num_groups()).map(protected(at)).min().unwrap_or(0),
            }
        }));
        let mut count = 0;
        for (step, kind, state) in ledger.steps() {
            let Some(plan) = ledger.plan_of(step) else { continue };
            if self.steps.len() == count {
                let (rows, shapes) = (Vec::new(), Vec::new());
                self.steps.push(SceneStep { step, is_extend: false, state, is_complete: false, rows, shapes });
            }
            let seen = &mut self.steps[count];
            (seen.step, seen.is_extend, seen.state) = (step, kind == StepKind::Extend, state);
            seen.is_complete = step <= ledger.completed();
            seen.rows.clone_from(&plan.rows);
            seen.shapes.clone_from(&plan.shapes);
            count += 1;
        }
        self.steps.truncate(count);
        let specs = (0..ledger.num_groups()).filter_map(|group| ledger.group_spec(group).ok());
        self.page_sizes.clear();
        self.page_sizes.extend(specs.map(|spec| spec.page_size as i32));
        self.span = span(ledger);
        self.lent.clear();
        self.lent.extend((0..ledger.num_groups()).map(|group| ledger.lent_pages(group).unwrap_or_default()));
        self.prefixes.clear();
        self.prefixes.extend(ledger.prefixes().map(|prefix| (prefix, ledger.prefix_len(prefix).unwrap_or(0))));
    }

    /// The row, or 0 if there is none.
    fn row(&self, row: i32) -> SceneRow {
        usize::try_from(row).ok().and_then(|at| self.rows.get(at)).cloned().unwrap_or_default()
    }

    /// r of a row, or 0 if there is no such row.
    #[must_use]
    pub fn resolved(&self, row: i32) -> i32 {
        self.row(row).resolved
    }

    /// The least p of a row in all groups, or 0 if there is no such row.
    #[must_use]
    pub fn protected(&self, row: i32) -> i32 {
        self.row(row).protected
    }

    /// The rows for which the test holds, in order.
    pub fn rows_where(&self, fits: impl Fn(&SceneRow) -> bool) -> Vec<i32> {
        (1..self.rows.len()).filter(|&at| self.rows[at].live && fits(&self.rows[at])).map(|at| at as i32).collect()
    }

    /// Whether the row has an extend that is not launched.
    #[must_use]
    pub fn has_unlaunched_extend(&self, row: i32) -> bool {
        let waits = |step: &&SceneStep| step.is_extend && step.state == StepState::Prepared;
        self.steps.iter().filter(waits).any(|step| step.rows.contains(&row))
    }
}
