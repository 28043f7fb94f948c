//! Numbers, texts and arrays as bytes, and back (`docs/event_log.md`). Reading checks everything: no bytes can make it
//! panic, or take more memory than their own length justifies.

use std::borrow::Cow;

use crate::memory;

/// What is wrong in a decoding; the reader adds the place.
pub(crate) type Decoded<T> = std::result::Result<T, String>;

/// LEB128: seven bits a byte, low ones first.
pub(crate) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// The 32 bits of a length, row or shape as a varint.
pub(crate) fn put_int(out: &mut Vec<u8>, value: i32) {
    put_varint(out, u64::from(value as u32));
}

pub(crate) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

pub(crate) fn put_text(out: &mut Vec<u8>, text: &str) {
    put_bytes(out, text.as_bytes());
}

/// The forms of an array, after its length. The writer takes the first that fits.
const SAME: u8 = 0;
const ASCENDING: u8 = 1;
const ONE_BYTE: u8 = 2;
const TWO_BYTES: u8 = 3;
const FOUR_BYTES: u8 = 4;

/// Each form is one tight loop, because arrays are the main cost of recording a decode step.
pub(crate) fn put_ints(out: &mut Vec<u8>, values: &[i32]) {
    put_varint(out, values.len() as u64);
    let Some(&first) = values.first() else { return };
    let is_one_up = |pair: &[i32]| pair[1] == pair[0].wrapping_add(1);
    if values.iter().all(|&value| value == first) {
        out.push(SAME);
        put_int(out, first);
    } else if values.windows(2).all(is_one_up) {
        out.push(ASCENDING);
        put_int(out, first);
    } else {
        let bits = values.iter().fold(0, |bits, &value| bits | value as u32);
        if bits <= 0xff {
            out.push(ONE_BYTE);
            out.extend(values.iter().map(|&value| value as u8));
        } else if bits <= 0xffff {
            out.push(TWO_BYTES);
            put_chunks(out, values, |value| (value as u16).to_le_bytes());
        } else {
            out.push(FOUR_BYTES);
            put_chunks(out, values, i32::to_le_bytes);
        }
    }
}

fn put_chunks<const N: usize>(out: &mut Vec<u8>, values: &[i32], bytes: impl Fn(i32) -> [u8; N]) {
    let from = out.len();
    out.resize(from + values.len() * N, 0);
    for (chunk, &value) in out[from..].chunks_exact_mut(N).zip(values) {
        chunk.copy_from_slice(&bytes(value));
    }
}

/// Reads what the `put_` functions wrote, and refuses everything else.
pub(crate) struct Bytes<'a> {
    bytes: &'a [u8],
    pub(crate) at: usize,
}

