//! One fixed 64-bit hash, for the running digest and for the state hash. It is the same on every machine and in every
//! build, so ranks and logs can be compared. It finds bugs; it does not resist attackers.

use pulp::Arch;

/// A running hash over 64-bit words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest(u64);

/// 2^64 divided by the golden ratio, odd.
const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

impl Default for Digest {
    fn default() -> Self {
        Self::new()
    }
}

impl Digest {
    /// The hash of no input.
    #[must_use]
    pub fn new() -> Self {
        Self(0x7370_6563_706F_6F6C) // "specpool"
    }

    /// Continues from a value that [`Digest::value`] gave.
    #[must_use]
    pub fn from_value(value: u64) -> Self {
        Self(value)
    }

    /// The hash so far.
    #[must_use]
    pub fn value(self) -> u64 {
        self.0
    }

    /// Adds one word: xor, multiply, fold the high half down.
    pub fn word(&mut self, word: u64) {
        let mixed = (self.0 ^ word).wrapping_mul(FACTOR);
        self.0 = mixed ^ (mixed >> 32);
    }

    /// Adds bytes, eight at a time in little-endian order, then their number.
    pub fn bytes(&mut self, bytes: &[u8]) {
        let mut words = bytes.chunks_exact(8);
        for word in &mut words {
            self.word(word.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)));
        }
        let rest = words.remainder();
        self.word(rest.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)));
        self.word(bytes.len() as u64);
    }

    /// Adds the numbers of an array, then their number.
    pub fn ints<T: Copy + Into<i64>>(&mut self, values: &[T]) {
        self.numbers(values.iter().copied());
    }

    /// Adds numbers, then their count.
    pub fn numbers<T: Into<i64>>(&mut self, values: impl Iterator<Item = T>) {
        let mut len = 0;
        for value in values {
            self.word(value.into() as u64);
            len += 1;
        }
        self.word(len);
    }
}

/// A checksum of KV that moves between processes, at the speed of memory. It finds damage, such as changed words and
/// blocks in another order. It does not resist attackers.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    let mut sum = Checksum::default();
    sum.bytes(bytes);
    sum.value()
}

/// A [`checksum`] of bytes that come piece by piece, and are copied on the way.
#[derive(Debug, Clone)]
pub struct Checksum {
    sums: Sums,
    rest: [u8; BLOCK], // the first `len % BLOCK` bytes of it are in no sum yet
    len: usize,
}

/// The sum of each 64-bit column of the blocks, and the sum of these sums after each block, as Fletcher's checksum has
/// it. One changed word changes a sum; another order changes the sums of sums. Additions are vector instructions.
#[derive(Debug, Clone, Copy)]
struct Sums {
    words: [u64; 8],
    sums: [u64; 8],
}

/// Bytes that the sums take at once.
const BLOCK: usize = 64;

/// Bytes that are copied before they are added: they are still in the first cache then, and the copy is a `memcpy`.
const PIECE: usize = 8192;

impl Default for Checksum {
    fn default() -> Self {
        let words = std::array::from_fn(|column| column as u64);
        Self { sums: Sums { words, sums: [0; 8] }, rest: [0; BLOCK], len: 0 }
    }
}

impl Checksum {
    /// Adds bytes.
    pub fn bytes(&mut self, mut bytes: &[u8]) {
        let held = self.len % BLOCK;
        self.len += bytes.len();
        if held > 0 {
            let (first, others) = bytes.split_at((BLOCK - held).min(bytes.len()));
            self.rest[held..held + first.len()].copy_from_slice(first);
            if held + first.len() < BLOCK {
                return;
            }
            self.sums.add(&[self.rest]);
            bytes = others;
        }
        let (blocks, rest) = bytes.as_chunks();
        self.sums.add(blocks);
        self.rest[..rest.len()].copy_from_slice(rest);
    }

