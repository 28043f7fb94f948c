//! The life of a step, for C: what it claims, and the changes of the page table that go before it.

use std::mem::{align_of, size_of};

use specpool_core::{PageCopy, Plan, StateFolds};

use crate::handle::guard;
use crate::ledger::{LEDGERS, Ledger};
use crate::slice::{has_room, put, read, write};
use crate::status::Status;

/// Copies the first `tokens` slots of page `src` to page `dst`, in every layer of the group.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CopyOfPage {
    /// The group's index.
    pub group: i32,
    /// The page that is read.
    pub src: i32,
    /// The page that is written.
    pub dst: i32,
    /// Slots that are copied.
    pub tokens: i32,
}

const _: () = assert!(
    size_of::<CopyOfPage>() == size_of::<PageCopy>()
        && align_of::<CopyOfPage>() == align_of::<PageCopy>()
        && std::mem::offset_of!(CopyOfPage, src) == std::mem::offset_of!(PageCopy, src)
        && std::mem::offset_of!(CopyOfPage, dst) == std::mem::offset_of!(PageCopy, dst)
        && std::mem::offset_of!(CopyOfPage, tokens) == std::mem::offset_of!(PageCopy, tokens)
);

/// What a prepare decided. The pointers are valid until the step is over (complete, and a decode resolved), is
/// cancelled, or the ledger is destroyed; `step` stays.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct StepPlan {
    /// The step's number.
    pub step: u64,
    /// b: rows that take part.
    pub num_lanes: usize,
    /// [b]: the rows.
    pub rows: *const i32,
    /// [b]: the shapes of a decode.
    pub shapes: *const i32,
    /// [b]: the epochs of the rows.
    pub epochs: *const u64,
    /// [b]: the least length that a row can have when the step runs.
    pub lo: *const i32,
    /// [b]: the greatest.
    pub hi: *const i32,
    /// [b]: an extend writes from here on.
    pub start: *const i32,
    /// [b]: an extend writes up to here.
    pub new_len: *const i32,
    /// [num_groups, b]: slots that the row had.
    pub allocated_before: *const i32,
    /// [num_groups, b]: slots that it has now.
    pub allocated_after: *const i32,
    /// Number of state groups: 0 or 1. Without one the four pointers that follow are NULL.
    pub num_states: usize,
    /// [num_states, b]: the state slot that each lane reads; 0 is a state of zeros.
    pub state_src: *const i32,
    /// [num_states, b]: the state slot that each lane writes; 0 if it folds nothing.
    pub state_dst: *const i32,
    /// [num_states, b]: tokens that state_src contains.
    pub state_from: *const i32,
    /// [num_states, b]: each lane folds the tokens from state_from up to here.
    pub state_to: *const i32,
    /// Copies to be made in this order, before the step's forward.
    pub page_copies: *const CopyOfPage,
    /// Their number.
    pub num_page_copies: usize,
}

/// Claims pages for a prefill or a chunk of every row: its tokens up to `new_lens[i]`. All rows or none.
///
/// # Safety
/// The arrays have `num_rows` entries; `plan` points to its structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_prepare_extend(
    ledger: Ledger,
    rows: *const i32,
    new_lens: *const i32,
    num_rows: usize,
    writes_draft: bool,
    plan: *mut StepPlan,
) -> Status {
    guard(|| unsafe {
        has_room("plan", plan, 1, 1)?;
        let (rows, new_lens) = (read("rows", rows, num_rows)?, read("new_lens", new_lens, num_rows)?);
        let prepared = LEDGERS
            .with(ledger.id, |ledger| Ok(plan_for_c(&*ledger.prepare_extend(rows, new_lens, writes_draft)?)))?;
        put("plan", prepared, plan)
    })
}

/// A specpool_ledger_prepare_extend whose lanes `keep`, ascending, leave a soft mark on their states, of new_len - 1
/// tokens each: specpool_ledger_index then finds them, although a round has folded on before.
///
/// # Safety
/// `rows` and `new_lens` have `num_rows` entries, `keep` has `num_kept`; `plan` points to its structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_prepare_extend_keeping(
    ledger: Ledger,
    rows: *const i32,
    new_lens: *const i32,
    num_rows: usize,
    keep: *const i32,
    num_kept: usize,
    writes_draft: bool,
    plan: *mut StepPlan,
) -> Status {
    guard(|| unsafe {
        has_room("plan", plan, 1, 1)?;
        let (rows, new_lens) = (read("rows", rows, num_rows)?, read("new_lens", new_lens, num_rows)?);
        let keep = read("keep", keep, num_kept)?;
        let prepared = LEDGERS.with(ledger.id, |ledger| {
            Ok(plan_for_c(&*ledger.prepare_extend_keeping(rows, new_lens, keep, writes_draft)?))
        })?;
        put("plan", prepared, plan)
    })
}

