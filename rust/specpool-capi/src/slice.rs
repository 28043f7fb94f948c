//! The caller's arrays and texts.

use std::ffi::{CStr, c_char};

use crate::status::{Outcome, bad_argument};

/// The caller's array, to be read.
///
/// # Safety
/// `data` points to `len` values that nobody writes during the call, or is NULL.
pub(crate) unsafe fn read<'a, T>(name: &str, data: *const T, len: usize) -> Outcome<&'a [T]> {
    if len == 0 {
        return Ok(&[]);
    }
    if data.is_null() {
        return bad_argument(format!("{name} is NULL, and should have {len} entries"));
    }
    check_size::<T>(name, len)?;
    // SAFETY: the caller's promise; neither NULL nor too long.
    Ok(unsafe { std::slice::from_raw_parts(data, len) })
}

fn check_size<T>(name: &str, len: usize) -> Outcome {
    if len > isize::MAX as usize / size_of::<T>().max(1) {
        return bad_argument(format!("{name} cannot have {len} entries"));
    }
    Ok(())
}

/// Writes `values` to the caller's array of `capacity` entries.
///
/// # Safety
/// `data` points to `capacity` values that nobody else uses during the call, or is NULL.
pub(crate) unsafe fn write<T: Copy>(name: &str, values: &[T], data: *mut T, capacity: usize) -> Outcome {
    has_room(name, data, capacity, values.len())?;
    if !values.is_empty() {
        // SAFETY: the caller's promise; there is room, as was checked.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), data, values.len()) };
    }
    Ok(())
}

/// Checks, before anything is changed, that an array will take `len` entries.
pub(crate) fn has_room<T>(name: &str, data: *mut T, capacity: usize, len: usize) -> Outcome {
    if capacity < len {
        return bad_argument(format!("{name} has room for {capacity} entries, and needs {len}"));
    }
    if data.is_null() && len > 0 {
        return bad_argument(format!("{name} is NULL, and needs room for {len} entries"));
    }
    Ok(())
}

/// Writes one value.
///
/// # Safety
/// `data` points to a value that nobody else uses during the call, or is NULL.
pub(crate) unsafe fn put<T>(name: &str, value: T, data: *mut T) -> Outcome {
    has_room(name, data, 1, 1)?;
    // SAFETY: the caller's promise; not NULL.
    unsafe { data.write(value) };
    Ok(())
}

/// A reference to a structure of the caller.
///
/// # Safety
/// `data` points to a value that nobody writes during the call, or is NULL.
pub(crate) unsafe fn given<'a, T>(name: &str, data: *const T) -> Outcome<&'a T> {
    // SAFETY: the caller's promise.
    match unsafe { data.as_ref() } {
        Some(value) => Ok(value),
        None => bad_argument(format!("{name} is NULL")),
    }
}

/// A text; `None` for NULL.
///
/// # Safety
/// `text` points to a text that ends with NUL, or is NULL.
pub(crate) unsafe fn text<'a>(name: &str, text: *const c_char) -> Outcome<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise; not NULL.
    match unsafe { CStr::from_ptr(text) }.to_str() {
        Ok(text) => Ok(Some(text)),
        Err(error) => bad_argument(format!("{name} is not UTF-8: {error}")),
    }
}

/// A number that C passes as -1 for "none".
pub(crate) fn optional(name: &str, value: i64) -> Outcome<Option<u64>> {
    match value {
        -1 => Ok(None),
        0.. => Ok(Some(value as u64)),
        _ => bad_argument(format!("{name} must be at least 0, or -1 for none, got {value}")),
    }
}
