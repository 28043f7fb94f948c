//! What can happen next: every call that the contract leaves to the engine, and everything that the device can do.

use specpool_core::{Call, Row, StepKind};

use crate::device::Plant;
use crate::scene::span;
use crate::world::{Event, World};

/// Which verbs an enumeration uses, and how far it goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alphabet {
    /// Tokens that an extend adds. Extends past L are left out.
    pub extend_by: Vec<i32>,
    /// The most steps that are not over, at any time.
    pub max_flights: usize,
    /// The most prefixes pinned at any time; 0 leaves sharing by prefixes out.
    pub max_prefixes: usize,
    /// The most pages of a group that are lent at any time; 0 leaves the cache outside out.
    pub max_lent: usize,
    /// Whether `export` and `import_row` are used, with at most so many prefixes at any time; 0 leaves them out.
    pub max_exports: usize,
    /// Whether `fork` is used.
    pub forks: bool,
    /// Whether `trim` is used.
    pub trims: bool,
    /// Whether `end_turn` is used.
    pub turns: bool,
    /// Whether `cancel` is used also when nothing is stale.
    pub cancels: bool,
    /// Whether steps of all rows together are used, beside steps of one row.
    pub batches: bool,
    /// Whether forwards may fail.
    pub failures: bool,
    /// Whether steps that write no draft KV are used, beside those that do.
    pub undrafted: bool,
    /// Whether the pending deltas count as state.
    pub deltas: bool,
    /// Whether extends that keep the states of their lanes are used, beside those that do not.
    pub keeps: bool,
    /// The texts that requests begin with; none leaves the prefix index out.
    pub texts: Vec<Vec<i32>>,
    /// Whether `forget` is used.
    pub forgets: bool,
}

impl Alphabet {
    /// Prefill, rounds, results, cancels, cuts and retraction.
    #[must_use]
    pub fn plain(extend_by: &[i32], max_flights: usize) -> Self {
        Self {
            extend_by: extend_by.to_vec(),
            max_flights,
            max_prefixes: 0,
            max_lent: 0,
            max_exports: 0,
            forks: false,
            trims: true,
            turns: false,
            cancels: true,
            batches: false,
            failures: false,
            undrafted: false,
            deltas: false,
            keeps: false,
            texts: Vec::new(),
            forgets: false,
        }
    }

    /// Returns everything that can happen next. The ledger will refuse some of it.
    #[must_use]
    pub fn events(&self, world: &World) -> Vec<Event> {
        let mut ops = Vec::new();
        let ledger = &world.ledger;
        let rows: Vec<i32> = (1..=ledger.num_rows() as i32).filter(|&row| ledger.is_live(Row(row))).collect();
        let has_row = rows.len() < ledger.num_rows();
        if has_row && self.texts.is_empty() {
            ops.push(Call::Admit {});
        }
        if has_row {
            self.hit_ops(&mut ops);
        }
        if self.forgets && ledger.index_size().0 > 0 {
            ops.push(Call::ForgetAll {});
        }
        // Without fences, an import has to wait for what was launched: its pages may be those of a row before it.
        let is_clear = ledger.page_fencing() || world.flights.iter().all(|flight| flight.ran.is_some());
        if has_row && self.max_exports > 0 && is_clear {
            for length in 1..=ledger.max_context_len() {
                ops.extend([0, length - 1, length].map(|drafted_len| Call::ImportRow { length, drafted_len }));
            }
        }
        for prefix in ledger.prefixes() {
            let prefix_len = ledger.prefix_len(prefix).unwrap_or(0);
            if has_row {
                ops.extend((1..=prefix_len).map(|len| Call::AdmitOn { prefix, length: Some(len) }));
            }
            ops.push(Call::ReleasePrefix { prefix });
        }
        for &row in &rows {
            self.row_ops(world, row, &mut ops);
        }
        if self.max_lent > 0 {
            self.loan_ops(world, &rows, has_row, &mut ops);
        }
        if ledger.steps().count() < self.max_flights {
            self.prepare_ops(world, &rows, &mut ops);
        }
        self.step_ops(world, &mut ops);
        let mut events: Vec<Event> = ops.into_iter().map(Event::Call).collect();
        self.device_events(world, &mut events);
        events
    }

