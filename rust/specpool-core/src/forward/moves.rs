//! Moves of slots within buffers of bytes. This is the CPU twin of `cuda/moves.cu`.

use std::ops::Range;

use crate::check::{fit, same_len};
use crate::error::{Error, Result};
use crate::forward::slots::check_slots;
use crate::memory::{room, zeroed};

/// The most widths that an error lists.
const MAX_SHOWN: usize = 16;

/// Where slots lie in a buffer of bytes `[lead, num_pages, P * sum(widths)]`. A page holds one field after the other,
/// each for all its P slots (sgl#31218). A plain buffer has one field, and pages of one slot.
#[derive(Debug, Clone)]
pub struct SlotLayout {
    lead: usize,
    num_pages: usize,
    page_bytes: usize,
    page_size: usize,
    widths: Vec<usize>, // bytes of one slot in each field
}

/// A buffer's layout and its bytes.
pub type Buffer<'a> = (&'a SlotLayout, &'a mut [u8]);

/// Moves for every buffer of `num_slots` slots: the bytes that `held` reads are saved first, then `direct` is copied
/// in order, then `held` is written.
#[derive(Debug, Clone)]
pub struct SlotMoves {
    num_slots: usize,
    direct: Vec<Run>,
    held: Vec<Run>, // moves that read what an earlier one writes
}

/// Moves of consecutive slots: consecutive in the source and in the target.
#[derive(Debug, Clone, Copy)]
struct Run {
    src: usize,
    dst: usize,
    len: usize,
}

/// One field of a buffer.
#[derive(Debug, Clone, Copy)]
struct Field {
    base: usize, // byte of slot 0
    page_size: usize,
    page_bytes: usize,
    width: usize, // bytes of one slot
}

impl SlotLayout {
    /// The layout of a buffer `[lead, num_pages, P * sum(widths)]`.
    ///
    /// # Errors
    /// [`Error::Shape`] when a page is not whole slots of `widths` bytes.
    pub fn new([lead, num_pages, page_bytes]: [usize; 3], widths: Vec<usize>) -> Result<Self> {
        let slot_bytes = widths.iter().fold(0_usize, |sum, &width| sum.saturating_add(width));
        if slot_bytes == 0 || !page_bytes.is_multiple_of(slot_bytes) {
            let shown = &widths[..widths.len().min(MAX_SHOWN)];
            return Err(Error::Shape(format!(
                "a page must be whole slots of {shown:?} bytes, 1 or more, got {page_bytes} bytes"
            )));
        }
        Ok(Self { lead, num_pages, page_bytes, page_size: page_bytes / slot_bytes, widths })
    }

    /// Slots of each lead and field.
    #[must_use]
    pub fn num_slots(&self) -> usize {
        self.num_pages.saturating_mul(self.page_size)
    }

    /// Bytes of `num_slots` slots, over all leads and fields.
    #[must_use]
    pub fn bytes_of(&self, num_slots: usize) -> usize {
        self.widths.iter().sum::<usize>().saturating_mul(self.lead).saturating_mul(num_slots)
    }

    fn fields(&self) -> impl Iterator<Item = Field> {
        let &Self { lead, num_pages, page_size, page_bytes, .. } = self;
        (0..lead).flat_map(move |lead| {
            let first = lead * num_pages * page_bytes;
            self.widths.iter().scan(first, move |next, &width| {
                let base = *next;
                *next += page_size * width;
                Some(Field { base, page_size, page_bytes, width })
            })
        })
    }
}

impl Field {
    fn at(&self, slot: usize) -> usize {
        if self.page_size == 1 {
            return self.base + slot * self.page_bytes;
        }
        self.base + slot / self.page_size * self.page_bytes + slot % self.page_size * self.width
    }

    /// Calls `copy` with the bytes of each run, or slot by slot if the slots of a field may lie apart.
    fn each(&self, runs: &[Run], mut copy: impl FnMut(Range<usize>, Range<usize>)) {
        let bytes = |slot, len| self.at(slot)..self.at(slot) + len * self.width;
        let is_plain = self.page_bytes == self.page_size * self.width;
        for &Run { src, dst, len } in runs {
            if is_plain {
                copy(bytes(src, len), bytes(dst, len));
            } else {
                (0..len).for_each(|i| copy(bytes(src + i, 1), bytes(dst + i, 1)));
            }
        }
    }

    /// Writes `values`, one after the other, to the targets of the runs, and consumes them.
    fn write(&self, runs: &[Run], bytes: &mut [u8], values: &mut &[u8]) {
        self.each(runs, |_, dst| {
            let (value, rest) = values.split_at(dst.len());
            bytes[dst].copy_from_slice(value);
            *values = rest;
        });
    }
}

