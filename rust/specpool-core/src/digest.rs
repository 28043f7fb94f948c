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