    fn row_ops(&self, world: &World, row: i32, ops: &mut Vec<Call<'static>>) {
        let ledger = &world.ledger;
        let resolved = ledger.resolved_len()[row as usize];
        let end = resolved + ledger.in_flight()[row as usize];
        if self.trims {
            ops.extend((0..=end).map(|length| Call::Trim { row, length }));
        }
        if self.turns {
            ops.extend((0..=end).map(|length| Call::EndTurn { row, length }));
        }
        if self.forks && ledger.num_free_rows() > 0 {
            ops.push(Call::Fork { row });
        }
        if ledger.prefixes().count() < self.max_exports {
            ops.push(Call::Export { row });
        }
        if ledger.prefixes().count() < self.max_prefixes {
            ops.extend((1..=resolved).map(|length| Call::PinPrefix { row, length }));
        }
        if !self.texts.is_empty() {
            let texts = (1..=resolved).filter_map(|len| world.text(row, len));
            ops.extend(texts.map(|text| Call::Index { row, tokens: text.into(), salt: Vec::new().into() }));
        }
        ops.push(Call::Retract { row });
    }

    /// A request of each text, which takes all but its last token from the index, and one that takes none.
    fn hit_ops(&self, ops: &mut Vec<Call<'static>>) {
        let hit = |text: &[i32], limit| {
            let (tokens, salt) = (text.to_vec().into(), Vec::new().into());
            Call::AdmitCached { tokens, salt, needs_draft: false, limit: Some(limit) }
        };
        ops.extend(self.texts.iter().map(|text| hit(text, text.len() as i32 - 1)));
        ops.extend(self.texts.first().map(|text| hit(text, 0)));
    }

    /// What a cache outside can do: lend what is behind p, bind rows to what it has, begin rows on it, give it up.
    fn loan_ops(&self, world: &World, rows: &[i32], has_row: bool, ops: &mut Vec<Call<'static>>) {
        let ledger = &world.ledger;
        let sizes: Vec<i32> = (0..ledger.num_groups())
            .filter_map(|group| ledger.group_spec(group).ok().map(|spec| spec.page_size as i32))
            .collect();
        let span = span(ledger);
        let is_edge = |len: &i32| len % span == 0;
        let lent: Vec<Vec<i32>> = (0..sizes.len()).map(|group| ledger.lent_pages(group).unwrap_or_default()).collect();
        for &row in rows {
            let protected = |group: usize| ledger.protected_len(group).map_or(0, |lens| lens[row as usize]);
            let Some(start) = (0..sizes.len()).map(protected).min() else { continue };
            let ends = (start + 1..=ledger.resolved_len()[row as usize]).filter(is_edge).collect::<Vec<_>>();
            if lent.iter().all(|pages| pages.len() < self.max_lent) {
                ops.extend(ends.iter().map(|&end| Call::Lend { row, start, end }));
            }
            for (loan, len) in world.loans.iter().map(crate::world::Loan::len).enumerate() {
                let bound = ends.iter().filter(|&&end| end <= len);
                ops.extend(bound.map(|&end| world.rebind(loan, row, start, end)));
            }
        }
        for (loan, len) in world.loans.iter().map(crate::world::Loan::len).enumerate().filter(|_| has_row) {
            ops.extend((1..=len).filter(is_edge).map(|len| world.admit_lent(loan, len)));
        }
        for (group, pages) in lent.iter().enumerate() {
            ops.extend(pages.iter().map(|&page| Call::ReleaseLent { group: group as i32, pages: vec![page].into() }));
        }
    }

