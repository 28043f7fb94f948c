//! The table of the ledger's verbs, and their names. What else must know every verb is derived from the table, each
//! part by a macro beside its use: [`Verb`] here, [`Call`](crate::Call) and its bytes in `log/call.rs`, and the replay
//! of a call in `replay/run.rs`.
//!
//! - What a call gives is a variant of [`Given`](crate::Given). A new one costs one file, `log/call.rs`, if its number
//!   is all that the digest takes in; else also `digest_after` in `ledger/record.rs`.
//! - `ledger/query.rs` has the questions that change nothing: they are not verbs and have no entry. A question whose
//!   answer is logged is a verb, because it moves the digest and is refused by a closed ledger. Its method stands beside
//!   the verbs that change what it asks about (pages of a row: `ledger/release.rs`), not in `query.rs`.
//! - A new verb takes the next free byte, and the log's version stays: a reader refuses a byte that it does not know.
//!   The version must rise if an old byte gets other arguments, or if the digest takes in something else for it.

/// Hands the table to the macro `$derive`.
///
/// An entry of the first list is a call that is logged (`docs/event_log.md`):
///
/// ```text
/// /// What the call does.
/// Name { argument: Kind, .. }           the arguments in the order of their bytes; log/argument.rs has the kinds
///     in 6                              the byte that the call begins with in the log
///     or 7 if flag, default true        if it has one more argument, a flag, which is in that byte
///     and argument: Type = value,       an argument that is not stored, and what it is when the call is read
///     named "admit"                     the verb in errors and page records; several calls may share it
///     gives Row                         the variant of `Given`; a call that gives a row has a tag beside it
///     shown "name({argument})"          its text; the name of the method stands before the bracket
///     runs ledger.name(*argument);      the call itself
/// ```
///
/// Those of the second list change no lengths and no pages, and their answers need not be replayed, so they are not
/// logged. The last list has the verbs of a block pool that no ledger has.
macro_rules! verbs {
    ($derive:ident) => {
        $derive! {
            (ledger, tag, snapshots)
            logged {
                /// Takes a free row.
                Admit {}
                    in 1 named "admit" gives Row shown "admit()"
                    runs ledger.admit(tag);
                /// Takes a row on a pinned prefix: on `length` tokens of it, or on all.
                AdmitOn { prefix: Prefix, length: MaybeLength }
                    in 2 named "admit" gives Row shown "admit(prefix={prefix}, length={length})"
                    runs ledger.admit_on(*prefix, *length, tag);
                /// Takes a row that begins as another.
                Fork { row: RowId }
                    in 3 named "fork" gives Row shown "fork({row})"
                    runs ledger.fork(Row(*row), tag);
                /// Keeps a row's first tokens for others.
                PinPrefix { row: RowId, length: Length }
                    in 4 named "pin_prefix" gives Prefix shown "pin_prefix({row}, {length})"
                    runs ledger.pin_prefix(Row(*row), *length);
                /// Gives a prefix back.
                ReleasePrefix { prefix: Prefix }
                    in 5 named "release_prefix" gives Nothing shown "release_prefix({prefix})"
                    runs ledger.release_prefix(*prefix);
                /// Claims pages for prefill.
                PrepareExtend { rows: Rows, new_lens: Lanes }
                    in 6 or 7 if writes_draft, default true
                    named "prepare_extend" gives Plan shown "prepare_extend({rows}, {new_lens}{writes_draft})"
                    runs ledger.prepare_extend(rows, new_lens, *writes_draft);
                /// Claims pages for a round.
                PrepareDecode { rows: Rows, shapes: Lanes }
                    in 8 or 9 if writes_draft, default true
                    named "prepare_decode" gives Plan shown "prepare_decode({rows}, {shapes}{writes_draft})"
                    runs ledger.prepare_decode(rows, shapes, *writes_draft);
                /// Marks a step as enqueued.
                Launch { step: Step }
                    in 10 named "launch" gives Nothing shown "launch({step})"
                    runs ledger.launch(*step);
                /// Counts a round's tokens. Dropped lanes are stored as 0, whatever the caller gave for them.
                Resolve { step: Step, accept_lens: Lanes }
                    in 11 named "resolve" gives Nothing shown "resolve({step}, {accept_lens})"
                    runs ledger.resolve(*step, accept_lens);
                /// Ends the fences of a step and of every step before it.
                Complete { step: Step }
                    in 12 named "complete" gives Nothing shown "complete({step})"
                    runs ledger.complete(*step);
                /// Undoes a step that is not launched.
                Cancel { step: Step }
                    in 13 named "cancel" gives Nothing shown "cancel({step})"
                    runs ledger.cancel(*step);
                /// Gives back the rows of a step whose forward failed.
                Abandon { step: Step }
                    in 14 named "abandon" gives Nothing shown "abandon({step})"
                    runs ledger.abandon(*step);
                /// Shortens a row.
                Trim { row: RowId, length: Length }
                    in 15 named "trim" gives Length shown "trim({row}, {length})"
                    runs ledger.trim(Row(*row), *length);
                /// Shortens a row and leaves it idle.
                EndTurn { row: RowId, length: Length }
                    in 16 named "end_turn" gives Length shown "end_turn({row}, {length})"
                    runs ledger.end_turn(Row(*row), *length);
                /// Gives back a row that will come again.
                Retract { row: RowId }
                    in 17 named "retract" gives Nothing shown "retract({row})"
                    runs ledger.retract(Row(*row));
                /// Gives back a row that is done.
                Finish { row: RowId }
                    in 18 named "finish" gives Nothing shown "finish({row})"
                    runs ledger.finish(Row(*row));
                /// Gives back a row that is given up.
                Abort { row: RowId }
                    in 19 named "abort" gives Nothing shown "abort({row})"
                    runs ledger.abort(Row(*row));
                /// Saves the whole state. Not part of the digest: one rank may take a snapshot alone.
                Snapshot {}
                    in 20 named "snapshot" gives Nothing shown "snapshot()"
                    runs snapshots.take(ledger);
                /// Brings a saved state back.
                Restore {}
                    in 21 named "restore" gives Nothing shown "restore()"
                    runs snapshots.restore(ledger);
                /// Keeps a row's tokens in the prefix index.
                Index { row: RowId, tokens: Tokens, salt: MaybeSalt }
                    in 22 named "index" gives Length shown "index({row}, {tokens}{salt})"
                    runs ledger.index(Row(*row), tokens, salt);
                /// Takes a row on what the prefix index has. The stored `tokens` end at the limit.
                AdmitCached { tokens: Tokens, salt: MaybeSalt }
                    in 23 or 24 if needs_draft, default false
                    and limit: Option<i32> = Some(tokens.len() as i32),
                    named "admit" gives Row shown "admit_cached({tokens}{salt}{needs_draft})"
                    runs ledger.admit_cached(tokens, salt, *limit, *needs_draft, tag);
                /// Gives up what the prefix index has under a salt.
                Forget { salt: Salt }
                    in 25 named "forget" gives Nothing shown "forget({salt})"
                    runs ledger.forget(Some(salt));
                /// Gives up all that the prefix index has.
                ForgetAll {}
                    in 26 named "forget" gives Nothing shown "forget()"
                    runs ledger.forget(None);
                /// Lets a cache outside hold a row's pages.
                Lend { row: RowId, start: Length, end: Length }
                    in 27 named "lend" gives Nothing shown "lend({row}, {start}, {end})"
                    runs ledger.lend(Row(*row), *start, *end);
                /// Binds a row to pages that a cache outside holds. `pages` group after group, as in the next call.
                Rebind { row: RowId, start: Length, end: Length, pages: Pages }
                    in 28 named "rebind" gives Nothing shown "rebind({row}, {start}, {end}, {pages})"
                    runs ledger.rebind(Row(*row), *start, *end, pages);
                /// Takes a row on pages that a cache outside holds.
                AdmitLent { length: Length, pages: Pages }
                    in 29 named "admit" gives Row shown "admit_lent({pages}, {length})"
                    runs ledger.admit_lent(pages, *length, tag);
                /// Takes pages of a group back from the cache outside.
                ReleaseLent { group: Group, pages: Pages }
                    in 30 named "release_lent" gives Nothing shown "release_lent({group}, {pages})"
                    runs ledger.release_lent(*group as usize, pages);
                /// Turns a row into a prefix that is sent to another ledger.
                Export { row: RowId }
                    in 31 named "export" gives Prefix shown "export({row})"
                    runs ledger.export(Row(*row));
                /// Takes a row for tokens that come from another ledger.
                ImportRow { length: Length, drafted_len: Length }
                    in 32 named "import_row" gives Row shown "import_row({length}, {drafted_len})"
                    runs ledger.import_row(*length, *drafted_len, tag);
                /// Claims pages for prefill, and keeps the states of some lanes.
                PrepareExtendKeeping { rows: Rows, new_lens: Lanes, keep: Lanes }
                    in 33 or 34 if writes_draft, default true
                    named "prepare_extend" gives Plan shown "prepare_extend({rows}, {new_lens}, keep={keep}{writes_draft})"
                    runs ledger.prepare_extend_keeping(rows, new_lens, keep, *writes_draft);
            }
            unlogged {
                /// Reads the pending changes of the tables.
                TakeDelta { step: Step }
                    named "take_delta" gives Delta shown "take_delta({step})"
                    runs ledger.take_delta(*step);
                /// Drops the changes that a device has.
                AckDelta { step: Step }
                    named "ack_delta" gives Nothing shown "ack_delta({step})"
                    runs ledger.ack_delta(*step);
            }
            of_pools { Take "take", Drop "drop", Put "put", Keep "keep", Unkeep "unkeep" }
        }
    };
}
pub(crate) use verbs;

