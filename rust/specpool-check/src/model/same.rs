//! Compares everything that a ledger can be asked with what the model says.

use std::collections::BTreeMap;
use std::fmt::Debug;

use specpool_core::{Ledger, Page, PageState, Row};

use super::kept::texts_of;
use super::{Model, PageId};

/// Per group: the ledger's page of each page of the model that was seen in a table. The slots of states are those of
/// one more group.
pub(crate) type PageMap = Vec<BTreeMap<PageId, i32>>;

#[allow(clippy::needless_pass_by_value, reason = "mostly numbers")]
fn equal<T: PartialEq + Debug>(what: &str, at: usize, actual: T, expected: T) -> Result<(), String> {
    if actual == expected {
        Ok(())
    } else {
        Err(format!("{what} of {at}: the ledger says {actual:?}, the model {expected:?}"))
    }
}

/// Compares all lengths, counts and tables. `pages` remembers the mapping of pages from one call to the next.
pub(crate) fn same(ledger: &Ledger, model: &Model, pages: &mut PageMap) -> Result<(), String> {
    let text = |error: specpool_core::Error| error.to_string();
    for (at, row) in model.rows.iter().enumerate() {
        let id = Row(at as i32);
        equal("is_live", at, ledger.is_live(id), row.live)?;
        equal("resolved_len", at, ledger.resolved_len()[at], row.resolved)?;
        equal("in_flight", at, ledger.in_flight()[at], row.rounds.len() as i32)?;
        equal("drafted_len", at, ledger.drafted_len()[at], row.drafted)?;
        equal("epoch", at, ledger.epoch()[at], row.epoch)?;
        equal("idle", at, ledger.idle()[at], row.idle)?;
        equal("checkpoint_len", at, ledger.checkpoint_len(id), row.checkpoint)?;
        equal("has_root", at, ledger.has_root(id), row.has_root)?;
        for (group, held) in row.groups.iter().enumerate() {
            equal("allocated_len", at, i64::from(ledger.allocated_len(group).map_err(text)?[at]), held.allocated)?;
            equal("protected_len", at, i64::from(ledger.protected_len(group).map_err(text)?[at]), held.protected)?;
            equal("evicted_len", at, i64::from(ledger.evicted_len(group).map_err(text)?[at]), held.evicted)?;
        }
    }
    pages.resize(model.groups.len() + 1, BTreeMap::new());
    for (group, names) in pages.iter_mut().enumerate().take(model.groups.len()) {
        equal("free pages", group, ledger.free_pages(group).map_err(text)?, model.free_pages(group))?;
        equal("cached pages", group, ledger.cached_pages(group).map_err(text)?, model.cached(group).len())?;
        equal("fenced pages", group, ledger.fenced_pages(group).map_err(text)?, model.fenced_pages(group))?;
        let reclaimable = ledger.reclaimable_pages(group).map_err(text)?;
        equal("reclaimable pages", group, reclaimable, model.reclaimable_pages(group))?;
        let lent = model.lent.keys().filter(|(at, _)| *at == group).map(|&(_, name)| name).collect();
        equal("lent pages", group, ledger.lent_pages(group).map_err(text)?, lent)?;
        same_pages(ledger, model, group, names)?;
    }
    same_states(ledger, model, &mut pages[model.groups.len()])?;
    equal("free rows", 0, ledger.num_free_rows(), model.num_free_rows())?;
    equal("completed", 0, ledger.completed(), model.completed)?;
    equal("prefixes", 0, ledger.prefixes().collect::<Vec<_>>(), model.prefixes.keys().copied().collect())
}

