//! Where the calls of a ledger or a pool are recorded: its `record`, or the environment's `SPECPOOL_RECORD`.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::PyResult;
use specpool_core::Result as CoreResult;

use crate::arrays::ConfigInt;
use crate::errors::{config_error, to_py};

/// Ledgers and pools of this process that are recorded because of the environment variable.
static OF_ENVIRONMENT: AtomicU64 = AtomicU64::new(0);

/// The path in `SPECPOOL_RECORD`. `%p` in it is the process id. The second and later ledgers and pools of a process
/// append their number to the name, so that none writes over the log of another.
fn path_of_environment() -> Option<PathBuf> {
    let name = std::env::var("SPECPOOL_RECORD").ok().filter(|name| !name.is_empty())?;
    let name = name.replace("%p", &std::process::id().to_string());
    match OF_ENVIRONMENT.load(Ordering::Relaxed) {
        0 => Some(name.into()),
        before => Some(format!("{name}.{}", before + 1).into()),
    }
}

/// Builds a ledger or a pool by `build`, which gets the path of its log and the most bytes of it, if there is to be one.
pub fn built<T>(
    record: Option<PathBuf>,
    limit: ConfigInt,
    build: impl FnOnce(Option<(&Path, u64)>) -> CoreResult<T>,
) -> PyResult<T> {
    let limit = limit.get("record_limit")?;
    let is_asked_for = record.is_some();
    let Some(path) = record.or_else(path_of_environment) else { return build(None).map_err(to_py) };
    let limit =
        u64::try_from(limit).map_err(|_| config_error(format!("record_limit must be 0 or more, got {limit}")))?;
    let made = build(Some((&path, limit))).map_err(to_py)?;
    if !is_asked_for {
        OF_ENVIRONMENT.fetch_add(1, Ordering::Relaxed);
    }
    Ok(made)
}
