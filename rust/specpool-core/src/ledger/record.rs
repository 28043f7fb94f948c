//! What a ledger remembers of its verbs: the running digest, and the event log if it is recorded.

use std::path::Path;
use std::sync::Arc;

use super::Ledger;
use super::prepare::each_growing_lane;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::ids::Row;
use crate::log::call::{Call, Given};
use crate::log::codec::{put_text, put_varint};
use crate::log::event_log::EventLog;
use crate::state::config::LedgerConfig;
use crate::state::step::{Plan, StepKind};

impl Ledger {
    /// Builds an empty ledger that records every state-changing call in the event log `path`, of at most `limit`
    /// bytes. At the limit the log ends and the ledger goes on. The digest is kept.
    ///
    /// # Errors
    /// As [`Ledger::new`]; [`Error::Record`] when the file cannot be written. If the gathered events cannot be written
    /// later, any verb can be refused with this error. Verbs work again once the file can be written.
    pub fn recorded(mut config: LedgerConfig, path: &Path, limit: u64) -> Result<Self> {
        config.digest = true;
        let mut ledger = Self::new(config)?;
        ledger.recorder.log = Some(EventLog::create(path, &ledger.config(), limit)?);
        Ok(ledger)
    }

    /// What the ledger was built from, with every default made explicit.
    #[must_use]
    pub fn config(&self) -> LedgerConfig {
        LedgerConfig {
            groups: self.groups.iter().map(|group| group.spec.clone()).collect(),
            shapes: self.shapes.clone(),
            num_rows: self.rows.num_rows() as i64,
            max_context_len: self.max_context_len.into(),
            max_batch: Some(self.max_batch as i64),
            overlap_depth: self.overlap_depth.into(),
            policy: self.policy,
            row_width: Some(self.groups.iter().map(|group| group.row_width).collect()),
            draft_kv: self.draft_kv,
            max_chunk: self.max_chunk().map(i64::from),
            sessions: self.sessions,
            page_fencing: self.page_fencing,
            digest: self.recorder.digest.is_some(),
            states: self.state_groups().to_vec(),
        }
    }

    /// Ends the ledger's work. Every verb is refused from now on; queries and views stay. The event log is written
    /// out. Closing twice has no further effect.
    ///
    /// # Errors
    /// [`Error::Record`] when the log cannot be written. The ledger is closed then, and another call tries to write
    /// again.
    pub fn close(&mut self) -> Result<()> {
        self.closed = true;
        self.recorder.close()
    }

    pub(super) fn check_open(&self) -> Result<()> {
        if self.closed { Err(Error::Order("the ledger is closed".into())) } else { Ok(()) }
    }

    /// Checks, at the start of every state-changing verb, that the ledger is open and that there is room for its
    /// record.
    pub(super) fn gate(&mut self) -> Result<()> {
        self.check_open()?;
        self.recorder.flush_if_full()
    }

    /// Notes a call that succeeded, what it gave, and the tag of the row that it gave.
    #[inline]
    pub(super) fn note(&mut self, call: &Call<'_>, given: &Given, tag: Option<&str>) {
        self.note_with(call, given, |aside| {
            if let Some(tag) = tag {
                put_text(aside, tag);
            }
        });
    }

    /// Notes the snapshot that was taken or restored.
    pub(super) fn note_snapshot(&mut self, call: &Call<'_>, number: u64) {
        self.note_with(call, &Given::Nothing(()), |aside| put_varint(aside, number));
    }

    /// Notes a step that was prepared. Nothing is made of the plan where nothing is recorded.
    pub(super) fn note_plan(&mut self, plan: &Arc<Plan>, keep: &[i32]) {
        if self.recorder.digest.is_none() {
            return;
        }
        let (rows, writes_draft) = (plan.rows.as_slice().into(), plan.writes_draft);
        let call = match plan.kind {
            StepKind::Extend => {
                let new_lens = plan.new_len.as_slice().into();
                match keep {
                    [] => Call::PrepareExtend { rows, new_lens, writes_draft },
                    _ => Call::PrepareExtendKeeping { rows, new_lens, keep: keep.into(), writes_draft },
                }
            }
            StepKind::Decode => Call::PrepareDecode { rows, shapes: plan.shapes.as_slice().into(), writes_draft },
        };
        self.note(&call, &Given::Plan(Arc::clone(plan)), None);
    }

