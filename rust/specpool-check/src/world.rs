//! A ledger, its model and its device side by side, and the engine between them: what it launches, with which table
//! delta, which results it gets, and when it reports a step as complete.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use specpool_core::{Call, DeltaEntries, Given, Ledger, LedgerConfig, PageNames, Plan, Snapshots, StepKind};

use crate::connector::Connector;
use crate::device::{Device, Fault, Forward, LaneFold, Pinned, Plant, Tag, tags_of};
use crate::model::Model;
use crate::model::ask::{ask, outcome};
use crate::model::kept::texts_of;
use crate::model::same::same;
use crate::model::states::{Lapse, same_folds};

/// One thing that can happen next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The engine calls the ledger.
    Call(Call<'static>),
    /// The oldest launched forward runs on the device; a round keeps `accept_lens[lane]` tokens.
    Run {
        /// Per lane, in `1..=A`; all 1 for an extend.
        accept_lens: Vec<i32>,
    },
    /// The oldest launched forward fails on the device.
    Fail,
}

/// A step that is not over, as the engine sees it.
#[derive(Debug, Clone)]
pub(crate) struct Flight {
    pub(crate) plan: Arc<Plan>,
    /// The row that each of its page copies is for; 0 if the row is gone.
    pub(crate) copy_rows: Vec<i32>,
    /// The table changes that go before it, if it is launched.
    pub(crate) delta: Option<Arc<Vec<DeltaEntries>>>,
    /// What it accepted, if it has run.
    pub(crate) ran: Option<Vec<i32>>,
    /// Whether it failed and the engine has not abandoned it yet.
    pub(crate) has_failed: bool,
    /// Whether it is resolved or abandoned; an extend starts so.
    pub(crate) is_settled: bool,
    pub(crate) is_complete: bool,
}

impl Flight {
    pub(crate) fn is_launched(&self) -> bool {
        self.delta.is_some()
    }

    /// Whether it may be reported as complete.
    pub(crate) fn is_done(&self) -> bool {
        self.ran.is_some() && !self.has_failed
    }
}

/// A pinned prefix as the engine sees it.
#[derive(Debug, Clone)]
struct Prefix {
    sequence: Vec<Tag>,
    /// Its tokens, if they are known.
    text: Vec<i32>,
    /// Per group.
    pages: Vec<Vec<i32>>,
    /// Whether a forward of its row failed: its contents then mean nothing.
    is_lost: bool,
}

/// Lent pages from a sequence's start on, as a cache outside would find them.
#[derive(Debug, Clone)]
pub(crate) struct Loan {
    sequence: Vec<Tag>,
    /// Per group and column; 0 where the row's window had passed.
    pages: Vec<Vec<i32>>,
}

impl Loan {
    /// Tokens.
    pub(crate) fn len(&self) -> i32 {
        self.sequence.len() as i32
    }
}

/// Ledger, model, device and engine.
#[derive(Debug, Clone)]
pub struct World {
    /// The real ledger.
    pub ledger: Ledger,
    model: Model,
    /// What the ledger's plans run on.
    pub device: Device,
    pub(crate) flights: VecDeque<Flight>,
    prefixes: BTreeMap<u64, Prefix>,
    pub(crate) loans: Vec<Loan>,
    pinned: Pinned,
    /// Per group: the table that the device will have when everything launched has run.
    tail: Vec<Vec<i32>>,
    /// Row -> length, for rows that were cut while a forward of theirs was on its way.
    resets: BTreeMap<i32, i32>,
    /// Live rows, last admitted last.
    pub(crate) admitted: Vec<i32>,
    /// What a connector copies, if there is one.
    connector: Option<Connector>,
}

impl World {
    /// An empty ledger of that configuration, and a device with a planted fault or none.
    ///
    /// # Errors
    /// The error of the configuration, as the ledger words it.
    pub fn new(config: &LedgerConfig, plant: Option<Plant>) -> Result<Self, Fault> {
        let ledger = Ledger::new(config.clone()).map_err(|error| error.to_string())?;
        let device = Device::new(&ledger, plant);
        let tail = device.tables.clone();
        // The ledger puts shape 0 first if it is not there; the model takes the list as it is.
        let mut model = Model::new(&LedgerConfig { shapes: ledger.shapes().to_vec(), ..config.clone() });
        model.lapse = plant.and_then(|plant| match plant {
            Plant::SkipUndo => Some(Lapse::SkipUndo),
            Plant::CutAnywhere => Some(Lapse::CutAnywhere),
            Plant::KeepCheckpoint => Some(Lapse::KeepCheckpoint),
            Plant::FreeAtOnce => Some(Lapse::FreeAtOnce),
            Plant::KeepCancelledMark => Some(Lapse::KeepCancelledMark),
            Plant::KeepCutMark => Some(Lapse::KeepCutMark),
            Plant::ServeWaiting => Some(Lapse::ServeWaiting),
            Plant::ServeOtherText => Some(Lapse::ServeOtherText),
            Plant::KeepSpoiled => Some(Lapse::KeepSpoiled),
            Plant::OutliveKv => Some(Lapse::OutliveKv),
            Plant::EvictNewest => Some(Lapse::EvictNewest),
            Plant::NeverSteal => Some(Lapse::NeverSteal),
            _ => None,
        });
        Ok(Self {
            model,
            ledger,
            device,
            flights: VecDeque::new(),
            prefixes: BTreeMap::new(),
            loans: Vec::new(),
            pinned: vec![Vec::new(); tail.len()],
            tail,
            resets: BTreeMap::new(),
            admitted: Vec::new(),
            connector: None,
        })
    }

