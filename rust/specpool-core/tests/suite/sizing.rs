//! The closed forms of the sizing (docs/contract.md, Sizing), compared with plain enumeration.

use proptest::prelude::*;
use specpool_core::ids::ceil_align;
use specpool_core::state::sizing::{self, Geometry, Policy, Reserve};
use specpool_core::{Error, Layout, Shape};

const PAGE_SIZES: [i64; 7] = [1, 2, 3, 4, 7, 16, 64];

/// Slots that one round writes from the root `s`: the footprint of docs/contract.md (Reserve), word by word.
fn footprint(s: i64, page_size: i64, hosts_drafts: bool, layout: Layout, shape: Shape) -> i64 {
    let (depth, k, n) = (i64::from(shape.num_steps), i64::from(shape.topk), i64::from(shape.num_draft_tokens));
    if !hosts_drafts || depth == 0 {
        s + n
    } else if layout == Layout::Dense || page_size == 1 || k == 1 {
        s + (depth * k).max(n)
    } else {
        let pages = (s % page_size + depth + page_size - 1) / page_size;
        (s + n).max(s / page_size * page_size + k * pages * page_size)
    }
}

fn geometries() -> Vec<(bool, Layout)> {
    vec![(false, Layout::Dense), (true, Layout::Dense), (true, Layout::Holey)]
}

fn shapes() -> Vec<Shape> {
    let mut all = Vec::new();
    for s in [0, 1, 2, 3, 5, 8] {
        for k in [1, 2, 3, 8] {
            for n in [1, 2, 4, 9, 40] {
                all.push(Shape::new(s, k, n).unwrap());
            }
        }
    }
    all
}

#[test]
fn exact_need_is_the_largest_footprint() {
    for page_size in PAGE_SIZES {
        for (hosts_drafts, layout) in geometries() {
            let geometry = Geometry::new(page_size, hosts_drafts, layout).unwrap();
            for shape in shapes() {
                let reserve = Reserve::exact(geometry, shape);
                let print = |s| footprint(s, page_size, hosts_drafts, layout, shape);
                for lo in 0..=2 * page_size.min(9) + 3 {
                    let mut most = 0;
                    for hi in lo..=lo + 2 * page_size.min(9) + 3 {
                        most = most.max(print(hi));
                        assert_eq!(reserve.need(lo, hi), most, "P={page_size} {layout:?} {shape:?} [{lo}, {hi}]");
                    }
                }
            }
        }
    }
}

#[test]
fn holey_on_chains_or_pages_of_one_is_dense() {
    for page_size in PAGE_SIZES {
        for shape in shapes().into_iter().filter(|shape| page_size == 1 || shape.topk == 1) {
            let [dense, holey] = [Layout::Dense, Layout::Holey]
                .map(|layout| Reserve::exact(Geometry::new(page_size, true, layout).unwrap(), shape));
            assert_eq!(dense, holey);
        }
    }
}

#[test]
fn a_row_is_wide_enough_and_not_too_wide() {
    for page_size in [1, 2, 3, 4, 16] {
        for (hosts_drafts, layout) in geometries() {
            let geometry = Geometry::new(page_size, hosts_drafts, layout).unwrap();
            for pair in shapes().chunks(7) {
                for depth in 0..=2 {
                    for context in [2, 3, 5, 17] {
                        for policy in [Policy::Exact, Policy::DoubleBuffer] {
                            let width = sizing::row_width(geometry, pair, context, depth, policy).unwrap();
                            let reserves = Reserve::for_shapes(geometry, pair, policy, depth).unwrap();
                            assert_eq!(width, widest_claim(&reserves, pair, context, depth, page_size));
                        }
                    }
                }
            }
        }
    }
}

/// The largest claim over every state that a row can be in: r < L, k <= D rounds of any shapes in flight.
fn widest_claim(reserves: &[Reserve], shapes: &[Shape], context: i64, depth: i64, page_size: i64) -> i64 {
    let mut widest = 0;
    for r in 1..context {
        let mut sums = vec![0];
        for k in 0..=depth {
            for sum in &sums {
                for reserve in reserves {
                    widest = widest.max(ceil_align(reserve.need(r + k, r + sum), page_size));
                }
            }
            let step = |sum: &i64| shapes.iter().map(|s| sum + i64::from(s.max_accept_len())).collect::<Vec<_>>();
            sums = sums.iter().flat_map(step).collect();
            sums.sort_unstable();
            sums.dedup();
        }
    }
    widest
}

