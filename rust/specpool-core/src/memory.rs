//! Allocates memory before it is used. If there is none, the call is refused ([`Error::OutOfMemory`]) and the process
//! goes on; `vec!`, `collect` and `push` would abort it. Everything whose size comes from outside is allocated here.
//! Things of a small fixed size (a message, a node of a map) are not.

use std::collections::VecDeque;

use bytemuck::Zeroable;

use crate::error::{Error, Result};

fn short<T>(what: &'static str, entries: usize) -> Error {
    Error::OutOfMemory { what, entries, entry_bytes: size_of::<T>() }
}

/// An empty vector with room for `len` entries and no more.
///
/// # Errors
/// [`Error::OutOfMemory`]; the same in every function here.
///
/// # Examples
/// ```
/// use specpool_core::{Error, memory};
///
/// assert_eq!(memory::filled(7, 2, "sevens")?, [7, 7]);
/// let error = memory::with_room::<u64>(1 << 60, "dreams").unwrap_err();
/// assert_eq!(error.to_string(), "no memory for dreams: 1152921504606846976 entries of 8 bytes");
/// # Ok::<(), Error>(())
/// ```
pub fn with_room<T>(len: usize, what: &'static str) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| short::<T>(what, len))?;
    Ok(values)
}

/// Makes room for `more` entries behind the present ones. It grows by half of its size or more, so that a loop of
/// calls costs no more than a loop of pushes.
///
/// # Errors
/// As [`with_room`]; the values stay.
#[inline]
pub fn room<T>(values: &mut Vec<T>, more: usize, what: &'static str) -> Result<()> {
    if values.capacity() - values.len() >= more {
        return Ok(());
    }
    let len = values.len();
    values.try_reserve(more).map_err(|_| short::<T>(what, len.saturating_add(more)))
}

/// As [`room`], for a queue.
///
/// # Errors
/// As [`with_room`]; the values stay.
pub fn room_in_queue<T>(values: &mut VecDeque<T>, more: usize, what: &'static str) -> Result<()> {
    let len = values.len();
    values.try_reserve(more).map_err(|_| short::<T>(what, len.saturating_add(more)))
}

/// A vector of `len` copies of the value.
///
/// # Errors
/// As [`with_room`].
pub fn filled<T: Clone>(value: T, len: usize, what: &'static str) -> Result<Vec<T>> {
    let mut values = with_room(len, what)?;
    values.resize(len, value);
    Ok(values)
}

/// `len` zeros. A large array gets untouched pages from the system, so it costs nothing before it is used.
///
/// # Errors
/// As [`with_room`].
pub fn zeroed<T: Zeroable>(len: usize, what: &'static str) -> Result<Vec<T>> {
    bytemuck::allocation::try_zeroed_vec(len).map_err(|()| short::<T>(what, len))
}

/// A copy of the values.
///
/// # Errors
/// As [`with_room`].
pub fn copied<T: Copy>(values: &[T], what: &'static str) -> Result<Vec<T>> {
    let mut copy = with_room(values.len(), what)?;
    copy.extend_from_slice(values);
    Ok(copy)
}

/// Collects an iterator of known length.
///
/// # Errors
/// As [`with_room`].
pub fn collected<T>(values: impl ExactSizeIterator<Item = T>, what: &'static str) -> Result<Vec<T>> {
    let mut all = with_room(values.len(), what)?;
    all.extend(values);
    Ok(all)
}

/// Collects an iterator whose length is not known before its end.
///
/// # Errors
/// As [`with_room`].
pub fn gathered<T>(values: impl Iterator<Item = T>, what: &'static str) -> Result<Vec<T>> {
    let mut all = Vec::new();
    for value in values {
        room(&mut all, 1, what)?;
        all.push(value);
    }
    Ok(all)
}

/// An owned copy of a text.
///
/// # Errors
/// As [`with_room`].
pub fn text(text: &str, what: &'static str) -> Result<Box<str>> {
    let mut owned = String::new();
    owned.try_reserve_exact(text.len()).map_err(|_| short::<u8>(what, text.len()))?;
    owned.push_str(text);
    Ok(owned.into_boxed_str())
}
