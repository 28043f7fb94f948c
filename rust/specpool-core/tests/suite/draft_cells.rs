//! Where drafts lie, and the copies that make whole-page reads correct.

use proptest::prelude::*;
use specpool_core::forward::draft_cells::{Drafts, advance_ancestors};
use specpool_core::forward::slots::TableView;
use specpool_core::ids::ceil_align;
use specpool_core::{Geometry, Layout, Reserve, Shape};

#[test]
fn the_worked_example_of_sgl_7725() {
    let cells: Vec<i32> = vec![0; 20].into_iter().chain(1..=20).collect();
    let table = TableView::new(&cells, 20, 4).unwrap();
    let moves = Drafts::new(5, 8, 4, Layout::Holey).unwrap().prefix_tail_moves(&table, &[1], &[7]).unwrap();
    assert_eq!(moves.src, [8, 9, 10].repeat(7));
    assert_eq!(moves.dst[..6], [16, 17, 18, 24, 25, 26]);
}

/// For a known root, a round reserves exactly what it writes: up to the last draft's cell (in the holey layout, to the
/// end of that cell's page), or up to the last node of the verify window.
#[test]
fn the_reserve_ends_where_the_cells_do() {
    for (page_size, layout) in (1..=6).flat_map(|p| [(p, Layout::Dense), (p, Layout::Holey)]) {
        let geometry = Geometry::new(page_size, true, layout).unwrap();
        for (s, k) in (1..=7).flat_map(|s| (1..=4).map(move |k| (s, k))) {
            let drafts = Drafts::new(s, k, page_size, layout).unwrap();
            for n in 1..=40 {
                let reserve = Reserve::exact(geometry, Shape::new(s as u32, k as u32, n).unwrap());
                for root in 0..=3 * page_size {
                    let positions = drafts.write_positions(&[root as i32]).unwrap();
                    let end = i64::from(*positions.iter().max().unwrap()) + 1;
                    let whole_pages = layout == Layout::Holey && page_size > 1 && k > 1;
                    let end = if whole_pages { ceil_align(end, page_size) } else { end };
                    let found = reserve.need(root, root);
                    assert_eq!(
                        found,
                        end.max(root + i64::from(n)),
                        "P={page_size} {layout:?} ({s}, {k}, {n}) at {root}"
                    );
                }
            }
        }
    }
}

proptest! {
    /// Cells never overlap, and both layouts are equal if pages cannot matter (P == 1 or K == 1).
    #[test]
    fn every_draft_has_a_cell_of_its_own(s in 1_usize..7, k in 1_usize..9, p in 1_i64..20, root in 0..100_i32) {
        let positions = |layout| Drafts::new(s, k, p, layout).unwrap().write_positions(&[root]).unwrap();
        let (dense, holey) = (positions(Layout::Dense), positions(Layout::Holey));
        for cells in [&dense, &holey] {
            prop_assert!(cells.windows(2).all(|pair| pair[0] < pair[1]) && cells[0] == root);
        }
        prop_assert!((p > 1 && k > 1) || dense == holey);
        // In the holey layout no page is used by two branches.
        let pages: Vec<i64> = holey.iter().map(|&position| i64::from(position) / p).collect();
        for (a, b) in pages.chunks(s).zip(pages.chunks(s).skip(1)) {
            prop_assert!(a[s - 1] < b[0]);
        }
    }

    /// Any argument gives a result or an error, never a panic.
    #[test]
    fn nothing_panics(s: usize, k: usize, p: i64, root: i32, row: i32, step: usize, parents: [i32; 2]) {
        for (s, k) in [(s, k), (s % 9, k % 9)] {
            let Ok(drafts) = Drafts::new(s, k, p, Layout::Holey) else { continue };
            let Ok(table) = TableView::new(&[0, 0, 3, 5], 2, p) else { continue };
            let _ = drafts.write_slots(&table, &[row], &[root]);
            let _ = drafts.read_indices(&table, &[row], &[root % 64], step, Some(&parents));
            let _ = drafts.visibility(&[root], step % 9, None);
            let _ = drafts.branch_pages(&table, &[row], &[root], step % 9);
            let _ = drafts.prefix_tail_moves(&table, &[row], &[root]);
            let _ = drafts.branch_copy_moves(&table, &[row], &[root], step % 9, &parents);
        }
        let _ = advance_ancestors(&mut [0; 6], &parents, k % 4, step % 9);
    }
}

#[test]
fn ancestors_follow_swaps() {
    let mut ancestors = [9; 6]; // two branches, three steps
    for (step, parents) in [[0, 1], [1, 0], [0, 0]].iter().enumerate() {
        advance_ancestors(&mut ancestors, parents, 2, step).unwrap();
    }
    assert_eq!(ancestors, [1, 0, 0, 1, 0, 1]);
}
