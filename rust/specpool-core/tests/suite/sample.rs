//! The seeded draw.

use proptest::prelude::*;
use specpool_core::tree::sample::{CHUNK, SampleParams, philox, sample_margins, sample_tokens, uniform};

const PLAIN: SampleParams = SampleParams { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, u: 0.5 };

#[test]
fn philox_gives_the_known_answers() {
    // kat_vectors of Random123.
    assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    assert_eq!(
        philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
        [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
    );
}

proptest! {
    #[test]
    fn uniform_is_below_one(seed: u64, position: u64) {
        prop_assert!((0.0..1.0).contains(&uniform(seed, position)));
    }

    /// The draw does not depend on neighbouring rows, and the token always has weight.
    #[test]
    fn rows_are_independent(
        logits in prop::collection::vec(-30.0_f32..30.0, 3 * CHUNK + 5), u in 0.0..1.0_f64, top_p in 0.01_f32..=1.0,
        top_k in 0..9_i32, temperature in 0.01_f32..3.0, min_p in 0.0_f32..=1.0
    ) {
        let params = SampleParams { temperature, top_k, top_p, min_p, u };
        let alone = sample_tokens(&logits, logits.len(), &[params]).unwrap()[0];
        let twice = [vec![0.0; logits.len()], logits.clone()].concat();
        prop_assert_eq!(sample_tokens(&twice, logits.len(), &[PLAIN, params]).unwrap()[1], alone);
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        prop_assert!((logits[alone as usize] - max) / temperature >= -87.5);
        prop_assert!((logits[alone as usize] - max) / temperature >= min_p.ln() - 1e-4);
    }

    /// A larger draw never gives a smaller token.
    #[test]
    fn inverse_cdf_is_monotone(
        logits in prop::collection::vec(-5.0_f32..5.0, 1..600), a in 0.0..1.0_f64, b in 0.0..1.0_f64,
        top_p in 0.1_f32..=1.0
    ) {
        let draw = |u| sample_tokens(&logits, logits.len(), &[SampleParams { top_p, u, ..PLAIN }]).unwrap()[0];
        prop_assert!(draw(a.min(b)) <= draw(a.max(b)));
    }
}

#[test]
fn greedy_margin_is_the_gap_of_the_two_greatest() {
    let greedy = SampleParams { temperature: 0.0, ..PLAIN };
    assert_eq!(sample_margins(&[1.0, 3.0, 2.5], 3, &[greedy]).unwrap(), [0.5]);
    assert_eq!(sample_tokens(&[3.0, 3.0, 2.5], 3, &[greedy]).unwrap(), [0]);
}

#[test]
fn refusals_name_the_row() {
    let text = |params| sample_tokens(&[0.0; 4], 2, &[PLAIN, params]).unwrap_err().to_string();
    assert_eq!(text(SampleParams { u: 1.0, ..PLAIN }), "u[1] must be in [0, 1), got 1");
    assert_eq!(text(SampleParams { top_p: 0.0, ..PLAIN }), "top_p[1] must be in (0, 1], got 0");
    assert_eq!(text(SampleParams { min_p: 1.5, ..PLAIN }), "min_p[1] must be in [0, 1], got 1.5");
    assert_eq!(text(SampleParams { top_k: -2, ..PLAIN }), "top_k[1] must be 0 (all) or more, got -2");
    assert_eq!(text(SampleParams { temperature: f32::NAN, ..PLAIN }), "temperature[1] must be in [0, inf), got NaN");
    assert!(sample_tokens(&[0.0; 3], 2, &[PLAIN]).is_err());
}
