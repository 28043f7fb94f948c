//! Maps core errors to the exceptions of `specpool.errors`. No other file does.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::prelude::*;
use specpool_core::{Error, Result as CoreResult};

mod py {
    use pyo3::import_exception;
    import_exception!(specpool.errors, ConfigError);
    import_exception!(specpool.errors, ContextEnd);
    import_exception!(specpool.errors, CorruptState);
    import_exception!(specpool.errors, DraftLag);
    import_exception!(specpool.errors, NotReady);
    import_exception!(specpool.errors, OrderError);
    import_exception!(specpool.errors, OutOfMemory);
    import_exception!(specpool.errors, OutOfPages);
    import_exception!(specpool.errors, OutOfRows);
    import_exception!(specpool.errors, PageStateError);
    import_exception!(specpool.errors, RecordError);
    import_exception!(specpool.errors, RowOverflow);
    import_exception!(specpool.errors, ShapeError);
    import_exception!(specpool.errors, StalePlan);
}

/// The Python exception of a core error, with its numbers as attributes.
pub fn to_py(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::OutOfPages { group, need, free, cached, fenced, reclaimable } => {
            py::OutOfPages::new_err((text, group, need, free, cached, fenced, reclaimable))
        }
        Error::OutOfBlocks { need, free, cached, fenced } => {
            py::OutOfPages::new_err((text, "blocks", need, free, cached, fenced, 0))
        }
        Error::OutOfMemory { entries, entry_bytes, .. } => {
            py::OutOfMemory::new_err((text, entries.saturating_mul(entry_bytes)))
        }
        Error::OutOfRows { num_rows, fenced } => py::OutOfRows::new_err((text, num_rows, fenced)),
        Error::RowOverflow { group, row, need, width } => py::RowOverflow::new_err((text, group, row, need, width)),
        Error::ContextEnd { rows, .. } => py::ContextEnd::new_err((text, rows)),
        Error::PageState { page, state, owner, .. } => py::PageStateError::new_err((text, page, state, owner)),
        Error::BlockState { block, state, tag, .. } => py::PageStateError::new_err((text, block, state, tag)),
        Error::StalePlan { step, row, .. } => py::StalePlan::new_err((text, step, row)),
        Error::Order(_) => py::OrderError::new_err(text),
        Error::NotReady(_) => py::NotReady::new_err(text),
        Error::DraftLag { row, drafted, resolved, .. } => py::DraftLag::new_err((text, row, drafted, resolved)),
        Error::Shape(_) => py::ShapeError::new_err(text),
        Error::Config(_) => py::ConfigError::new_err(text),
        Error::Corrupt(_) => py::CorruptState::new_err(text),
        Error::Record(_) => py::RecordError::new_err(text),
    }
}

/// A [`ShapeError`](py::ShapeError) for an argument that the binding itself refuses.
pub fn shape_error(message: String) -> PyErr {
    to_py(Error::Shape(message))
}

/// A [`ConfigError`](py::ConfigError) for an argument that the binding itself refuses.
pub fn config_error(message: String) -> PyErr {
    to_py(Error::Config(message))
}

/// Runs a verb. A panic in it is a bug of ours, or a stray write into our memory, and may leave the state half changed.
/// So it raises `CorruptState`, and so does every verb after it. `left` says what can still be done.
pub fn guarded<T, R>(
    state: &mut T,
    is_broken: &mut bool,
    left: &str,
    verb: impl FnOnce(&mut T) -> CoreResult<R>,
) -> PyResult<R> {
    if *is_broken {
        return Err(to_py(Error::Corrupt(format!("a verb before this one panicked: {left}"))));
    }
    let Ok(outcome) = catch_unwind(AssertUnwindSafe(|| verb(state))) else {
        *is_broken = true;
        let why = format!("the verb panicked and may be half done (the panic is on stderr): {left}");
        return Err(to_py(Error::Corrupt(why)));
    };
    outcome.map_err(to_py)
}