fn any_shape() -> impl Strategy<Value = Shape> {
    (0_u32..12, 1_u32..12, 1_u32..64).prop_map(|(s, k, n)| Shape::new(s, k, n).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn exact_is_never_more_than_double_buffer(
        page_size in 1_i64..70,
        layout in prop_oneof![Just(Layout::Dense), Just(Layout::Holey)],
        hosts_drafts: bool,
        shapes in prop::collection::vec(any_shape(), 1..4),
        resolved in 1_i64..300,
        flight in prop::collection::vec(0_usize..4, 0..4),
        spare in 0_i64..2,
    ) {
        let geometry = Geometry::new(page_size, hosts_drafts, layout).unwrap();
        let depth = flight.len() as i64 + spare;
        let lo = resolved + flight.len() as i64;
        let hi = resolved
            + flight.iter().map(|&i| i64::from(shapes[i % shapes.len()].max_accept_len())).sum::<i64>();
        let exact = Reserve::for_shapes(geometry, &shapes, Policy::Exact, depth).unwrap();
        let double = Reserve::for_shapes(geometry, &shapes, Policy::DoubleBuffer, depth).unwrap();
        for (exact, double) in exact.iter().zip(&double) {
            prop_assert!(exact.need(lo, hi) <= double.need(lo, hi));
        }
    }

    #[test]
    fn any_raw_number_gives_a_value_or_a_config_error(
        page_size: i64, lo: i64, hi: i64, depth: i64, context: i64, shape in any_shape(), big: bool,
    ) {
        let shape = if big { Shape::new(1 << 20, 1 << 20, 1 << 20).unwrap() } else { shape };
        // Half of the draws are reduced to the range in which the functions answer.
        for (page_size, lo, hi) in [(page_size, lo, hi), (page_size & 0x7fff_ffff, lo & 0xffff, hi & 0xffff_ffff_ffff)] {
            let config = |error: &Error| matches!(error, Error::Config(_));
            let geometry = Geometry::upstream(page_size);
            if let Ok(geometry) = geometry {
                for policy in [Policy::Exact, Policy::DoubleBuffer] {
                    let width = sizing::row_width(geometry, &[shape], context, depth, policy);
                    prop_assert!(width.as_ref().map_or_else(config, |&width| width > 0));
                }
                let need = sizing::need(&Reserve::exact(geometry, shape), lo, hi);
                prop_assert!(need.as_ref().map_or_else(config, |&need| need > hi));
            }
            prop_assert!(Reserve::double_buffer(page_size, lo, depth).as_ref().map_or_else(config, |_| true));
            prop_assert!(sizing::next_allocated(lo, hi, page_size).as_ref().map_or_else(config, |&next| next >= lo));
            prop_assert!(sizing::row_headroom(page_size, shape).as_ref().map_or_else(config, |&n| n > 4));
        }
    }
}

/// `4 + N` slots for pages of one, else at least `2 * W + P - 1`.
#[test]
fn the_headroom_that_upstream_gives_a_row() {
    let headroom = |page_size, s, k, n| sizing::row_headroom(page_size, Shape::new(s, k, n).unwrap()).unwrap();
    assert_eq!(headroom(1, 5, 8, 64), 68);
    assert_eq!(headroom(64, 5, 8, 64), 2 * 1024 + 63);
    assert_eq!(headroom(2, 3, 1, 4), 2 * 4 + 1);
    assert_eq!(headroom(2, 0, 1, 1), 5);
}

#[test]
fn what_a_row_has_next() {
    assert_eq!(sizing::next_allocated(4, 9, 4), Ok(12));
    assert_eq!(sizing::next_allocated(12, 9, 4), Ok(12));
    assert_eq!(Geometry::new(7, true, Layout::Holey).unwrap().page_size(), 7);
}
