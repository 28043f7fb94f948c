//! The enumerations of the proof: small page sizes, shapes, depths and pools, family by family.

use specpool_core::{Group, Layout, Ledger, LedgerConfig, Policy, Shape};

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
        is_quick: false,
        is_minimal: true,
    }
}

/// A named case from its parts.
fn case(name: String, config: LedgerConfig, slack: i64, alphabet: Alphabet) -> Case {
    Case { name, config: with_pools(config, slack), alphabet, is_quick: false, is_minimal: false }
}

/// Two rows or three that compete for the pages of hardly more than one.
fn pools() -> Vec<Case> {
    let mut cases = Vec::new();
    for (page_size, slack, depth, num_rows) in [(1, 0, 0, 2), (1, 1, 1, 2), (2, 0, 0, 2), (2, 0, 1, 2), (2, 0, 0, 3)] {
        for page_fencing in [true, false] {
            let kv = group("kv", page_size, true, Layout::Dense, None);
            let shapes = if num_rows == 3 { vec![] } else { vec![shape(1, 1, 2)] };
            let mut config = LedgerConfig::new(vec![kv], shapes, num_rows, 2 + page_size);
            (config.overlap_depth, config.page_fencing) = (depth, page_fencing);
            let alphabet = Alphabet { batches: num_rows == 2, ..Alphabet::plain(&[1, 2], depth as usize + 2) };
            let name = format!("pool P={page_size} +{slack} D={depth} rows={num_rows} fencing={page_fencing}");
            cases.push(case(name, config, slack, alphabet));
        }
    }
    cases
}

/// Prefixes, forks and the copies of their tails.
fn sharing() -> Vec<Case> {
    let mut cases = Vec::new();
    for (sizes, num_rows, len) in [(&[2][..], 2, 4), (&[3], 2, 4), (&[2, 3], 2, 4), (&[2], 3, 3)] {
        for failures in [false, true] {
            for page_fencing in [true, false] {
                let name = |at: usize| if at == 0 { "draft" } else { "target" };
                let groups = sizes.iter().enumerate();
                let groups = groups.map(|(at, &size)| group(name(at), size, at == 0, Layout::Dense, None)).collect();
                let mut config = LedgerConfig::new(groups, vec![shape(1, 1, 2)], num_rows, len);
                config.page_fencing = page_fencing;
                let alphabet = Alphabet { max_prefixes: 1, forks: true, failures, ..Alphabet::plain(&[1, 3], 2) };
                let name = format!("sharing P={sizes:?} rows={num_rows} failures={failures} fencing={page_fencing}");
                cases.push(case(name, config, 1, alphabet));
            }
        }
    }
    cases
}

/// Sliding windows, alone and beside a full group, with sessions.
fn windows() -> Vec<Case> {
    let mut cases = Vec::new();
    for (page_size, window, len) in [(1, 1, 5), (1, 2, 5), (2, 1, 6), (2, 2, 6), (2, 3, 6), (3, 2, 7)] {
        for (beside, depth, sessions) in [(false, 0, true), (false, 1, false), (true, 0, true)] {
            let full = beside.then(|| group("full", 2, true, Layout::Dense, None));
            let sliding = group("window", page_size, !beside, Layout::Dense, Some(window));
            let groups = full.into_iter().chain([sliding]).collect();
            let mut config = LedgerConfig::new(groups, vec![shape(1, 1, 2)], 1, len);
            (config.overlap_depth, config.sessions, config.max_chunk) = (depth, sessions, Some(2));
            let alphabet = Alphabet { turns: sessions, ..Alphabet::plain(&[1, 2], depth as usize + 2) };
            let name = format!("window P={page_size} w={window} D={depth} beside={beside} sessions={sessions}");
            cases.push(case(name, config, 0, alphabet));
        }
    }
    for (page_size, window) in [(1, 2), (2, 2), (2, 3)] {
        let sliding = group("window", page_size, true, Layout::Dense, Some(window));
        let mut config = LedgerConfig::new(vec![sliding], vec![], 2, 4);
        (config.sessions, config.max_chunk) = (true, Some(2));
        let alphabet = Alphabet { turns: true, forks: true, max_prefixes: 1, ..Alphabet::plain(&[1, 2], 2) };
        cases.push(case(format!("window sharing P={page_size} w={window}"), config, 1, alphabet));
    }
    cases
}

/// Failed forwards, rounds without draft KV, pending deltas as state, the upstream policy.
fn others() -> Vec<Case> {
    let one = |page_size| vec![group("kv", page_size, true, Layout::Holey, None)];
    let chain = vec![shape(1, 1, 2)];
    let mut failures = LedgerConfig::new(one(2), chain.clone(), 2, 4);
    failures.overlap_depth = 1;
    let mut undrafted = LedgerConfig::new(one(2), chain.clone(), 1, 5);
    undrafted.overlap_depth = 1;
    let mut no_draft_kv = undrafted.clone();
    no_draft_kv.draft_kv = false;
    let deltas = LedgerConfig::new(one(2), chain.clone(), 1, 5);
    let mut upstream = LedgerConfig::new(one(2), vec![shape(2, 2, 3), shape(1, 1, 2)], 1, 5);
    (upstream.overlap_depth, upstream.policy) = (1, Policy::DoubleBuffer);
    let plain = Alphabet::plain(&[1, 2], 3);
    vec![
        case("failures P=2 D=1".into(), failures, 0, Alphabet { failures: true, ..plain.clone() }),
        case("undrafted P=2 D=1".into(), undrafted, 0, Alphabet { undrafted: true, ..plain.clone() }),
        case("no draft KV P=2 D=1".into(), no_draft_kv, 0, Alphabet { undrafted: true, ..plain.clone() }),
        case("deltas P=2".into(), deltas, 0, Alphabet { deltas: true, ..plain.clone() }),
        case("upstream P=2 D=1".into(), upstream, 0, plain),
    ]
}

/// Every case of the proof.
#[must_use]
pub fn all() -> Vec<Case> {
    let mut cases = [others(), windows(), sharing(), pools()].concat();
    for page_size in 1..=3 {
        for depth in 0..=2 {
            for shapes in [vec![shape(1, 1, 2)], vec![shape(2, 2, 3), shape(1, 1, 2)]] {
                // Where P or K is 1 the holey layout is the dense one.
                let is_tree = page_size > 1 && shapes.iter().any(|shape| shape.topk > 1);
                let layouts = if is_tree { &[Layout::Dense, Layout::Holey][..] } else { &[Layout::Dense] };
                for &layout in layouts {
                    for is_split in [false, true] {
                        cases.push(rounds(page_size, &shapes, depth, layout, is_split, 4 + page_size));
                    }
                }
            }
        }
    }
    cases
}