    /// From now on the tokens of every row are known beforehand, so that the prefix index can be used: those that
    /// `admit_cached` names, and zeros behind them. A cut to an odd length toggles the token behind it between 0 and 1.
    pub fn tell_texts(&mut self) {
        self.device.tell_texts();
    }

    /// The row's first `len` tokens, if they are known.
    #[must_use]
    pub fn text(&self, row: i32, len: i32) -> Option<Vec<i32>> {
        self.device.text(row, len as usize)
    }

    /// Tokens of the row that was admitted last, 0 if it is gone.
    #[must_use]
    pub fn last_admitted_len(&self) -> i32 {
        self.admitted.last().map_or(0, |&row| self.ledger.resolved_len()[row as usize])
    }

    /// Puts a connector beside the ledger.
    ///
    /// # Errors
    /// The ledger's.
    pub fn connect(&mut self) -> Result<(), Fault> {
        self.connector = Some(Connector::new(&mut self.ledger)?);
        Ok(())
    }

    /// Lets the connector do what the ledger's events say. Returns how many it has followed since the start.
    ///
    /// # Errors
    /// The law that was broken.
    pub fn follow_events(&mut self) -> Result<u64, Fault> {
        let is_quiet = self.flights.is_empty() && !self.has_waiting_copies();
        let Some(connector) = &mut self.connector else { return Ok(0) };
        connector.follow(&mut self.ledger, &self.device, is_quiet)?;
        Ok(connector.num_events)
    }

    /// Applies the event. Returns false if the ledger refused the call, and the model too.
    ///
    /// # Errors
    /// The law that was broken.
    pub fn apply(&mut self, event: &Event) -> Result<bool, Fault> {
        let is_done = self.happen(event)?;
        if is_done {
            self.forget_free_pages();
            self.forget_free_states();
        }
        Ok(is_done)
    }

    fn happen(&mut self, event: &Event) -> Result<bool, Fault> {
        match event {
            Event::Call(op) => self.call(op),
            Event::Run { accept_lens } => self.run(accept_lens, false),
            Event::Fail => {
                let Some(flight) = self.flights.iter().find(|flight| flight.ran.is_none()) else { return Ok(false) };
                self.run(&vec![1; flight.plan.num_lanes()], true)
            }
        }
    }

    fn call(&mut self, op: &Call<'_>) -> Result<bool, Fault> {
        let estimate = match op {
            Call::PrepareDecode { rows, shapes, .. } => self.ledger.tokens_required(rows, shapes).ok(),
            _ => None,
        };
        let ledger = &self.ledger;
        let expected = match op {
            // A lend leaves the tables as they are, so the ledger can name the pages before.
            Call::Lend { row, start, end } => self.model.lend(*row, *start, *end, |group, column| {
                ledger.page_table(group).map_or(0, |table| table.row(specpool_core::Row(*row))[column as usize])
            }),
            op => ask(&mut self.model, op),
        };
        if let Call::ReleasePrefix { prefix } = op {
            self.check_kept(*prefix)?;
        }
        let answer = op.run(&mut self.ledger, None, &mut Snapshots::default());
        let said = outcome(&answer);
        if said != expected {
            return Err(format!("{op:?}: the ledger says {said:?}, the contract {expected:?}"));
        }
        let Ok(given) = answer else { return Ok(false) };
        self.model.observe(&self.ledger)?;
        if let (Given::Plan(plan), Some(estimate)) = (&given, estimate) {
            check_estimate(plan, &estimate)?;
        }
        self.follow(op, given)?;
        Ok(true)
    }