/// Claims pages for one round of every row. All rows or none.
///
/// # Safety
/// The arrays have `num_rows` entries; `plan` points to its structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_prepare_decode(
    ledger: Ledger,
    rows: *const i32,
    shapes: *const i32,
    num_rows: usize,
    writes_draft: bool,
    plan: *mut StepPlan,
) -> Status {
    guard(|| unsafe {
        has_room("plan", plan, 1, 1)?;
        let (rows, shapes) = (read("rows", rows, num_rows)?, read("shapes", shapes, num_rows)?);
        let prepared =
            LEDGERS.with(ledger.id, |ledger| Ok(plan_for_c(&*ledger.prepare_decode(rows, shapes, writes_draft)?)))?;
        put("plan", prepared, plan)
    })
}

/// The ledger keeps the plan until its step is over, so the pointers stay valid until then.
fn plan_for_c(plan: &Plan) -> StepPlan {
    let states = plan.states.as_deref();
    let of_states =
        |numbers: fn(&StateFolds) -> &Vec<i32>| states.map_or(std::ptr::null(), |states| numbers(states).as_ptr());
    StepPlan {
        step: plan.step,
        num_lanes: plan.num_lanes(),
        rows: plan.rows.as_ptr(),
        shapes: plan.shapes.as_ptr(),
        epochs: plan.epochs.as_ptr(),
        lo: plan.lo.as_ptr(),
        hi: plan.hi.as_ptr(),
        start: plan.start.as_ptr(),
        new_len: plan.new_len.as_ptr(),
        allocated_before: plan.allocated_before.as_ptr(),
        allocated_after: plan.allocated_after.as_ptr(),
        num_states: usize::from(states.is_some()),
        state_src: of_states(|states| &states.src),
        state_dst: of_states(|states| &states.dst),
        state_from: of_states(|states| &states.from),
        state_to: of_states(|states| &states.to),
        page_copies: plan.page_copies.as_ptr().cast(),
        num_page_copies: plan.page_copies.len(),
    }
}

/// The slots that specpool_ledger_prepare_decode of the same rows would claim, per group. It changes nothing.
///
/// # Safety
/// `rows` and `shapes` have `num_rows` entries, `tokens` has `num_groups`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_tokens_required(
    ledger: Ledger,
    rows: *const i32,
    shapes: *const i32,
    num_rows: usize,
    tokens: *mut i64,
    num_groups: usize,
) -> Status {
    guard(|| unsafe {
        let (rows, shapes) = (read("rows", rows, num_rows)?, read("shapes", shapes, num_rows)?);
        let required = LEDGERS.with(ledger.id, |ledger| Ok(ledger.tokens_required(rows, shapes)?))?;
        write("tokens", &required, tokens, num_groups)
    })
}

/// Marks the step as enqueued. Call it in step order, before the first copy, table delta or kernel of the step.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_ledger_launch(ledger: Ledger, step: u64) -> Status {
    guard(|| LEDGERS.with(ledger.id, |ledger| Ok(ledger.launch(step)?)))
}

/// Counts a round's tokens: `accept_lens[lane]`, the bonus token included.
///
/// # Safety
/// The array has `num_lanes` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_resolve(
    ledger: Ledger,
    step: u64,
    accept_lens: *const i32,
    num_lanes: usize,
) -> Status {
    guard(|| unsafe {
        let accept_lens = read("accept_lens", accept_lens, num_lanes)?;
        LEDGERS.with(ledger.id, |ledger| Ok(ledger.resolve(step, accept_lens)?))
    })
}

/// Says that this step and every step before it have finished on the device.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_ledger_complete(ledger: Ledger, step: u64) -> Status {
    guard(|| LEDGERS.with(ledger.id, |ledger| Ok(ledger.complete(step)?)))
}

/// Undoes the newest step that is not launched.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_ledger_cancel(ledger: Ledger, step: u64) -> Status {
    guard(|| LEDGERS.with(ledger.id, |ledger| Ok(ledger.cancel(step)?)))
}

/// Gives up a launched step whose forward failed: its rows are retracted.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_ledger_abandon(ledger: Ledger, step: u64) -> Status {
    guard(|| LEDGERS.with(ledger.id, |ledger| Ok(ledger.abandon(step)?)))
}

/// Writes the pending changes of one group's page table, `table[rows[i]][columns[i]] = pages[i]`, and their number. They
/// stay pending until specpool_ledger_ack_delta: with too little room the call can be made again.
///
/// # Safety
/// The arrays have room for `capacity` entries each; `count` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_take_delta(
    ledger: Ledger,
    step: u64,
    group: usize,
    rows: *mut i32,
    columns: *mut i32,
    pages: *mut i32,
    capacity: usize,
    count: *mut usize,
) -> Status {
    guard(|| unsafe {
        has_room("count", count, 1, 1)?;
        let mut deltas = LEDGERS.with(ledger.id, |ledger| {
            ledger.group_spec(group)?;
            Ok(ledger.take_delta(step)?)
        })?;
        let delta = deltas.swap_remove(group);
        put("count", delta.rows.len(), count)?;
        write("rows", &delta.rows, rows, capacity)?;
        write("columns", &delta.columns, columns, capacity)?;
        write("pages", &delta.pages, pages, capacity)
    })
}

/// Says that the changes taken for the step, of every group, are applied.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_ledger_ack_delta(ledger: Ledger, step: u64) -> Status {
    guard(|| LEDGERS.with(ledger.id, |ledger| Ok(ledger.ack_delta(step)?)))
}
