//! The prefix index of a ledger with one full group and pages of one token: every text that is known is an entry, with
//! the page of its last token.

use std::collections::BTreeSet;

use super::states::{Lapse, SlotId, State};
use super::{Holding, Model, Outcome, PageId, Refusal};

/// What the index has of a text.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// The page of the last token.
    pub(crate) page: PageId,
    /// Whether the last token has draft KV.
    is_drafted: bool,
    /// The state of the text.
    pub(crate) state: Option<SlotId>,
}

impl Model {
    /// Pages that the index holds.
    pub(super) fn indexed_pages(&self) -> BTreeSet<PageId> {
        self.entries.values().map(|entry| entry.page).collect()
    }

    pub(crate) fn index(&mut self, row: i32, tokens: &[i32], salt: &[u8]) -> Outcome {
        let row = self.live(row)?;
        if tokens.is_empty() || tokens.len() > self.rows[row].resolved as usize || salt.len() > 256 {
            return Err(Refusal::Shape);
        }
        if self.first_written(row) < tokens.len() as i64 || self.has_unfinished_copy(row) {
            return Err(Refusal::NotReady);
        }
        let (drafted, mut known, mut own_end) = (self.rows[row].drafted, 0, 0);
        for len in 1..=tokens.len() {
            let page = self.rows[row].groups[0].table[&(len as i64 - 1)];
            let is_drafted = drafted as usize >= len;
            let is_elsewhere = self.entries.iter().any(|(text, entry)| entry.page == page && *text != tokens[..len]);
            match self.entries.get_mut(&tokens[..len]) {
                Some(entry) => {
                    if is_drafted && !entry.is_drafted && !is_elsewhere {
                        (entry.page, entry.is_drafted) = (page, true);
                    }
                    own_end = if entry.page == page { len } else { own_end };
                }
                None if is_elsewhere => break,
                None => {
                    self.entries.insert(tokens[..len].to_vec(), Entry { page, is_drafted, state: None });
                    own_end = len;
                }
            }
            self.shared.insert((0, self.entries[&tokens[..len]].page));
            known = len;
        }
        let held = &mut self.rows[row].groups[0];
        held.protected = held.protected.max(own_end as i64);
        self.shared.extend(held.table.range(..own_end as i64).map(|(_, &page)| (0, page)));
        self.index_states(row, &tokens[..known]);
        Ok(known as i64)
    }

    /// How many of the tokens are known.
    fn known(&self, tokens: &[i32]) -> usize {
        (1..=tokens.len()).take_while(|&len| self.entries.contains_key(&tokens[..len])).count()
    }

    pub(crate) fn admit_cached(
        &mut self,
        tokens: &[i32],
        salt: &[u8],
        limit: Option<i32>,
        needs_draft: bool,
    ) -> Outcome {
        if needs_draft || (!salt.is_empty() && salt.len() <= 256) {
            return Err(Refusal::Never("the model's index has one salt, and no other rule for draft KV".into()));
        }
        let longest = tokens.len().min(self.max_context_len as usize);
        let limit = limit.map_or((tokens.len() as i32 - 1).max(0).min(longest as i32), |limit| limit);
        if salt.len() > 256 || limit < 0 || limit as usize > longest {
            return Err(Refusal::Shape);
        }
        let known = self.known(&tokens[..limit as usize]);
        let serves = |slot: &SlotId| !self.is_waiting(*slot) || self.lapse == Some(Lapse::ServeWaiting);
        let state_of = |len: usize| {
            let of_length = |text: &[i32]| {
                text.len() == len && (text == &tokens[..len] || self.lapse == Some(Lapse::ServeOtherText))
            };
            let mut all = self.entries.iter().filter(|(text, _)| of_length(text)).filter_map(|(_, entry)| entry.state);
            Some(State { slot: all.find(serves)?, len: len as i32 })
        };
        let most = if self.lapse == Some(Lapse::ServeOtherText) { limit as usize } else { known };
        let state = (1..=most).rev().find_map(state_of);
        let len = if self.states.is_some() { state.map_or(0, |state| state.len) } else { known as i32 };
        self.check_free_row()?;
        let paths = || (1..=len.min(known as i32) as usize).map(|len| &self.entries[&tokens[..len]]);
        let drafted = paths().take_while(|entry| entry.is_drafted).count() as i32;
        let table = paths().enumerate().map(|(column, entry)| (column as i64, entry.page)).collect();
        let row = self.take_row_on(&[Holding { table, ..Holding::default() }], len, drafted);
        self.rows[row].state = state.unwrap_or_default();
        Ok(row as i64)
    }

    /// `forget` of one salt, or of everything.
    pub(crate) fn forget(&mut self, salt: Option<&[u8]>) -> Outcome {
        match salt {
            Some(salt) if salt.len() > 256 => return Err(Refusal::Shape),
            Some(salt) if !salt.is_empty() => return Ok(0),
            _ => self.lose_entries(|_| true),
        }
        Ok(0)
    }

    fn lose_entries(&mut self, is_lost: impl Fn(&[i32]) -> bool) {
        let outlives = self.lapse == Some(Lapse::OutliveKv);
        let lost = self.entries.iter().filter(|(text, _)| is_lost(text));
        let orphans: Vec<SlotId> = lost.filter_map(|(_, entry)| entry.state).filter(|_| outlives).collect();
        self.kept.orphans.extend(orphans);
        self.entries.retain(|text, _| !is_lost(text));
    }

    /// The ledger has these texts. What is missing was cached, or lay behind what was.
    pub(super) fn observe_entries(&mut self, texts: &BTreeSet<Vec<i32>>) -> Result<(), String> {
        let is_lost = |text: &[i32]| !texts.contains(text);
        if let Some(text) = texts.iter().find(|text| !self.entries.contains_key(*text)) {
            return Err(format!("the ledger's index has {text:?}, the model's does not"));
        }
        let cached = self.cached(0);
        let lost: Vec<PageId> =
            self.entries.iter().filter(|(text, _)| is_lost(text)).map(|(_, entry)| entry.page).collect();
        let num_freed = lost.iter().filter(|page| cached.contains(page)).count();
        let in_use = self.held_pages(0).len() + self.fenced_pages(0) + cached.len();
        let lacking = in_use.saturating_sub(self.groups[0].num_pages);
        if num_freed != lacking || (lacking == 0 && !lost.is_empty()) {
            return Err(format!("{num_freed} cached pages and {} entries went, {lacking} were lacking", lost.len()));
        }
        self.lose_entries(is_lost);
        Ok(())
    }
}
