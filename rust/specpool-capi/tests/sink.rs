//! A group's sink reaches the core: its pages stay when the window leaves them.

use std::mem::MaybeUninit;

use specpool::*;

/// The pages of the 7 columns of a row of 13 tokens in a group of 2 slots a page and a window of 5.
fn pages_beside(sink: i64) -> Vec<i32> {
    let group = GroupConfig {
        name: c"window".as_ptr(),
        page_size: 2,
        num_pages: 40,
        hosts_drafts: true,
        holey: false,
        window: 5,
        sink,
    };
    let shape = ShapeConfig { num_steps: 3, topk: 1, num_draft_tokens: 4 };
    let (mut ledger, mut row, mut plan) = (Ledger { id: 0 }, 0, MaybeUninit::<StepPlan>::uninit());
    let (mut pages, mut count) = ([-1; 40], 0);
    // SAFETY: every pointer is to what the call writes or reads, and the counts are right.
    unsafe {
        let config = specpool_ledger_config_default(&raw const group, 1, &raw const shape, 1, 2, 40);
        assert_eq!(specpool_ledger_create(&raw const config, &raw mut ledger), Status::SpecpoolOk);
        assert_eq!(specpool_ledger_admit(ledger, std::ptr::null(), &raw mut row), Status::SpecpoolOk);
        let (rows, lens) = ([row], [13]);
        let done = specpool_ledger_prepare_extend(ledger, rows.as_ptr(), lens.as_ptr(), 1, true, plan.as_mut_ptr());
        assert_eq!(done, Status::SpecpoolOk);
        let step = plan.assume_init().step;
        assert_eq!(specpool_ledger_launch(ledger, step), Status::SpecpoolOk);
        assert_eq!(specpool_ledger_complete(ledger, step), Status::SpecpoolOk);
        let mut prefix = 0;
        assert_eq!(specpool_ledger_export(ledger, row, &raw mut prefix), Status::SpecpoolOk);
        assert_eq!(specpool_ledger_admit_on(ledger, prefix, -1, std::ptr::null(), &raw mut row), Status::SpecpoolOk);
        let done = specpool_ledger_row_pages(ledger, 0, row, pages.as_mut_ptr(), pages.len(), &raw mut count);
        assert_eq!(done, Status::SpecpoolOk);
    }
    assert_eq!(specpool_ledger_destroy(ledger), Status::SpecpoolOk);
    pages[..7].to_vec()
}

#[test]
fn the_pages_of_a_sink_stay_beside_the_window() {
    let held = |sink| pages_beside(sink).iter().map(|&page| page > 0).collect::<Vec<_>>();
    assert_eq!(held(0), [false, false, false, false, true, true, true]);
    assert_eq!(held(3), [true, true, false, false, true, true, true]);
}