    #[inline]
    fn note_with(&mut self, call: &Call<'_>, given: &Given, put_aside: impl FnOnce(&mut Vec<u8>)) {
        if let Some(before) = self.recorder.digest {
            self.record_call(before, call, given, put_aside);
        }
    }

    fn record_call(&mut self, before: Digest, call: &Call<'_>, given: &Given, put_aside: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = std::mem::take(&mut self.recorder.bytes);
        bytes.clear();
        call.encode(&mut bytes);
        let after = self.digest_after(before, call, given, &bytes);
        if let Some(log) = &mut self.recorder.log {
            let aside = &mut self.recorder.aside;
            aside.clear();
            put_aside(aside);
            log.push(&bytes, aside, before, after);
        }
        self.recorder.digest = Some(after);
        self.recorder.bytes = bytes;
    }

    /// Hashes the call's bytes, then the ids that it gave: rows, prefixes, steps, lengths cut to, and pages in the
    /// order of groups, lanes and columns. A snapshot leaves the digest as it is, so that one rank may take one.
    fn digest_after(&self, mut digest: Digest, call: &Call<'_>, given: &Given, bytes: &[u8]) -> Digest {
        if matches!(call, Call::Snapshot {}) {
            return digest;
        }
        digest.bytes(bytes);
        if let Some(id) = given.id() {
            digest.word(id);
        }
        // An admitted row has no pages yet, and the caller names those of a lent one.
        let has_pages = !matches!(call, Call::Admit {} | Call::AdmitLent { .. });
        if let Given::Row(row) = given
            && has_pages
        {
            for group in &self.groups {
                let columns = i64::from(group.allocated[row.at()]) / group.page_size;
                digest.ints(&group.table.row(*row)[..columns as usize]);
            }
            if let (Call::AdmitCached { .. }, Some(states)) = (call, &self.states) {
                digest.word(states.slot_of(*row).0 as u64);
            }
        }
        if let Given::Plan(plan) = given {
            self.hash_claim(&mut digest, plan);
        }
        if matches!(call, Call::Restore {}) {
            digest.word(self.state_hash());
        }
        digest
    }

    /// Adds the pages that the plan's rows took.
    fn hash_claim(&self, digest: &mut Digest, plan: &Plan) {
        let lanes = plan.num_lanes();
        let claims = plan.allocated_before.chunks(lanes).zip(plan.allocated_after.chunks(lanes));
        for (group, (before, after)) in self.groups.iter().zip(claims) {
            let column = |len: i32| (i64::from(len) / group.page_size) as usize;
            let hashed = each_growing_lane(before, after, |lane| {
                let pages = group.table.row(Row(plan.rows[lane]));
                digest.ints(&pages[column(before[lane])..column(after[lane])]);
                Ok::<(), std::convert::Infallible>(())
            });
            hashed.unwrap_or_else(|never| match never {});
        }
        if let Some(folds) = &plan.states {
            digest.ints(&folds.dst);
        }
    }
}

