//! One fixed 64-bit hash, for the running digest and for the state hash. It is the same on every machine and in every
//! build, so ranks and logs can be compared. It finds bugs; it does not resist attackers.

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

/// A checksum of KV that moves between processes, at the speed of memory. Whatever one word of 64 bits is changed to, the
/// checksum differs. It finds damage; it does not resist attackers.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    let mut lanes: [u64; 8] = std::array::from_fn(|lane| lane as u64);
    let mut blocks = bytes.chunks_exact(64);
    for block in &mut blocks {
        for (lane, word) in lanes.iter_mut().zip(block.chunks_exact(8)) {
            let word = u64::from_le_bytes(word.try_into().unwrap_or_default());
            *lane = (*lane ^ word).wrapping_mul(FACTOR).rotate_left(29);
        }
    }
    let mut digest = Digest::new();
    for lane in lanes {
        digest.word(lane);
    }
    digest.bytes(blocks.remainder());
    digest.word(bytes.len() as u64);
    digest.value()
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
}