impl<'a> Bytes<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(crate) fn rest(&self) -> &'a [u8] {
        &self.bytes[self.at..]
    }

    fn take(&mut self, len: usize) -> Decoded<&'a [u8]> {
        let rest = self.rest();
        if len > rest.len() {
            return Err(format!("{len} bytes are needed, {} are left", rest.len()));
        }
        self.at += len;
        Ok(&rest[..len])
    }

    pub(crate) fn byte(&mut self) -> Decoded<u8> {
        Ok(self.take(1)?[0])
    }

    pub(crate) fn flag(&mut self) -> Decoded<bool> {
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(format!("a flag is 0 or 1, got {other}")),
        }
    }

    pub(crate) fn varint(&mut self) -> Decoded<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                // The tenth byte has room for one bit, and no number may have two encodings.
                let is_canonical = (shift < 63 || byte <= 1) && (byte > 0 || shift == 0);
                return if is_canonical { Ok(value) } else { Err("a number is not in its shortest form".into()) };
            }
        }
        Err("a number is longer than 64 bits".into())
    }

    pub(crate) fn int(&mut self) -> Decoded<i32> {
        let value = self.varint()?;
        u32::try_from(value).map(|bits| bits as i32).map_err(|_| format!("{value} is not a number of 32 bits"))
    }

    pub(crate) fn text(&mut self) -> Decoded<String> {
        let len = self.varint()?;
        let bytes = self.take(usize::try_from(len).unwrap_or(usize::MAX))?;
        let text = std::str::from_utf8(bytes).map_err(|error| format!("a text is not UTF-8: {error}"))?;
        memory::text(text, "a text").map(String::from).map_err(|error| error.to_string())
    }

    pub(crate) fn bytes(&mut self, max_len: usize) -> Decoded<Vec<u8>> {
        let len = self.varint()?;
        if len > max_len as u64 {
            return Err(format!("{len} bytes, at most {max_len} fit"));
        }
        memory::copied(self.take(len as usize)?, "bytes").map_err(|error| error.to_string())
    }

    pub(crate) fn ints(&mut self, max_len: usize) -> Decoded<Cow<'static, [i32]>> {
        let len = self.varint()?;
        if len > max_len as u64 {
            return Err(format!("an array of {len} entries, at most {max_len} fit"));
        }
        let len = len as usize;
        if len == 0 {
            return Ok(Cow::Owned(Vec::new()));
        }
        let form = self.byte()?;
        // Two of the forms can state any number of lanes in a few bytes.
        let mut values = memory::with_room(len, "an array").map_err(|error| error.to_string())?;
        match form {
            SAME => values.resize(len, self.int()?),
            ASCENDING => {
                let first = self.int()?;
                values.extend((0..len as i32).map(|at| first.wrapping_add(at)));
            }
            ONE_BYTE => values.extend(self.take(len)?.iter().map(|&byte| i32::from(byte))),
            TWO_BYTES => {
                let bytes = self.take(len * 2)?.chunks_exact(2);
                values.extend(bytes.map(|pair| i32::from(u16::from_le_bytes([pair[0], pair[1]]))));
            }
            FOUR_BYTES => {
                let bytes = self.take(len * 4)?.chunks_exact(4);
                values.extend(bytes.map(|four| i32::from_le_bytes([four[0], four[1], four[2], four[3]])));
            }
            _ => return Err(format!("there is no array of form {form}")),
        }
        Ok(Cow::Owned(values))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of each form are fixed, because logs and digests of other builds contain them.
    #[test]
    fn an_array_takes_the_first_form_that_fits() {
        let bytes = |values: &[i32]| {
            let mut out = Vec::new();
            put_ints(&mut out, values);
            out
        };
        assert_eq!(bytes(&[]), [0]);
        assert_eq!(bytes(&[7]), [1, SAME, 7]);
        assert_eq!(bytes(&[200, 200, 200]), [3, SAME, 0xc8, 1]);
        assert_eq!(bytes(&[200, 201, 202]), [3, ASCENDING, 0xc8, 1]);
        assert_eq!(bytes(&[200, 202, 255]), [3, ONE_BYTE, 200, 202, 255]);
        assert_eq!(bytes(&[200, 256]), [2, TWO_BYTES, 200, 0, 0, 1]);
        assert_eq!(bytes(&[0, 65_535]), [2, TWO_BYTES, 0, 0, 255, 255]);
        assert_eq!(bytes(&[0, 65_536]), [2, FOUR_BYTES, 0, 0, 0, 0, 0, 0, 1, 0]);
        assert_eq!(bytes(&[1, -2]), [2, FOUR_BYTES, 1, 0, 0, 0, 254, 255, 255, 255]);
    }

    #[test]
    fn a_number_has_one_spelling() {
        for value in [0, 1, 127, 128, 16_383, 16_384, u64::MAX / 2, u64::MAX] {
            let mut out = Vec::new();
            put_varint(&mut out, value);
            let mut input = Bytes::new(&out);
            assert_eq!((input.varint(), input.rest().len()), (Ok(value), 0));
        }
        let refused = |bytes: &[u8]| Bytes::new(bytes).varint().unwrap_err();
        assert!(refused(&[0x80, 0]).contains("shortest form"));
        assert!(refused(&[0xff; 9]).contains("1 bytes are needed, 0 are left"));
        let nine = [0xff; 9];
        assert!(refused(&[&nine[..], &[2]].concat()).contains("shortest form"), "65 bits");
        assert!(refused(&[&nine[..], &[0x80]].concat()).contains("longer than 64 bits"));
        assert!(Bytes::new(&[0x80, 0x80, 0x80, 0x80, 0x10]).int().unwrap_err().contains("not a number of 32 bits"));
    }

    #[test]
    fn flags_and_texts_are_checked() {
        assert_eq!(Bytes::new(&[1]).flag(), Ok(true));
        assert!(Bytes::new(&[2]).flag().unwrap_err().contains("got 2"));
        assert!(Bytes::new(&[2, 0xc3, 0x28]).text().unwrap_err().contains("UTF-8"));
        assert!(Bytes::new(&[3, b'a']).text().unwrap_err().contains("3 bytes are needed, 1 are left"));
        assert!(Bytes::new(&[9, 0, 1]).ints(8).unwrap_err().contains("9 entries, at most 8"));
        assert!(Bytes::new(&[2, 5, 1]).ints(8).unwrap_err().contains("no array of form 5"));
    }
}
