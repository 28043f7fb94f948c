//! Which columns queries see.

use specpool_core::forward::mask::{MaskLanes, attention_mask};

const ONE: MaskLanes = MaskLanes {
    starts: &[2],
    q_lens: &[2],
    num_queries: 3,
    own_mask: None,
    q_positions: None,
    own_positions: None,
    own_width: 0,
    window: None,
    sink: 0,
};

fn picture(lanes: &MaskLanes, columns: usize) -> Vec<String> {
    let mask = attention_mask(lanes, columns).unwrap();
    mask.chunks(columns).map(|line| line.iter().map(|&seen| if seen { '1' } else { '.' }).collect()).collect()
}

#[test]
fn causal_prefix_padding_and_window() {
    assert_eq!(picture(&ONE, 5), ["111..", "1111.", "1...."]);
    assert_eq!(picture(&MaskLanes { window: Some(2), ..ONE }, 5), [".11..", "..11.", "1...."]);
    assert_eq!(picture(&MaskLanes { window: Some(2), sink: 1, ..ONE }, 5), ["111..", "1.11.", "1...."]);
    assert_eq!(picture(&MaskLanes { window: Some(1), sink: 3, ..ONE }, 5), ["111..", "1111.", "1...."]);
    let error = attention_mask(&MaskLanes { sink: -1, ..ONE }, 5).unwrap_err();
    assert_eq!(error.to_string(), "sink must be 0 or more, got -1");
}

#[test]
fn own_cells_by_mask_and_position() {
    let own_mask = [true, false, true, true, false, false];
    let lanes = MaskLanes { num_queries: 2, own_mask: Some(&own_mask), own_width: 3, ..ONE };
    assert_eq!(picture(&lanes, 5), ["111.1", "111.."]);
    let lanes = MaskLanes { q_positions: Some(&[5, 3]), own_positions: Some(&[2, 3, 5]), window: Some(2), ..lanes };
    assert_eq!(picture(&lanes, 5), ["....1", "..1.."]);
    assert_eq!(picture(&MaskLanes { sink: 3, ..lanes }, 5), ["111.1", "111.."]);
}

#[test]
fn cells_beyond_the_columns_are_refused() {
    let error = attention_mask(&ONE, 3).unwrap_err();
    assert!(error.to_string().starts_with("lane 0 has 2 queries from column 2"), "{error}");
    let lanes = MaskLanes { num_queries: 2, own_mask: Some(&[false, true, false, false]), own_width: 2, ..ONE };
    assert_eq!(attention_mask(&lanes, 3).unwrap_err().to_string(), "own_mask[0, 0, 1] is column 3 of 3");
}
