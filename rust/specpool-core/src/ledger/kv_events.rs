//! What a KV connector must know: which positions hold verified KV, and which no longer do.
//!
//! The ledger keeps what was reported. `take_kv_events` compares it with the state now, so no other verb gets slower. Only
//! what a comparison cannot find is noted when it happens: how far each row was cut, and the page copies.

use super::Ledger;
use crate::error::{Error, Result};
use crate::ids::Row;
use crate::memory::{copied, filled, room, with_room, zeroed};
use crate::state::page_copy::{PageCopy, TailCopy};
use crate::state::step::Plan;

/// A change of verified KV, for a connector that copies it elsewhere (docs/contract.md, KV events). A position is
/// verified once its token is final.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvEvent {
    /// What lay at position `len` or behind it in the row is void, in every group. 0 if the row was given back.
    Rewind {
        /// The row.
        row: Row,
        /// Positions below it stand.
        len: i32,
    },
    /// Positions `start..end` of the row have left its pages in the group: no later query of the row sees them.
    Evict {
        /// The row.
        row: Row,
        /// The group's index.
        group: usize,
        /// The first position.
        start: i32,
        /// Behind the last position.
        end: i32,
    },
    /// Verified KV was copied from one page to another, where a `Commit` of the same call names it.
    Move {
        /// The row that has the new page.
        row: Row,
        /// The pages, the group, and how many slots.
        copy: PageCopy,
    },
    /// Positions `start..end` of the row hold verified KV, and every step that writes them is complete. They lie where
    /// the row's page table says.
    Commit {
        /// The row.
        row: Row,
        /// The group's index.
        group: usize,
        /// The first position.
        start: i32,
        /// Behind the last position.
        end: i32,
    },
}

/// What was reported of each row.
#[derive(Debug, Clone)]
pub(crate) struct KvFeed {
    /// Verified positions below this were reported.
    reported: Vec<i32>,
    /// `[group][row]`: positions below this are not held, as far as it was reported.
    evicted: Vec<Vec<i32>>,
    /// The shortest length since the last call; `i32::MAX` if the row was not cut.
    cut: Vec<i32>,
    /// The shortest length since the row was admitted, which is when a page copy into it is asked for.
    low: Vec<i32>,
    /// The launched copies with their step, and the epoch that their row had.
    copies: Vec<(u64, u64, TailCopy)>,
}

impl KvFeed {
    /// Notes that what lies behind `len` is void.
    pub(super) fn cut(&mut self, row: Row, len: i32) {
        for shortest in [&mut self.cut[row.at()], &mut self.low[row.at()]] {
            *shortest = len.min(*shortest);
        }
    }

    /// Notes that all of it is void, and how long the rows are now.
    pub(super) fn cut_all(&mut self, resolved: &[i32]) {
        self.cut.fill(0);
        self.low.copy_from_slice(resolved);
    }

    pub(super) fn admitted(&mut self, row: Row) {
        self.low[row.at()] = i32::MAX;
    }

    pub(super) fn make_room(&mut self, plan: &Plan) -> Result<()> {
        room(&mut self.copies, plan.page_copies.len(), "page copies")
    }

    /// Notes a copy, up to where its row has been cut since it was asked for: what is behind that may be written over.
    pub(super) fn launched(&mut self, step: u64, epoch: u64, mut copy: TailCopy, page_size: i64) {
        let stands = i64::from(self.low[copy.row.at()]) - copy.column as i64 * page_size;
        copy.copy.tokens = stands.clamp(0, copy.copy.tokens.into()) as i32;
        if copy.copy.tokens > 0 {
            self.copies.push((step, epoch, copy));
        }
    }
}

impl Ledger {
    /// Starts to note what [`take_kv_events`](Self::take_kv_events) tells. What the rows hold already is reported too.
    /// O(rows). Called again, it starts anew.
    ///
    /// # Errors
    /// [`Error::Config`] with a state group; [`Error::OutOfMemory`].
    pub fn watch_kv(&mut self) -> Result<()> {
        self.check_stateless("watch_kv", "events name KV, and a hit needs a state too")?;
        let (len, what) = (self.rows.num_rows() + 1, "KV events");
        let mut evicted = with_room(self.groups.len(), what)?;
        for _ in &self.groups {
            evicted.push(zeroed(len, what)?);
        }
        let (reported, cut, low) =
            (zeroed(len, what)?, filled(i32::MAX, len, what)?, copied(&self.rows.resolved, what)?);
        self.feed = Some(Box::new(KvFeed { reported, evicted, cut, low, copies: Vec::new() }));
        Ok(())
    }

