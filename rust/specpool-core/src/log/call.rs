//! The ledger's state-changing calls as bytes: what the event log stores and the digest hashes (`docs/event_log.md`).
//!
//! A [`Call`] is an [`Event`] without the ids that the ledger gave for it. The encoding is canonical: equal calls have
//! equal bytes, on every machine.

use std::borrow::Cow;

use crate::ledger::MAX_SALT;
use crate::log::codec::{Bytes, Decoded, put_bytes, put_int, put_ints, put_varint};
use crate::log::event::Event;
use crate::state::step::StepKind;
use crate::verb::Verb;

/// Whole numbers, one per lane or token.
pub type Ints<'a> = Cow<'a, [i32]>;

/// A salt of the prefix index.
pub type Salt<'a> = Cow<'a, [u8]>;

/// One successful call and its arguments.
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
    /// `prefix` is its id and the number of its tokens that the row takes.
    Admit {
        prefix: Option<(u64, i32)>,
    },
    Fork {
        row: i32,
    },
    PinPrefix {
        row: i32,
        len: i32,
    },
    ReleasePrefix {
        prefix: u64,
    },
    PrepareExtend {
        rows: Ints<'a>,
        new_lens: Ints<'a>,
        writes_draft: bool,
    },
    PrepareDecode {
        rows: Ints<'a>,
        shapes: Ints<'a>,
        writes_draft: bool,
    },
    Launch {
        step: u64,
    },
    /// Lanes that were dropped are stored as 0, whatever the caller gave for them.
    Resolve {
        step: u64,
        accept_lens: Ints<'a>,
    },
    Complete {
        step: u64,
    },
    Cancel {
        step: u64,
    },
    Abandon {
        step: u64,
    },
    Trim {
        row: i32,
        len: i32,
    },
    EndTurn {
        row: i32,
        len: i32,
    },
    Retract {
        row: i32,
    },
    Finish {
        row: i32,
    },
    Abort {
        row: i32,
    },
    /// Not part of the digest: one rank may take a snapshot alone.
    Snapshot,
    Restore,
    Index {
        row: i32,
        tokens: Ints<'a>,
        salt: Salt<'a>,
    },
    /// `tokens` end at the limit.
    AdmitCached {
        tokens: Ints<'a>,
        salt: Salt<'a>,
        needs_draft: bool,
    },
    Forget {
        salt: Option<Salt<'a>>,
    },
    Lend {
        row: i32,
        start: i32,
        end: i32,
    },
    /// `pages` group after group.
    Rebind {
        row: i32,
        start: i32,
        end: i32,
        pages: Ints<'a>,
    },
    /// `pages` group after group.
    AdmitLent {
        pages: Ints<'a>,
        len: i32,
    },
    ReleaseLent {
        group: i32,
        pages: Ints<'a>,
    },
    Export {
        row: i32,
    },
    ImportRow {
        len: i32,
        drafted: i32,
    },
}

impl<'a> From<Event<'a>> for Call<'a> {
    fn from(event: Event<'a>) -> Self {
        match event {
            Event::Admit { prefix: 0, .. } => Self::Admit { prefix: None },
            Event::Admit { prefix, len, .. } => Self::Admit { prefix: Some((prefix, len)) },
            Event::Fork { parent, .. } => Self::Fork { row: parent.0 },
            Event::PinPrefix { row, len, .. } => Self::PinPrefix { row: row.0, len },
            Event::ReleasePrefix { prefix } => Self::ReleasePrefix { prefix },
            Event::Prepare { plan } => {
                let (rows, writes_draft) = (Cow::Borrowed(&plan.rows[..]), plan.writes_draft);
                match plan.kind {
                    StepKind::Extend => {
                        Self::PrepareExtend { rows, new_lens: Cow::Borrowed(&plan.new_len), writes_draft }
                    }
                    StepKind::Decode => Self::PrepareDecode { rows, shapes: Cow::Borrowed(&plan.shapes), writes_draft },
                }
            }
            Event::Launch { step } => Self::Launch { step },
            Event::Resolve { step, accept_lens } => Self::Resolve { step, accept_lens: Cow::Borrowed(accept_lens) },
            Event::Complete { step } => Self::Complete { step },
            Event::Cancel { step } => Self::Cancel { step },
            Event::Abandon { step } => Self::Abandon { step },
            Event::Cut { verb: Verb::Trim, row, len, .. } => Self::Trim { row: row.0, len },
            Event::Cut { row, len, .. } => Self::EndTurn { row: row.0, len },
            Event::GiveBack { verb: Verb::Retract, row } => Self::Retract { row: row.0 },
            Event::GiveBack { verb: Verb::Finish, row } => Self::Finish { row: row.0 },
            Event::GiveBack { row, .. } => Self::Abort { row: row.0 },
            Event::Snapshot { .. } => Self::Snapshot,
            Event::Restore { .. } => Self::Restore,
            Event::Index { row, tokens, salt, .. } => {
                Self::Index { row: row.0, tokens: Cow::Borrowed(tokens), salt: Cow::Borrowed(salt) }
            }
            Event::AdmitCached { tokens, salt, needs_draft, .. } => {
                Self::AdmitCached { tokens: Cow::Borrowed(tokens), salt: Cow::Borrowed(salt), needs_draft }
            }
            Event::Forget { salt } => Self::Forget { salt: salt.map(Cow::Borrowed) },
            Event::Lend { row, start, end } => Self::Lend { row: row.0, start, end },
            Event::Rebind { row, start, end, pages } => {
                Self::Rebind { row: row.0, start, end, pages: Cow::Borrowed(pages) }
            }
            Event::AdmitLent { pages, len, .. } => Self::AdmitLent { pages: Cow::Borrowed(pages), len },
            Event::ReleaseLent { group, pages } => {
                Self::ReleaseLent { group: group as i32, pages: Cow::Borrowed(pages) }
            }
            Event::Export { row, .. } => Self::Export { row: row.0 },
            Event::ImportRow { len, drafted, .. } => Self::ImportRow { len, drafted },
        }
    }
}

