//! Whole pages of several buffers as one run of bytes, for rows that move: the pages of the first buffer, those of the
//! second, and so on.

use std::ops::Range;

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
    for &(bytes, size) in buffers {
        for run in runs(pages) {
            let end = at + run.len() * size;
            sum.copy(&bytes[run.start * size..run.end * size], &mut out[at..end]);
            at = end;
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
    for (bytes, size) in buffers {
        for run in runs(pages) {
            let end = at + run.len() * *size;
            sum.copy(&values[at..end], &mut bytes[run.start * *size..run.end * *size]);
            at = end;
        }
    }
    Ok(sum.value())
}

/// Pages that lie behind each other, as ranges: long copies take half the time of page after page.
fn runs(pages: &[i32]) -> impl Iterator<Item = Range<usize>> {
    pages.chunk_by(|a, b| a + 1 == *b).map(|run| run[0] as usize..run[0] as usize + run.len())
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
