//! Handles: numbers that name a pool or a ledger, and the guard around each call.

use std::any::type_name;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use crate::status::{Outcome, Refusal, Status, report};

/// One thing behind a handle. Its lock is poisoned once a call panicked: it may be half changed.
type Place<T> = Arc<Mutex<T>>;

/// Everything of one kind that was made and not destroyed.
///
/// A handle is the number of its slot plus, in the upper half, how often the slot was used: so an old handle never
/// names a new thing.
pub(crate) struct Table<T> {
    slots: Mutex<Vec<(u32, Option<Place<T>>)>>,
}

impl<T> Table<T> {
    pub(crate) const fn new() -> Self {
        Self { slots: Mutex::new(Vec::new()) }
    }

    fn slots(&self) -> MutexGuard<'_, Vec<(u32, Option<Place<T>>)>> {
        // No code that can panic runs under this lock.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a thing and returns its handle, which is never 0.
    pub(crate) fn insert(&self, value: T) -> u64 {
        let mut slots = self.slots();
        let cell = Some(Arc::new(Mutex::new(value)));
        // A slot whose count is used up stays empty.
        let slot = if let Some(slot) = slots.iter().position(|(uses, cell)| cell.is_none() && *uses < u32::MAX) {
            slots[slot] = (slots[slot].0 + 1, cell);
            slot
        } else {
            slots.push((1, cell));
            slots.len() - 1
        };
        u64::from(slots[slot].0) << 32 | slot as u64
    }

    fn find(&self, handle: u64) -> Outcome<Place<T>> {
        let (uses, slot) = ((handle >> 32) as u32, handle as u32 as usize);
        match self.slots().get(slot) {
            Some((now, Some(cell))) if *now == uses => Ok(Arc::clone(cell)),
            _ => Err(bad_handle::<T>(handle)),
        }
    }

    /// Destroys the thing behind a handle, also a poisoned one. It must not be in a call.
    pub(crate) fn remove(&self, handle: u64) -> Outcome {
        let cell = self.find(handle)?;
        let lock = match lock(&cell) {
            Err(Refusal::Here(Status::SpecpoolCorrupt, _)) => None,
            other => Some(other?),
        };
        let (slot, mut slots) = (handle as u32 as usize, self.slots());
        match slots.get_mut(slot) {
            // Another thread may have been faster.
            Some((now, cell)) if u64::from(*now) == handle >> 32 && cell.is_some() => *cell = None,
            _ => return Err(bad_handle::<T>(handle)),
        }
        drop(slots);
        drop(lock);
        Ok(())
    }

    /// Runs a call on the thing behind a handle.
    pub(crate) fn with<R>(&self, handle: u64, call: impl FnOnce(&mut T) -> Outcome<R>) -> Outcome<R> {
        let cell = self.find(handle)?;
        let mut lock = lock(&cell)?;
        call(&mut lock)
    }
}

fn bad_handle<T>(handle: u64) -> Refusal {
    let kind = type_name::<T>().rsplit("::").next().unwrap_or_default();
    Refusal::Here(Status::SpecpoolBadHandle, format!("{handle:#x} is no handle of a {kind}, or it was destroyed"))
}

fn lock<T>(cell: &Place<T>) -> Outcome<MutexGuard<'_, T>> {
    match cell.try_lock() {
        Ok(lock) => Ok(lock),
        Err(TryLockError::WouldBlock) => {
            let why = "another thread is inside a call of this handle: one call at a time";
            Err(Refusal::Here(Status::SpecpoolBusy, why.into()))
        }
        Err(TryLockError::Poisoned(_)) => {
            let why =
                "a call before this one panicked and may be half done (the panic is on stderr): destroy the handle";
            Err(Refusal::Here(Status::SpecpoolCorrupt, why.into()))
        }
    }
}

/// Runs a call and returns its code. A panic ends here and becomes SPECPOOL_CORRUPT; the handle's lock is poisoned
/// then, which refuses every later call.
pub(crate) fn guard(call: impl FnOnce() -> Outcome) -> Status {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => Status::SpecpoolOk,
        Ok(Err(refusal)) => report(refusal),
        Err(_) => {
            let why = "the call panicked and may be half done (the panic is on stderr): the handle cannot be used";
            report(Refusal::Here(Status::SpecpoolCorrupt, why.into()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_code_and_the_handle_is_refused_until_destroyed() {
        let table = Table::new();
        let handle = table.insert(5);
        let status = guard(|| table.with(handle, |_: &mut i32| panic!("planted")));
        assert_eq!(status, Status::SpecpoolCorrupt);
        assert_eq!(guard(|| table.with(handle, |_| Ok(()))), Status::SpecpoolCorrupt);
        assert_eq!(guard(|| table.remove(handle)), Status::SpecpoolOk);
        assert_eq!(guard(|| table.with(handle, |_| Ok(()))), Status::SpecpoolBadHandle);
    }

    #[test]
    fn a_slot_is_used_again_under_another_handle() {
        let table = Table::new();
        let old = table.insert(1);
        assert_eq!(guard(|| table.remove(old)), Status::SpecpoolOk);
        assert_eq!(guard(|| table.remove(old)), Status::SpecpoolBadHandle);
        let new = table.insert(2);
        assert!(new != old && new as u32 == old as u32);
        assert_eq!(guard(|| table.with(old, |_| Ok(()))), Status::SpecpoolBadHandle);
        let mut value_seen = 0;
        assert_eq!(
            guard(|| table.with(new, |value| {
                value_seen = *value;
                Ok(())
            })),
            Status::SpecpoolOk
        );
        assert_eq!(value_seen, 2);
    }

    #[test]
    fn a_second_call_at_the_same_time_is_refused() {
        let table = Table::new();
        let handle = table.insert(0);
        let mut inner = Status::SpecpoolOk;
        let call = |_: &mut i32| {
            inner = guard(|| table.with(handle, |_| Ok(())));
            Ok(())
        };
        assert_eq!(guard(|| table.with(handle, call)), Status::SpecpoolOk);
        assert_eq!(inner, Status::SpecpoolBusy);
    }
}