/// Exchanges pages that no public call can exchange, and checks that the digest differs.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::state::group::Group;
    use crate::verb::Verb;

    fn ledger() -> Ledger {
        let group = Group {
            name: "kv".into(),
            page_size: 4,
            num_pages: 30,
            hosts_drafts: false,
            layout: Layout::Dense,
            window: None,
            sink: 0,
        };
        let mut config = LedgerConfig::new(vec![group], vec![], 3, 40);
        config.digest = true;
        Ledger::new(config).unwrap()
    }

    /// Makes the pool hand out another page next.
    fn turn_free_list(ledger: &mut Ledger) {
        let pool = &mut ledger.groups[0].pool;
        let pages = [pool.take(Row(3), 1, Verb::None).unwrap(), pool.take(Row(3), 1, Verb::None).unwrap()];
        for page in pages {
            pool.release(page, Row(3), 0, 0, Verb::None).unwrap();
        }
    }

    /// The digest after `last`, with the free list as it is and reversed.
    fn both(before: impl Fn(&mut Ledger), last: impl Fn(&mut Ledger)) -> [Option<u64>; 2] {
        [false, true].map(|turned| {
            let mut ledger = ledger();
            before(&mut ledger);
            if turned {
                turn_free_list(&mut ledger);
            }
            last(&mut ledger);
            ledger.digest()
        })
    }

    fn extend(ledger: &mut Ledger, len: i32) {
        let step = ledger.prepare_extend(&[1], &[len], true).unwrap().step;
        ledger.launch(step).unwrap();
        ledger.complete(step).unwrap();
    }

    #[test]
    fn the_pages_that_a_call_gave_enter_the_digest() {
        let start = |ledger: &mut Ledger| {
            ledger.admit(None).unwrap();
        };
        let [one, other] = both(start, |ledger| extend(ledger, 3));
        assert_ne!(one, other, "extend");
        let start = |ledger: &mut Ledger| {
            ledger.admit(None).unwrap();
            extend(ledger, 4);
        };
        let [one, other] = both(start, |ledger| drop(ledger.prepare_decode(&[1], &[0], true).unwrap()));
        assert_ne!(one, other, "decode");
        let start = |ledger: &mut Ledger| {
            ledger.admit(None).unwrap();
            extend(ledger, 6);
        };
        let [one, other] = both(start, |ledger| {
            ledger.fork(Row(1), None).unwrap();
        });
        assert_ne!(one, other, "fork");
        let [one, other] = both(start, |ledger| ledger.finish(Row(1)).unwrap());
        assert_eq!(one, other, "finish gives nothing");
    }

    /// The digest's rule word by word, as `docs/event_log.md` states it, for every call of the table.
    #[test]
    fn the_ids_that_a_call_gave_enter_the_digest() {
        let ledger = ledger();
        let hashed = |call: &Call<'_>, given: Given| {
            let mut expected = Digest::new();
            expected.bytes(b"call");
            let digest = ledger.digest_after(Digest::new(), call, &given, b"call");
            move |words: &[u64]| {
                for &word in words {
                    expected.word(word);
                }
                assert_eq!(digest, expected);
            }
        };
        for kind in Call::KINDS {
            // Arguments that are 0, arrays that are empty.
            let (call, _) = Call::decode(&[*kind, 0, 0, 0, 0], 0, 0, 0).unwrap();
            match call {
                Call::Snapshot {} => {
                    let digest = ledger.digest_after(Digest::new(), &call, &Given::Nothing(()), b"call");
                    assert_eq!(digest, Digest::new());
                }
                Call::Restore {} => hashed(&call, Given::Nothing(()))(&[ledger.state_hash()]),
                Call::Admit {} | Call::AdmitLent { .. } => hashed(&call, Given::Row(Row(2)))(&[2]),
                // The list of the row's pages is empty: its length is 0.
                _ if call.is_tagged() => hashed(&call, Given::Row(Row(2)))(&[2, 0]),
                _ => {
                    hashed(&call, Given::Prefix(5))(&[5]);
                    hashed(&call, Given::Length(-8))(&[(-8_i64) as u64]);
                    hashed(&call, Given::Nothing(()))(&[]);
                }
            }
        }
    }

    #[test]
    fn a_closed_ledger_refuses_verbs_and_deltas() {
        let mut ledger = ledger();
        ledger.close().unwrap();
        ledger.close().unwrap();
        for refused in [ledger.admit(None).map(drop), ledger.take_delta(1).map(drop), ledger.ack_delta(1)] {
            assert_eq!(refused, Err(Error::Order("the ledger is closed".into())));
        }
        assert_eq!(ledger.free_pages(0), Ok(30));
    }

    #[test]
    fn the_restored_state_enters_the_digest() {
        let [one, other] = [false, true].map(|turned| {
            let mut ledger = ledger();
            let mut snapshot_of = ledger.clone();
            if turned {
                turn_free_list(&mut snapshot_of);
            }
            ledger.restore(&snapshot_of.snapshot().unwrap()).unwrap();
            ledger.digest()
        });
        assert_ne!(one, other);
    }
}
