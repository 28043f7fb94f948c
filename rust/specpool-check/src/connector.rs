//! A KV connector beside the ledger: it copies what the events name, and forgets what they take back.

use specpool_core::{KvEvent, Ledger, Row};

use crate::device::{Device, Fault, Tag};

/// What was copied: per group and row the tag of each position, 0 where there is none.
#[derive(Debug, Clone)]
pub struct Connector {
    copies: Vec<Vec<Vec<Tag>>>,
    /// Events that were followed.
    pub num_events: u64,
}

impl Connector {
    /// A connector that has copied nothing. The ledger notes events from now on.
    ///
    /// # Errors
    /// The ledger's.
    pub fn new(ledger: &mut Ledger) -> Result<Self, Fault> {
        ledger.watch_kv().map_err(|error| error.to_string())?;
        Ok(Self { copies: vec![vec![Vec::new(); ledger.num_rows() + 1]; ledger.num_groups()], num_events: 0 })
    }

    /// From now on `new` stands for the token that was `old`.
    pub(crate) fn equate(&mut self, old: Tag, new: Tag) {
        self.copies.iter_mut().flatten().flatten().filter(|tag| **tag == old).for_each(|tag| *tag = new);
    }

    /// Takes the ledger's events and does what they say.
    ///
    /// # Errors
    /// An event names KV that is not that of the row's tokens; a copy is none of the row's tokens any more; if nothing
    /// is in flight, a token was never told. Rows of a failed step are left out until they are freed.
    pub fn follow(&mut self, ledger: &mut Ledger, device: &Device, is_quiet: bool) -> Result<(), Fault> {
        let events = ledger.take_kv_events().map_err(|error| error.to_string())?;
        self.num_events += events.len() as u64;
        for event in &events {
            match *event {
                KvEvent::Rewind { row, len } => {
                    self.copies.iter_mut().for_each(|rows| rows[row.at()].truncate(len as usize));
                }
                // A failed step left the row's KV undefined: nothing is copied until the row is freed, so nothing is lost.
                KvEvent::Commit { row, .. } | KvEvent::Evict { row, .. } if device.rows[row.at()].is_lost => {}
                KvEvent::Evict { row, group, start, end } => {
                    let gone = self.copies[group][row.at()].get_mut(start as usize..end as usize);
                    gone.ok_or_else(|| format!("{event:?} names what was never told"))?.fill(0);
                }
                KvEvent::Move { copy, .. } => {
                    let page_size = ledger.group_spec(copy.group as usize).map_or(0, |spec| spec.page_size);
                    let dst = &device.target[copy.group as usize][copy.dst as usize * page_size as usize..];
                    if device.has_target(copy.group as usize) && dst[..copy.tokens as usize].contains(&0) {
                        return Err(format!("{event:?} names a page that was not copied"));
                    }
                }
                KvEvent::Commit { row, group, start, end } => {
                    for position in start..end {
                        let tag =
                            found(ledger, device, row, group, position).map_err(|why| format!("{event:?}: {why}"))?;
                        let copies = &mut self.copies[group][row.at()];
                        copies.resize(copies.len().max(position as usize + 1), 0);
                        copies[position as usize] = tag;
                    }
                }
            }
        }
        self.check(ledger, device, is_quiet)
    }

    fn check(&self, ledger: &Ledger, device: &Device, is_quiet: bool) -> Result<(), Fault> {
        for (group, rows) in self.copies.iter().enumerate() {
            let evicted = ledger.evicted_len(group).map_err(|error| error.to_string())?;
            let sink = ledger.group_spec(group).map_err(|error| error.to_string())?.sink as i32;
            for (row, copies) in rows.iter().enumerate().filter(|(row, _)| !device.rows[*row].is_lost) {
                let sequence = &device.rows[row].sequence;
                let differs = |at: &usize| copies[*at] != 0 && Some(&copies[*at]) != sequence.get(*at);
                if let Some(at) = (0..copies.len()).find(differs) {
                    return Err(format!("the copy of position {at} of row {row} in group {group} is stale"));
                }
                let resolved = ledger.resolved_len()[row];
                let is_missing = |at: &i32| copies.get(*at as usize).is_none_or(|&tag| tag == 0);
                if is_quiet
                    && let Some(at) = (0..resolved).filter(|&at| at < sink || at >= evicted[row]).find(is_missing)
                {
                    return Err(format!("position {at} of row {row} in group {group} was never told"));
                }
            }
        }
        Ok(())
    }
}

/// What lies at a position of the row.
fn found(ledger: &Ledger, device: &Device, row: Row, group: usize, position: i32) -> Result<Tag, Fault> {
    let text = |error: specpool_core::Error| error.to_string();
    let page_size = ledger.group_spec(group).map_err(text)?.page_size as i32;
    let page = ledger.page_table(group).map_err(text)?.row(row)[(position / page_size) as usize];
    let tag = device.target[group][(page * page_size + position % page_size) as usize];
    match device.rows[row.at()].sequence.get(position as usize) {
        None => Err(format!("position {position} has no token")),
        Some(&token) if device.has_target(group) && tag != token => {
            Err(format!("position {position} holds {tag} and not the token's {token}"))
        }
        Some(&token) => Ok(token),
    }
}
