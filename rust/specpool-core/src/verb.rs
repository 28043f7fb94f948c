//! The verbs of ledger and block pool and their names, in one place: errors, logs, page records and the binding use
//! these names.

/// A method of the ledger, or of a block pool, that changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the methods")]
pub enum Verb {
    /// No verb yet: the record of a page that was never handed out.
    #[default]
    None,
    /// `admit`, `admit_on` a prefix, `admit_cached` and `admit_lent`.
    Admit,
    Fork,
    PinPrefix,
    ReleasePrefix,
    PrepareExtend,
    PrepareDecode,
    Launch,
    Resolve,
    Complete,
    Cancel,
    Abandon,
    Trim,
    EndTurn,
    Retract,
    Finish,
    Abort,
    TakeDelta,
    AckDelta,
    Snapshot,
    Restore,
    Index,
    Forget,
    Lend,
    Rebind,
    ReleaseLent,
    Export,
    ImportRow,
    Take,
    Drop,
    Put,
    Keep,
    Unkeep,
}

impl Verb {
    /// The verb's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Admit => "admit",
            Self::Fork => "fork",
            Self::PinPrefix => "pin_prefix",
            Self::ReleasePrefix => "release_prefix",
            Self::PrepareExtend => "prepare_extend",
            Self::PrepareDecode => "prepare_decode",
            Self::Launch => "launch",
            Self::Resolve => "resolve",
            Self::Complete => "complete",
            Self::Cancel => "cancel",
            Self::Abandon => "abandon",
            Self::Trim => "trim",
            Self::EndTurn => "end_turn",
            Self::Retract => "retract",
            Self::Finish => "finish",
            Self::Abort => "abort",
            Self::TakeDelta => "take_delta",
            Self::AckDelta => "ack_delta",
            Self::Snapshot => "snapshot",
            Self::Restore => "restore",
            Self::Index => "index",
            Self::Forget => "forget",
            Self::Lend => "lend",
            Self::Rebind => "rebind",
            Self::ReleaseLent => "release_lent",
            Self::Export => "export",
            Self::ImportRow => "import_row",
            Self::Take => "take",
            Self::Drop => "drop",
            Self::Put => "put",
            Self::Keep => "keep",
            Self::Unkeep => "unkeep",
        }
    }
}

impl std::fmt::Display for Verb {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}
