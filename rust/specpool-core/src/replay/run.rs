//! Runs an event log again on a ledger of the same configuration. The digest says whether it does the same.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::Row;
use crate::ledger::{Ledger, Snapshot};
use crate::log::call::{Call, Given};
use crate::replay::log_reader::{LogEnd, LogReader, Record};
use crate::state::config::LedgerConfig;
use crate::state::step::Plan;
use crate::verb::verbs;

/// The snapshots that a log's ledger took, by number: any may be restored later.
#[derive(Debug, Default)]
pub struct Snapshots {
    taken: BTreeMap<u64, Snapshot>,
    /// The number that the record has beside its call.
    number: u64,
}

impl Snapshots {
    fn take(&mut self, ledger: &mut Ledger) -> Result<()> {
        self.taken.insert(self.number, ledger.snapshot()?);
        Ok(())
    }

    fn restore(&self, ledger: &mut Ledger) -> Result<()> {
        let number = self.number;
        let foreign = || Error::Record(format!("snapshot {number} is not of this log: another ledger took it"));
        ledger.restore(self.taken.get(&number).ok_or_else(foreign)?)
    }
}

/// Makes [`Call::run`]: an arm for every entry of the table, which runs its right side.
macro_rules! derive_run {
    (
        ($ledger:ident, $tag:ident, $snapshots:ident)
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
        impl Call<'_> {
            /// Makes the call on a ledger. A row that it gives gets the tag. `snapshots` are those of the log that is
            /// replayed; without a log, the default has none.
            ///
            /// # Errors
            /// The verb's own refusal, which changes nothing.
            pub fn run(&self, $ledger: &mut Ledger, $tag: Option<&str>, $snapshots: &mut Snapshots) -> Result<Given> {
                match self {
                    $(Self::$call { $($argument,)* $($flag,)? $($extra,)? } => $run.map(Given::$given),)*
                    $(Self::$more { $($more_argument,)* } => $more_run.map(Given::$more_given),)*
                }
            }
        }
    };
}

verbs!(derive_run);

/// A log that is being run. The caller holds the ledger.
///
/// ```
/// use specpool_core::{Group, Layout, Ledger, LedgerConfig, Replay};
///
/// let group =
///     Group { name: "kv".into(), page_size: 4, num_pages: 64, hosts_drafts: false, layout: Layout::Dense, window: None, sink: 0 };
/// let path = std::env::temp_dir().join(format!("specpool-doc-{}.log", std::process::id()));
/// let mut ledger = Ledger::recorded(LedgerConfig::new(vec![group], vec![], 2, 100), &path, 1 << 20)?;
/// let row = ledger.admit(Some("request-1"))?;
/// let step = ledger.prepare_extend(&[row.0], &[10], true)?.step;
/// ledger.launch(step)?;
/// ledger.close()?;
///
/// let mut replay = Replay::open(&path)?;
/// let mut again = replay.ledger()?;
/// while let Some(run) = replay.advance(&mut again)? {
///     println!("{} {run}", run.record.index); // 2 prepare_extend([1], [10]) -> step 1
/// }
/// assert_eq!(again.state_hash(), ledger.state_hash());
/// assert_eq!(again.digest(), ledger.digest());
/// # std::fs::remove_file(&path).unwrap();
/// # Ok::<(), specpool_core::Error>(())
/// ```
pub struct Replay {
    reader: LogReader,
    snapshots: Snapshots,
}

/// One event that was run again.
#[derive(Debug, Clone)]
pub struct Run {
    /// The record of the log.
    pub record: Record,
    /// What it gave.
    pub given: Given,
}

impl Run {
    /// The plan that a prepare gave.
    #[must_use]
    pub fn plan(&self) -> Option<&Arc<Plan>> {
        if let Given::Plan(plan) = &self.given { Some(plan) } else { None }
    }

    /// The step that the event is about, if any.
    #[must_use]
    pub fn step(&self) -> Option<u64> {
        self.plan().map(|plan| plan.step).or_else(|| self.record.call.step())
    }

    /// The rows that the event is about: those that its call names, and the one that it gave.
    #[must_use]
    pub fn rows(&self) -> Vec<i32> {
        let mut rows = self.record.call.rows().to_vec();
        if let Given::Row(row) = self.given {
            rows.push(row.0);
        }
        rows
    }
}

impl std::fmt::Display for Run {
    /// The call and what it gave: `prepare_decode([1, 2], [1, 1]) -> step 9`.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}", self.record.call)?;
        self.given.id().map_or(Ok(()), |_| write!(formatter, " -> {}", self.given))
    }
}

impl Replay {
    /// Opens a log.
    ///
    /// # Errors
    /// As [`LogReader::open`].
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self { reader: LogReader::open(path)?, snapshots: Snapshots::default() })
    }

    /// The configuration of the recorded ledger.
    #[must_use]
    pub fn config(&self) -> &LedgerConfig {
        self.reader.config()
    }

    /// The version of specpool that wrote the log.
    #[must_use]
    pub fn made_by(&self) -> &str {
        self.reader.made_by()
    }

    /// How the log ends, once all is run.
    #[must_use]
    pub fn end(&self) -> Option<LogEnd> {
        self.reader.end()
    }

    /// Builds an empty ledger for [`Replay::advance`].
    ///
    /// # Errors
    /// [`Error::Config`] when this version refuses the configuration.
    pub fn ledger(&self) -> Result<Ledger> {
        Ledger::new(self.config().clone())
    }

    /// Runs the next event; `None` at the end of the log.
    ///
    /// # Errors
    /// [`Error::Record`] when the log is truncated or damaged, or when the ledger refuses the call or does something
    /// else than it did when recorded. The error states the event, its offset and both digests.
    pub fn advance(&mut self, ledger: &mut Ledger) -> Result<Option<Run>> {
        let Some(record) = self.reader.next_record()? else { return Ok(None) };
        let run = self.run(ledger, record)?;
        let digest = ledger.digest().unwrap_or_default();
        if digest == run.record.digest {
            return Ok(Some(run));
        }
        let why = format!("the digest is {digest:016x}, the log has {:016x}", run.record.digest);
        Err(self.differs(&run.record, run.step(), &why))
    }

    fn run(&mut self, ledger: &mut Ledger, record: Record) -> Result<Run> {
        self.snapshots.number = record.snapshot;
        match record.call.run(ledger, record.tag.as_deref(), &mut self.snapshots) {
            Ok(given) => Ok(Run { record, given }),
            Err(error) => Err(self.differs(&record, record.call.step(), &format!("it is refused: {error}"))),
        }
    }

    fn differs(&mut self, record: &Record, step: Option<u64>, why: &str) -> Error {
        let step = step.map_or(String::new(), |step| format!(", step {step}"));
        let error = Error::Record(format!(
            "event log {}, event {} ({}{step}) at byte {}: the replay differs: {why}",
            self.reader.name(),
            record.index,
            record.call.verb(),
            record.offset
        ));
        self.reader.stop(error)
    }
}