/// Makes [`Verb`]: a variant and a name for every entry of the table.
macro_rules! derive_verb {
    (
        $bindings:tt
        logged { $(
            $(#[$doc:meta])* $call:ident $arguments:tt in $byte:literal $(or $with:literal if $flag:ident, default $default:literal)?
            $(and $extra:ident: $extra_type:ty = $read:expr,)?
            named $name:literal gives $given:ident shown $text:literal runs $run:expr;
        )* }
        unlogged { $(
            $(#[$more_doc:meta])* $more:ident $more_arguments:tt
            named $more_name:literal gives $more_given:ident shown $more_text:literal runs $more_run:expr;
        )* }
        of_pools { $($of_pool:ident $of_pool_name:literal),* }
    ) => {
        /// A method of the ledger, or of a block pool, that changes it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        #[allow(missing_docs, reason = "the names are the methods")]
        pub enum Verb {
            /// No verb yet: the record of a page that was never handed out.
            #[default]
            None,
            $($call,)* $($more,)* $($of_pool,)*
        }

        impl Verb {
            /// Those whose calls are logged, in the order of the table.
            pub const LOGGED: &'static [Self] = &[$(Self::$call,)*];
            /// Those of the ledger whose calls are not logged.
            pub const UNLOGGED: &'static [Self] = &[$(Self::$more,)*];

            /// The verb's name. `admit`, `admit_cached` and `admit_lent` are one name.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    Self::None => "none",
                    $(Self::$call => $name,)*
                    $(Self::$more => $more_name,)*
                    $(Self::$of_pool => $of_pool_name,)*
                }
            }
        }
    };
}

verbs!(derive_verb);

impl std::fmt::Display for Verb {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}
