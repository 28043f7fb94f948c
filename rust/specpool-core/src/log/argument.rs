//! The kinds of arguments that a call of the ledger has: how each is stored, read back and shown.

use std::borrow::Cow;

use crate::ledger::MAX_SALT;
use crate::log::codec::{Bytes, Decoded, put_bytes, put_int, put_ints, put_varint};

/// Whole numbers, one per lane, token or page.
pub type Ints<'a> = Cow<'a, [i32]>;

/// A salt of the prefix index.
pub type SaltBytes<'a> = Cow<'a, [u8]>;

/// The longest arrays that a log may state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) lanes: usize,
    pub(crate) tokens: usize,
    pub(crate) pages: usize,
}

/// One argument as a value, for texts and bindings. `Display` shows it as it would be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Argument<'a> {
    /// A row.
    Row(&'a i32),
    /// `[b]`: each lane's row.
    Rows(&'a [i32]),
    /// A step.
    Step(u64),
    /// The id of a prefix.
    Prefix(u64),
    /// A length or an index.
    Int(i32),
    /// A number that may be left out.
    MaybeInt(Option<i32>),
    /// An array, and what its entries are: a long one is cut off in texts.
    Ints(&'a [i32], &'static str),
    /// A salt.
    Salt(&'a [u8]),
    /// A salt as a further argument: nothing is shown if it is empty.
    MaybeSalt(&'a [u8]),
    /// A flag as a further argument, its name and its default: nothing is shown if it is the default.
    Flag(bool, &'static str, bool),
}

impl std::fmt::Display for Argument<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self::Row(row) => row.fmt(formatter),
            Self::Rows(rows) => list(rows, "lanes").fmt(formatter),
            Self::Step(id) | Self::Prefix(id) => id.fmt(formatter),
            Self::Int(number) => number.fmt(formatter),
            Self::MaybeInt(number) => number.map_or("None".to_owned(), |number| number.to_string()).fmt(formatter),
            Self::Ints(values, of) => list(values, of).fmt(formatter),
            Self::Salt(salt) => write!(formatter, "b\"{}\"", salt.escape_ascii()),
            Self::MaybeSalt([]) => Ok(()),
            Self::MaybeSalt(salt) => write!(formatter, ", salt={}", Self::Salt(salt)),
            Self::Flag(value, _, default) if value == default => Ok(()),
            Self::Flag(value, name, _) => write!(formatter, ", {name}={}", if value { "True" } else { "False" }),
        }
    }
}

/// Entries that are shown before a list is cut off.
const MAX_SHOWN: usize = 16;

/// Numbers as a list, cut off behind the first ones; `noun` names them.
pub(crate) fn list(values: &[i32], noun: &str) -> String {
    if values.len() <= MAX_SHOWN {
        return format!("{values:?}");
    }
    let shown: Vec<String> = values[..MAX_SHOWN].iter().map(ToString::to_string).collect();
    format!("[{}, .. {} {noun}]", shown.join(", "), values.len())
}

/// `Kind: type, |value, out| put, |input, limits| get, |value| argument;` makes the type `types::Kind`, which is what a
/// call holds, and the functions of `kinds::Kind`: `put` appends the bytes, `get` reads them, and `argument` is the value
/// for texts and bindings.
macro_rules! kinds {
    ($(
        $(#[$doc:meta])* $kind:ident: $type:ty,
            |$put_value:ident, $out:ident| $put:expr,
            |$input:ident, $limits:pat_param| $get:expr,
            |$value:ident| $argument:expr;
    )*) => {
        /// What a call holds for an argument of each kind.
        pub mod types {
            use super::{Ints, SaltBytes};

            $($(#[$doc])* pub type $kind<'a> = $type;)*
        }

        pub(crate) mod kinds {
            use super::*;

            $(
                pub(crate) enum $kind {}

                impl $kind {
                    pub(crate) fn put($put_value: &types::$kind<'_>, $out: &mut Vec<u8>) {
                        $put;
                    }

                    pub(crate) fn get($input: &mut Bytes<'_>, $limits: &Limits) -> Decoded<types::$kind<'static>> {
                        $get
                    }

                    pub(crate) fn argument<'v>($value: &'v types::$kind<'_>) -> Argument<'v> {
                        $argument
                    }
                }
            )*
        }
    };
}

kinds! {
    /// A row.
    RowId: i32,
        |row, out| put_int(out, *row), |input, _| input.int(), |row| Argument::Row(row);
    /// `[b]`: each lane's row.
    Rows: Ints<'a>,
        |rows, out| put_ints(out, rows), |input, limits| input.ints(limits.lanes), |rows| Argument::Rows(rows);
    /// `[b]`: a number of each lane.
    Lanes: Ints<'a>,
        |values, out| put_ints(out, values),
        |input, limits| input.ints(limits.lanes),
        |values| Argument::Ints(values, "lanes");
    /// The tokens of a text.
    Tokens: Ints<'a>,
        |tokens, out| put_ints(out, tokens),
        |input, limits| input.ints(limits.tokens),
        |tokens| Argument::Ints(tokens, "tokens");
    /// Pages.
    Pages: Ints<'a>,
        |pages, out| put_ints(out, pages),
        |input, limits| input.ints(limits.pages),
        |pages| Argument::Ints(pages, "pages");
    /// The number of a step.
    Step: u64,
        |step, out| put_varint(out, *step), |input, _| input.varint(), |step| Argument::Step(*step);
    /// The id of a prefix.
    Prefix: u64,
        |prefix, out| put_varint(out, *prefix), |input, _| input.varint(), |prefix| Argument::Prefix(*prefix);
    /// A length, in tokens.
    Length: i32,
        |length, out| put_int(out, *length), |input, _| input.int(), |length| Argument::Int(*length);
    /// A length that a caller may leave out. The ledger notes the length that it then takes; a log never has -1.
    MaybeLength: Option<i32>,
        |length, out| put_int(out, length.unwrap_or(-1)),
        |input, _| input.int().map(Some),
        |length| Argument::MaybeInt(*length);
    /// The index of a group.
    Group: i32,
        |group, out| put_int(out, *group), |input, _| input.int(), |group| Argument::Int(*group);
    /// A salt of the prefix index.
    Salt: SaltBytes<'a>,
        |salt, out| put_bytes(out, salt),
        |input, _| input.bytes(MAX_SALT).map(Cow::Owned),
        |salt| Argument::Salt(salt);
    /// A salt that a text shows as a further argument, and leaves out if it is empty.
    MaybeSalt: SaltBytes<'a>,
        |salt, out| put_bytes(out, salt),
        |input, _| input.bytes(MAX_SALT).map(Cow::Owned),
        |salt| Argument::MaybeSalt(salt);
}
