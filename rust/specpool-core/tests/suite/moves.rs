//! Moves of bytes, compared with a gather followed by a scatter.

use proptest::prelude::*;
use specpool_core::forward::moves::{SlotLayout, SlotMoves};

/// The bytes after the moves, computed slot by slot from a copy of the bytes before.
fn slow(
    before: &[u8],
    [lead, num_pages, page_bytes]: [usize; 3],
    widths: &[usize],
    src: &[i64],
    dst: &[i64],
) -> Vec<u8> {
    let mut after = before.to_vec();
    let page_size = page_bytes / widths.iter().sum::<usize>();
    for lead in 0..lead {
        let mut first = lead * num_pages * page_bytes;
        for &width in widths {
            let at = |slot: i64| first + slot as usize / page_size * page_bytes + slot as usize % page_size * width;
            for (&src, &dst) in src.iter().zip(dst) {
                after[at(dst)..][..width].copy_from_slice(&before[at(src)..][..width]);
            }
            first += page_size * width;
        }
    }
    after
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

proptest! {
    /// Sources repeat, chains and cycles pass through slots that are read and written, and runs cross pages.
    #[test]
    fn every_slot_takes_what_its_source_held(
        lead in 1_usize..3,
        page_size in 1_usize..5,
        widths in prop::collection::vec(0_usize..4, 1..4),
        dst in Just((0..12_i64).collect::<Vec<_>>()).prop_shuffle(),
        src in prop::collection::vec(0..12_i64, 12),
        shift in 0..12_i64,
        n in 0_usize..13,
    ) {
        prop_assume!(widths.iter().sum::<usize>() > 0);
        let dims = [lead, 12_usize.div_ceil(page_size), page_size * widths.iter().sum::<usize>()];
        let layout = SlotLayout::new(dims, widths.clone()).unwrap();
        let before = bytes(dims.iter().product());
        let (ascending, shifted): (Vec<_>, Vec<_>) = (0..12).map(|i| (i, (i + shift) % 12)).unzip();
        for (src, dst) in [(&src, &dst), (&ascending, &shifted), (&shifted, &ascending)] {
            let (src, dst) = (&src[..n], &dst[..n]);
            let moves = SlotMoves::new(src, dst, 12).unwrap();
            let mut after = before.clone();
            moves.apply(&mut [(&layout, &mut after)]).unwrap();
            prop_assert_eq!(after, slow(&before, dims, &widths, src, dst));
        }
    }

    /// Values are the slots of a buffer without pages.
    #[test]
    fn scattered_values_come_in_the_order_of_the_slots(
        slots in Just((0..9_i64).collect::<Vec<_>>()).prop_shuffle(), n in 0_usize..10
    ) {
        let layout = SlotLayout::new([2, 9, 3], vec![3]).unwrap();
        let values = bytes(2 * n * 3);
        let mut after = vec![0; 2 * 9 * 3];
        SlotMoves::new(&slots[..n], &slots[..n], 9).unwrap().scatter(&mut [(&layout, &mut after)], &[&values]).unwrap();
        for (lead, (i, &slot)) in (0..2).flat_map(|lead| slots[..n].iter().enumerate().map(move |of| (lead, of))) {
            let place = (lead * 9 + slot as usize) * 3;
            prop_assert_eq!(&after[place..place + 3], &values[(lead * n + i) * 3..][..3]);
        }
        prop_assert_eq!(after.iter().filter(|&&byte| byte != 0).count(), values.iter().filter(|&&byte| byte != 0).count());
    }
}

#[test]
fn what_does_not_fit_is_refused_and_moves_nothing() {
    let text = |src: &[i64], dst: &[i64]| SlotMoves::new(src, dst, 3).unwrap_err().to_string();
    assert_eq!(text(&[0, 1], &[2, 2]), "dst names slot 2 twice");
    assert_eq!(text(&[3], &[2]), "src[0] must be in [0, 3), got 3");
    assert_eq!(text(&[0], &[-1]), "dst[0] must be in [0, 3), got -1");
    assert_eq!(text(&[0], &[]), "dst must have 1 elements, got 0");
    let error = SlotLayout::new([1, 2, 7], vec![2, 1]).unwrap_err();
    assert_eq!(error.to_string(), "a page must be whole slots of [2, 1] bytes, 1 or more, got 7 bytes");
    assert!(SlotLayout::new([1, 2, 0], vec![0]).is_err());

    let moves = SlotMoves::new(&[0], &[1], 3).unwrap();
    let mut two = *b"ab";
    let error = moves.apply(&mut [(&SlotLayout::new([1, 2, 1], vec![1]).unwrap(), &mut two)]).unwrap_err();
    assert_eq!(error.to_string(), "a buffer must have 3 slots or more, got 2");
    let layout = SlotLayout::new([1, 3, 1], vec![1]).unwrap();
    let error = moves.apply(&mut [(&layout, &mut two)]).unwrap_err();
    assert_eq!(error.to_string(), "bytes must have 3 elements, got 2");
    let error = moves.scatter(&mut [(&layout, &mut [0; 3])], &[b"ab"]).unwrap_err();
    assert_eq!(error.to_string(), "bytes of values must have 1 elements, got 2");
    assert_eq!(&two, b"ab");
}

/// Law: all buffers are written, or none. If the second is refused, the first stays as it was.
#[test]
fn a_buffer_that_is_refused_keeps_the_others_unwritten() {
    let layout = SlotLayout::new([1, 3, 1], vec![1]).unwrap();
    let moves = SlotMoves::new(&[0], &[1], 3).unwrap();
    let (mut first, mut second) = (*b"abc", *b"ab");
    assert!(moves.apply(&mut [(&layout, &mut first), (&layout, &mut second)]).is_err());
    let moves = SlotMoves::new(&[1], &[1], 3).unwrap();
    let mut third = *b"abc";
    let values: [&[u8]; 2] = [b"x", b"xy"];
    let error = moves.scatter(&mut [(&layout, &mut first), (&layout, &mut third)], &values).unwrap_err();
    assert_eq!(error.to_string(), "bytes of values must have 1 elements, got 2");
    assert!(moves.scatter(&mut [(&layout, &mut first), (&layout, &mut third)], &values[..1]).is_err());
    assert_eq!((&first, &second, &third), (b"abc", b"ab", b"abc"));
}

/// Buffers without a byte may have any sizes: they are neither walked nor counted.
#[test]
fn sizes_of_nothing_cost_nothing() {
    let moves = SlotMoves::new(&[], &[], 0).unwrap();
    let layout = SlotLayout::new([1 << 60, 0, 4], vec![4]).unwrap();
    moves.apply(&mut [(&layout, &mut [])]).unwrap();
    moves.scatter(&mut [(&layout, &mut [])], &[&[]]).unwrap();
    let error = SlotMoves::new(&[0], &[1], 1 << 40).unwrap_err().to_string();
    assert!(error.contains("at most 2^31 - 1 fit"), "{error}");
}
