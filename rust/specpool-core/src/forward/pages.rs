//! Whole pages of several buffers as one run of bytes, for rows that move. A page of the run has the page of each buffer,
//! one after the other.

use crate::check::same_len;
use crate::digest::Checksum;
use crate::error::{Error, Result};

/// Copies pages to `out`, and returns the checksum of it. `buffers` has the bytes of each, and those of one of its pages.
///
/// # Errors
/// [`Error::Shape`] when a page lies outside a buffer, or `out` has another length. Then nothing is written.
pub fn gather_pages(buffers: &[(&[u8], usize)], pages: &[i32], out: &mut [u8]) -> Result<u64> {
    let sizes = buffers.iter().map(|(bytes, size)| (bytes.len(), *size));
    check("out", sizes, pages, out.len())?;
    let (mut sum, mut at) = (Checksum::default(), 0);
    for &page in pages {
        for &(bytes, size) in buffers {
            let start = page as usize * size;
            sum.copy(&bytes[start..start + size], &mut out[at..at + size]);
            at += size;
        }
    }
    Ok(sum.value())
}

/// Copies `values` to pages, and returns its checksum. If a page is named twice, the last one counts.
///
/// # Errors
/// As [`gather_pages`].
pub fn scatter_pages(buffers: &mut [(&mut [u8], usize)], pages: &[i32], values: &[u8]) -> Result<u64> {
    let sizes = buffers.iter().map(|(bytes, size)| (bytes.len(), *size));
    check("values", sizes, pages, values.len())?;
    let (mut sum, mut at) = (Checksum::default(), 0);
    for &page in pages {
        for (bytes, size) in &mut *buffers {
            let start = page as usize * *size;
            sum.copy(&values[at..at + *size], &mut bytes[start..start + *size]);
            at += *size;
        }
    }
    Ok(sum.value())
}

fn check(name: &str, sizes: impl Iterator<Item = (usize, usize)>, pages: &[i32], len: usize) -> Result<()> {
    let (mut num_pages, mut page_bytes) = (usize::MAX, 0_usize);
    for (bytes, size) in sizes {
        num_pages = num_pages.min(bytes.checked_div(size).unwrap_or(usize::MAX));
        page_bytes = page_bytes.saturating_add(size);
    }
    if let Some(at) = pages.iter().position(|&page| page < 0 || page as usize >= num_pages) {
        return Err(Error::Shape(format!("pages[{at}] must be in [0, {num_pages}), got {}", pages[at])));
    }
    same_len(&format!("bytes of {name}"), len, page_bytes.saturating_mul(pages.len()))
}