    /// Returns what has changed since the last call: what is void, then what was copied, then what is
    /// verified. If it is called before each launch, no position that was reported is overwritten before its `Rewind` or
    /// `Evict`. O(rows and lanes in flight). It is not part of the digest, the log or snapshots.
    ///
    /// # Errors
    /// [`Error::Order`] without [`watch_kv`](Self::watch_kv); [`Error::OutOfMemory`], which loses nothing.
    ///
    /// # Examples
    /// ```
    /// # use specpool_core::{Group, KvEvent, Layout, Ledger, LedgerConfig, Row, Shape};
    /// # let (name, layout, window) = ("kv".into(), Layout::Dense, None);
    /// # let group = Group { name, page_size: 4, num_pages: 64, hosts_drafts: true, layout, window, sink: 0 };
    /// # let chain = Shape::eagle(3, 1, 4)?;
    /// # let mut ledger = Ledger::new(LedgerConfig::new(vec![group], vec![chain], 8, 100))?;
    /// ledger.watch_kv()?;
    /// let row = ledger.admit(None)?;
    /// let prefill = ledger.prepare_extend(&[row.0], &[10], true)?;
    /// ledger.launch(prefill.step)?;
    /// assert_eq!(ledger.take_kv_events()?, []); // the forward runs
    /// ledger.complete(prefill.step)?;
    /// assert_eq!(ledger.take_kv_events()?, [KvEvent::Commit { row, group: 0, start: 0, end: 10 }]);
    ///
    /// let round = ledger.prepare_decode(&[row.0], &[1], true)?;
    /// ledger.launch(round.step)?;
    /// ledger.complete(round.step)?;
    /// assert_eq!(ledger.take_kv_events()?, []); // four tokens are written, none is verified
    /// ledger.resolve(round.step, &[3])?;
    /// assert_eq!(ledger.take_kv_events()?, [KvEvent::Commit { row, group: 0, start: 10, end: 13 }]);
    /// ledger.finish(row)?;
    /// assert_eq!(ledger.take_kv_events()?, [KvEvent::Rewind { row, len: 0 }]);
    /// # Ok::<(), specpool_core::Error>(())
    /// ```
    pub fn take_kv_events(&mut self) -> Result<Vec<KvEvent>> {
        let Some(mut feed) = self.feed.take() else {
            return Err(Error::Order("take_kv_events: call watch_kv first".into()));
        };
        let events = self.events(&mut feed);
        self.feed = Some(feed);
        events
    }

    /// Per row: positions below this hold verified KV that is on the device. They are resolved, and neither a step nor
    /// a page copy that is not complete may still write there.
    fn settled(&self) -> Result<Vec<i32>> {
        let mut settled = copied(&self.rows.resolved, "KV events")?;
        for record in self.steps.incomplete() {
            for (lane, &row) in record.plan.rows.iter().enumerate() {
                if let Some(from) = self.writes_from(record, lane) {
                    settled[row as usize] = settled[row as usize].min(from);
                }
            }
        }
        for (copy, _) in self.unfinished_copies() {
            let from = copy.column as i64 * self.groups[copy.group()].page_size;
            settled[copy.row.at()] = settled[copy.row.at()].min(from as i32);
        }
        Ok(settled)
    }

    fn events(&self, feed: &mut KvFeed) -> Result<Vec<KvEvent>> {
        let settled = self.settled()?;
        let rows = || 1..settled.len();
        let evicted = |feed: &KvFeed, at: usize| {
            self.groups.iter().zip(&feed.evicted).any(|(group, reported)| group.evicted[at] != reported[at])
        };
        let changed = rows()
            .filter(|&at| feed.cut[at] < feed.reported[at] || settled[at] > feed.reported[at] || evicted(feed, at));
        let mut events = Vec::new();
        room(&mut events, changed.count() * (1 + 3 * self.groups.len()) + feed.copies.len(), "KV events")?;

        // What is void comes first: its pages may be those of a commit.
        for at in rows() {
            let (row, cut) = (Row(at as i32), std::mem::replace(&mut feed.cut[at], i32::MAX));
            if cut < feed.reported[at] {
                events.push(KvEvent::Rewind { row, len: cut });
                feed.reported[at] = cut;
            }
            let reported = feed.reported[at];
            for (group, (state, was)) in self.groups.iter().zip(&mut feed.evicted).enumerate() {
                was[at] = was[at].min(reported);
                let end = state.evicted[at].min(reported);
                let start = was[at].max(state.sink_len() as i32);
                if start < end {
                    events.push(KvEvent::Evict { row, group, start, end });
                }
                was[at] = was[at].max(end);
            }
        }
        let completed = self.steps.completed();
        feed.copies.retain(|(step, epoch, tail)| {
            let (row, group) = (tail.row, &self.groups[tail.group()]);
            let stands = *epoch == self.rows.epoch[row.at()] && group.holds(row, tail.column, tail.dst());
            if *step <= completed && stands {
                events.push(KvEvent::Move { row, copy: tail.copy });
            }
            *step > completed
        });
        for at in rows() {
            let (row, reported, end) = (Row(at as i32), feed.reported[at], settled[at]);
            for (group, (state, was)) in self.groups.iter().zip(&mut feed.evicted).enumerate() {
                let (now, sink) = (state.evicted[at], state.sink_len() as i32);
                // A cut to a checkpoint brings the window below it back. The sink never went.
                let back = (now.max(sink), was[at]);
                let gone = if now > sink { now } else { 0 };
                for (start, end) in [back, (reported, sink.min(gone).min(end)), (reported.max(gone), end)] {
                    if start < end {
                        events.push(KvEvent::Commit { row, group, start, end });
                    }
                }
                was[at] = now;
            }
            feed.reported[at] = reported.max(end);
        }
        Ok(events)
    }
}