/// Checks that rows and checkpoints have the model's states, under the ledger's names, and counts the slots.
fn same_states(ledger: &Ledger, model: &Model, names: &mut BTreeMap<PageId, i32>) -> Result<(), String> {
    if model.states.is_none() {
        return Ok(());
    }
    let text = |error: specpool_core::Error| error.to_string();
    let kept = model.kept_slots();
    names.retain(|slot, _| kept.contains(slot) || !model.slot_holders(*slot).is_empty());
    for (at, row) in model.rows.iter().enumerate() {
        let slot = ledger.state_slot(0).map_err(text)?[at];
        equal("state_len", at, ledger.state_len(0).map_err(text)?[at], row.state.len)?;
        let expected = if row.state.slot == 0 { 0 } else { *names.entry(row.state.slot).or_insert(slot) };
        equal("state_slot", at, slot, expected)?;
        let kept = ledger.kept_state(0, Row(at as i32)).map_err(text)?.map(|(slot, len)| (slot.0, len));
        let seen = kept.map_or(0, |(slot, _)| slot);
        let expected = row.kept.map(|state| (*names.entry(state.slot).or_insert(seen), state.len));
        equal("kept_state", at, kept, expected)?;
        let marks: Vec<_> =
            ledger.soft_marks(0, Row(at as i32)).map_err(text)?.map(|(slot, len)| (slot.0, len)).collect();
        let mut seen = marks.iter().map(|&(slot, _)| slot);
        let expected =
            model.marks_of(at).map(|state| (*names.entry(state.slot).or_insert(seen.next().unwrap_or(0)), state.len));
        equal("soft_marks", at, &marks, &expected.collect())?;
    }
    same_index_states(ledger, model, names)?;
    let mut distinct: Vec<i32> = names.values().copied().collect();
    distinct.sort_unstable();
    distinct.dedup();
    equal("distinct slots", 0, distinct.len(), names.len())?;
    equal("free slots", 0, ledger.free_state_slots(0).map_err(text)?, model.free_slots())?;
    equal("cached slots", 0, ledger.cached_state_slots(0).map_err(text)?, model.cached_slots())?;
    equal("fenced slots", 0, ledger.fenced_state_slots(0).map_err(text)?, model.fenced_slots())?;
    equal("reclaimable slots", 0, ledger.reclaimable_state_slots(0).map_err(text)?, model.reclaimable_slots())
}

/// Checks that the index has the model's states, each of its own text.
fn same_index_states(ledger: &Ledger, model: &Model, names: &mut BTreeMap<PageId, i32>) -> Result<(), String> {
    let texts = texts_of(ledger);
    let indexed = ledger.index_states(0).map_err(|error| error.to_string())?;
    let actual: BTreeMap<_, _> =
        indexed.map(|(place, slot, len)| (texts[place].0[..len as usize].to_vec(), slot.0)).collect();
    let mut expected = BTreeMap::new();
    for (text, slot) in model.entries.iter().filter_map(|(text, entry)| Some((text, entry.state?))) {
        let seen = actual.get(text).copied().unwrap_or(0);
        expected.insert(text.clone(), *names.entry(slot).or_insert(seen));
    }
    equal("index_states", 0, actual, expected)
}

/// Checks that the tables hold the model's pages under the ledger's names, each with its state and its holders.
fn same_pages(ledger: &Ledger, model: &Model, group: usize, names: &mut BTreeMap<PageId, i32>) -> Result<(), String> {
    let text = |error: specpool_core::Error| error.to_string();
    let held = model.held_pages(group);
    names.retain(|page, _| held.contains(page) || model.is_indexed(group, *page));
    let table = ledger.page_table(group).map_err(text)?;
    for (at, row) in model.rows.iter().enumerate() {
        for (column, &cell) in table.row(Row(at as i32)).iter().enumerate() {
            let page = row.groups[group].table.get(&(column as i64));
            let expected = page.map_or(0, |&page| *names.entry(page).or_insert(cell));
            equal("a cell", at, (column, cell), (column, expected))?;
        }
    }
    for (&(_, name), &(page, _)) in model.lent.iter().filter(|((at, _), _)| *at == group) {
        equal("a lent page", group, *names.entry(page).or_insert(name), name)?;
    }
    let texts: BTreeMap<_, _> = if group == 0 { texts_of(ledger).into_iter().collect() } else { BTreeMap::new() };
    let entries = model.entries.iter().filter(|_| group == 0);
    equal("indexed texts", group, texts.keys().collect::<Vec<_>>(), entries.clone().map(|(text, _)| text).collect())?;
    for (text, entry) in entries {
        equal("an indexed page", group, texts[text], *names.entry(entry.page).or_insert(texts[text]))?;
    }
    let mut distinct: Vec<i32> = names.values().copied().collect();
    distinct.sort_unstable();
    distinct.dedup();
    equal("distinct pages", group, distinct.len(), names.len())?;
    for (&page, &name) in names.iter() {
        let record = ledger.page_record(group, Page(name)).map_err(text)?;
        let state = match (held.contains(&page), model.is_shared(group, page), model.is_touched(group, page)) {
            (true, true, _) => PageState::Shared,
            (true, false, _) => PageState::Owned,
            (false, _, true) => PageState::Fenced,
            (false, _, false) => PageState::Cached,
        };
        let holders = model.holders(group, page).len() + usize::from(model.is_indexed(group, page));
        equal("state and holders", name as usize, (record.state, record.holders as usize), (state, holders))?;
    }
    Ok(())
}