    /// Copies `from` to `to` and adds it. Memory is read and written once.
    ///
    /// # Panics
    /// If they differ in length.
    pub fn copy(&mut self, from: &[u8], to: &mut [u8]) {
        assert_eq!(from.len(), to.len(), "bytes that are copied");
        for (from, to) in from.chunks(PIECE).zip(to.chunks_mut(PIECE)) {
            to.copy_from_slice(from);
            self.bytes(from);
        }
    }

    /// The checksum of what was added.
    #[must_use]
    pub fn value(&self) -> u64 {
        let mut digest = Digest::new();
        for word in self.sums.words.into_iter().chain(self.sums.sums) {
            digest.word(word);
        }
        digest.bytes(&self.rest[..self.len % BLOCK]);
        digest.word(self.len as u64);
        digest.value()
    }
}

impl Sums {
    /// Adds blocks, with the widest vector instructions of this machine.
    fn add(&mut self, blocks: &[[u8; BLOCK]]) {
        *self = Arch::new().dispatch(|| self.with(blocks));
    }

    /// The sums after more blocks. It is compiled once for each kind of vector instructions.
    #[allow(clippy::inline_always, reason = "only what is inlined is compiled for the instructions chosen")]
    #[inline(always)]
    fn with(self, blocks: &[[u8; BLOCK]]) -> Self {
        let Self { mut words, mut sums } = self;
        for block in blocks {
            let (block, _) = block.as_chunks();
            for ((word, sum), bytes) in words.iter_mut().zip(&mut sums).zip(block) {
                *word = word.wrapping_add(u64::from_le_bytes(*bytes));
                *sum = sum.wrapping_add(*word);
            }
        }
        Self { words, sums }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every bit and every length counts, on both sides of a block.
    #[test]
    fn a_checksum_sees_every_bit_and_the_length() {
        for len in [0, 1, 7, 8, 63, 64, 65, 200] {
            let bytes: Vec<u8> = (0..len).map(|at: usize| (at * 37) as u8).collect();
            let whole = checksum(&bytes);
            assert_ne!(whole, checksum(&[&bytes[..], &[0]].concat()), "{len}");
            for bit in 0..len * 8 {
                let mut other = bytes.clone();
                other[bit / 8] ^= 1 << (bit % 8);
                assert_ne!(checksum(&other), whole, "bit {bit} of {len} bytes");
            }
        }
        assert_eq!(checksum(b"specpool"), checksum(b"specpool"));
    }

    /// Also of zeros, whose words add nothing.
    #[test]
    fn a_checksum_sees_the_order_of_blocks() {
        for (first, second) in [([1_u8; 64], [2; 64]), ([0; 64], [3; 64])] {
            let blocks = [first, first, second, first].concat();
            for at in [0, 1, 3] {
                let mut moved = blocks.clone();
                moved[128..192].copy_from_slice(&first);
                moved[at * 64..at * 64 + 64].copy_from_slice(&second);
                assert_ne!(checksum(&moved), checksum(&blocks), "{at}");
            }
        }
    }

    /// However the bytes are cut into pieces, and whether they are copied or read.
    #[test]
    fn pieces_have_the_checksum_of_the_whole() {
        let bytes: Vec<u8> = (0..3 * PIECE + 700).map(|at: usize| (at * 37 + at / 64) as u8).collect();
        for sizes in [&[0, 1, 63, 64, 65, 128, 200][..], &[997], &[64], &[96, 40], &[PIECE + 5]] {
            let (mut sum, mut copied, mut at) = (Checksum::default(), vec![0; bytes.len()], 0);
            for (turn, &size) in sizes.iter().cycle().enumerate() {
                let end = (at + size).min(bytes.len());
                if turn % 3 == 2 {
                    sum.bytes(&bytes[at..end]);
                    copied[at..end].copy_from_slice(&bytes[at..end]);
                } else {
                    sum.copy(&bytes[at..end], &mut copied[at..end]);
                }
                at = end;
                assert_eq!(sum.value(), checksum(&bytes[..at]), "{sizes:?} {at}");
                if at == bytes.len() {
                    break;
                }
            }
            assert_eq!(copied, bytes);
        }
    }
}