impl Call<'_> {
    /// The verb that was called.
    #[must_use]
    pub fn verb(&self) -> Verb {
        match self {
            Self::Admit { .. } | Self::AdmitCached { .. } | Self::AdmitLent { .. } => Verb::Admit,
            Self::Fork { .. } => Verb::Fork,
            Self::PinPrefix { .. } => Verb::PinPrefix,
            Self::ReleasePrefix { .. } => Verb::ReleasePrefix,
            Self::PrepareExtend { .. } => Verb::PrepareExtend,
            Self::PrepareDecode { .. } => Verb::PrepareDecode,
            Self::Launch { .. } => Verb::Launch,
            Self::Resolve { .. } => Verb::Resolve,
            Self::Complete { .. } => Verb::Complete,
            Self::Cancel { .. } => Verb::Cancel,
            Self::Abandon { .. } => Verb::Abandon,
            Self::Trim { .. } => Verb::Trim,
            Self::EndTurn { .. } => Verb::EndTurn,
            Self::Retract { .. } => Verb::Retract,
            Self::Finish { .. } => Verb::Finish,
            Self::Abort { .. } => Verb::Abort,
            Self::Snapshot => Verb::Snapshot,
            Self::Restore => Verb::Restore,
            Self::Index { .. } => Verb::Index,
            Self::Forget { .. } => Verb::Forget,
            Self::Lend { .. } => Verb::Lend,
            Self::Rebind { .. } => Verb::Rebind,
            Self::ReleaseLent { .. } => Verb::ReleaseLent,
            Self::Export { .. } => Verb::Export,
            Self::ImportRow { .. } => Verb::ImportRow,
        }
    }

    /// The step that the call names, if any. (A prepare returns a step but names none.)
    #[must_use]
    pub fn step(&self) -> Option<u64> {
        match *self {
            Self::Launch { step }
            | Self::Resolve { step, .. }
            | Self::Complete { step }
            | Self::Cancel { step }
            | Self::Abandon { step } => Some(step),
            _ => None,
        }
    }

    /// The rows that the call names.
    #[must_use]
    pub fn rows(&self) -> &[i32] {
        match self {
            Self::PrepareExtend { rows, .. } | Self::PrepareDecode { rows, .. } => rows,
            Self::Fork { row }
            | Self::PinPrefix { row, .. }
            | Self::Index { row, .. }
            | Self::Lend { row, .. }
            | Self::Rebind { row, .. }
            | Self::Trim { row, .. }
            | Self::EndTurn { row, .. }
            | Self::Export { row }
            | Self::Retract { row }
            | Self::Finish { row }
            | Self::Abort { row } => std::slice::from_ref(row),
            _ => &[],
        }
    }

    /// Appends the event's bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let row_event = |out: &mut Vec<u8>, kind, row: i32| {
            out.push(kind);
            put_int(out, row);
        };
        let step_event = |out: &mut Vec<u8>, kind, step| {
            out.push(kind);
            put_varint(out, step);
        };
        match self {
            Self::Admit { prefix: None } => out.push(1),
            &Self::Admit { prefix: Some((prefix, len)) } => {
                step_event(out, 2, prefix);
                put_int(out, len);
            }
            &Self::Fork { row } => row_event(out, 3, row),
            &Self::PinPrefix { row, len } => {
                row_event(out, 4, row);
                put_int(out, len);
            }
            &Self::ReleasePrefix { prefix } => step_event(out, 5, prefix),
            Self::PrepareExtend { rows, new_lens, writes_draft } => {
                out.push(6 + u8::from(*writes_draft));
                put_ints(out, rows);
                put_ints(out, new_lens);
            }
            Self::PrepareDecode { rows, shapes, writes_draft } => {
                out.push(8 + u8::from(*writes_draft));
                put_ints(out, rows);
                put_ints(out, shapes);
            }
            &Self::Launch { step } => step_event(out, 10, step),
            Self::Resolve { step, accept_lens } => {
                step_event(out, 11, *step);
                put_ints(out, accept_lens);
            }
            &Self::Complete { step } => step_event(out, 12, step),
            &Self::Cancel { step } => step_event(out, 13, step),
            &Self::Abandon { step } => step_event(out, 14, step),
            &Self::Trim { row, len } => {
                row_event(out, 15, row);
                put_int(out, len);
            }
            &Self::EndTurn { row, len } => {
                row_event(out, 16, row);
                put_int(out, len);
            }
            &Self::Retract { row } => row_event(out, 17, row),
            &Self::Finish { row } => row_event(out, 18, row),
            &Self::Abort { row } => row_event(out, 19, row),
            Self::Snapshot => out.push(20),
            Self::Restore => out.push(21),
            Self::Index { row, tokens, salt } => {
                row_event(out, 22, *row);
                put_ints(out, tokens);
                put_bytes(out, salt);
            }
            Self::AdmitCached { tokens, salt, needs_draft } => {
                out.push(23 + u8::from(*needs_draft));
                put_ints(out, tokens);
                put_bytes(out, salt);
            }
            Self::Forget { salt: Some(salt) } => {
                out.push(25);
                put_bytes(out, salt);
            }
            Self::Forget { salt: None } => out.push(26),
            &Self::Lend { row, start, end } => {
                row_event(out, 27, row);
                put_int(out, start);
                put_int(out, end);
            }
            Self::Rebind { row, start, end, pages } => {
                row_event(out, 28, *row);
                put_int(out, *start);
                put_int(out, *end);
                put_ints(out, pages);
            }
            Self::AdmitLent { pages, len } => {
                row_event(out, 29, *len);
                put_ints(out, pages);
            }
            Self::ReleaseLent { group, pages } => {
                row_event(out, 30, *group);
                put_ints(out, pages);
            }
            &Self::Export { row } => row_event(out, 31, row),
            &Self::ImportRow { len, drafted } => {
                row_event(out, 32, len);
                put_int(out, drafted);
            }
        }
    }

    /// Decodes the event at the start of `bytes`, and returns how many bytes it takes. No array of lanes is longer than
    /// `max_lanes`, no array of tokens than `max_tokens`, no array of pages than `max_pages`.
    ///
    /// # Errors
    /// The text says what is wrong with the bytes.
    pub fn decode(
        bytes: &[u8],
        max_lanes: usize,
        max_tokens: usize,
        max_pages: usize,
    ) -> std::result::Result<(Call<'static>, usize), String> {
        let mut input = Bytes::new(bytes);
        let kind = input.byte()?;
        let call = match kind {
            1 => Call::Admit { prefix: None },
            2 => Call::Admit { prefix: Some((input.varint()?, input.int()?)) },
            3 => Call::Fork { row: input.int()? },
            4 => Call::PinPrefix { row: input.int()?, len: input.int()? },
            5 => Call::ReleasePrefix { prefix: input.varint()? },
            6 | 7 => Call::PrepareExtend {
                rows: input.ints(max_lanes)?,
                new_lens: input.ints(max_lanes)?,
                writes_draft: kind == 7,
            },
            8 | 9 => Call::PrepareDecode {
                rows: input.ints(max_lanes)?,
                shapes: input.ints(max_lanes)?,
                writes_draft: kind == 9,
            },
            10 => Call::Launch { step: input.varint()? },
            11 => Call::Resolve { step: input.varint()?, accept_lens: input.ints(max_lanes)? },
            12 => Call::Complete { step: input.varint()? },
            13 => Call::Cancel { step: input.varint()? },
            14 => Call::Abandon { step: input.varint()? },
            15 => Call::Trim { row: input.int()?, len: input.int()? },
            16 => Call::EndTurn { row: input.int()?, len: input.int()? },
            17 => Call::Retract { row: input.int()? },
            18 => Call::Finish { row: input.int()? },
            19 => Call::Abort { row: input.int()? },
            20 => Call::Snapshot,
            21 => Call::Restore,
            22 => Call::Index { row: input.int()?, tokens: input.ints(max_tokens)?, salt: salt(&mut input)? },
            23 | 24 => {
                Call::AdmitCached { tokens: input.ints(max_tokens)?, salt: salt(&mut input)?, needs_draft: kind == 24 }
            }
            25 => Call::Forget { salt: Some(salt(&mut input)?) },
            26 => Call::Forget { salt: None },
            27 => Call::Lend { row: input.int()?, start: input.int()?, end: input.int()? },
            28 => Call::Rebind {
                row: input.int()?,
                start: input.int()?,
                end: input.int()?,
                pages: input.ints(max_pages)?,
            },
            29 => Call::AdmitLent { len: input.int()?, pages: input.ints(max_pages)? },
            30 => Call::ReleaseLent { group: input.int()?, pages: input.ints(max_pages)? },
            31 => Call::Export { row: input.int()? },
            32 => Call::ImportRow { len: input.int()?, drafted: input.int()? },
            _ => return Err(format!("there is no call of kind {kind}")),
        };
        Ok((call, input.at))
    }
}

