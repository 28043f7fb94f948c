//! Laws of whole pages as a run of bytes.

use specpool_core::digest::checksum;
use specpool_core::forward::pages::{gather_pages, scatter_pages};

fn buffers() -> [Vec<u8>; 2] {
    [(0..6 * 64).map(|at| (at * 7 % 251) as u8).collect(), (0..6 * 10).map(|at| (at * 3 + 1) as u8).collect()]
}

#[test]
fn what_is_gathered_lies_buffer_by_buffer_and_scatters_back() {
    let [wide, narrow] = buffers();
    let mut run = vec![0; 4 * 74];
    let sum = gather_pages(&[(&wide, 64), (&narrow, 10)], &[4, 1, 2, 5], &mut run).unwrap();
    let of = |bytes: &[u8], size: usize| -> Vec<u8> {
        [4, 1, 2, 5].iter().flat_map(|&page: &usize| bytes[page * size..][..size].to_vec()).collect()
    };
    let expected = [of(&wide, 64), of(&narrow, 10)].concat();
    assert_eq!((&run, sum), (&expected, checksum(&expected)));

    let (mut other_wide, mut other_narrow) = (vec![0; wide.len()], vec![0; narrow.len()]);
    let mut others: [(&mut [u8], usize); 2] = [(&mut other_wide, 64), (&mut other_narrow, 10)];
    assert_eq!(scatter_pages(&mut others, &[2, 3, 0, 1], &run).unwrap(), sum);
    assert_eq!((&other_wide[2 * 64..3 * 64], &other_narrow[10..20]), (&wide[4 * 64..5 * 64], &narrow[50..]));
    assert_eq!((&other_wide[..64], &other_narrow[..10]), (&wide[2 * 64..3 * 64], &narrow[20..30]));
    assert!(other_wide[4 * 64..].iter().chain(&other_narrow[40..]).all(|&byte| byte == 0));
}

#[test]
fn a_page_outside_or_a_wrong_length_writes_nothing() {
    let [wide, narrow] = buffers();
    let before = vec![9; 2 * 74];
    for (pages, len, words) in [
        (&[0, 6][..], 2 * 74, "pages[1] must be in [0, 6), got 6"),
        (&[-1, 0], 2 * 74, "pages[0] must be in [0, 6), got -1"),
        (&[0], 2 * 74, "bytes of out must have 74 elements, got 148"),
    ] {
        let mut out = before.clone();
        let error = gather_pages(&[(&wide, 64), (&narrow, 10)], pages, &mut out[..len]).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(out, before);
    }
    let mut other = wide.clone();
    let error = scatter_pages(&mut [(&mut other, 64)], &[0, 6], &before[..128]).unwrap_err();
    assert!(error.to_string().contains("pages[1] must be in [0, 6), got 6"), "{error}");
    assert!(scatter_pages(&mut [(&mut other, 64)], &[0], &before[..63]).is_err());
    assert_eq!(other, wide);
    assert_eq!(gather_pages(&[], &[], &mut []).unwrap(), checksum(&[]));
}