    fn prepare_ops(&self, world: &World, rows: &[i32], ops: &mut Vec<Call<'static>>) {
        let ledger = &world.ledger;
        let drafts: &[bool] = if self.undrafted { &[true, false] } else { &[true] };
        let new_len = |row: i32, add: i32| ledger.resolved_len()[row as usize] + add;
        let shapes = ledger.shapes().len() as i32;
        for &writes_draft in drafts {
            for &row in rows {
                for add in self.extend_by.iter().filter(|&&add| new_len(row, add) <= ledger.max_context_len()) {
                    let new_lens = vec![new_len(row, *add)].into();
                    ops.push(Call::PrepareExtend { rows: vec![row].into(), new_lens, writes_draft });
                    if self.keeps {
                        let (rows, new_lens) = (vec![row].into(), vec![new_len(row, *add)].into());
                        ops.push(Call::PrepareExtendKeeping { rows, new_lens, keep: vec![0].into(), writes_draft });
                    }
                }
                ops.extend((0..shapes).map(|shape| Call::PrepareDecode {
                    rows: vec![row].into(),
                    shapes: vec![shape].into(),
                    writes_draft,
                }));
            }
        }
        if self.batches && rows.len() > 1 {
            let new_lens: Vec<i32> = rows.iter().map(|&row| new_len(row, self.extend_by[0])).collect();
            if new_lens.iter().all(|&len| len <= ledger.max_context_len()) {
                ops.push(Call::PrepareExtend {
                    rows: rows.to_vec().into(),
                    new_lens: new_lens.into(),
                    writes_draft: true,
                });
            }
            for shape in 0..shapes {
                // Mixed shapes: every row's shape differs from its neighbour's.
                let mixed = (0..rows.len() as i32).map(|at| (shape + at) % shapes).collect();
                ops.push(Call::PrepareDecode { rows: rows.to_vec().into(), shapes: mixed, writes_draft: true });
            }
        }
    }

    fn step_ops(&self, world: &World, ops: &mut Vec<Call<'static>>) {
        let flights = &world.flights;
        if let Some(flight) = flights.iter().find(|flight| !flight.is_launched()) {
            ops.push(Call::Launch { step: flight.plan.step });
        }
        let newest = flights.back().filter(|flight| !flight.is_launched());
        let is_stuck = |step: u64| {
            world.ledger.steps().any(|(other, _, state)| other >= step && state == specpool_core::StepState::Stale)
        };
        let first = flights.iter().find(|flight| !flight.is_launched()).map_or(0, |flight| flight.plan.step);
        if let Some(flight) = newest.filter(|_| self.cancels || is_stuck(first)) {
            ops.push(Call::Cancel { step: flight.plan.step });
        }
        let device = &world.device;
        let is_unresolved = |flight: &&crate::world::Flight| !flight.is_settled && flight.plan.kind == StepKind::Decode;
        for flight in flights.iter().filter(is_unresolved) {
            let Some(ran) = &flight.ran else { continue };
            if !flight.has_failed || device.plant == Some(Plant::SkipAbandon) {
                let more = i32::from(device.plant == Some(Plant::ResolveMore));
                let shapes = world.ledger.shapes();
                let max_accept_len = |lane: usize| shapes[flight.plan.shapes[lane] as usize].max_accept_len() as i32;
                let accept_lens =
                    ran.iter().enumerate().map(|(lane, &len)| (len + more).min(max_accept_len(lane))).collect();
                ops.push(Call::Resolve { step: flight.plan.step, accept_lens });
            }
        }
        let failed = flights.iter().filter(|flight| flight.has_failed && !flight.is_complete);
        ops.extend(failed.map(|flight| Call::Abandon { step: flight.plan.step }));
        let is_done = |flight: &&crate::world::Flight| match device.plant {
            Some(Plant::CompleteEarly) => flight.is_launched(),
            Some(Plant::SkipAbandon) => flight.ran.is_some(),
            _ => flight.is_done(),
        };
        let done = flights.iter().take_while(is_done).filter(|flight| !flight.is_complete);
        ops.extend(done.map(|flight| Call::Complete { step: flight.plan.step }));
    }

    fn device_events(&self, world: &World, events: &mut Vec<Event>) {
        let Some(flight) = world.flights.iter().find(|flight| flight.ran.is_none()) else { return };
        if !flight.is_launched() {
            return;
        }
        let plan = &flight.plan;
        let max_accept_len = |lane: usize| match plan.kind {
            StepKind::Extend => 1,
            StepKind::Decode => world.ledger.shapes()[plan.shapes[lane] as usize].max_accept_len() as i32,
        };
        let mut all: Vec<Vec<i32>> = vec![Vec::new()];
        for lane in 0..plan.num_lanes() {
            let longer = |lens: &Vec<i32>| {
                let lens = lens.clone();
                (1..=max_accept_len(lane)).map(move |len| lens.iter().copied().chain([len]).collect())
            };
            all = all.iter().flat_map(longer).collect();
        }
        events.extend(all.into_iter().map(|accept_lens| Event::Run { accept_lens }));
        if self.failures {
            events.push(Event::Fail);
        }
    }
}
