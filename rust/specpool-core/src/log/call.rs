//! The ledger's calls as values: what the event log stores, what the digest hashes, and what random tests make up
//! (`docs/event_log.md`). The table in `verb.rs` lists them. The encoding is canonical: equal calls have equal bytes,
//! on every machine.

use std::sync::Arc;

use crate::ids::Row;
use crate::log::argument::{Argument, Limits, kinds, types};
use crate::log::codec::Bytes;
use crate::state::delta::DeltaEntries;
use crate::state::step::Plan;
use crate::verb::{Verb, verbs};

/// What a call gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Given {
    /// Nothing: what a method that returns `()` gave.
    Nothing(()),
    /// A new row.
    Row(Row),
    /// A new prefix.
    Prefix(u64),
    /// A new `resolved_len`, or tokens that the index knows.
    Length(i32),
    /// A plan.
    Plan(Arc<Plan>),
    /// Table changes, per group.
    Delta(Vec<DeltaEntries>),
}

impl Given {
    /// The number of what was given, which the digest takes in; `None` if it has none.
    #[must_use]
    pub fn id(&self) -> Option<u64> {
        match self {
            Self::Row(row) => Some(row.0 as u64),
            Self::Prefix(prefix) => Some(*prefix),
            Self::Length(length) => Some(*length as u64),
            Self::Plan(plan) => Some(plan.step),
            Self::Nothing(()) | Self::Delta(_) => None,
        }
    }
}

impl std::fmt::Display for Given {
    /// What a replay shows behind the call: `step 9`. Nothing is shown of what has no number.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Row(row) => write!(formatter, "row {}", row.0),
            Self::Prefix(prefix) => write!(formatter, "prefix {prefix}"),
            Self::Length(length) => write!(formatter, "{length}"),
            Self::Plan(plan) => write!(formatter, "step {}", plan.step),
            Self::Nothing(()) | Self::Delta(_) => Ok(()),
        }
    }
}

/// Whether calls that give this have a tag beside them in the log.
macro_rules! is_tagged {
    (Row) => {
        true
    };
    ($given:ident) => {
        false
    };
}