fn salt(input: &mut Bytes<'_>) -> Decoded<Salt<'static>> {
    input.bytes(MAX_SALT).map(Cow::Owned)
}

/// Lanes that are shown before a list is cut off.
const MAX_SHOWN: usize = 16;

/// Numbers as a list, cut off behind the first ones; `of` says what they are.
pub(crate) fn list(values: &[i32], of: &str) -> String {
    if values.len() <= MAX_SHOWN {
        return format!("{values:?}");
    }
    let shown: Vec<String> = values[..MAX_SHOWN].iter().map(ToString::to_string).collect();
    format!("[{}, .. {} {of}]", shown.join(", "), values.len())
}

impl std::fmt::Display for Call<'_> {
    /// Shows the call as it would be written: `resolve(9, [3, 1])`.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let verb = self.verb();
        let drafts = |writes: bool| if writes { "" } else { ", writes_draft=False" };
        match self {
            Self::Admit { prefix: None } | Self::Snapshot | Self::Restore | Self::Forget { salt: None } => {
                write!(formatter, "{verb}()")
            }
            Self::Admit { prefix: Some((prefix, len)) } => write!(formatter, "{verb}(prefix={prefix}, length={len})"),
            Self::ReleasePrefix { prefix } => write!(formatter, "{verb}({prefix})"),
            Self::PrepareExtend { rows, new_lens: values, writes_draft }
            | Self::PrepareDecode { rows, shapes: values, writes_draft } => {
                write!(formatter, "{verb}({}, {}{})", list(rows, "lanes"), list(values, "lanes"), drafts(*writes_draft))
            }
            Self::Resolve { step, accept_lens } => write!(formatter, "{verb}({step}, {})", list(accept_lens, "lanes")),
            Self::Launch { step } | Self::Complete { step } | Self::Cancel { step } | Self::Abandon { step } => {
                write!(formatter, "{verb}({step})")
            }
            Self::PinPrefix { row, len } | Self::Trim { row, len } | Self::EndTurn { row, len } => {
                write!(formatter, "{verb}({row}, {len})")
            }
            Self::Index { row, tokens, salt } => {
                write!(formatter, "{verb}({row}, {}{})", list(tokens, "tokens"), Salted(salt))
            }
            Self::AdmitCached { tokens, salt, needs_draft } => {
                let needs = if *needs_draft { ", needs_draft=True" } else { "" };
                write!(formatter, "admit_cached({}{}{needs})", list(tokens, "tokens"), Salted(salt))
            }
            Self::Lend { row, start, end } => write!(formatter, "{verb}({row}, {start}, {end})"),
            Self::Rebind { row, start, end, pages } => {
                write!(formatter, "{verb}({row}, {start}, {end}, {})", list(pages, "pages"))
            }
            Self::AdmitLent { pages, len } => write!(formatter, "admit_lent({}, {len})", list(pages, "pages")),
            Self::ReleaseLent { group, pages } => write!(formatter, "{verb}({group}, {})", list(pages, "pages")),
            Self::Forget { salt: Some(salt) } => write!(formatter, "{verb}(b\"{}\")", salt.escape_ascii()),
            Self::ImportRow { len, drafted } => write!(formatter, "{verb}({len}, {drafted})"),
            Self::Fork { row }
            | Self::Export { row }
            | Self::Retract { row }
            | Self::Finish { row }
            | Self::Abort { row } => {
                write!(formatter, "{verb}({row})")
            }
        }
    }
}

/// A salt as a further argument; the empty salt is left out.
pub(crate) struct Salted<'a>(pub(crate) &'a [u8]);

impl std::fmt::Display for Salted<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(formatter, ", salt=b\"{}\"", self.0.escape_ascii()) }
    }
}
