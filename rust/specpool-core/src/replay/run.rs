//! Runs an event log again on a ledger of the same configuration. The digest says whether it does the same.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::Row;
use crate::ledger::{Ledger, Snapshot};
use crate::log::call::Call;
use crate::replay::log_reader::{LogEnd, LogReader, Record};
use crate::state::config::LedgerConfig;
use crate::state::step::Plan;

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
    /// All snapshots that were taken, by number: any may be restored later.
    snapshots: BTreeMap<u64, Snapshot>,
}

/// One event that was run again.
#[derive(Debug, Clone)]
pub struct Run {
    /// The record of the log.
    pub record: Record,
    /// The plan that a prepare gave.
    pub plan: Option<Arc<Plan>>,
    /// What another verb gave: a row (admit, `admit_cached`, fork, `import_row`), a prefix (`pin_prefix`, export), a length (trim, `end_turn`, index).
    pub given: Option<u64>,
}

impl Run {
    /// The step that the event is about, if any.
    #[must_use]
    pub fn step(&self) -> Option<u64> {
        self.plan.as_ref().map(|plan| plan.step).or_else(|| self.record.call.step())
    }

    /// The rows that the event is about: those of its call, those of its step's plan, or the one that it gave.
    #[must_use]
    pub fn rows(&self) -> Vec<i32> {
        let mut rows = self.record.call.rows().to_vec();
        if let (
            Call::Admit { .. }
            | Call::AdmitCached { .. }
            | Call::AdmitLent { .. }
            | Call::Fork { .. }
            | Call::ImportRow { .. },
            Some(row),
        ) = (&self.record.call, self.given)
        {
            rows.push(row as i32);
        }
        rows
    }
}

impl std::fmt::Display for Run {
    /// The call and what it gave: `prepare_decode([1, 2], [1, 1]) -> step 9`.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = match self.record.call {
            Call::Admit { .. }
            | Call::AdmitCached { .. }
            | Call::AdmitLent { .. }
            | Call::Fork { .. }
            | Call::ImportRow { .. } => "row ",
            Call::PinPrefix { .. } | Call::Export { .. } => "prefix ",
            _ => "",
        };
        write!(formatter, "{}", self.record.call)?;
        match (&self.plan, self.given) {
            (Some(plan), _) => write!(formatter, " -> step {}", plan.step),
            (None, Some(given)) => write!(formatter, " -> {what}{given}"),
            (None, None) => Ok(()),
        }
    }
}

impl Replay {
    /// Opens a log.
    ///
    /// # Errors
    /// As [`LogReader::open`].
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self { reader: LogReader::open(path)?, snapshots: BTreeMap::new() })
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
        match self.call(ledger, &record) {
            Ok((plan, given)) => Ok(Run { record, plan, given }),
            Err(error) => Err(self.differs(&record, record.call.step(), &format!("it is refused: {error}"))),
        }
    }

    fn call(&mut self, ledger: &mut Ledger, record: &Record) -> Result<(Option<Arc<Plan>>, Option<u64>)> {
        let tag = record.tag.as_deref();
        let id = |row: Row| row.0 as u64;
        let (mut plan, mut given) = (None, None);
        match &record.call {
            Call::Admit { prefix: None } => given = Some(id(ledger.admit(tag)?)),
            &Call::Admit { prefix: Some((prefix, len)) } => {
                given = Some(id(ledger.admit_on(prefix, Some(len), tag)?));
            }
            &Call::Fork { row } => given = Some(id(ledger.fork(Row(row), tag)?)),
            &Call::PinPrefix { row, len } => given = Some(ledger.pin_prefix(Row(row), len)?),
            &Call::ReleasePrefix { prefix } => ledger.release_prefix(prefix)?,
            Call::PrepareExtend { rows, new_lens, writes_draft } => {
                plan = Some(ledger.prepare_extend(rows, new_lens, *writes_draft)?);
            }
            Call::PrepareDecode { rows, shapes, writes_draft } => {
                plan = Some(ledger.prepare_decode(rows, shapes, *writes_draft)?);
            }
            &Call::Launch { step } => ledger.launch(step)?,
            Call::Resolve { step, accept_lens } => ledger.resolve(*step, accept_lens)?,
            &Call::Complete { step } => ledger.complete(step)?,
            &Call::Cancel { step } => ledger.cancel(step)?,
            &Call::Abandon { step } => ledger.abandon(step)?,
            &Call::Trim { row, len } => given = Some(ledger.trim(Row(row), len)? as u64),
            &Call::EndTurn { row, len } => given = Some(ledger.end_turn(Row(row), len)? as u64),
            &Call::Retract { row } => ledger.retract(Row(row))?,
            &Call::Finish { row } => ledger.finish(Row(row))?,
            &Call::Abort { row } => ledger.abort(Row(row))?,
            Call::Snapshot => drop(self.snapshots.insert(record.snapshot, ledger.snapshot()?)),
            Call::Restore => ledger.restore(self.snapshot(record.snapshot)?)?,
            Call::Index { row, tokens, salt } => given = Some(ledger.index(Row(*row), tokens, salt)? as u64),
            Call::AdmitCached { tokens, salt, needs_draft } => {
                let limit = Some(tokens.len() as i32);
                given = Some(id(ledger.admit_cached(tokens, salt, limit, *needs_draft, tag)?));
            }
            Call::Forget { salt } => ledger.forget(salt.as_deref())?,
            &Call::Lend { row, start, end } => ledger.lend(Row(row), start, end)?,
            Call::Rebind { row, start, end, pages } => ledger.rebind(Row(*row), *start, *end, pages)?,
            Call::AdmitLent { pages, len } => given = Some(id(ledger.admit_lent(pages, *len, tag)?)),
            Call::ReleaseLent { group, pages } => ledger.release_lent(*group as usize, pages)?,
            &Call::Export { row } => given = Some(ledger.export(Row(row))?),
            &Call::ImportRow { len, drafted } => given = Some(id(ledger.import_row(len, drafted, tag)?)),
        }
        Ok((plan, given))
    }

    fn snapshot(&self, number: u64) -> Result<&Snapshot> {
        self.snapshots
            .get(&number)
            .ok_or_else(|| Error::Record(format!("snapshot {number} is not of this log: another ledger took it")))
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