    /// Does what the engine does after a call that succeeded.
    fn follow(&mut self, op: &Call<'_>, given: Given) -> Result<(), Fault> {
        match (op, given) {
            (Call::Admit {}, Given::Row(row)) => self.seat(row.0, Vec::new()),
            (Call::AdmitOn { prefix, .. }, Given::Row(row)) => {
                let len = self.ledger.resolved_len()[row.at()] as usize;
                let Prefix { sequence, text, .. } = self.prefixes[prefix].clone();
                self.seat(row.0, sequence[..len].to_vec());
                self.device.set_text(row.0, &text[..len.min(text.len())]);
            }
            (Call::AdmitCached { tokens, .. }, Given::Row(row)) => {
                let len = self.ledger.resolved_len()[row.at()] as usize;
                self.seat(row.0, tags_of(&tokens[..len]));
                self.device.set_text(row.0, tokens);
            }
            (Call::Fork { row: parent }, Given::Row(row)) => {
                let len = self.ledger.resolved_len()[row.at()];
                let sequence = self.device.sequence(*parent, len);
                self.seat(row.0, sequence);
                let text = self.text(*parent, self.ledger.max_context_len());
                if let Some(text) = text {
                    self.device.set_text(row.0, &text);
                }
            }
            (Call::PinPrefix { row, .. } | Call::Export { row }, Given::Prefix(prefix)) => self.pin(*row, prefix)?,
            (Call::ImportRow { length, drafted_len }, Given::Row(row)) => {
                let sequence = self.device.import(&self.ledger, row, *length, *drafted_len)?;
                self.seat(row.0, sequence);
            }
            (Call::ReleasePrefix { prefix }, _) => {
                self.prefixes.remove(prefix);
                self.collect_pinned();
            }
            (Call::Lend { row, end, .. }, _) => self.note_loan(*row, *end)?,
            (Call::Rebind { row, start, end, pages }, _) => self.equate(*row, *start, *end, pages)?,
            (Call::AdmitLent { length, pages }, Given::Row(row)) => {
                let loan =
                    self.loans.iter().find(|loan| loan.len() >= *length && self.loaned(loan, 0, *length) == **pages);
                let loan = loan.ok_or_else(|| format!("{op:?}: the cache outside has no such pages"))?;
                let sequence = loan.sequence[..*length as usize].to_vec();
                self.seat(row.0, sequence);
            }
            (Call::ReleaseLent { group, pages }, _) => {
                self.loans.retain(|loan| !loan.pages[*group as usize].iter().any(|page| pages.contains(page)));
                self.collect_pinned();
            }
            (_, Given::Plan(plan)) => {
                self.check_taken_slots(&plan)?;
                let is_settled = plan.kind == StepKind::Extend;
                let copy_rows = self.copy_rows(&plan);
                let (delta, ran, has_failed, is_complete) = (None, None, false, false);
                self.flights.push_back(Flight { plan, copy_rows, delta, ran, has_failed, is_settled, is_complete });
            }
            (Call::Launch { step }, _) => self.launch(*step)?,
            (Call::Resolve { step, .. } | Call::Abandon { step }, _) => {
                if let Some(flight) = self.flights.iter_mut().find(|flight| flight.plan.step == *step) {
                    flight.is_settled = true;
                    flight.has_failed &= matches!(op, Call::Resolve { .. });
                }
                self.forget_flights();
            }
            (Call::Complete { step }, _) => {
                let complete = self.flights.iter_mut().filter(|flight| flight.plan.step <= *step);
                complete.for_each(|flight| flight.is_complete = true);
                self.forget_flights();
            }
            (Call::Cancel { .. }, _) => drop(self.flights.pop_back()),
            // If the root stays, the device reaches this length by itself, and a round may go beyond it.
            (Call::Trim { row, .. } | Call::EndTurn { row, .. }, Given::Length(len))
                if !self.ledger.has_root(specpool_core::Row(*row)) =>
            {
                self.resets.insert(*row, len);
                self.toggle(*row, len);
                self.reset_lengths();
            }
            _ => {}
        }
        let ledger = &self.ledger;
        self.admitted.retain(|&row| ledger.is_live(specpool_core::Row(row)));
        Ok(())
    }

    /// What follows a cut to an odd length is another text than before.
    fn toggle(&mut self, row: i32, len: i32) {
        if let Some(mut text) = self.text(row, self.ledger.max_context_len()).filter(|_| len % 2 == 1)
            && let Some(token) = text.get_mut(len as usize)
        {
            *token = i32::from(*token == 0);
            self.device.set_text(row, &text);
        }
    }

    /// The row whose table has the page that each copy writes; 0 if there is none.
    fn copy_rows(&self, plan: &Plan) -> Vec<i32> {
        let row_of = |copy: &specpool_core::PageCopy| {
            let table = self.ledger.page_table(copy.group as usize).ok()?;
            let cell = table.cells().iter().position(|&page| page == copy.dst)?;
            Some((cell / table.pages_per_row()) as i32)
        };
        plan.page_copies.iter().map(|copy| row_of(copy).unwrap_or(0)).collect()
    }

    /// Sets the device's length in stream order, behind everything that was launched before the cut. (An extend that
    /// is launched first sets it itself.)
    fn reset_lengths(&mut self) {
        let Self { resets, flights, device, .. } = self;
        resets.retain(|row, len| {
            let mut on_its_way = flights.iter().filter(|flight| flight.is_launched() && flight.ran.is_none());
            let waits = on_its_way.any(|flight| flight.plan.rows.contains(row));
            if !waits {
                device.set_length(*row, *len);
            }
            waits
        });
    }

    fn seat(&mut self, row: i32, sequence: Vec<Tag>) {
        self.resets.remove(&row);
        // A copy of a step that was not launched may be for the row's last request.
        let copy_rows = self.flights.iter_mut().flat_map(|flight| &mut flight.copy_rows);
        copy_rows.filter(|target| **target == row).for_each(|target| *target = 0);
        self.device.admit(row, sequence);
        self.device.set_text(row, &[]);
        self.admitted.retain(|&other| other != row);
        self.admitted.push(row);
    }

