use super::*;
use crate::error::Error;
use crate::layout::Layout;
use crate::shape::Shape;
use crate::state::config::LedgerConfig;
use crate::state::group::Group;
use crate::state::kept_states::{KeptStates, Writer};
use crate::state::state_group::StateGroup;
use crate::verb::Verb;

/// One row of 10 tokens on pages of 4, with one round of shape 1 in flight.
fn busy() -> (Ledger, Row) {
    let group = Group {
        name: "kv".into(),
        page_size: 4,
        num_pages: 20,
        hosts_drafts: true,
        layout: Layout::Dense,
        window: None,
        sink: 0,
    };
    let shapes = vec![Shape::eagle(3, 1, 4).unwrap()];
    let mut config = LedgerConfig::new(vec![group], shapes, 2, 40);
    config.overlap_depth = 1;
    let mut ledger = Ledger::new(config).unwrap();
    let row = ledger.admit(Some("request-7")).unwrap();
    let step = ledger.prepare_extend(&[row.0], &[10], true).unwrap().step;
    ledger.launch(step).unwrap();
    let step = ledger.prepare_decode(&[row.0], &[1], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.check().unwrap();
    (ledger, row)
}

fn report(ledger: &Ledger) -> String {
    ledger.check().unwrap_err().to_string()
}

#[test]
fn every_planted_fault_is_reported() {
    type Fault = fn(&mut Ledger, Row);
    let faults: [(&str, Fault); 14] = [
        ("page 1 of group kv: 0 of its holders are idle rows, the pool counts 1", |ledger, _| {
            ledger.groups[0].pool.rest(Page(1));
        }),
        ("page 2 of group kv: 1 of its holders are idle rows, the pool counts 0", |ledger, row| {
            ledger.rows.set_idle(row, true);
        }),
        ("is page 1, which is owned, below protected_len 4", |ledger, row| {
            ledger.groups[0].protected[row.at()] = 4;
        }),
        ("kv_committed_len 17 allocated_len 16", |ledger, row| {
            ledger.rows.resolved[row.at()] = 16;
            ledger.rows.hi[row.at()] = 20;
        }),
        ("in_flight 0", |ledger, row| ledger.rows.in_flight[row.at()] = 0),
        ("hi 99", |ledger, row| ledger.rows.hi[row.at()] = 99),
        ("launched 0", |ledger, row| ledger.rows.launched_rounds[row.at()] = 0),
        ("drafted=11", |ledger, row| ledger.rows.drafted[row.at()] = 11),
        ("is page 1, beyond its end", |ledger, row| {
            let cell = ledger.groups[0].table.cell(row, 5);
            ledger.groups[0].table.set(cell, Page(1));
        }),
        ("which is free", |ledger, row| {
            ledger.groups[0].pool.release(Page(2), row, 0, 0, Verb::Trim).unwrap();
        }),
        ("page 5 of group kv: 0 holders and 0 copies, the pool counts 1 and 0", |ledger, row| {
            ledger.groups[0].pool.take(row, 1, Verb::Trim).unwrap();
        }),
        ("2 live + 1 free + 0 fenced rows are not 2", |ledger, _| ledger.rows.live[2] = true),
        ("row 2 is not admitted but reads r=3", |ledger, _| ledger.rows.resolved[2] = 3),
        ("row 0: r=0 k=1", |ledger, _| ledger.rows.in_flight[0] = 1),
    ];
    for (expected, plant) in faults {
        let (mut ledger, row) = busy();
        plant(&mut ledger, row);
        let text = report(&ledger);
        assert!(text.contains(expected), "{expected:?} is not in {text:?}");
    }
}

/// One session of 10 tokens whose slot 1 has 9 of them and is kept, and a round that was cut.
fn with_states() -> (Ledger, Row) {
    let (plain, _) = busy();
    let states = vec![StateGroup { name: "ssm".into(), num_slots: 5, flush: 1, eager: false }];
    let mut ledger = Ledger::new(LedgerConfig { sessions: true, states, ..plain.config() }).unwrap();
    let row = ledger.admit(Some("request-7")).unwrap();
    let step = ledger.prepare_extend(&[row.0], &[10], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.end_turn(row, 10).unwrap();
    ledger.check().unwrap();
    (ledger, row)
}

fn states(ledger: &mut Ledger) -> &mut StateSlots {
    ledger.states.as_mut().unwrap()
}

#[test]
fn every_planted_fault_of_the_states_is_reported_and_changes_the_hash() {
    type Fault = fn(&mut Ledger, Row);
    let faults: [(&str, Fault); 10] = [
        ("it is not admitted, but has slot 0 of 3 tokens", |ledger, _| states(ledger).len[2] = 3),
        ("it is not admitted, but has slot 4 of 0 tokens", |ledger, _| states(ledger).slot[2] = 4),
        ("slot 1 has 0 tokens", |ledger, row| states(ledger).len[row.at()] = 0),
        ("slot 1 has -1 tokens", |ledger, row| states(ledger).len[row.at()] = -1),
        ("slot 0 has 9 tokens", |ledger, row| states(ledger).slot[row.at()] = 0),
        ("its slot has 8 tokens, the kept one 9", |ledger, row| states(ledger).len[row.at()] = 8),
        ("the state has 11 tokens, at most 10 are resolved", |ledger, row| states(ledger).len[row.at()] = 11),
        ("it holds slot 3, which is free", |ledger, row| states(ledger).slot[row.at()] = 3),
        ("slot 1 of state group ssm: 2 holders, 2 of them idle, the pool counts 3 and 2", |ledger, _| {
            states(ledger).pool.share(Page(1), Verb::Fork).unwrap();
        }),
        ("slot 2 of state group ssm: 0 holders, 0 of them idle, the pool counts 1 and 0", |ledger, row| {
            states(ledger).pool.take(row, 1, Verb::Trim).unwrap();
        }),
    ];
    for (expected, plant) in faults {
        let (mut ledger, row) = with_states();
        let before = ledger.state_hash();
        plant(&mut ledger, row);
        let text = report(&ledger);
        assert!(text.contains(expected), "{expected:?} is not in {text:?}");
        assert_ne!(ledger.state_hash(), before, "{expected}");
    }
}

/// Its root counts as folded if it is in flight, and in no other group.
#[test]
fn a_state_of_more_than_the_resolved_tokens_is_reported() {
    for (eager, has_round) in [(false, true), (true, false)] {
        let (plain, _) = busy();
        let states = vec![StateGroup { name: "ssm".into(), num_slots: 5, flush: 1, eager }];
        let mut ledger = Ledger::new(LedgerConfig { states, ..plain.config() }).unwrap();
        let row = ledger.admit(None).unwrap();
        let step = ledger.prepare_extend(&[row.0], &[10], true).unwrap().step;
        ledger.launch(step).unwrap();
        if has_round {
            ledger.prepare_decode(&[row.0], &[0], true).unwrap();
        }
        ledger.check().unwrap();
        ledger.states.as_mut().unwrap().len[row.at()] = 11;
        assert!(report(&ledger).contains("the state has 11 tokens, at most 10"), "{eager}");
    }
}

#[test]
fn an_export_whose_slot_is_gone_is_neither_released_nor_gone_on_from() {
    let (mut ledger, row) = with_states();
    ledger.complete(1).unwrap();
    let export = ledger.export(row).unwrap();
    while states(&mut ledger).pool.release_shared(Page(1), 0, Verb::ReleasePrefix).is_ok() {}
    let before = ledger.state_hash();
    for refused in [ledger.release_prefix(export), ledger.admit_on(export, None, None).map(|_| ())] {
        assert!(matches!(refused, Err(Error::PageState { page: 1, .. })), "{refused:?}");
    }
    assert_eq!(ledger.state_hash(), before);
}

#[test]
fn a_slot_that_is_gone_refuses_what_would_drop_it() {
    type Drop = fn(&mut Ledger, u64, Row) -> crate::error::Result<()>;
    let drops: [(usize, Drop); 4] = [
        (2, |ledger, step, _| ledger.cancel(step)),
        (1, |ledger, step, _| ledger.launch(step)),
        (2, |ledger, _, row| ledger.finish(row)),
        (1, |ledger, _, row| ledger.finish(row)),
    ];
    for (at, (slot, drop)) in drops.into_iter().enumerate() {
        let (mut ledger, row) = with_states();
        ledger.complete(1).unwrap();
        let plan = ledger.prepare_extend(&[row.0], &[12], true).unwrap();
        let folds = plan.states.as_ref().unwrap();
        assert_eq!((folds.src[0], folds.dst[0]), (1, 2));
        while states(&mut ledger).pool.release(Page(slot as i32), row, 0, 0, Verb::Trim).is_ok() {}
        let before = ledger.state_hash();
        let error = drop(&mut ledger, plan.step, row).unwrap_err();
        assert!(matches!(error, Error::PageState { page, .. } if page == slot), "{at}: {error:?}");
        assert_eq!(ledger.state_hash(), before, "{at}");
    }
}

/// The index has states of 4 and 9 tokens of a row, and another row has a soft mark on slot 3.
fn with_kept_states() -> Ledger {
    let (plain, _) = busy();
    let states = vec![StateGroup { name: "ssm".into(), num_slots: 5, flush: 1, eager: false }];
    let mut ledger = Ledger::new(LedgerConfig { states, ..plain.config() }).unwrap();
    let rows = [ledger.admit(Some("request-7")).unwrap(), ledger.admit(None).unwrap()];
    for (row, len) in [(rows[0], 5), (rows[0], 10), (rows[1], 6)] {
        let step = ledger.prepare_extend_keeping(&[row.0], &[len], &[0], true).unwrap().step;
        ledger.launch(step).unwrap();
        ledger.complete(step).unwrap();
        if row == rows[0] {
            ledger.index(row, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9][..len as usize], b"").unwrap();
        }
    }
    ledger.check().unwrap();
    ledger
}

#[test]
fn every_planted_fault_of_kept_states_is_reported_and_changes_the_hash() {
    type Fault = fn(&mut KeptStates);
    let faults: [(&str, Fault); 8] = [
        ("the soft mark of row 2 has 0 tokens, its state 5", |kept| kept.marks[0].len = 0),
        ("the soft mark of row 2 has 6 tokens, its state 5", |kept| kept.marks[0].len = 6),
        ("a soft mark is on slot 4, which the pool does not count", |kept| kept.marks[0].slot = Page(4)),
        ("slot 3 of state group ssm: 1 holders, 0 of them idle, the pool counts 2 and 0", |kept| kept.marks.clear()),
        ("slot 1 has 70 tokens, its entry", |kept| kept.indexed[0].len = 70),
        ("the states of the index are out of order", |kept| kept.indexed.swap(0, 1)),
        ("entry 9 holds slot 2, which is of entry", |kept| kept.indexed[1].entry = 9),
        ("the entries in use have 1 states, 2 are indexed", |kept| kept.indexed[1].entry = 9),
    ];
    for (expected, plant) in faults {
        let mut ledger = with_kept_states();
        let before = ledger.state_hash();
        plant(&mut states(&mut ledger).kept);
        let text = report(&ledger);
        assert!(text.contains(expected), "{expected:?} is not in {text:?}");
        assert_ne!(ledger.state_hash(), before, "{expected}");
    }
}

#[test]
fn the_hash_sees_marks_alone_and_states_of_the_index_alone() {
    let faults: [[fn(&mut KeptStates); 2]; 2] = [
        [|kept| kept.indexed.clear(), |kept| kept.marks[0].len = 4],
        [|kept| kept.marks.clear(), |kept| kept.indexed[0].len = 3],
    ];
    for [alone, change] in faults {
        let mut ledger = with_kept_states();
        alone(&mut states(&mut ledger).kept);
        let before = ledger.state_hash();
        change(&mut states(&mut ledger).kept);
        assert_ne!(ledger.state_hash(), before);
    }
}

#[test]
fn the_hash_sees_no_writer_that_is_complete() {
    let mut ledger = with_kept_states();
    let hashes = [2, 3, 4].map(|step| {
        states(&mut ledger).kept.set_written(Page(1), Writer { step, row: 1 });
        ledger.state_hash()
    });
    assert!(hashes[0] == hashes[1] && hashes[1] != hashes[2]);
}

#[test]
fn the_hash_sees_who_still_writes_a_kept_slot() {
    let mut ledger = with_kept_states();
    let mut hashes = [(9, 1), (10, 1), (10, 2)].map(|(step, row)| {
        states(&mut ledger).kept.set_written(Page(1), Writer { step, row });
        ledger.state_hash()
    });
    hashes.sort_unstable();
    assert!(hashes.windows(2).all(|pair| pair[0] != pair[1]));
}

#[test]
fn a_wrong_count_of_idle_holders_of_a_slot_is_reported() {
    let (mut ledger, _) = with_states();
    states(&mut ledger).pool.wake(Page(1));
    assert!(report(&ledger).contains("slot 1 of state group ssm: 2 holders, 2 of them idle, the pool counts 2 and 1"));
}

#[test]
fn a_slot_that_the_row_does_not_hold_is_neither_given_back_nor_shared() {
    for call in [
        (|ledger, row| ledger.finish(row)) as fn(&mut Ledger, Row) -> Result<()>,
        |ledger, row| ledger.trim(row, 4).map(|_| ()),
        |ledger, row| ledger.fork(row, None).map(|_| ()),
    ] {
        let (mut ledger, row) = with_states();
        ledger.complete(1).unwrap();
        states(&mut ledger).slot[row.at()] = 3;
        let before = format!("{ledger:?}");
        let error = call(&mut ledger, row).unwrap_err();
        assert!(matches!(&error, Error::PageState { group, page: 3, .. } if group == "ssm"), "{error}");
        assert_eq!(format!("{ledger:?}"), before);
    }
}

/// (group, page, row) of each finding: what can be taken out of use.
#[test]
fn a_finding_names_what_it_is_about() {
    type Fault = fn(&mut Ledger, Row);
    type About = (Option<usize>, Option<i32>, Option<i32>);
    let faults: [(&[About], Fault); 5] = [
        (&[(None, None, Some(1))], |ledger, row| ledger.rows.drafted[row.at()] = 11),
        (&[(Some(0), Some(4), Some(1)), (Some(0), Some(4), None)], |ledger, row| {
            ledger.groups[0].allocated[row.at()] = 12; // a page less than it holds
        }),
        (&[(Some(0), Some(1), None), (Some(0), Some(4), None)], |ledger, row| {
            let cell = ledger.groups[0].table.cell(row, 3);
            ledger.groups[0].table.set(cell, Page(1)); // twice in the row
        }),
        (&[(Some(0), Some(5), None)], |ledger, row| {
            ledger.groups[0].pool.take(row, 1, Verb::Trim).unwrap();
        }),
        (&[(None, None, None)], |ledger, _| ledger.rows.num_idle = 1),
    ];
    assert_eq!(busy().0.audit(), Ok(vec![]));
    for (expected, plant) in faults {
        let (mut ledger, row) = busy();
        plant(&mut ledger, row);
        let findings: Vec<About> = ledger
            .audit()
            .unwrap()
            .into_iter()
            .map(|finding| (finding.group, finding.page.map(|page| page.0), finding.row.map(|row| row.0)))
            .collect();
        for about in expected {
            assert!(findings.contains(about), "{about:?} is not in {findings:?}");
        }
    }
}

/// Scenario 8: committed beyond allocated is refused at the next claim, naming the request and both numbers.
#[test]
fn scenario_08_a_claim_on_a_corrupt_row_is_refused() {
    let (mut ledger, row) = busy();
    ledger.rows.resolved[row.at()] = 16;
    ledger.rows.drafted[row.at()] = 16;
    let before = format!("{ledger:?}");
    let error = ledger.prepare_decode(&[row.0], &[1], true).unwrap_err().to_string();
    assert!(error.contains("request-7") && error.contains("17 > allocated_len 16"), "{error}");
    assert_eq!(before, format!("{ledger:?}"));
}

/// A round that the row does not have in flight is not taken from it.
#[test]
fn a_resolve_of_a_corrupt_row_is_refused() {
    let (mut ledger, row) = busy();
    ledger.rows.in_flight[row.at()] = 0;
    let before = format!("{ledger:?}");
    let error = ledger.resolve(2, &[1]).unwrap_err().to_string();
    assert_eq!(error, "resolve of step 2: the oldest round of row 1 (request-7) is step 0");
    assert_eq!(before, format!("{ledger:?}"));
}

/// Scenario 4: whatever the lengths say, no claim passes the end of the row.
#[test]
fn scenario_04_a_claim_past_the_row_width_is_refused() {
    let (mut ledger, row) = busy();
    let width = ledger.row_width(0).unwrap();
    ledger.rows.hi[row.at()] = width as i32 - 3;
    let before = format!("{ledger:?}");
    let error = ledger.prepare_decode(&[row.0], &[1], true).unwrap_err();
    assert_eq!(error, Error::RowOverflow { group: "kv".into(), row: row.at(), need: width + 1, width });
    assert_eq!(before, format!("{ledger:?}"));
}

/// Two lanes that are wrong are not one that is right.
#[test]
fn two_corrupt_rows_are_refused_as_one_is() {
    let (mut ledger, row) = busy();
    let other = ledger.admit(None).unwrap();
    let step = ledger.prepare_extend(&[other.0], &[10], true).unwrap().step;
    ledger.launch(step).unwrap();
    let width = ledger.row_width(0).unwrap() as i32;
    // The row with a round in flight claims from 16 on, the end of what it has, or from beyond it.
    let plants: [(i32, [i32; 2], &str); 4] = [
        (15, [width - 3; 2], "row 1 overflows"),
        (15, [width - 4, width - 3], "row 2 in group kv: kv_committed_len 15 > allocated_len 12"),
        (17, [18; 2], "kv_committed_len 18 > allocated_len 16"),
        (17, [width - 3; 2], "kv_committed_len 18 > allocated_len 16"),
    ];
    for (resolved, his, expected) in plants {
        let mut ledger = ledger.clone();
        for (row, hi) in [row, other].into_iter().zip(his) {
            ledger.rows.resolved[row.at()] = resolved;
            ledger.rows.drafted[row.at()] = resolved;
            ledger.rows.hi[row.at()] = hi;
        }
        let error = ledger.prepare_decode(&[row.0, other.0], &[1, 1], true).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// Nor is it shared.
#[test]
fn a_foreign_page_is_never_shared() {
    let (mut ledger, row) = busy();
    ledger.complete(1).unwrap();
    ledger.groups[0].pool.release(Page(2), row, 0, 0, Verb::Trim).unwrap();
    ledger.groups[0].pool.take(Row(2), 9, Verb::PrepareDecode).unwrap();
    let before = format!("{ledger:?}");
    let error = ledger.pin_prefix(row, 10).unwrap_err();
    assert!(matches!(&error, Error::PageState { page: 2, owner, .. } if owner.contains("row 2")), "{error}");
    assert_eq!(before, format!("{ledger:?}"));
}

/// A page in the row's table that another row owns stops the release before anything moves.
#[test]
fn a_foreign_page_is_never_given_back() {
    let (mut ledger, row) = busy();
    ledger.groups[0].pool.release(Page(3), row, 0, 0, Verb::Trim).unwrap();
    ledger.groups[0].pool.take(Row(2), 9, Verb::PrepareDecode).unwrap();
    let before = format!("{ledger:?}");
    for refused in [ledger.finish(row), ledger.trim(row, 5).map(drop)] {
        let Err(Error::PageState { page, state, owner, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!((page, state.as_str()), (3, "owned"));
        assert!(owner.contains("row 2"), "{owner}");
    }
    assert_eq!(before, format!("{ledger:?}"));
}

/// Two texts that part at their 9th token, on pages of 4, and a third one under a salt.
fn indexed() -> Ledger {
    let group = Group {
        name: "kv".into(),
        page_size: 4,
        num_pages: 40,
        hosts_drafts: true,
        layout: Layout::Dense,
        window: None,
        sink: 0,
    };
    let mut ledger = Ledger::new(LedgerConfig::new(vec![group], vec![], 4, 40)).unwrap();
    for (last, salt) in [(8, &b""[..]), (9, b""), (8, b"tenant")] {
        let row = ledger.admit(None).unwrap();
        let step = ledger.prepare_extend(&[row.0], &[10], true).unwrap().step;
        ledger.launch(step).unwrap();
        ledger.complete(step).unwrap();
        ledger.index(row, &[0, 1, 2, 3, 4, 5, 6, 7, last, last], salt).unwrap();
        ledger.finish(row).unwrap();
    }
    ledger.check().unwrap();
    ledger
}

#[test]
fn every_planted_fault_of_the_index_is_reported_and_changes_the_hash() {
    type Fault = fn(&mut Ledger, &[u32]);
    // Entries: two whole ones and two tails behind the second; then those of the salt.
    let faults: [(&str, Fault); 7] = [
        ("has a length out of its range", |ledger, at| ledger.index.set_drafted(at[0], 5)),
        ("has a length out of its range", |ledger, at| ledger.index.shorten(at[2], 0)),
        ("is a tail with children", |ledger, at| ledger.index.shorten(at[1], 3)),
        ("has children out of order", |ledger, at| ledger.index.grow(at[3], &[8, 8, 8])),
        ("lacks a page of group kv", |ledger, at| ledger.index.set_page(at[2], 0, 0, Page(0))),
        ("of group kv, of entry", |ledger, at| {
            let page = ledger.index.pages(at[1], 0)[0];
            ledger.index.set_page(at[0], 0, 0, Page(page));
        }),
        ("holders and 0 copies, the pool counts", |ledger, at| ledger.index.remove(at[3])),
    ];
    for (expected, plant) in faults {
        let mut ledger = indexed();
        let entries: Vec<u32> = ledger.index.all().collect();
        assert_eq!(entries.len(), 7);
        let before = ledger.state_hash();
        plant(&mut ledger, &entries);
        assert_ne!(ledger.state_hash(), before, "{expected}");
        let text = report(&ledger);
        assert!(text.contains(expected), "{expected:?} is not in {text}");
    }
}

/// Which page is given up next is part of the state.
#[test]
fn the_order_of_cached_pages_is_hashed() {
    let (mut ledger, other) = (indexed(), indexed());
    assert_eq!(ledger.state_hash(), other.state_hash());
    let oldest = ledger.groups[0].pool.oldest_cached().unwrap();
    ledger.groups[0].pool.touch(oldest);
    ledger.check().unwrap();
    assert_ne!(ledger.state_hash(), other.state_hash());
}
