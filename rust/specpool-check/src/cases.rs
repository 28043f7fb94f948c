//! The enumerations of the proof: small page sizes, shapes, depths and pools, family by family.

use specpool_core::{Group, Layout, Ledger, LedgerConfig, Shape};

use crate::events::Alphabet;
use crate::explore::Case;

/// A group whose pool is set later.
fn group(name: &str, page_size: i64, hosts_drafts: bool, layout: Layout, window: Option<i64>) -> Group {
    Group { name: name.into(), page_size, num_pages: 1 << 20, hosts_drafts, layout, window }
}

/// Sets every pool to the least that the ledger accepts, and `slack` pages more.
fn with_pools(mut config: LedgerConfig, slack: i64) -> LedgerConfig {
    for at in 0..config.groups.len() {
        let accepts = |num_pages: i64| {
            let mut config = config.clone();
            config.groups[at].num_pages = num_pages;
            Ledger::new(config).is_ok()
        };
        config.groups[at].num_pages = (1..1 << 16).find(|&pages| accepts(pages)).unwrap_or(1) + slack;
    }
    config
}

fn shape(num_steps: u32, topk: u32, num_draft_tokens: u32) -> Shape {
    Shape { num_steps, topk, num_draft_tokens }
}

/// One row, rounds of mixed shapes: every reserve and row width sufficient and minimal.
fn rounds(page_size: i64, shapes: &[Shape], depth: i64, layout: Layout, is_split: bool, len: i64) -> Case {
    let target = group("target", page_size, false, Layout::Dense, None);
    let draft = group("draft", page_size, true, layout, None);
    let groups = if is_split { vec![target, draft] } else { vec![draft] };
    let mut config = LedgerConfig::new(groups, shapes.to_vec(), 1, len);
    config.overlap_depth = depth;
    let placement = if is_split { "split" } else { "shared" };
    let names: Vec<String> =
        shapes.iter().map(|s| format!("{}/{}/{}", s.num_steps, s.topk, s.num_draft_tokens)).collect();
    Case {
        name: format!("rounds P={page_size} {} D={depth} {layout:?} {placement} L={len}", names.join("+")),
        config: with_pools(config, 0),
        alphabet: Alphabet { trims: false, cancels: false, ..Alphabet::plain(&[1, 2], depth as usize + 2) },
        is_minimal: true,
    }
}

/// Every case of the proof.
#[must_use]
pub fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    for page_size in 1..=3 {
        for depth in 0..=2 {
            for shapes in [vec![shape(1, 1, 2)], vec![shape(2, 2, 3), shape(1, 1, 2)]] {
                for layout in [Layout::Dense, Layout::Holey] {
                    for is_split in [false, true] {
                        cases.push(rounds(page_size, &shapes, depth, layout, is_split, 4 + page_size));
                    }
                }
            }
        }
    }
    cases
}