    fn pin(&mut self, row: i32, prefix: u64) -> Result<(), Fault> {
        let text = |error: specpool_core::Error| error.to_string();
        let len = self.ledger.prefix_len(prefix).map_err(text)?;
        let mut pages = Vec::new();
        for group in 0..self.ledger.num_groups() {
            let run = self.ledger.prefix_pages(prefix, group).map_err(text)?;
            pages.push(run.pages.iter().map(|page| page.0).collect());
        }
        let sequence = self.device.sequence(row, len);
        if sequence.len() < len as usize {
            return Err(format!("a prefix of {len} tokens of row {row}, which has {} written", sequence.len()));
        }
        let is_lost = self.device.rows[row as usize].is_lost;
        let text = self.text(row, len).unwrap_or_default();
        self.prefixes.insert(prefix, Prefix { sequence, text, pages, is_lost });
        self.collect_pinned();
        Ok(())
    }

    /// Checks that the pages of a prefix still hold its tokens: who reads them, as a sender does, may take its time.
    fn check_kept(&self, prefix: u64) -> Result<(), Fault> {
        let Some(pinned) = self.prefixes.get(&prefix).filter(|pinned| !pinned.is_lost) else { return Ok(()) };
        let text = |error: specpool_core::Error| error.to_string();
        let drafted = self.ledger.prefix_drafted_len(prefix).map_err(text)?;
        for group in 0..self.ledger.num_groups() {
            let run = self.ledger.prefix_pages(prefix, group).map_err(text)?;
            self.device.check_kept(group, run, &pinned.sequence, drafted)?;
        }
        let slot = self.ledger.prefix_state_slot(prefix).map_err(text)?;
        if slot.0 == 0 { Ok(()) } else { self.device.check_slot(slot.at(), &pinned.sequence) }
    }

    /// The slots that exports hold.
    fn exported_slots(&self) -> impl Iterator<Item = usize> {
        let slots = self.ledger.prefixes().filter_map(|prefix| self.ledger.prefix_state_slot(prefix).ok());
        slots.map(specpool_core::Page::at).filter(|&slot| slot != 0)
    }

    /// The loan's pages of the tokens `[start, end)`, group after group.
    fn loaned(&self, loan: &Loan, start: i32, end: i32) -> Vec<i32> {
        let of_group = |group: usize| {
            let page_size = self.ledger.group_spec(group).map_or(1, |spec| spec.page_size);
            let column = |len: i32| (i64::from(len) / page_size) as usize;
            loan.pages[group][column(start)..column(end)].to_vec()
        };
        (0..loan.pages.len()).flat_map(of_group).collect()
    }

