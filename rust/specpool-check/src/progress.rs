//! The progress law (docs/contract.md): a request that the pool cannot serve now can be served in the end. The steps
//! are: drop idle sessions, unused prefixes and what is lent; retract, last in first out, until the free and fenced pages suffice;
//! drain what is in flight; retry.

use specpool_core::{Call, Error, Snapshots, StepState};

use crate::device::Fault;
use crate::world::{Event, World};

/// What the refused call lacks, in the first group that is short: (group, need, free and cached, fenced); `None` if it
/// would lack nothing.
fn shortage(world: &World, op: &Call<'static>) -> Option<(String, usize, usize, usize)> {
    match op.run(&mut world.ledger.clone(), None, &mut Snapshots::default()) {
        Err(Error::OutOfPages { group, need, free, cached, fenced, .. }) => Some((group, need, free + cached, fenced)),
        _ => None,
    }
}

/// If `op`, whose only row is `row`, is refused for lack of pages, brings the world to a state in which it is served.
///
/// # Errors
/// What prevents it, or that pages that were counted as coming back did not come back.
pub fn check_progress(world: &World, op: &Call<'static>, row: i32) -> Result<(), Fault> {
    if shortage(world, op).is_none() {
        return Ok(());
    }
    let mut world = world.clone();
    for prefix in world.ledger.prefixes().collect::<Vec<_>>() {
        call(&mut world, &Call::ReleasePrefix { prefix })?;
    }
    for group in 0..world.ledger.num_groups() {
        let pages = world.ledger.lent_pages(group).map_err(|error| error.to_string())?;
        call(&mut world, &Call::ReleaseLent { group: group as i32, pages: pages.into() })?;
    }
    for other in world.admitted.clone() {
        if world.ledger.idle()[other as usize] && other != row {
            call(&mut world, &Call::Finish { row: other })?;
        }
    }
    // Pages that only a waiting copy holds count as fenced too. They come back with the next step, not by a drain.
    let is_strict = !world.has_waiting_copies();
    while let Some((group, need, free, fenced)) = shortage(&world, op) {
        let is_busy = world.ledger.steps().next().is_some();
        if is_busy && need <= free + fenced {
            drain(&mut world)?;
            let is_still_short = |other: (String, usize, usize, usize)| other.0 == group;
            if is_strict && shortage(&world, op).is_some_and(is_still_short) {
                return Err(format!(
                    "no progress for {op:?}: {need} pages of {group} needed, {free} free, {fenced} fenced, drained"
                ));
            }
        } else if let Some(&victim) = world.admitted.iter().rev().find(|&&other| other != row) {
            call(&mut world, &Call::Retract { row: victim })?;
        } else if is_busy {
            drain(&mut world)?;
        } else if world.has_waiting_copies() {
            // For its own tail: one token fits beside it, and that step takes the copy along.
            let new_lens = vec![world.ledger.resolved_len()[row as usize] + 1];
            call(
                &mut world,
                &Call::PrepareExtend { rows: vec![row].into(), new_lens: new_lens.into(), writes_draft: true },
            )?;
        } else {
            return Err(format!(
                "{op:?} can never be served: {need} pages of {group} needed, {free} free, {fenced} fenced"
            ));
        }
    }
    Ok(())
}

/// Ends everything in flight: stale steps are cancelled; the others are launched, run, settled and completed.
///
/// # Errors
/// A call that is refused although nothing prevents it.
pub fn drain(world: &mut World) -> Result<(), Fault> {
    while let Some((step, ..)) = world.ledger.steps().filter(|(.., state)| *state == StepState::Stale).last() {
        let newest = world.flights.back().map_or(step, |flight| flight.plan.step);
        call(world, &Call::Cancel { step: newest })?;
    }
    loop {
        let next = world.flights.iter().find_map(|flight| {
            let step = flight.plan.step;
            match &flight.ran {
                _ if !flight.is_launched() => Some(Event::Call(Call::Launch { step })),
                None => Some(Event::Run { accept_lens: vec![1; flight.plan.num_lanes()] }),
                Some(_) if flight.has_failed => Some(Event::Call(Call::Abandon { step })),
                Some(ran) if !flight.is_settled => {
                    Some(Event::Call(Call::Resolve { step, accept_lens: ran.clone().into() }))
                }
                Some(_) => Some(Event::Call(Call::Complete { step })).filter(|_| !flight.is_complete),
            }
        });
        match next {
            // A retraction may leave later steps stale, and so may an abandon here.
            Some(Event::Call(Call::Launch { .. })) if has_stale(world) => {
                let newest = world.flights.back().map_or(0, |flight| flight.plan.step);
                call(world, &Call::Cancel { step: newest })?;
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

/// Makes a call that nothing prevents.
fn call(world: &mut World, op: &Call<'static>) -> Result<(), Fault> {
    if world.apply(&Event::Call(op.clone()))? {
        Ok(())
    } else {
        Err(format!("{op:?} is refused on the way to progress"))
    }
}
