use super::*;
use crate::ids::Row;

fn plan() -> Plan {
    let lanes = vec![1, 2];
    let (rows, shapes, lo, hi, start) = (lanes.clone(), lanes.clone(), lanes.clone(), lanes.clone(), lanes.clone());
    let (new_len, allocated_before, allocated_after) = (lanes.clone(), lanes.clone(), lanes);
    let (step, kind, writes_draft, epochs, page_copies) = (1, StepKind::Extend, false, vec![1, 2], vec![]);
    Plan {
        step,
        kind,
        writes_draft,
        rows,
        shapes,
        epochs,
        lo,
        hi,
        start,
        new_len,
        allocated_before,
        allocated_after,
        states: None,
        page_copies,
    }
}

fn hash(change: impl FnOnce(&mut Plan), before: Before, after: impl FnOnce(&mut Steps)) -> u64 {
    let (mut plan, mut steps, mut digest) = (plan(), Steps::new(), Digest::new());
    change(&mut plan);
    steps.push(Arc::new(plan), before);
    after(&mut steps);
    steps.hash(&mut digest);
    digest.value()
}

#[test]
fn cancelled_numbers_take_no_more_memory_than_their_bound() {
    let mut steps = Steps::new();
    let prepare = |steps: &mut Steps| {
        let plan = Plan { step: steps.next(), ..plan() };
        steps.push(Arc::new(plan), Before::default());
        steps.next() - 1
    };
    let last = (0..MAX_CANCELLED + 9).fold(0, |_, _| {
        let cancelled = prepare(&mut steps);
        steps.cancel_newest();
        let step = prepare(&mut steps);
        steps.num_unlaunched = 0;
        steps.complete(step);
        assert!(steps.check_complete(cancelled).is_err() && steps.check_complete(step).is_ok());
        cancelled
    });
    assert_eq!(steps.cancelled.len(), MAX_CANCELLED);
    assert!(steps.check_complete(last - 2 * (MAX_CANCELLED as u64 - 1)).is_err());
    assert!(steps.check_complete(1).is_ok());
}

#[test]
fn the_hash_sees_every_number_that_counts() {
    type Change = fn(&mut Plan);
    let changes: [Change; 11] = [
        |_| {},
        |plan| plan.step = 2,
        |plan| plan.kind = StepKind::Decode,
        |plan| plan.writes_draft = true,
        |plan| plan.rows[1] = 3,
        |plan| plan.shapes[1] = 3,
        |plan| plan.lo[1] = 3,
        |plan| plan.hi[1] = 3,
        |plan| plan.new_len[1] = 3,
        |plan| plan.allocated_before[1] = 3,
        |plan| plan.epochs[1] = 3,
    ];
    let mut hashes: Vec<u64> = changes.iter().map(|change| hash(change, Before::default(), |_| {})).collect();
    let copy = PageCopy { group: 0, src: 1, dst: 2, tokens: 3 };
    let copies = vec![TailCopy { copy, row: Row(1), column: 0 }];
    let befores = [
        Before { copies, ..Before::default() },
        Before { drafted: vec![1], ..Before::default() },
        Before { idle: vec![1], ..Before::default() },
    ];
    hashes.extend(befores.into_iter().map(|before| hash(|_| {}, before, |_| {})));
    let afters: [fn(&mut Steps); 5] = [
        |steps| steps.queue[0].stale = true,
        |steps| steps.num_unlaunched = 0,
        |steps| steps.queue[0].abandoned = true,
        |steps| steps.completed = 1,
        |steps| steps.queue.clear(),
    ];
    hashes.extend(afters.into_iter().map(|after| hash(|_| {}, Before::default(), after)));
    hashes.sort_unstable();
    assert!(hashes.windows(2).all(|pair| pair[0] != pair[1]));
}