    /// A row on the first `len` tokens of a loan.
    pub(crate) fn admit_lent(&self, loan: usize, length: i32) -> Call<'static> {
        Call::AdmitLent { length, pages: self.loaned(&self.loans[loan], 0, length).into() }
    }

    /// The rebind of a row to a loan's pages; 0 for those that the row does not hold.
    pub(crate) fn rebind(&self, loan: usize, row: i32, start: i32, end: i32) -> Call<'static> {
        let mut pages = self.loaned(&self.loans[loan], start, end);
        let mut first = 0;
        for group in 0..self.pinned.len() {
            let page_size = self.ledger.group_spec(group).map_or(1, |spec| spec.page_size);
            let evicted = self.ledger.evicted_len(group).map_or(0, |lens| i64::from(lens[row as usize]));
            let count = (i64::from(end - start) / page_size) as usize;
            let gone = ((evicted - i64::from(start)) / page_size).clamp(0, count as i64) as usize;
            pages[first..first + gone].fill(0);
            first += count;
        }
        Call::Rebind { row, start, end, pages: pages.into() }
    }

    /// Notes what a cache outside can find now that the row's pages up to `end` are lent.
    fn note_loan(&mut self, row: i32, end: i32) -> Result<(), Fault> {
        let sequence = self.device.sequence(row, end);
        if sequence.len() < end as usize {
            return Err(format!("{end} tokens of row {row} are lent, {} are written", sequence.len()));
        }
        let text = |error: specpool_core::Error| error.to_string();
        let (mut pages, mut is_whole) = (Vec::new(), true);
        for group in 0..self.ledger.num_groups() {
            let page_size = self.ledger.group_spec(group).map_err(text)?.page_size;
            let columns = (i64::from(end) / page_size) as usize;
            let cells = &self.ledger.page_table(group).map_err(text)?.row(specpool_core::Row(row))[..columns];
            let lent = self.ledger.lent_pages(group).map_err(text)?;
            is_whole &= cells.iter().all(|page| *page == 0 || lent.contains(page));
            pages.push(cells.to_vec());
        }
        if is_whole {
            self.loans.retain(|loan| !loan.pages.iter().zip(&pages).all(|(old, new)| new.starts_with(old)));
            self.loans.push(Loan { sequence, pages });
        }
        self.collect_pinned();
        Ok(())
    }

    /// What the row computed and what the loan has are the same tokens: the caller of the rebind says so.
    fn equate(&mut self, row: i32, start: i32, end: i32, pages: &[i32]) -> Result<(), Fault> {
        if pages.iter().all(|&page| page == 0) {
            return Ok(()); // The row's window has passed the range.
        }
        let is_it = |loan: &&Loan| {
            let theirs = if loan.len() < end { Vec::new() } else { self.loaned(loan, start, end) };
            theirs.len() == pages.len() && theirs.iter().zip(pages).all(|(loaned, page)| *page == 0 || loaned == page)
        };
        let loan = self.loans.iter().find(is_it);
        let loan = loan.ok_or_else(|| format!("a rebind to {pages:?}, which no loan has"))?;
        for (at, new) in (start as usize..end as usize).zip(loan.sequence[start as usize..end as usize].to_vec()) {
            let old = self.device.rows[row as usize].sequence[at];
            self.device.equate(old, new);
            self.connector.iter_mut().for_each(|connector| connector.equate(old, new));
            let sequences = self.prefixes.values_mut().map(|prefix| &mut prefix.sequence);
            let sequences = sequences.chain(self.loans.iter_mut().map(|loan| &mut loan.sequence));
            sequences.flatten().filter(|tag| **tag == old).for_each(|tag| *tag = new);
        }
        Ok(())
    }

    fn collect_pinned(&mut self) {
        for (group, pinned) in self.pinned.iter_mut().enumerate() {
            pinned.clear();
            self.prefixes.values().for_each(|prefix| pinned.extend(&prefix.pages[group]));
            pinned.extend(self.ledger.lent_pages(group).unwrap_or_default());
        }
    }

    /// Takes the delta right after the launch and enqueues it.
    fn launch(&mut self, step: u64) -> Result<(), Fault> {
        self.check_written_slots(step)?;
        let text = |error: specpool_core::Error| error.to_string();
        let delta = self.ledger.take_delta(step).map_err(text)?;
        self.ledger.ack_delta(step).map_err(text)?;
        for (group, entries) in delta.iter().enumerate() {
            let table = self.ledger.page_table(group).map_err(text)?;
            for at in 0..entries.rows.len() {
                let cell = entries.rows[at] as usize * table.pages_per_row() + entries.columns[at] as usize;
                self.tail[group][cell] = entries.pages[at];
            }
            if self.tail[group] != table.cells() {
                return Err(format!("the delta of step {step} leaves the device's table of group {group} behind"));
            }
        }
        if let Some(flight) = self.flights.iter_mut().find(|flight| flight.plan.step == step) {
            flight.delta = Some(Arc::new(delta));
            if flight.plan.kind == StepKind::Extend {
                self.resets.retain(|row, _| !flight.plan.rows.contains(row));
            }
        }
        Ok(())
    }

    /// Runs a step that the ledger refused to launch, for [`Plant::LaunchStale`].
    ///
    /// # Errors
    /// What the device finds wrong with it.
    pub fn run_stale(&mut self) -> Result<(), Fault> {
        let Some(flight) = self.flights.iter().find(|flight| !flight.is_launched()) else { return Ok(()) };
        let forward = Forward { plan: Arc::clone(&flight.plan), delta: Vec::new(), copy_rows: Vec::new() };
        let accept_lens = vec![1; flight.plan.num_lanes()];
        self.device.run(&self.ledger, &self.pinned, &forward, &accept_lens, false)
    }

    fn run(&mut self, accept_lens: &[i32], fails: bool) -> Result<bool, Fault> {
        let Some(flight) = self.flights.iter_mut().find(|flight| flight.ran.is_none()) else { return Ok(false) };
        let Some(delta) = &flight.delta else { return Ok(false) };
        let copy_rows = flight.copy_rows.clone();
        let forward = Forward { plan: Arc::clone(&flight.plan), delta: delta.to_vec(), copy_rows };
        self.device.run(&self.ledger, &self.pinned, &forward, accept_lens, fails)?;
        flight.ran = Some(accept_lens.to_vec());
        flight.has_failed = fails;
        flight.delta = Some(Arc::default());
        self.reset_lengths();
        Ok(true)
    }

    /// Whether a copied tail waits for the next step.
    #[must_use]
    pub fn has_waiting_copies(&self) -> bool {
        !self.model.pending.is_empty()
    }

    /// Clears the free pages. Without page fencing a forward on its way may still read them.
    fn forget_free_pages(&mut self) {
        let is_quiet = self.flights.iter().all(|flight| !flight.is_launched() || flight.ran.is_some());
        if self.ledger.page_fencing() || is_quiet {
            self.device.forget_pages(|group, page| {
                let record = self.ledger.page_record(group, specpool_core::Page(page));
                record.is_ok_and(|record| record.state == specpool_core::PageState::Free)
            });
        }
    }

    /// Forgets the states and records that nobody may use again: a row may go back to its state without its unlaunched
    /// steps, and a launched step reads what it was prepared with.
    fn forget_free_states(&mut self) {
        let exported: Vec<usize> = self.exported_slots().collect();
        let Self { device, ledger, flights, .. } = self;
        let Some(mut states) = device.states.take() else { return };
        let device = &*device;
        let (Ok(slots), Ok(lens)) = (ledger.state_slot(0), ledger.state_len(0)) else { return };
        let coming: Vec<(i32, LaneFold)> = (flights.iter().filter(|flight| flight.ran.is_none()))
            .flat_map(|flight| (0..flight.plan.num_lanes()).map(|lane| (flight.plan.rows[lane], &flight.plan, lane)))
            .filter_map(|(row, plan, lane)| Some((row, device.fold(plan, lane)?)))
            .collect();
        let kept = |row: usize| ledger.kept_state(0, specpool_core::Row(row as i32)).ok().flatten();
        let marks = (1..slots.len()).filter_map(|row| ledger.soft_marks(0, specpool_core::Row(row as i32)).ok());
        let indexed = ledger.index_states(0).into_iter().flatten().map(|(_, slot, _)| slot.at());
        let kept_slots: Vec<usize> = marks.flatten().map(|(slot, _)| slot.at()).chain(indexed).collect();
        let is_held = |slot: usize| {
            let has = |row: usize| slots[row] as usize == slot || kept(row).is_some_and(|(kept, _)| kept.at() == slot);
            kept_slots.contains(&slot)
                || exported.contains(&slot)
                || (1..slots.len()).any(has)
                || coming.iter().any(|(_, fold)| fold.src == slot || fold.dst == slot)
        };
        let records = |row: usize| {
            let device_row = &device.rows[row];
            let is_live = ledger.is_live(specpool_core::Row(row as i32));
            let coming = coming.iter().filter(|&&(other, _)| other as usize == row).map(|(_, fold)| fold.from);
            let first = coming.chain(is_live.then_some(i64::from(lens[row]))).min().unwrap_or(i64::MAX);
            first..device_row.sequence.len() as i64
        };
        states.forget(is_held, records);
        self.device.states = Some(states);
    }

    /// Checks that no launched, incomplete step touches a slot that the plan has taken.
    fn check_taken_slots(&self, plan: &Plan) -> Result<(), Fault> {
        same_folds(plan, self.model.steps.last().ok_or("the model has no step")?)?;
        for (lane, &row) in plan.rows.iter().enumerate() {
            let Some(LaneFold { src, dst, .. }) = self.device.fold(plan, lane) else { return Ok(()) };
            let mut folds = self.folds_on_their_way();
            if dst != src
                && let Some((other, step, _)) = folds.find(|(.., fold)| dst != 0 && [fold.src, fold.dst].contains(&dst))
            {
                return Err(format!("row {row} takes slot {dst}, which step {step} of row {other} touches"));
            }
        }
        Ok(())
    }

    /// What launched, incomplete steps do with states: (row, step, fold). With one stream, none of it matters.
    fn folds_on_their_way(&self) -> impl Iterator<Item = (i32, u64, LaneFold)> {
        let is_launched = |flight: &&Flight| flight.is_launched() && !flight.is_complete && self.ledger.page_fencing();
        let plans = self.flights.iter().filter(is_launched).map(|flight| &flight.plan);
        plans.flat_map(|plan| {
            let fold = |lane| Some((plan.rows[lane], plan.step, self.device.fold(plan, lane)?));
            (0..plan.num_lanes()).filter_map(fold)
        })
    }

    /// Checks, at the launch of a step, that no checkpoint, no soft mark but its own, not the index, no export and nothing
    /// of another row has a slot that it writes, and that no launched step of another row writes a slot that it reads.
    fn check_written_slots(&self, step: u64) -> Result<(), Fault> {
        let text = |error: specpool_core::Error| error.to_string();
        let Some(flight) = self.flights.iter().find(|flight| flight.plan.step == step) else { return Ok(()) };
        let plan = &flight.plan;
        for (lane, &row) in plan.rows.iter().enumerate() {
            let Some(LaneFold { src, dst, to, .. }) = self.device.fold(plan, lane) else { return Ok(()) };
            let fault = |what: String| Err(format!("step {step} of row {row} {what}"));
            for (other, step, fold) in self.folds_on_their_way().filter(|&(other, ..)| other != row) {
                if dst != 0 && [fold.src, fold.dst].contains(&dst) {
                    return fault(format!("writes slot {dst}, which step {step} of row {other} touches"));
                }
                if src != 0 && src == fold.dst {
                    return fault(format!("reads slot {src}, which step {step} of row {other} writes"));
                }
            }
            for other in (1..=self.ledger.num_rows() as i32).filter(|_| dst != 0) {
                let slot = self.ledger.state_slot(0).map_err(text)?[other as usize] as usize;
                let kept = self.ledger.kept_state(0, specpool_core::Row(other)).map_err(text)?;
                if (other != row && slot == dst) || kept.is_some_and(|(kept, _)| kept.at() == dst) {
                    return fault(format!("writes slot {dst}, which row {other} or its checkpoint has"));
                }
                let mut marks = self.ledger.soft_marks(0, specpool_core::Row(other)).map_err(text)?;
                if marks.any(|(slot, len)| slot.at() == dst && (other != row || i64::from(len) != to)) {
                    return fault(format!("writes slot {dst}, which a soft mark of row {other} keeps"));
                }
            }
            if dst != 0 && self.ledger.index_states(0).map_err(text)?.any(|(_, slot, _)| slot.at() == dst) {
                return fault(format!("writes slot {dst}, which the index keeps"));
            }
            if self.exported_slots().any(|slot| slot == dst) {
                return fault(format!("writes slot {dst}, which an export holds"));
            }
        }
        Ok(())
    }

    fn forget_flights(&mut self) {
        self.flights.retain(|flight| !(flight.is_settled && flight.is_complete));
    }

    /// Checks what must hold in every state: the audit is clean, and the ledger equals its model.
    ///
    /// # Errors
    /// The difference.
    pub fn check(&self) -> Result<(), Fault> {
        self.ledger.check().map_err(|error| error.to_string())?;
        same(&self.ledger, &self.model, &mut Vec::new())?;
        self.check_pending()?;
        self.check_quiet_states()?;
        self.check_index()?;
        let is_lent = self.pinned.iter().any(|pages| !pages.is_empty());
        let nothing_left = self.admitted.is_empty() && self.flights.is_empty() && !is_lent;
        for group in 0..self.pinned.len() {
            let all = self.ledger.group_spec(group).map_err(|error| error.to_string())?.num_pages;
            let free = self.ledger.free_pages(group).map_err(|error| error.to_string())?
                + self.ledger.cached_pages(group).map_err(|error| error.to_string())?;
            if nothing_left && free as i64 != all {
                return Err(format!("nothing is left, but {free} of {all} pages of group {group} are free"));
            }
        }
        for (group, spec) in self.ledger.state_groups().iter().enumerate().filter(|_| nothing_left) {
            let free = self.ledger.free_state_slots(group).map_err(|error| error.to_string())?
                + self.ledger.cached_state_slots(group).map_err(|error| error.to_string())?;
            if free as i64 != spec.num_slots {
                return Err(format!("nothing is left, but {free} of {} state slots are free", spec.num_slots));
            }
        }
        Ok(())
    }

    /// Checks that the rows of which nothing is prepared or in flight have their states.
    fn check_quiet_states(&self) -> Result<(), Fault> {
        let is_coming =
            |row: &i32| self.flights.iter().any(|flight| flight.ran.is_none() && flight.plan.rows.contains(row));
        let is_quiet = |row: &&i32| !is_coming(row) && !self.device.rows[**row as usize].is_lost;
        self.admitted.iter().filter(is_quiet).try_for_each(|&row| self.device.check_states(&self.ledger, row))
    }

    /// Checks that every page of the index holds the KV of its text, and every slot the state of its text, unless the
    /// step that writes it has not run or has failed, or runs behind one of its row that has failed.
    fn check_index(&self) -> Result<(), Fault> {
        if self.device.text(0, 0).is_none() {
            return Ok(());
        }
        let texts = texts_of(&self.ledger);
        for (text, page) in &texts {
            let (found, tag) = (self.device.target[0][*page as usize], tags_of(text).pop());
            if Some(found) != tag {
                return Err(format!("page {page} of the index has KV of {found}, not of {text:?}"));
            }
        }
        let is_spoiled = |step: u64, row: i32| {
            let mut failed = self.flights.iter().filter(|flight| flight.has_failed && flight.plan.step <= step);
            failed.any(|flight| flight.plan.rows.contains(&row))
        };
        let is_uncertain = |slot: i32| {
            self.flights.iter().any(|Flight { plan, ran, .. }| {
                let mut lanes = plan.states.iter().flat_map(|folds| plan.rows.iter().zip(&folds.dst));
                lanes.any(|(&row, &dst)| dst == slot && (ran.is_none() || is_spoiled(plan.step, row)))
            })
        };
        for (group, _) in self.ledger.state_groups().iter().enumerate() {
            for (place, slot, len) in self.ledger.index_states(group).map_err(|error| error.to_string())? {
                let text = tags_of(&texts[place].0[..len as usize]);
                let checked = self.device.check_slot(slot.at(), &text);
                checked
                    .or_else(|fault| if is_uncertain(slot.0) { Ok(()) } else { Err(format!("the index: {fault}")) })?;
            }
        }
        Ok(())
    }

    /// Checks that every cell in which the device will differ from the ledger is pending.
    fn check_pending(&self) -> Result<(), Fault> {
        for (group, tail) in self.tail.iter().enumerate() {
            let table = self.ledger.page_table(group).map_err(|error| error.to_string())?.cells();
            if tail != table {
                let pending: Vec<u32> = self.ledger.pending_cells(group).collect();
                let is_lost = |&cell: &usize| tail[cell] != table[cell] && !pending.contains(&(cell as u32));
                if let Some(cell) = (0..table.len()).find(is_lost) {
                    return Err(format!("cell {cell} of group {group} has changed, but no delta says so"));
                }
            }
        }
        Ok(())
    }

    /// Everything that decides what can happen from here on, with arbitrary names replaced.
    pub fn write_normal_form(&self, names: &mut PageNames, with_deltas: bool, word: &mut impl FnMut(u64)) {
        names.clear();
        self.ledger.write_normal_form(names, word);
        let mut tables = self.device.tables.clone();
        for flight in &self.flights {
            let flags = [flight.is_launched(), flight.ran.is_some(), flight.has_failed, flight.is_settled];
            word(flags.iter().fold(u64::from(flight.is_complete), |bits, &flag| bits << 1 | u64::from(flag)));
            flight.ran.iter().flatten().for_each(|&len| word(len as u64));
            let plan = &flight.plan;
            if flight.is_launched() && !flight.is_complete {
                for fold in (0..plan.num_lanes()).filter_map(|lane| self.device.fold(plan, lane)) {
                    // What a step that has run did with states matters only as slots that it may still touch.
                    let ends = if flight.ran.is_none() { [fold.from as u64, fold.to as u64] } else { [0, 0] };
                    let slots = [fold.src, fold.dst].map(|slot| names.name(self.tail.len(), slot as i32));
                    slots.into_iter().chain(ends).for_each(&mut *word);
                }
            }
            let Some(delta) = flight.delta.as_ref().filter(|_| flight.ran.is_none()) else { continue };
            let lengths = [&plan.shapes, &plan.lo, &plan.hi, &plan.start, &plan.new_len];
            let claims = [&plan.allocated_before, &plan.allocated_after];
            lengths.into_iter().chain(claims).flatten().for_each(|&len| word(len as u64));
            word(u64::from(plan.writes_draft));
            flight.copy_rows.iter().for_each(|&row| word(row as u64));
            // A forward sees its rows in the table as it is then. Cells that it does not see are overwritten before
            // anyone does: what is pending covers them, which `check` makes sure of.
            for (group, entries) in delta.iter().enumerate() {
                let columns = tables[group].len() / self.device.rows.len();
                for at in 0..entries.rows.len() {
                    tables[group][entries.rows[at] as usize * columns + entries.columns[at] as usize] =
                        entries.pages[at];
                }
                for &row in &flight.plan.rows {
                    let cells = &tables[group][row as usize * columns..(row as usize + 1) * columns];
                    for &page in cells {
                        word(names.name(group, page));
                    }
                }
            }
        }
        for page in self.loans.iter().flat_map(|loan| loan.pages.iter().enumerate()) {
            page.1.iter().for_each(|&id| word(names.name(page.0, id)));
            word(u64::MAX);
        }
        self.write_contents(names, word);
        self.ledger.write_normal_pages(names, word);
        for group in (0..self.tail.len()).filter(|_| with_deltas) {
            let mut pending: Vec<u32> = self.ledger.pending_cells(group).collect();
            pending.sort_unstable();
            for cell in pending {
                word(cell.into());
            }
            word(u64::MAX);
        }
    }

    /// The sequences, with tags in order of appearance, and where their tokens lie.
    fn write_contents(&self, names: &PageNames, word: &mut impl FnMut(u64)) {
        let mut tags: Vec<Tag> = Vec::new();
        let mut sequence = |tokens: &[Tag], word: &mut dyn FnMut(u64)| {
            word(tokens.len() as u64);
            for &token in tokens {
                let index = tags.iter().position(|&tag| tag == token).unwrap_or_else(|| {
                    tags.push(token);
                    tags.len() - 1
                });
                word(index as u64);
            }
        };
        for (at, row) in self.device.rows.iter().enumerate().skip(1) {
            let waits = |flight: &Flight| flight.ran.is_none() && flight.plan.rows.contains(&(at as i32));
            if self.admitted.contains(&(at as i32)) || self.flights.iter().any(waits) {
                word(u64::from(row.is_lost) << 32 | self.resets.get(&(at as i32)).map_or(0, |&len| len as u64 + 1));
                sequence(&row.sequence, word);
                let text = self.text(at as i32, self.ledger.max_context_len());
                text.into_iter().flatten().for_each(|token| word(token as u64));
            }
        }
        for prefix in self.prefixes.values() {
            word(u64::from(prefix.is_lost));
            sequence(&prefix.sequence, word);
            prefix.text.iter().for_each(|&token| word(token as u64));
        }
        for loan in &self.loans {
            sequence(&loan.sequence, word);
        }
        if let Some(states) = &self.device.states {
            let name = |tag: Tag| tags.iter().position(|&other| other == tag).map_or(0, |index| index as u64 + 1);
            for ring in &states.rings {
                for record in ring {
                    word(record.map_or(0, |(position, tag)| (position as u64 + 1) << 32 | name(tag)));
                }
            }
            let mut slots: Vec<(u64, i32)> = names.named(self.tail.len()).map(|(slot, name)| (name, slot)).collect();
            slots.sort_unstable();
            for (_, slot) in slots {
                let text = states.slots[slot as usize].as_deref();
                word(text.map_or(u64::MAX, |text| text.len() as u64));
                text.into_iter().flatten().for_each(|&tag| word(name(tag)));
            }
        }
        for (group, (target, draft)) in self.device.target.iter().zip(&self.device.draft).enumerate() {
            let page_size =
                target.len() / (self.ledger.group_spec(group).map_or(0, |spec| spec.num_pages) as usize + 1);
            let mut pages: Vec<(u64, i32)> = names.named(group).map(|(page, name)| (name, page)).collect();
            pages.sort_unstable();
            for (_, page) in pages {
                let slots = page as usize * page_size..(page as usize + 1) * page_size;
                for &tag in target[slots.clone()].iter().chain(&draft[slots]) {
                    word(tags.iter().position(|&other| other == tag && tag != 0).map_or(0, |index| index as u64 + 1));
                }
            }
        }
    }
}

/// Checks that the step took what the estimate said.
fn check_estimate(plan: &Plan, estimate: &[i64]) -> Result<(), Fault> {
    for (group, estimate) in estimate.iter().enumerate() {
        let lanes = group * plan.num_lanes()..(group + 1) * plan.num_lanes();
        let claims = plan.allocated_after[lanes.clone()].iter().zip(&plan.allocated_before[lanes]);
        let taken: i64 = claims.map(|(&after, &before)| i64::from(after) - i64::from(before)).sum();
        if taken != *estimate {
            return Err(format!("step {} took {taken} slots of group {group}, the estimate was {estimate}", plan.step));
        }
    }
    Ok(())
}
