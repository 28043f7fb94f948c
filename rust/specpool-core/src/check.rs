//! Checks of settings and arrays, with the error that a wrong one gives.

use crate::error::{Error, Result};

/// Ids are int32, so no array of ids is longer.
const MAX_LEN: usize = 1 << 31;

/// Refuses a setting outside `[minimum, maximum]`.
pub(crate) fn in_range(name: &str, value: i64, minimum: i64, maximum: i64) -> Result<i64> {
    if value < minimum || value > maximum {
        return Err(Error::Config(format!("{name} must be in [{minimum}, {maximum}], got {value}")));
    }
    Ok(value)
}

/// The product of `sizes`, refused if an array of that many elements could not be indexed by int32. A size of 0 makes
/// the product 0, but the other sizes are still checked: a caller loops over them.
pub(crate) fn fit(name: &str, sizes: &[usize]) -> Result<usize> {
    let total = sizes.iter().try_fold(1_usize, |product, &size| product.checked_mul(size.max(1)));
    match total {
        Some(total) if total < MAX_LEN => Ok(if sizes.contains(&0) { 0 } else { total }),
        _ => Err(Error::Shape(format!("{name} of {sizes:?} elements is too large: at most 2^31 - 1 fit"))),
    }
}

/// Refuses an array of another length than expected.
pub(crate) fn same_len(name: &str, len: usize, expected: usize) -> Result<()> {
    if len == expected {
        return Ok(());
    }
    Err(Error::Shape(format!("{name} must have {expected} elements, got {len}")))
}

/// Refuses a negative entry.
pub(crate) fn not_negative(name: &str, at: usize, value: i32) -> Result<i64> {
    if value < 0 {
        return Err(Error::Shape(format!("{name}[{at}] must be 0 or more, got {value}")));
    }
    Ok(i64::from(value))
}
