//! The device's recurrent states: slots that know the text of their state, and a ring of records for each row.
//!
//! A round at root s, of a lane whose plan says to fold `[from, to)`:
//!
//! ```text
//!   writes the records of its nodes at [s, s+N), then reads its slot (the state after `from` tokens) and the records
//!   of [from, s), writes the state after `to` tokens, and moves the records of accepted nodes to [s, s+accept_len)
//! ```

use std::sync::Arc;

use specpool_core::{Ledger, Plan, Row, StepKind};

use super::lane::Lane;
use super::{Device, Fault, Plant, Tag};

/// A record: the position and the token whose inputs it has; token 0 for a node that was not accepted.
type Record = (i64, Tag);

/// The slots and rings of a device.
#[derive(Debug, Clone)]
pub(crate) struct DeviceStates {
    /// By slot: the text of its state; `None` if nothing may rely on it. Slot 0 has the state of no text.
    pub(crate) slots: Vec<Option<Arc<[Tag]>>>,
    /// `[num_rows + 1, R]`, position q at `q % R`; `None` if nothing may rely on it.
    pub(crate) rings: Vec<Vec<Option<Record>>>,
    /// Whether a round of one node with nothing in flight folds its root.
    is_eager: bool,
}

/// What a lane does with its row's state, as the device understands the plan.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaneFold {
    pub(crate) src: usize,
    /// 0 if nothing is written.
    pub(crate) dst: usize,
    pub(crate) from: i64,
    pub(crate) to: i64,
}

impl LaneFold {
    fn of(plan: &Plan, lane: usize) -> Option<Self> {
        let folds = plan.states.as_ref()?;
        let slot = |slots: &[i32]| slots[lane] as usize;
        let (from, to) = (folds.from[lane].into(), folds.to[lane].into());
        Some(Self { src: slot(&folds.src), dst: slot(&folds.dst), from, to })
    }
}

impl DeviceStates {
    pub(super) fn new(ledger: &Ledger, plant: Option<Plant>) -> Option<Self> {
        let group = ledger.state_groups().first()?;
        let ring_len = ledger.state_ring_len(0).ok()? - i64::from(plant == Some(Plant::RingShort));
        let mut slots = vec![None; group.num_slots as usize + 1];
        slots[0] = Some(Arc::default());
        let rings = vec![vec![None; ring_len as usize]; ledger.num_rows() + 1];
        Some(Self { slots, rings, is_eager: group.eager })
    }

    fn record(&mut self, row: usize, position: i64, record: Option<Record>) {
        let ring = &mut self.rings[row];
        let place = position as usize % ring.len();
        ring[place] = record;
    }

    fn recorded(&self, row: usize, position: i64) -> Option<Record> {
        let ring = &self.rings[row];
        ring[position as usize % ring.len()]
    }

    /// What is in the slot, and the row's records, mean nothing from here on.
    pub(super) fn spoil(&mut self, row: usize, slot: usize) {
        if slot != 0 {
            self.slots[slot] = None;
        }
        self.rings[row].fill(None);
    }

    /// Forgets the slots that are not used, and every record outside of `[from, end)` of its row.
    pub(crate) fn forget(&mut self, is_used: impl Fn(usize) -> bool, records: impl Fn(usize) -> std::ops::Range<i64>) {
        for (slot, text) in self.slots.iter_mut().enumerate().skip(1) {
            if text.is_some() && !is_used(slot) {
                *text = None;
            }
        }
        for (row, ring) in self.rings.iter_mut().enumerate().filter(|(_, ring)| ring.iter().any(Option::is_some)) {
            let range = records(row);
            for record in ring.iter_mut() {
                *record = record.filter(|(position, _)| range.contains(position));
            }
        }
    }
}

impl Device {
    /// What a lane of the plan does with its row's state; `None` if there are no states.
    pub(crate) fn fold(&self, plan: &Plan, lane: usize) -> Option<LaneFold> {
        let mut fold = LaneFold::of(plan, lane)?;
        match self.plant {
            Some(Plant::WriteShared) if fold.src != 0 && fold.dst != 0 => fold.dst = fold.src,
            Some(Plant::ReadRecycled) if fold.src == 0 => fold.src = fold.dst,
            Some(Plant::FoldBack) if plan.kind == StepKind::Decode => {
                fold.from = fold.from.min(plan.start[lane].into());
            }
            _ => {}
        }
        Some(fold)
    }

    /// Checks that a row has its state, and those that its checkpoint and soft marks keep. Nothing of it is in flight.
    ///
    /// # Errors
    /// The slot that has another text.
    pub(crate) fn check_states(&self, ledger: &Ledger, row: i32) -> Result<(), Fault> {
        if self.states.is_none() {
            return Ok(());
        }
        let text = |error: specpool_core::Error| error.to_string();
        let its = (ledger.state_slot(0).map_err(text)?[row as usize], ledger.state_len(0).map_err(text)?[row as usize]);
        let kept = ledger.kept_state(0, Row(row)).map_err(text)?.map(|(slot, len)| (slot.0, len));
        let sequence = &self.rows[row as usize].sequence;
        let marks = ledger.soft_marks(0, Row(row)).map_err(text)?.map(|(slot, len)| (slot.0, len));
        for (slot, len) in [its].into_iter().chain(kept).chain(marks) {
            let Some(text) = sequence.get(..len as usize) else {
                return Err(format!("row {row}: slot {slot} has {len} tokens, the row {}", sequence.len()));
            };
            self.check_slot(slot as usize, text).map_err(|fault| format!("row {row}: {fault}"))?;
        }
        Ok(())
    }

