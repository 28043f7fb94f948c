//! The questions that a ledger answers. Nothing here changes it.

use std::sync::Arc;

use super::Ledger;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::ids::{Page, Row, ceil_div};
use crate::memory::{collected, filled, gathered};
use crate::shape::Shape;
use crate::state::group::{Group, GroupState};
use crate::state::page_pool::PageRecord;
use crate::state::page_table::PageTable;
use crate::state::sizing::Policy;
use crate::state::state_group::{StateGroup, StateSlots};
use crate::state::step::{Plan, StepKind, StepState};

impl Ledger {
    /// A group's index, checked.
    pub(crate) fn group(&self, group: usize) -> Result<&GroupState> {
        self.groups.get(group).ok_or_else(|| Error::Shape(format!("group {group} is not in 0..{}", self.groups.len())))
    }

    /// What the group was built from.
    ///
    /// # Errors
    /// [`Error::Shape`] when there is no such group; the same in every query that takes a group.
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

    /// The policy: how much is reserved for a round.
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

    /// Cells of the group's table that hold a page, over all rows. O(1).
    ///
    /// # Errors
    /// As [`Ledger::group_spec`].
    pub fn held_cells(&self, group: usize) -> Result<usize> {
        Ok(self.group(group)?.table.num_held())
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

    /// Pages of the group that pinned prefixes hold, each counted once.
    ///
    /// # Errors
    /// As [`Ledger::group_spec`].
    pub fn pinned_pages(&self, group: usize) -> Result<usize> {
        self.group(group)?;
        let mut pages = gathered(self.prefix_holders(group), "the pages of prefixes")?;
        pages.sort_unstable();
        pages.dedup();
        Ok(pages.len())
    }

    /// Pages of the group whose every holder, besides the prefix index, is an idle row.
    ///
    /// # Errors
    /// As [`Ledger::group_spec`].
    pub fn reclaimable_pages(&self, group: usize) -> Result<usize> {
        Ok(self.group(group)?.pool.num_reclaimable())
    }

    /// Pages of each group that these rows hold, and how many of them are shared: two times `[lanes * groups]`, lane by
    /// lane. A row holds no page twice, but two rows may hold the same shared page. Pages that only a checkpoint keeps
    /// are not counted. O(rows + lanes * groups).
    ///
    /// # Errors
    /// [`Error::Shape`] for a row that is not admitted or is named twice; [`Error::OutOfMemory`].
    pub fn held_pages(&self, rows: &[i32]) -> Result<(Vec<i64>, Vec<i64>)> {
        self.check_rows(rows, "rows", rows.len())?;
        let num_groups = self.groups.len();
        let mut held = filled(0, rows.len() * num_groups, "the pages of rows")?;
        let mut shared = filled(0, rows.len() * num_groups, "the pages of rows")?;
        for (at, group) in self.groups.iter().enumerate() {
            let size = group.page_size;
            for (lane, &row) in rows.iter().enumerate() {
                let row = row as usize;
                let evicted = i64::from(group.evicted[row]) / size;
                // The pages of the sink lie before those that the window has passed.
                let sinks = ceil_div(group.spec.sink, size).min(evicted);
                let protected = ceil_div(group.protected[row].into(), size);
                held[lane * num_groups + at] = i64::from(group.allocated[row]) / size - evicted + sinks;
                shared[lane * num_groups + at] = (protected - evicted).max(0) + protected.min(sinks);
            }
        }
        Ok((held, shared))
    }

    /// Pages of each group, 0 or 1, of which the first `len` tokens of a row fill only a part. A row that begins with
    /// as many tokens of another one's text copies these pages.
    ///
    /// # Errors
    /// [`Error::Shape`] for a negative length; [`Error::OutOfMemory`].
    pub fn tail_pages(&self, len: i32) -> Result<Vec<i64>> {
        if len < 0 {
            return Err(Error::Shape(format!("length must be at least 0, got {len}")));
        }
        let is_partial = |group: &GroupState| i64::from(i64::from(len) % group.page_size != 0);
        collected(self.groups.iter().map(is_partial), "the pages of a length")
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

    /// The ownership map of every page of the group, page 0 first.
    ///
    /// # Errors
    /// As [`Ledger::group_spec`]; [`Error::OutOfMemory`].
    pub fn ownership_map(&self, group: usize) -> Result<Vec<PageRecord>> {
        collected(self.page_records(group, false)?, "an ownership map")
    }

    /// The lines of the ownership map, page 0 first. With `taken`, they end at the last page that was ever handed out;
    /// all pages behind it are free.
    ///
    /// # Errors
    /// As [`Ledger::group_spec`].
    pub fn page_records(&self, group: usize, taken: bool) -> Result<impl ExactSizeIterator<Item = PageRecord>> {
        let pool = &self.group(group)?.pool;
        Ok(pool.records(if taken { pool.num_mapped() - 1 } else { pool.num_pages() }))
    }

    /// The rows that are admitted, ascending.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn live_rows(&self) -> Result<Vec<i32>> {
        let live = self.rows.live.iter().enumerate().filter(|&(_, &is_live)| is_live);
        gathered(live.map(|(row, _)| row as i32), "the rows that are admitted")
    }

    /// `int32 [num_rows + 1]`: slots that each row holds in the group.
    ///
    /// # Errors
    /// As [`Ledger::group_spec`].
    pub fn allocated_len(&self, group: usize) -> Result<&[i32]> {
        Ok(&self.group(group)?.allocated)
    }

    /// `int32 [num_rows + 1]`: r, tokens whose KV is final. From an extend's preparation on it is the new length.
    #[must_use]
    pub fn resolved_len(&self) -> &[i32] {
        &self.rows.resolved
    }

    /// `int32 [num_rows + 1]`: k, rounds that are prepared and not resolved. `kv_committed_len` is r + k.
    #[must_use]
    pub fn in_flight(&self) -> &[i32] {
        &self.rows.in_flight
    }

    /// `int32 [num_rows + 1]`: draft KV is valid below this.
    #[must_use]
    pub fn drafted_len(&self) -> &[i32] {
        &self.rows.drafted
    }

    /// `int32 [num_rows + 1]`: p, tokens at the row's start in the group whose pages others may read; they are never
    /// written again. A multiple of P, unless the prefix index holds a partly filled page of the row.
    ///
    /// # Errors
    /// As [`Ledger::group_spec`].
    pub fn protected_len(&self, group: usize) -> Result<&[i32]> {
        Ok(&self.group(group)?.protected)
    }

    /// `int32 [num_rows + 1]`: e, slots below the row's window that were given back in the group, all but those of the
    /// sink; a multiple of P.
    ///
    /// # Errors
    /// As [`Ledger::group_spec`].
    pub fn evicted_len(&self, group: usize) -> Result<&[i32]> {
        Ok(&self.group(group)?.evicted)
    }

    /// `bool [num_rows + 1]`: whether the row is between two turns of a session; its pages are reclaimable then.
    #[must_use]
    pub fn idle(&self) -> &[bool] {
        &self.rows.idle
    }

    /// Tokens of the row's checkpoint, which `end_turn` set; `None` if there is no checkpoint or no such row.
    #[must_use]
    pub fn checkpoint_len(&self, row: Row) -> Option<i32> {
        self.rows.check_live(row.0).ok().and_then(|row| self.rows.checkpoint(row))
    }

    /// Checks that a decode prepared now could be launched at once, and that nobody has to read its plan.
    ///
    /// # Errors
    /// [`Error::Order`] when another step waits to be launched, or page copies wait for the next step; [`Error::Shape`]
    /// when there is a state group.
    pub fn check_lone_decode(&self) -> Result<()> {
        if let Some(group) = self.state_groups().first() {
            return Err(Error::Shape(format!("a step with state group {:?} has slots to read and write", group.name)));
        }
        if let Some(record) = self.steps.unlaunched().next() {
            return Err(Error::Order(format!("step {} is not launched: launch or cancel it first", record.plan.step)));
        }
        if !self.copies.is_empty() {
            return Err(Error::Order(format!("the next step carries page copies, {} of them", self.copies.len())));
        }
        Ok(())
    }

    /// What the state groups were built from; at most one.
    #[must_use]
    pub fn state_groups(&self) -> &[StateGroup] {
        self.states.as_ref().map_or(&[], |states| std::slice::from_ref(&states.spec))
    }

    fn state_slots(&self, group: usize) -> Result<&StateSlots> {
        self.states
            .iter()
            .nth(group)
            .ok_or_else(|| Error::Shape(format!("state group {group} is not in 0..{}", self.state_groups().len())))
    }

    /// `int32 [num_rows + 1]`: the state slot of each row; 0 before its first fold.
    ///
    /// # Errors
    /// [`Error::Shape`] when there is no such state group; the same in every query that takes one.
    pub fn state_slot(&self, group: usize) -> Result<&[i32]> {
        Ok(&self.state_slots(group)?.slot)
    }

    /// `int32 [num_rows + 1]`: c, tokens that each row's state contains. A prepare moves it.
    ///
    /// # Errors
    /// As [`Ledger::state_slot`].
    pub fn state_len(&self, group: usize) -> Result<&[i32]> {
        Ok(&self.state_slots(group)?.len)
    }

    /// The state slot that `end_turn` keeps for the row, and the tokens that it contains; `None` if it keeps none, or
    /// there is no such row.
    ///
    /// # Errors
    /// As [`Ledger::state_slot`].
    pub fn kept_state(&self, group: usize, row: Row) -> Result<Option<(Page, i32)>> {
        let states = self.state_slots(group)?;
        Ok(self.rows.check_live(row.0).ok().and_then(|row| states.mark(row)))
    }

    /// State slots that can be taken now.
    ///
    /// # Errors
    /// As [`Ledger::state_slot`].
    pub fn free_state_slots(&self, group: usize) -> Result<usize> {
        Ok(self.state_slots(group)?.pool.num_free())
    }

    /// State slots that were given back but that a launched step may still touch.
    ///
    /// # Errors
    /// As [`Ledger::state_slot`].
    pub fn fenced_state_slots(&self, group: usize) -> Result<usize> {
        Ok(self.state_slots(group)?.pool.num_fenced())
    }

    /// State slots whose every holder is an idle row.
    ///
    /// # Errors
    /// As [`Ledger::state_slot`].
    pub fn reclaimable_state_slots(&self, group: usize) -> Result<usize> {
        Ok(self.state_slots(group)?.pool.num_reclaimable())
    }

    /// State slots that only soft marks and the prefix index hold. They can be handed out, after those that are free.
    ///
    /// # Errors
    /// As [`Ledger::state_slot`].
    pub fn cached_state_slots(&self, group: usize) -> Result<usize> {
        Ok(self.state_slots(group)?.pool.num_cached())
    }

    /// The state slots that the row's soft marks keep, and the tokens that each contains, in the order in which the
    /// marks were left. O(soft marks).
    ///
    /// # Errors
    /// As [`Ledger::state_slot`].
    pub fn soft_marks(&self, group: usize, row: Row) -> Result<impl Iterator<Item = (Page, i32)>> {
        Ok(self.state_slots(group)?.kept.marks_of(row))
    }

    /// The states of the prefix index: for each its entry, as a place among [`Ledger::index_entries`], its slot, and the
    /// tokens that the slot contains; the longest state of an entry first. O(entries).
    ///
    /// # Errors
    /// As [`Ledger::state_slot`].
    pub fn index_states(&self, group: usize) -> Result<impl Iterator<Item = (usize, Page, i32)>> {
        let kept = &self.state_slots(group)?.kept;
        let entries = self.index.all().enumerate();
        Ok(entries.flat_map(|(at, entry)| kept.of_entry(entry, i32::MAX).map(move |state| (at, state.slot, state.len))))
    }

    /// R: records that the device's ring of one row must hold; the record of position p lies at `p % R`. It is enough
    /// also if a forward writes the records of its nodes before it reads older ones.
    ///
    /// # Errors
    /// As [`Ledger::state_slot`].
    pub fn state_ring_len(&self, group: usize) -> Result<i64> {
        self.state_slots(group)?.spec.ring_len(&self.shapes, self.overlap_depth.into())
    }

    /// The embedder's name for the row's request, also after its release.
    #[must_use]
    pub fn tag(&self, row: Row) -> Option<&str> {
        self.rows.tags.get(usize::try_from(row.0).ok()?)?.as_deref()
    }

    /// Whether the row is admitted.
    #[must_use]
    pub fn is_live(&self, row: Row) -> bool {
        self.rows.check_live(row.0).is_ok()
    }

    /// The steps in flight, oldest first: number, kind and state. A step that is over stays listed while an older one
    /// waits for its resolve.
    pub fn steps(&self) -> impl Iterator<Item = (u64, StepKind, StepState)> {
        self.steps.states().map(|(record, state)| (record.plan.step, record.plan.kind, state))
    }

    /// The plan of a step that is not over.
    #[must_use]
    pub fn plan_of(&self, step: u64) -> Option<&Arc<Plan>> {
        self.steps.get(step).map(|record| &record.plan)
    }

    /// Whether the row's tokens allow a round: an extend of the row has launched since it was admitted or cut shorter.
    #[must_use]
    pub fn has_root(&self, row: Row) -> bool {
        self.rows.check_live(row.0).is_ok_and(|row| self.rows.ready[row.at()])
    }

    /// The last step up to which every step has finished on the device.
    #[must_use]
    pub fn completed(&self) -> u64 {
        self.steps.completed()
    }

    /// The ids of the pinned prefixes, ascending.
    pub fn prefixes(&self) -> impl Iterator<Item = u64> {
        self.prefixes.iter().map(|&(id, _)| id)
    }

    /// Tokens of a pinned prefix.
    ///
    /// # Errors
    /// [`Error::Shape`] when there is no such prefix.
    pub fn prefix_len(&self, prefix: u64) -> Result<i32> {
        Ok(self.prefix(prefix)?.len)
    }

    /// Most tokens of one extend; `None` if there is no limit.
    #[must_use]
    pub fn max_chunk(&self) -> Option<i32> {
        Some(self.max_chunk).filter(|&chunk| chunk < i32::MAX)
    }

    /// Whether `end_turn` may be used in window groups.
    #[must_use]
    pub fn sessions(&self) -> bool {
        self.sessions
    }

    /// Whether freed pages wait for launched steps.
    #[must_use]
    pub fn page_fencing(&self) -> bool {
        self.page_fencing
    }

    /// Whether [`Ledger::close`] was called.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// The running hash over every state-changing call that succeeded and the ids that it gave; `None` if it is not
    /// kept. It is equal on ranks that made the same calls.
    #[must_use]
    pub fn digest(&self) -> Option<u64> {
        self.recorder.digest.map(Digest::value)
    }

    /// A hash of everything that decides what the ledger will do, O(rows + pages in use): lengths, tables, epochs,
    /// page states, the order of free and cached pages and of free rows, waiting copies, prefixes, the prefix index,
    /// state slots, what keeps them, and steps in flight. It leaves out tags, deltas, the counters of steps, prefixes and
    /// snapshots, the step that a page was taken for, and the digest. So a cancel restores it, unless the prepare
    /// evicted pages or states.
    #[must_use]
    pub fn state_hash(&self) -> u64 {
        let mut digest = Digest::new();
        self.rows.hash(&mut digest);
        self.steps.hash(&mut digest);
        self.copies.iter().for_each(|copy| copy.hash(&mut digest));
        for group in &self.groups {
            group.hash(&mut digest);
        }
        if let Some(states) = &self.states {
            states.hash(&mut digest, self.index.all(), self.steps.completed());
        }
        for (id, prefix) in &self.prefixes {
            digest.word(*id);
            prefix.hash(&mut digest);
        }
        self.index.hash(&mut digest);
        digest.value()
    }

    /// `uint64 [num_rows + 1]`: bumped by every release of the row (`trim`, `end_turn`,
    /// `abandon`, `retract`, `finish`, `abort`).
    #[must_use]
    pub fn epoch(&self) -> &[u64] {
        &self.rows.epoch
    }

    pub(crate) fn page_error(&self, group: usize, record: PageRecord) -> Error {
        self.record_error(&self.groups[group].spec.name, record)
    }

    pub(crate) fn record_error(&self, group: &str, record: PageRecord) -> Error {
        Error::PageState {
            group: group.into(),
            page: record.page.at(),
            state: record.state.to_string(),
            owner: format!(
                "{} (since step {}, last {})",
                self.rows.describe(record.owner),
                record.birth_step,
                record.last_verb
            ),
        }
    }
}