/// Makes [`Call`], its bytes and its text. What is in `$( )*` stands once for every entry of the table: `$call` is its
/// name, `$argument: $kind` each of its arguments. `$more` are the entries of calls that are not logged.
macro_rules! derive_call {
    (
        $bindings:tt
        logged { $(
            $(#[$doc:meta])* $call:ident { $($argument:ident: $kind:ident),* }
            in $byte:literal $(or $with:literal if $flag:ident, default $default:literal)?
            $(and $extra:ident: $extra_type:ty = $read:expr,)?
            named $name:literal gives $given:ident shown $text:literal runs $run:expr;
        )* }
        unlogged { $(
            $(#[$more_doc:meta])* $more:ident { $($more_argument:ident: $more_kind:ident),* }
            named $more_name:literal gives $more_given:ident shown $more_text:literal runs $more_run:expr;
        )* }
        of_pools $of_pools:tt
    ) => {
        /// One call and its arguments. The table of verbs has them all.
        ///
        /// ```
        /// use specpool_core::log::call::Call;
        ///
        /// let call = Call::Resolve { step: 9, accept_lens: (&[3, 1]).into() };
        /// let mut bytes = Vec::new();
        /// call.encode(&mut bytes);
        /// assert_eq!(Call::decode(&bytes, 2, 0, 0), Ok((call, bytes.len())));
        /// ```
        #[derive(Debug, Clone, PartialEq, Eq)]
        #[allow(missing_docs, reason = "the fields are the arguments of the ledger's verbs")]
        pub enum Call<'a> {
            $(
                $(#[$doc])*
                $call {
                    $($argument: types::$kind<'a>,)*
                    $($flag: bool,)?
                    $($extra: $extra_type,)?
                },
            )*
            $(
                $(#[$more_doc])*
                $more { $($more_argument: types::$more_kind<'a>,)* },
            )*
        }

        impl<'a> Call<'a> {
            /// The first byte of every call that is logged, in the order of the table.
            pub const KINDS: &'static [u8] = &[$($byte, $($with,)?)*];

            /// The verb that was called.
            #[must_use]
            pub fn verb(&self) -> Verb {
                match self {
                    $(Self::$call { .. } => Verb::$call,)*
                    $(Self::$more { .. } => Verb::$more,)*
                }
            }

            /// Whether a record of the call may have a tag: it does if the call gives a row.
            pub(crate) fn is_tagged(&self) -> bool {
                match self {
                    $(Self::$call { .. } => is_tagged!($given),)*
                    $(Self::$more { .. } => is_tagged!($more_given),)*
                }
            }

            /// Hands every argument and its name to `visit`.
            pub fn visit_arguments<'v>(&'v self, mut visit: impl FnMut(&'static str, Argument<'v>)) {
                match self {
                    $(Self::$call { $($argument,)* $($flag,)? $($extra,)? } => {
                        $(visit(stringify!($argument), kinds::$kind::argument($argument));)*
                        $(visit(stringify!($flag), Argument::Flag(*$flag, stringify!($flag), $default));)?
                        $(visit(stringify!($extra), Argument::MaybeInt(*$extra));)?
                    })*
                    $(Self::$more { $($more_argument,)* } => {
                        $(visit(stringify!($more_argument), kinds::$more_kind::argument($more_argument));)*
                    })*
                }
            }

            /// Appends the call's bytes. A call that is not logged has none.
            pub fn encode(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$call { $($argument,)* $($flag,)? .. } => {
                        let byte = $byte;
                        $(let byte = if *$flag { $with } else { byte };)?
                        out.push(byte);
                        $(kinds::$kind::put($argument, out);)*
                    })*
                    $(Self::$more { .. } => {})*
                }
            }

            /// Decodes the call at the start of `bytes`, and returns how many bytes it takes. No array of lanes is
            /// longer than `max_lanes`, no array of tokens than `max_tokens`, no array of pages than `max_pages`.
            ///
            /// # Errors
            /// The text says what is wrong with the bytes.
            pub fn decode(
                bytes: &[u8],
                max_lanes: usize,
                max_tokens: usize,
                max_pages: usize,
            ) -> std::result::Result<(Call<'static>, usize), String> {
                let limits = Limits { lanes: max_lanes, tokens: max_tokens, pages: max_pages };
                let mut input = Bytes::new(bytes);
                let byte = input.byte()?;
                let call = match byte {
                    $($byte $(| $with)? => {
                        $(let $argument = kinds::$kind::get(&mut input, &limits)?;)*
                        $(let $flag = byte == $with;)?
                        $(let $extra = $read;)?
                        Call::$call { $($argument,)* $($flag,)? $($extra,)? }
                    })*
                    _ => return Err(format!("there is no call of kind {byte}")),
                };
                Ok((call, input.at))
            }
        }

        impl std::fmt::Display for Call<'_> {
            /// Shows the call as it would be written: `resolve(9, [3, 1])`.
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self {
                    $(Self::$call { $($argument,)* $($flag,)? .. } => {
                        $(let $argument = kinds::$kind::argument($argument);)*
                        $(let $flag = Argument::Flag(*$flag, stringify!($flag), $default);)?
                        write!(formatter, $text)
                    })*
                    $(Self::$more { $($more_argument,)* } => {
                        $(let $more_argument = kinds::$more_kind::argument($more_argument);)*
                        write!(formatter, $more_text)
                    })*
                }
            }
        }

        /// The text of a call, for the name of its method.
        fn text_of(call: &Call<'_>) -> &'static str {
            match call {
                $(Call::$call { .. } => $text,)*
                $(Call::$more { .. } => $more_text,)*
            }
        }
    };
}

verbs!(derive_call);

impl Call<'_> {
    /// The method of the ledger that was called: [`Call::verb`]'s name, but for `admit_cached` and `admit_lent`.
    #[must_use]
    pub fn method(&self) -> &'static str {
        text_of(self).split('(').next().unwrap_or_default()
    }

    /// The step that the call names, if any. (A prepare returns a step but names none.)
    #[must_use]
    pub fn step(&self) -> Option<u64> {
        let mut named = None;
        self.visit_arguments(|_, argument| {
            if let Argument::Step(step) = argument {
                named = Some(step);
            }
        });
        named
    }

    /// The rows that the call names.
    #[must_use]
    pub fn rows(&self) -> &[i32] {
        let mut named: &[i32] = &[];
        self.visit_arguments(|_, argument| match argument {
            Argument::Row(row) => named = std::slice::from_ref(row),
            Argument::Rows(rows) => named = rows,
            _ => {}
        });
        named
    }
}
