//! What a call returns, and the message of the last error of the thread.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

use specpool_core::Error;

/// What a call returns.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Done.
    SpecpoolOk = 0,
    /// Too few pages or blocks: specpool_error_shortage() has the numbers.
    SpecpoolOutOfPages = 1,
    /// Every row is taken.
    SpecpoolOutOfRows = 2,
    /// The machine has too little memory.
    SpecpoolOutOfMemory = 3,
    /// A claim would pass the end of a row.
    SpecpoolRowOverflow = 4,
    /// Rows have reached the end of the context: specpool_error_rows() lists them.
    SpecpoolContextEnd = 5,
    /// A page or block is not in the state that the call needs: freed twice, foreign, still in use.
    SpecpoolPageState = 6,
    /// A step was prepared with a row that has been released since: cancel it.
    SpecpoolStalePlan = 7,
    /// A call out of order.
    SpecpoolOrder = 8,
    /// A row cannot take part yet.
    SpecpoolNotReady = 9,
    /// The draft KV of a row is behind its target KV.
    SpecpoolDraftLag = 10,
    /// An argument has a wrong value, length or combination; a pointer is NULL.
    SpecpoolBadArgument = 11,
    /// A configuration that cannot work.
    SpecpoolConfig = 12,
    /// An audit found a broken invariant, or a call before this one panicked.
    SpecpoolCorrupt = 13,
    /// An event log cannot be written.
    SpecpoolRecord = 14,
    /// The handle was destroyed or never made.
    SpecpoolBadHandle = 15,
    /// Another thread is inside a call of this handle.
    SpecpoolBusy = 16,
}

/// The numbers of SPECPOOL_OUT_OF_PAGES.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShortageInfo {
    /// Pages that the call needs.
    pub need: usize,
    /// Pages that hold nothing.
    pub free: usize,
    /// Pages that only the prefix index holds; they can be handed out too.
    pub cached: usize,
    /// Freed pages that a launched step may still touch: they come back with specpool_ledger_complete.
    pub fenced: usize,
    /// Pages whose every holder is idle.
    pub reclaimable: usize,
}

/// Why a call is refused: an error of the core, or one of this border.
pub(crate) enum Refusal {
    Core(Error),
    Here(Status, String),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Core(error)
    }
}

pub(crate) type Outcome<T = ()> = Result<T, Refusal>;

pub(crate) fn bad_argument<T>(why: String) -> Outcome<T> {
    Err(Refusal::Here(Status::SpecpoolBadArgument, why))
}

#[derive(Default)]
struct Last {
    message: CString,
    shortage: ShortageInfo,
    rows: Vec<i32>,
}

thread_local! {
    static LAST: RefCell<Last> = RefCell::default();
}

/// Keeps what went wrong for the thread, and returns its code.
pub(crate) fn report(refusal: Refusal) -> Status {
    let (status, message, shortage, rows) = match refusal {
        Refusal::Here(status, why) => (status, why, None, None),
        Refusal::Core(error) => {
            let message = error.to_string();
            let (mut shortage, mut rows) = (None, None);
            let status = match error {
                Error::OutOfPages { need, free, cached, fenced, reclaimable, .. } => {
                    shortage = Some(ShortageInfo { need, free, cached, fenced, reclaimable });
                    Status::SpecpoolOutOfPages
                }
                Error::OutOfBlocks { need, free, cached, fenced } => {
                    shortage = Some(ShortageInfo { need, free, cached, fenced, reclaimable: 0 });
                    Status::SpecpoolOutOfPages
                }
                Error::ContextEnd { rows: ended, .. } => {
                    rows = Some(ended.into_iter().map(|row| row as i32).collect());
                    Status::SpecpoolContextEnd
                }
                Error::OutOfMemory { .. } => Status::SpecpoolOutOfMemory,
                Error::OutOfRows { .. } => Status::SpecpoolOutOfRows,
                Error::RowOverflow { .. } => Status::SpecpoolRowOverflow,
                Error::PageState { .. } | Error::BlockState { .. } => Status::SpecpoolPageState,
                Error::StalePlan { .. } => Status::SpecpoolStalePlan,
                Error::Order(_) => Status::SpecpoolOrder,
                Error::NotReady(_) => Status::SpecpoolNotReady,
                Error::DraftLag { .. } => Status::SpecpoolDraftLag,
                Error::Shape(_) => Status::SpecpoolBadArgument,
                Error::Config(_) => Status::SpecpoolConfig,
                Error::Corrupt(_) => Status::SpecpoolCorrupt,
                Error::Record(_) => Status::SpecpoolRecord,
            };
            (status, message, shortage, rows)
        }
    };
    // A name in the message may hold a NUL: C would stop there.
    let message = CString::new(message.replace('\0', "\\0")).unwrap_or_default();
    LAST.with_borrow_mut(|last| {
        *last = Last { message, shortage: shortage.unwrap_or_default(), rows: rows.unwrap_or_default() };
    });
    status
}

/// The message of this thread's last error: one line with the numbers; "" if there was none. Valid until this thread's
/// next call that fails.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_error_message() -> *const c_char {
    LAST.with_borrow(|last| last.message.as_ptr())
}

/// The numbers of this thread's last error, all 0 if it was not SPECPOOL_OUT_OF_PAGES.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_error_shortage() -> ShortageInfo {
    LAST.with_borrow(|last| last.shortage)
}

/// The rows of this thread's last error, none if it was not SPECPOOL_CONTEXT_END. Writes up to `capacity` of them and
/// returns how many there are.
///
/// # Safety
/// `rows` points to `capacity` integers, or `capacity` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_error_rows(rows: *mut i32, capacity: usize) -> usize {
    LAST.with_borrow(|last| {
        if !rows.is_null() {
            let count = capacity.min(last.rows.len());
            // SAFETY: the caller's array has `capacity` entries.
            unsafe { std::ptr::copy_nonoverlapping(last.rows.as_ptr(), rows, count) };
        }
        last.rows.len()
    })
}

/// The version of the library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn specpool_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