impl SlotMoves {
    /// Plans the moves by which slot `dst[i]` takes what slot `src[i]` held before the first move.
    ///
    /// # Errors
    /// [`Error::Shape`] when lengths differ, a slot is outside `[0, num_slots)`, one is written twice, or there are
    /// 2^31 slots or more; [`Error::OutOfMemory`].
    ///
    /// # Examples
    /// ```
    /// use specpool_core::forward::moves::{SlotLayout, SlotMoves};
    ///
    /// let mut bytes = *b"aabbcc"; // three slots of two bytes
    /// let moves = SlotMoves::new(&[0, 1], &[1, 2], 3)?;
    /// moves.apply(&mut [(&SlotLayout::new([1, 3, 2], vec![2])?, &mut bytes)])?;
    /// assert_eq!(&bytes, b"aaaabb");
    /// # Ok::<(), specpool_core::Error>(())
    /// ```
    pub fn new(src: &[i64], dst: &[i64], num_slots: usize) -> Result<Self> {
        same_len("dst", dst.len(), src.len())?;
        check_slots("src", src, num_slots)?;
        check_slots("dst", dst, num_slots)?;
        let mut moves = Self { num_slots, direct: Vec::new(), held: Vec::new() };
        if dst.is_empty() {
            return Ok(moves);
        }
        let mut is_written = zeroed(fit("a buffer", &[num_slots])?, "the check of moves")?;
        for (&src, &dst) in src.iter().zip(dst) {
            let (src, dst) = (src as usize, dst as usize);
            let runs = if is_written[src] { &mut moves.held } else { &mut moves.direct };
            match runs.last_mut() {
                Some(run) if run.src + run.len == src && run.dst + run.len == dst => run.len += 1,
                _ => {
                    room(runs, 1, "moves")?;
                    runs.push(Run { src, dst, len: 1 });
                }
            }
            if std::mem::replace(&mut is_written[dst], true) {
                return Err(Error::Shape(format!("dst names slot {dst} twice")));
            }
        }
        Ok(moves)
    }

    /// Makes the moves in every buffer.
    ///
    /// # Errors
    /// [`Error::Shape`] when a buffer does not fit its layout or has fewer slots, [`Error::OutOfMemory`]. Then nothing
    /// is moved in any buffer.
    pub fn apply(&self, buffers: &mut [Buffer<'_>]) -> Result<()> {
        for (layout, bytes) in &*buffers {
            self.check(layout, bytes)?;
        }
        if self.direct.is_empty() && self.held.is_empty() {
            return Ok(()); // Return before looking at the fields: a buffer without bytes may have any number of them.
        }
        let num_held: usize = self.held.iter().map(|run| run.len).sum();
        let widest = buffers.iter().flat_map(|(layout, _)| &layout.widths).max().copied().unwrap_or(0);
        let mut held = Vec::new();
        room(&mut held, num_held.saturating_mul(widest), "slots that are read before they are written")?;
        for (layout, bytes) in buffers {
            for field in layout.fields() {
                held.clear();
                field.each(&self.held, |src, _| held.extend_from_slice(&bytes[src]));
                field.each(&self.direct, |src, dst| bytes.copy_within(src, dst.start));
                field.write(&self.held, bytes, &mut held.as_slice());
            }
        }
        Ok(())
    }

    /// Writes each buffer's values to the targets, in the order given to `new`: `n` slots of one field after the
    /// other. The sources must be the targets.
    ///
    /// # Errors
    /// As [`SlotMoves::apply`], and when there are more or fewer values. Then nothing is written in any buffer.
    pub fn scatter(&self, buffers: &mut [Buffer<'_>], values: &[&[u8]]) -> Result<()> {
        same_len("values", values.len(), buffers.len())?;
        let n = self.direct.iter().map(|run| run.len).sum();
        for ((layout, bytes), values) in buffers.iter().zip(values) {
            self.check(layout, bytes)?;
            same_len("bytes of values", values.len(), layout.bytes_of(n))?;
        }
        if n == 0 {
            return Ok(());
        }
        for ((layout, bytes), mut values) in buffers.iter_mut().zip(values.iter().copied()) {
            layout.fields().for_each(|field| field.write(&self.direct, bytes, &mut values));
        }
        Ok(())
    }

    fn check(&self, layout: &SlotLayout, bytes: &[u8]) -> Result<()> {
        same_len("bytes", bytes.len(), layout.bytes_of(layout.num_slots()))?;
        if layout.num_slots() < self.num_slots {
            let (num_slots, needed) = (layout.num_slots(), self.num_slots);
            return Err(Error::Shape(format!("a buffer must have {needed} slots or more, got {num_slots}")));
        }
        Ok(())
    }
}
