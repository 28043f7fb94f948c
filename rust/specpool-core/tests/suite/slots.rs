//! Slots and moves. The binding's tests compare them with slow twins over many sizes.

use proptest::prelude::*;
use specpool_core::forward::slots::{
    TableView, apply_table_delta, check_moves, compact_moves, page_csr, slot_ranges, slots_at,
};

const TABLE: [i32; 9] = [0, 0, 0, 4, 2, 6, 1, 0, 0]; // rows 0 (padding), 1, 2; three columns

fn table(page_size: i64) -> TableView<'static> {
    TableView::new(&TABLE, 3, page_size).unwrap()
}

#[test]
fn slots_follow_the_table() {
    assert_eq!(slots_at(&table(3), &[1, 1, 2, 0], &[0, 5, 2, 8]).unwrap(), [12, 8, 5, 2]);
    assert_eq!(slot_ranges(&table(3), &[1, 2], &[2, 0], &[3, 1]).unwrap(), [14, 6, 7, 3]);
    let csr = page_csr(&table(3), &[1, 2, 1], &[7, 0, 3]).unwrap();
    assert_eq!((csr.kv_indptr, csr.kv_indices), (vec![0, 3, 3, 4], vec![4, 2, 6, 4]));
    assert_eq!(csr.kv_last_page_len, [1, 0, 3]);
}

proptest! {
    /// Any argument gives a result or an error, never a panic.
    #[test]
    fn nothing_panics(
        page_size: i64, row: i32, position: i32, len: i32, id: i32, cells in prop::collection::vec(any::<i32>(), 0..9)
    ) {
        let Ok(table) = TableView::new(&cells, 3, page_size) else { return Ok(()) };
        let _ = slots_at(&table, &[row, 1], &[position, position]);
        let _ = slot_ranges(&table, &[1], &[position], &[len.min(1000)]);
        let _ = page_csr(&table, &[1], &[len]);
        let _ = compact_moves(&table, &[1], &[position], &[0, id], 7);
    }
}

#[test]
fn compaction_keeps_only_real_moves() {
    let moves = compact_moves(&table(3), &[1, 0], &[2, 2], &[0, 2, 3, -1, 4, 5, 6, 7], 4).unwrap();
    assert_eq!((moves.src, moves.dst), (vec![7, 8], vec![6, 7]));
    let error = compact_moves(&table(3), &[2], &[1], &[0, 3], 4).unwrap_err();
    assert_eq!(error.to_string(), "position 4 of row 2 has no page: page_table[2, 1] is 0");
    assert!(compact_moves(&table(3), &[1], &[2], &[0, 2, 1], 4).is_err());
}

#[test]
fn moves_write_each_slot_once() {
    assert!(check_moves(&[0, 1], &[1, 0], 2).is_ok());
    assert_eq!(check_moves(&[0, 1], &[1, 1], 2).unwrap_err().to_string(), "dst names slot 1 twice");
    assert_eq!(check_moves(&[0, 2], &[0, 1], 2).unwrap_err().to_string(), "src[1] must be in [0, 2), got 2");
}

#[test]
fn a_refused_delta_changes_nothing() {
    let mut cells = TABLE;
    assert!(apply_table_delta(&mut cells, 3, &[1, 2], &[0, 3], &[7, 7]).is_err());
    assert_eq!(cells, TABLE);
    apply_table_delta(&mut cells, 3, &[1, 2], &[0, 2], &[7, 8]).unwrap();
    assert_eq!(cells, [0, 0, 0, 7, 2, 6, 1, 0, 8]);
}
