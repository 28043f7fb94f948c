//! A step's life through the public calls: what each call refuses, with which numbers, and that a refusal changes
//! nothing.

use specpool_core::{Error, Group, KvEvent, Layout, Ledger, LedgerConfig, Row, Shape};

/// A chain that accepts 1 to 4 tokens, one round of overlap, rows of 20 tokens.
fn ledger() -> (Ledger, Row) {
    let (name, layout, window) = ("kv".into(), Layout::Dense, None);
    let group = Group { name, page_size: 4, num_pages: 40, hosts_drafts: true, layout, window, sink: 0 };
    let chain = Shape::eagle(3, 1, 4).unwrap();
    let config = LedgerConfig { overlap_depth: 1, ..LedgerConfig::new(vec![group], vec![chain], 3, 20) };
    let mut ledger = Ledger::new(config).unwrap();
    let row = ledger.admit(Some("one")).unwrap();
    let step = ledger.prepare_extend(&[row.0], &[5], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.complete(step).unwrap();
    (ledger, row)
}

/// Checks that the call is refused, that the error contains all of `parts`, and that nothing changed.
#[track_caller]
fn refuses<T>(ledger: &mut Ledger, call: impl FnOnce(&mut Ledger) -> Result<T, Error>, parts: &[&str]) -> Error {
    let before = (ledger.state_hash(), format!("{ledger:?}"));
    let Err(error) = call(ledger) else { panic!("not refused: {parts:?}") };
    assert_eq!((ledger.state_hash(), format!("{ledger:?}")), before);
    let text = error.to_string();
    assert!(parts.iter().all(|part| text.contains(part)), "{parts:?} are not all in {text:?}");
    error
}

#[test]
fn an_accept_len_is_in_the_range_of_its_shape() {
    let (mut ledger, row) = ledger();
    for (shape, most) in [(1, 4), (0, 1)] {
        let step = ledger.prepare_decode(&[row.0], &[shape], true).unwrap().step;
        ledger.launch(step).unwrap();
        for wrong in [0, -1, most + 1, i32::MAX] {
            let (range, got) = (format!("[1, {most}]"), format!("got {wrong}"));
            let error = refuses(&mut ledger, |l| l.resolve(step, &[wrong]), &["row 1 (one)", &range, &got]);
            assert!(matches!(error, Error::Shape(_)));
        }
        for wrong in [&[][..], &[1, 1]] {
            let got = wrong.len().to_string();
            let error = refuses(&mut ledger, |l| l.resolve(step, wrong), &[&got]);
            assert!(matches!(error, Error::Shape(_)));
        }
        let before = ledger.resolved_len()[row.at()];
        ledger.resolve(step, &[most]).unwrap();
        assert_eq!(ledger.resolved_len()[row.at()], before + most);
        ledger.complete(step).unwrap();
    }
}

/// If one of several lanes is wrong, the error names it.
#[test]
fn the_lane_that_is_out_of_range_is_named() {
    let (mut ledger, row) = ledger();
    let other = ledger.admit(Some("two")).unwrap();
    let step = ledger.prepare_extend(&[other.0], &[5], true).unwrap().step;
    ledger.launch(step).unwrap();
    let step = ledger.prepare_decode(&[row.0, other.0], &[1, 1], true).unwrap().step;
    ledger.launch(step).unwrap();
    refuses(&mut ledger, |l| l.resolve(step, &[4, 5]), &["row 2 (two)", "[1, 4]", "got 5"]);
    refuses(&mut ledger, |l| l.resolve(step, &[1, 0]), &["row 2 (two)", "got 0"]);
    ledger.resolve(step, &[4, 1]).unwrap();
}

#[test]
fn only_a_launched_round_is_resolved_and_once() {
    let (mut ledger, row) = ledger();
    let extend = ledger.prepare_extend(&[row.0], &[7], true).unwrap().step;
    refuses(&mut ledger, |l| l.resolve(extend, &[1]), &["resolve of step 2"]);
    ledger.launch(extend).unwrap();
    refuses(&mut ledger, |l| l.resolve(extend, &[1]), &["resolve of step 2", "an extend has nothing to resolve"]);
    let round = ledger.prepare_decode(&[row.0], &[1], true).unwrap().step;
    refuses(&mut ledger, |l| l.resolve(round, &[1]), &["resolve of step 3", "not launched"]);
    ledger.launch(round).unwrap();
    ledger.resolve(round, &[1]).unwrap();
    refuses(&mut ledger, |l| l.resolve(round, &[1]), &["resolve of step 3", "already resolved"]);
    refuses(&mut ledger, |l| l.resolve(9, &[1]), &["resolve of step 9"]);
}

#[test]
fn nothing_is_prepared_behind_a_stale_step() {
    let (mut ledger, row) = ledger();
    let stale = ledger.prepare_decode(&[row.0], &[1], true).unwrap().step;
    assert_eq!(ledger.trim(row, 3).unwrap(), 3);
    let error = refuses(&mut ledger, |l| l.prepare_extend(&[row.0], &[4], true), &["step 2 is stale"]);
    assert!(matches!(error, Error::NotReady(_)));
    let other = ledger.admit(None).unwrap();
    refuses(&mut ledger, |l| l.prepare_extend(&[other.0], &[4], true), &["step 2 is stale"]);
    refuses(&mut ledger, |l| l.prepare_decode(&[row.0], &[1], true), &["step 2 is stale"]);
    refuses(&mut ledger, |l| l.launch(stale), &["step 2 is stale", "row 1 was at epoch 0", "is at 1"]);
    ledger.cancel(stale).unwrap();
    ledger.prepare_extend(&[row.0], &[4], true).unwrap();
}

#[test]
fn the_pages_of_impossible_roots_are_not_reckoned() {
    let (mut ledger, _) = ledger();
    for (lo, hi) in [(-1, 5), (6, 5), (5, 20), (20, 20)] {
        let roots = format!("[{lo}, {hi}]");
        refuses(&mut ledger, |l| l.pages_needed(lo, hi, 1), &[&roots, "[0, 20)"]);
    }
    for shape in [-1, 2] {
        refuses(&mut ledger, |l| l.pages_needed(1, 5, shape), &[&format!("shape {shape} is not in 0..2")]);
    }
    // Roots 0 to 19 plus the 4 nodes of a round: 23 slots.
    assert_eq!(ledger.pages_needed(0, 19, 1).unwrap(), [6]);
    assert_eq!(ledger.pages_needed(19, 19, 0).unwrap(), [5]);
}

#[test]
fn rows_shapes_and_lengths_are_checked_in_every_lane() {
    let (mut ledger, row) = ledger();
    let known = [row.0, row.0];
    refuses(&mut ledger, |l| l.prepare_decode(&known, &[1, 1], true), &["row 1 is named twice"]);
    refuses(&mut ledger, |l| l.tokens_required(&known, &[1, 1]), &["row 1 is named twice"]);
    // Some of these unknown rows are wrong in two ways.
    for (wrong, why) in [(0, "not in 1..=3"), (-1, "not in 1..=3"), (4, "not in 1..=3"), (3, "not admitted")] {
        for rows in [[wrong, 1], [1, wrong], [wrong, wrong]] {
            let parts = [&format!("row {wrong} is ")[..], why];
            refuses(&mut ledger, |l| l.tokens_required(&rows, &[1, 1]), &parts);
            refuses(&mut ledger, |l| l.prepare_decode(&rows, &[1, 1], true), &parts);
            refuses(&mut ledger, |l| l.prepare_extend(&rows, &[9, 9], true), &parts);
        }
    }
    for shape in [-1, 2, i32::MIN] {
        let expected = format!("row 1: shape {shape} is not in 0..2");
        refuses(&mut ledger, |l| l.tokens_required(&[1], &[shape]), &[&expected]);
        refuses(&mut ledger, |l| l.prepare_decode(&[1], &[shape], true), &[&expected]);
    }
    for wrong in [&[][..], &[1, 1]] {
        refuses(&mut ledger, |l| l.prepare_decode(&[1], wrong, true), &["1 rows", &format!("{} shapes", wrong.len())]);
    }
    refuses(&mut ledger, |l| l.prepare_decode(&[], &[], true), &["1..=3 rows, got 0"]);
    refuses(&mut ledger, |l| l.prepare_decode(&[1; 4], &[1; 4], true), &["1..=3 rows, got 4"]);
}

#[test]
fn every_row_past_the_context_is_listed() {
    let (mut ledger, row) = ledger();
    let (other, third) = (ledger.admit(None).unwrap(), ledger.admit(None).unwrap());
    let rows = [row.0, other.0, third.0];
    let error = refuses(&mut ledger, |l| l.prepare_extend(&rows, &[21, 20, 22], true), &["[1, 3]", "20 tokens"]);
    assert_eq!(error, Error::ContextEnd { rows: vec![1, 3], max_context_len: 20 });
    let step = ledger.prepare_extend(&rows, &[20, 19, 20], true).unwrap().step;
    ledger.launch(step).unwrap();
    let error = refuses(&mut ledger, |l| l.prepare_decode(&rows, &[1, 1, 1], true), &["[1, 3]"]);
    assert_eq!(error, Error::ContextEnd { rows: vec![1, 3], max_context_len: 20 });
    ledger.prepare_decode(&[other.0], &[1], true).unwrap();
}

/// The reasons that keep a row from a round, one alone and two at once: the first reason is reported.
#[test]
fn a_row_that_is_late_in_two_ways_is_late() {
    let (mut ledger, row) = ledger();
    let decode = |ledger: &mut Ledger| ledger.prepare_decode(&[row.0], &[1], true);
    let plain = |ledger: &mut Ledger| ledger.prepare_decode(&[row.0], &[0], true);
    // A cut row has no root, whether or not its draft KV lags.
    ledger.trim(row, 3).unwrap();
    assert!(matches!(refuses(&mut ledger, plain, &["row 1 (one) has no root"]), Error::NotReady(_)));
    let step = ledger.prepare_extend(&[row.0], &[4], false).unwrap().step;
    assert!(matches!(refuses(&mut ledger, decode, &["has no root"]), Error::NotReady(_)));
    ledger.launch(step).unwrap();
    refuses(&mut ledger, decode, &["drafted_len 3, resolved_len 4, 0 rounds in flight write no draft KV"]);
    // Two rounds in flight that write no draft KV: too many rounds is reported before the lag.
    for _ in 0..2 {
        let step = ledger.prepare_decode(&[row.0], &[0], false).unwrap().step;
        ledger.launch(step).unwrap();
    }
    let error = refuses(&mut ledger, decode, &["2 rounds in flight, overlap_depth 1 allows 2"]);
    assert!(matches!(error, Error::Order(_)));
    ledger.resolve(3, &[1]).unwrap();
    refuses(&mut ledger, decode, &["drafted_len 3, resolved_len 5, 1 rounds in flight write no draft KV"]);
    ledger.resolve(4, &[1]).unwrap();
    // At the end of the context, and with lagging draft KV.
    let step = ledger.prepare_extend(&[row.0], &[20], false).unwrap().step;
    ledger.launch(step).unwrap();
    assert!(matches!(refuses(&mut ledger, decode, &["[1]"]), Error::ContextEnd { .. }));
    // At the end of the context, and without a root.
    let other = ledger.admit(None).unwrap();
    ledger.prepare_extend(&[other.0], &[20], true).unwrap();
    let error = refuses(&mut ledger, |l| l.prepare_decode(&[other.0], &[0], true), &["row 2 has no root"]);
    assert!(matches!(error, Error::NotReady(_)));
}

/// A trim to r with nothing in flight frees only the reserve: rounds go on, also with drafts.
#[test]
fn a_cut_that_takes_no_token_keeps_the_root() {
    let (mut ledger, row) = ledger();
    for accept_len in [1, 4, 2] {
        let step = ledger.prepare_decode(&[row.0], &[1], true).unwrap().step;
        ledger.launch(step).unwrap();
        ledger.resolve(step, &[accept_len]).unwrap();
        ledger.complete(step).unwrap();
        let (len, epoch) = (ledger.resolved_len()[row.at()], ledger.epoch()[row.at()]);
        assert_eq!(ledger.trim(row, len).unwrap(), len);
        assert!(ledger.has_root(row));
        assert_eq!(ledger.epoch()[row.at()], epoch + 1);
        assert_eq!(ledger.allocated_len(0).unwrap()[row.at()], (len + 3) / 4 * 4);
        assert_eq!(ledger.drafted_len()[row.at()], len);
    }
}

/// A cut to r takes the root if it also takes a round or an extend, or ends a turn. It never gives a root.
#[test]
fn a_cut_that_takes_what_is_in_flight_takes_the_root() {
    let (mut ledger, row) = ledger();
    let other = ledger.admit(None).unwrap();
    assert_eq!(ledger.trim(other, 0).unwrap(), 0);
    assert!(!ledger.has_root(other), "it had none");
    let fork = ledger.fork(row, None).unwrap();
    assert_eq!(ledger.trim(fork, 5).unwrap(), 5);
    assert!(!ledger.has_root(fork), "it had none");
    let step = ledger.prepare_extend(&[row.0], &[8], true).unwrap().step;
    assert_eq!(ledger.trim(row, 8).unwrap(), 5);
    assert!(!ledger.has_root(row), "its extend is lost");
    ledger.cancel(step).unwrap();
    let extend = |ledger: &mut Ledger, len| {
        let step = ledger.prepare_extend(&[row.0], &[len], true).unwrap().step;
        ledger.launch(step).unwrap();
    };
    extend(&mut ledger, 6);
    let step = ledger.prepare_decode(&[row.0], &[1], true).unwrap().step;
    ledger.launch(step).unwrap();
    assert_eq!(ledger.trim(row, 6).unwrap(), 6);
    assert!(!ledger.has_root(row), "its round is lost");
    extend(&mut ledger, 7);
    assert_eq!(ledger.end_turn(row, 7).unwrap(), 7);
    assert!(!ledger.has_root(row), "its turn has ended");
    assert_eq!(ledger.trim(row, 7).unwrap(), 7);
    assert!(!ledger.has_root(row), "it had none");
}

#[test]
fn a_closed_ledger_answers_and_does_nothing_more() {
    let (mut ledger, row) = ledger();
    assert!(!ledger.is_closed());
    ledger.close().unwrap();
    ledger.close().unwrap();
    assert!(ledger.is_closed());
    for refused in [ledger.finish(row), ledger.admit(None).map(drop), ledger.snapshot().map(drop)] {
        assert_eq!(refused, Err(Error::Order("the ledger is closed".into())));
    }
    assert_eq!(ledger.resolved_len()[row.at()], 5);
    ledger.check().unwrap();
}

/// A copy that rides on a step concerns its row only while the row has the page that is written.
#[test]
fn a_row_that_was_cut_below_an_unfinished_copy_can_be_shared() {
    let (mut ledger, row) = ledger();
    let copy = ledger.fork(row, None).unwrap();
    let step = ledger.prepare_extend(&[copy.0], &[8], true).unwrap().step;
    ledger.launch(step).unwrap();
    refuses(&mut ledger, |l| l.pin_prefix(copy, 5), &["pin_prefix of row 2", "is not finished"]);
    ledger.trim(copy, 4).unwrap();
    let prefix = ledger.pin_prefix(copy, 4).unwrap();
    assert_eq!(ledger.prefix_len(prefix), Ok(4));
}

/// A row that is named twice is found in a batch of any size.
#[test]
fn a_batch_names_each_row_once() {
    let (name, layout, window) = ("kv".into(), Layout::Dense, None);
    let group = Group { name, page_size: 4, num_pages: 400, hosts_drafts: true, layout, window, sink: 0 };
    let mut ledger = Ledger::new(LedgerConfig::new(vec![group], vec![], 40, 20)).unwrap();
    let live: Vec<i32> = (0..30).map(|_| ledger.admit(None).unwrap().0).collect();
    for len in 1..live.len() {
        let shapes = vec![0; len + 1];
        assert!(ledger.tokens_required(&live[..len], &shapes[..len]).is_ok());
        for (wrong, says) in [(live[len / 2], "is named twice"), (40, "not admitted"), (-1, "row -1")] {
            let rows = [&live[..len], &[wrong]].concat();
            refuses(&mut ledger, |l| l.tokens_required(&rows, &shapes), &[&format!("row {wrong}"), says]);
        }
    }
}

/// One pass gives what a take and its acknowledgement give, and nothing stays pending.
#[test]
fn a_drained_delta_is_one_that_is_taken_and_acknowledged() {
    let (mut drained, row) = ledger();
    drained.admit(None).unwrap();
    drained.finish(Row(2)).unwrap();
    let step = drained.prepare_decode(&[row.0], &[1], true).unwrap().step;
    drained.launch(step).unwrap();
    let mut taken = drained.clone();
    let entries = taken.take_delta(step).unwrap().swap_remove(0);
    taken.ack_delta(step).unwrap();

    let mut seen = vec![];
    drained.take_delta(step).unwrap();
    drained.drain_delta(step, |group, row, column, page| seen.push((group, row.0, column as i32, page.0))).unwrap();
    let lines = entries.rows.iter().zip(&entries.columns).zip(&entries.pages);
    assert_eq!(seen, lines.map(|((&row, &column), &page)| (0, row, column, page)).collect::<Vec<_>>());
    assert!(seen.len() > 1);
    for ledger in [&mut drained, &mut taken] {
        ledger.check().unwrap();
        refuses(ledger, |l| l.ack_delta(step), &["no delta of it is waiting"]);
        assert_eq!(ledger.take_delta(step).unwrap()[0].rows, []);
    }
    refuses(&mut drained, |l| l.drain_delta(step + 1, |_, _, _, _| ()), &["no such step is in flight"]);
}

/// A fork that is cut before its page copy is launched keeps only what is before the cut: it writes over the rest, or
/// gives the page back and takes it again. A connector is told of no more.
#[test]
fn a_copy_into_a_row_that_was_cut_moves_what_is_left() {
    for cut in [3, 2, 1, 0] {
        let (mut ledger, row) = ledger();
        ledger.trim(row, 3).unwrap();
        ledger.watch_kv().unwrap();
        ledger.take_kv_events().unwrap();
        let fork = ledger.fork(row, None).unwrap();
        let page = ledger.page_table(0).unwrap().row(fork)[0];
        let step = ledger.prepare_extend(&[row.0], &[4], true).unwrap().step;
        if cut < 3 {
            ledger.trim(fork, cut).unwrap();
        }
        ledger.launch(step).unwrap();
        ledger.complete(step).unwrap();
        ledger.prepare_extend(&[fork.0], &[4], true).unwrap();
        assert_eq!(ledger.page_table(0).unwrap().row(fork)[0], page, "the same page, also if it was given back");
        let tokens = |event: &KvEvent| match event {
            KvEvent::Move { copy, .. } if copy.dst == page => Some(copy.tokens),
            _ => None,
        };
        let told = ledger.take_kv_events().unwrap().iter().find_map(tokens);
        assert_eq!(told, Some(cut).filter(|&tokens| tokens > 0));
    }
}

/// A row that is given back before its page copy is launched leaves its number to another row, which may take the page
/// of the copy at the same place. The copy is not told of as that row's.
#[test]
fn a_copy_into_a_row_that_has_gone_is_not_the_next_rows() {
    for has_gone in [false, true] {
        let (mut ledger, row) = ledger();
        let extend = |ledger: &mut Ledger, row: Row, len: i32| {
            let step = ledger.prepare_extend(&[row.0], &[len], true).unwrap().step;
            ledger.launch(step).unwrap();
            ledger.complete(step).unwrap();
        };
        extend(&mut ledger, row, 11);
        let prefix = ledger.pin_prefix(row, 11).unwrap();
        ledger.watch_kv().unwrap();
        ledger.take_kv_events().unwrap();
        let other = ledger.admit_on(prefix, Some(7), None).unwrap();
        let page = ledger.page_table(0).unwrap().row(other)[1];
        let step = ledger.prepare_extend(&[row.0], &[12], true).unwrap().step;
        if has_gone {
            ledger.finish(other).unwrap();
            assert_eq!(ledger.admit_on(prefix, Some(0), None).unwrap(), other, "the same number");
        }
        ledger.launch(step).unwrap();
        if has_gone {
            extend(&mut ledger, other, 4); // takes another page, as the copy still has its own
        }
        extend(&mut ledger, other, 8);
        assert_eq!(ledger.page_table(0).unwrap().row(other)[1], page, "the same page at the same place");
        let moves = |event: &KvEvent| matches!(event, KvEvent::Move { copy, .. } if copy.dst == page);
        assert_eq!(ledger.take_kv_events().unwrap().iter().any(moves), !has_gone);
    }
}
