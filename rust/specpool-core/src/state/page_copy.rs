//! Copies of partly filled pages: the tail of a prefix that `admit` and `fork` give to a new row.
//!
//! A copy waits until a step is prepared, and rides on that step. It holds both its pages until the step is launched;
//! from then on their fences hold them. If its row goes away in the meantime, the copy writes a page that nobody
//! holds, or is dropped.

use crate::digest::Digest;
use crate::ids::{Page, Row};

/// Copies the first `tokens` slots of page `src` to page `dst`, in every layer of the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct PageCopy {
    /// The group's index.
    pub group: i32,
    /// The page that is read.
    pub src: i32,
    /// The page that is written.
    pub dst: i32,
    /// Slots that are copied, from the page's first slot on; fewer than P.
    pub tokens: i32,
}

/// A copy and the row that it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TailCopy {
    pub(crate) copy: PageCopy,
    pub(crate) row: Row,
    /// The column in which the row's table had `dst` when the copy was asked for.
    pub(crate) column: usize,
}

impl TailCopy {
    pub(crate) fn group(&self) -> usize {
        self.copy.group as usize
    }

    pub(crate) fn dst(&self) -> Page {
        Page(self.copy.dst)
    }

    pub(crate) fn pages(&self) -> [Page; 2] {
        [Page(self.copy.src), Page(self.copy.dst)]
    }

    pub(crate) fn hash(&self, digest: &mut Digest) {
        let PageCopy { group, src, dst, tokens } = self.copy;
        digest.ints(&[group, src, dst, tokens, self.row.0, self.column as i32]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_sees_every_number() {
        let copy = |group, src, dst, tokens, row, column| {
            let mut digest = Digest::new();
            TailCopy { copy: PageCopy { group, src, dst, tokens }, row: Row(row), column }.hash(&mut digest);
            digest.value()
        };
        let mut hashes = vec![copy(0, 0, 0, 0, 0, 0), copy(1, 0, 0, 0, 0, 0), copy(0, 1, 0, 0, 0, 0)];
        hashes.extend([copy(0, 0, 1, 0, 0, 0), copy(0, 0, 0, 1, 0, 0), copy(0, 0, 0, 0, 1, 0), copy(0, 0, 0, 0, 0, 1)]);
        hashes.sort_unstable();
        assert!(hashes.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