    /// Checks that the slot has the state of this text.
    ///
    /// # Errors
    /// The text of which it has the state.
    pub(crate) fn check_slot(&self, slot: usize, text: &[Tag]) -> Result<(), Fault> {
        let found = self.states.as_ref().and_then(|states| states.slots[slot].as_deref());
        if found == Some(text) {
            Ok(())
        } else {
            Err(format!("slot {slot} has the state of {found:?}, not of {text:?}"))
        }
    }
}

impl Lane<'_> {
    fn nodes(&self) -> i64 {
        match self.plan.kind {
            StepKind::Extend => 0,
            StepKind::Decode => self.device.facts.shapes[self.plan.shapes[self.at] as usize].num_draft_tokens.into(),
        }
    }

    /// Writes the records of a round's nodes, which are not tokens yet.
    pub(super) fn record_nodes(&mut self, root: i64) {
        let nodes = self.nodes();
        if let Some(states) = &mut self.device.states {
            (root..root + nodes).for_each(|position| states.record(self.row, position, Some((position, 0))));
        }
    }

    /// Checks what the plan says of the row's state, and what the forward at `root` reads of it.
    pub(super) fn read_state(&mut self, root: i64) -> Result<(), Fault> {
        let Some(fold) = self.device.fold(self.plan, self.at) else { return Ok(()) };
        self.check_fold(fold.dst)?;
        let (device, nodes) = (&*self.device, self.nodes());
        let state = &device.rows[self.row];
        let Some(states) = device.states.as_ref().filter(|_| !state.is_lost) else { return Ok(()) };
        let LaneFold { src, from, .. } = fold;
        let text = &states.slots[src];
        if text.is_none() || text.as_deref() != state.sequence.get(..from as usize) {
            return self.fault(&format!("reads slot {src} for a state of {from} tokens: it is that of {text:?}"));
        }
        for position in from..root {
            let (record, token) = (states.recorded(self.row, position), state.sequence[position as usize]);
            if record != Some((position, token)) {
                return self.fault(&format!("reads the record of position {position}: {record:?}, not {token}"));
            }
        }
        if from < root && nodes > 0 {
            self.device.ring_reached = self.device.ring_reached.max(root + nodes - from);
        }
        Ok(())
    }

    /// Checks that the host knows both ends of the fold, that it goes forward, and that nobody else has the slot that
    /// it writes.
    fn check_fold(&self, written: usize) -> Result<(), Fault> {
        let (plan, at) = (self.plan, self.at);
        let Some(LaneFold { src, dst, from, to }) = LaneFold::of(plan, at) else { return Ok(()) };
        let is_eager = self.device.states.as_ref().is_some_and(|states| states.is_eager);
        let is_alone = plan.lo[at] == plan.start[at] && self.nodes() == 1;
        let resolved = match plan.kind {
            StepKind::Extend => plan.new_len[at],
            StepKind::Decode => plan.start[at] + i32::from(is_eager && is_alone),
        };
        // Behind an eager round, the state has one token more than the row.
        let is_known = to <= i64::from(resolved) || to == from;
        if from > to || !is_known || (dst != 0) != (from < to) || (src == 0) != (from == 0) {
            return self
                .fault(&format!("folds [{from}, {to}) of {resolved} resolved tokens from slot {src} into slot {dst}"));
        }
        if written == 0 || !self.device.facts.page_fencing {
            return Ok(()); // With one stream, the next owner of the slot writes it after this.
        }
        let text = |error: specpool_core::Error| error.to_string();
        let slots = self.ledger.state_slot(0).map_err(text)?;
        for other in (1..=self.ledger.num_rows()).filter(|&other| other != self.row) {
            let kept = self.ledger.kept_state(0, Row(other as i32)).map_err(text)?;
            if slots[other] as usize == written || kept.is_some_and(|(slot, _)| slot.at() == written) {
                return self.fault(&format!("writes slot {written}, which row {other} has"));
            }
        }
        Ok(())
    }

    /// Writes the folded state and the records of the tokens that stay. The row has its new tokens by now.
    pub(super) fn write_state(&mut self, root: i64) {
        let Some(LaneFold { dst, to, .. }) = self.device.fold(self.plan, self.at) else { return };
        let (plant, nodes, row) = (self.device.plant, self.nodes(), self.row);
        let Device { states: Some(states), rows, .. } = &mut *self.device else { return };
        let sequence = &rows[row].sequence;
        let end = sequence.len() as i64;
        if rows[row].is_lost {
            return states.spoil(row, dst);
        }
        let moved = if plant == Some(Plant::SkipCompaction) && nodes > 0 { root + 1 } else { end };
        for position in root.max(to).min(end)..end.max(root + nodes) {
            match position {
                _ if position < moved => states.record(row, position, Some((position, sequence[position as usize]))),
                _ if position >= end => states.record(row, position, None),
                _ => {}
            }
        }
        let folded = match plant {
            Some(Plant::FoldOneMore) => (to + 1).min(end),
            Some(Plant::FoldToRoot) if nodes > 0 => root.max(to),
            _ => to,
        };
        if dst != 0 {
            states.slots[dst] = Some(sequence[..folded as usize].into());
        }
    }

    /// The row's length and contents mean nothing: neither do the state that the lane writes and the records.
    pub(super) fn spoil_state(&mut self) -> Result<(), Fault> {
        let Some(fold) = self.device.fold(self.plan, self.at) else { return Ok(()) };
        self.check_fold(fold.dst)?;
        if let Some(states) = &mut self.device.states {
            states.spoil(self.row, fold.dst);
        }
        Ok(())
    }
}
