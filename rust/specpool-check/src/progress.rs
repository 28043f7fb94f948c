//! The progress law (spec 4): a request that the pool cannot serve now can always be served in the end. Drop idle
//! sessions and unused prefixes; retract, last in first, until the pages that are free or fenced suffice, and no
//! further; drain what is in flight; the retry succeeds.

use specpool_core::{Error, StepState};

use crate::device::Fault;
use crate::op::{Op, apply};
use crate::world::{Event, World};

/// The pages that the refused call lacks: (need, free, fenced), or nothing when it would not lack any.
fn shortage(world: &World, op: &Op) -> Option<(usize, usize, usize)> {
    match apply(&mut world.ledger.clone(), op) {
        Err(Error::OutOfPages { need, free, fenced, .. }) => Some((need, free, fenced)),
        _ => None,
    }
}

/// Brings the world to a state in which `op`, just refused for want of pages, is served. `row` is the only row of `op`.
///
/// # Errors
/// What stands in the way, or that pages counted as coming back did not.
pub fn check_progress(world: &World, op: &Op, row: i32) -> Result<(), Fault> {
    let mut world = world.clone();
    let mut must = |world: &mut World, op: Op| match world.apply(&Event::Call(op.clone()))? {
        true => Ok(()),
        false => Err(format!("{op:?} is refused on the way to progress")),
    };
    for prefix in world.ledger.prefixes().collect::<Vec<_>>() {
        must(&mut world, Op::ReleasePrefix { prefix })?;
    }
    for other in world.admitted.clone() {
        if world.ledger.idle()[other as usize] && other != row {
            must(&mut world, Op::Finish { row: other })?;
        }
    }
    while let Some((need, free, fenced)) = shortage(&world, op) {
        if need <= free + fenced {
            break;
        }
        let Some(&victim) = world.admitted.iter().rev().find(|&&other| other != row) else {
            // What is in flight may still hold pages of the row's own that a resolve lets go.
            break;
        };
        must(&mut world, Op::Retract { row: victim })?;
    }
    drain(&mut world)?;
    match shortage(&world, op) {
        None => Ok(()),
        Some((need, free, fenced)) => {
            Err(format!("no progress for {op:?}: drained, and still {need} needed, {free} free, {fenced} fenced"))
        }
    }
}

/// Everything in flight is brought to its end: stale steps cancelled, the others launched, run, settled and completed.
///
/// # Errors
/// A call that is refused though nothing stands in its way.
pub fn drain(world: &mut World) -> Result<(), Fault> {
    while let Some((step, ..)) = world.ledger.steps().filter(|(.., state)| *state == StepState::Stale).last() {
        let newest = world.flights.back().map_or(step, |flight| flight.plan.step);
        call(world, Op::Cancel { step: newest })?;
    }
    loop {
        let next = world.flights.iter().find_map(|flight| {
            let step = flight.plan.step;
            match &flight.ran {
                _ if !flight.is_launched() => Some(Event::Call(Op::Launch { step })),
                None => Some(Event::Run { accept_lens: vec![1; flight.plan.num_lanes()] }),
                Some(_) if flight.has_failed && !flight.is_settled => Some(Event::Call(Op::Abandon { step })),
                Some(ran) if !flight.is_settled => Some(Event::Call(Op::Resolve { step, accept_lens: ran.clone() })),
                Some(_) => Some(Event::Call(Op::Complete { step })).filter(|_| !flight.is_complete),
            }
        });
        match next {
            // A retraction may leave later steps stale: what is abandoned here can do so too.
            Some(Event::Call(Op::Launch { .. })) if has_stale(world) => {
                let newest = world.flights.back().map_or(0, |flight| flight.plan.step);
                call(world, Op::Cancel { step: newest })?;
            }
            Some(event) => {
                if !world.apply(&event)? {
                    return Err(format!("{event:?} is refused while draining"));
                }
            }
            None => return Ok(()),
        }
    }
}

fn has_stale(world: &World) -> bool {
    world.ledger.steps().any(|(.., state)| state == StepState::Stale)
}

fn call(world: &mut World, op: Op) -> Result<(), Fault> {
    match world.apply(&Event::Call(op.clone()))? {
        true => Ok(()),
        false => Err(format!("{op:?} is refused while draining")),
    }
}
