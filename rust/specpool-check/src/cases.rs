//! The enumerations of the proof: small page sizes, shapes, depths and pools, family by family.
//!
//! A case without a limit is run to its last state. If a family is too large as a whole, its parts are run to their
//! last state, and the whole is run up to its limit, nearest states first.

use specpool_core::{Group, Layout, LedgerConfig, Policy, Shape, StateGroup};

use crate::events::Alphabet;
pub use crate::explore::Case;
use crate::pools::least_pages;

/// States of a case that is not run to its end.
const CUT: u64 = 300_000;
/// States of a case with two rows and states that is not run to its end: a family has many of these.
const FEW: u64 = 30_000;

/// A group. Its pool is set later.
fn group(name: &str, page_size: i64, hosts_drafts: bool, layout: Layout, window: Option<i64>) -> Group {
    Group { name: name.into(), page_size, num_pages: 1 << 20, hosts_drafts, layout, window, sink: 0 }
}

/// Sets every pool to the least that the ledger accepts plus `slack` pages.
fn with_pools(mut config: LedgerConfig, slack: i64) -> LedgerConfig {
    for at in 0..config.groups.len() {
        config.groups[at].num_pages = least_pages(&config, at) + slack;
    }
    config
}

fn shape(num_steps: u32, topk: u32, num_draft_tokens: u32) -> Shape {
    Shape { num_steps, topk, num_draft_tokens }
}

fn case(name: String, config: LedgerConfig, slack: i64, alphabet: Alphabet, limit: Option<u64>) -> Case {
    Case { name, config: with_pools(config, slack), alphabet, limit, is_quick: false, is_minimal: false }
}

/// One row and rounds of mixed shapes: every reserve and row width is sufficient and minimal.
fn rounds() -> Vec<Case> {
    let mut cases = Vec::new();
    for (page_size, depth) in (1..=3).flat_map(|page_size| (0..=2).map(move |depth| (page_size, depth))) {
        for shapes in [&[shape(1, 1, 2)][..], &[shape(2, 2, 3), shape(1, 1, 2)], &[shape(0, 1, 3), shape(2, 2, 2)]] {
            // If P or K is 1, the holey layout equals the dense one.
            let is_tree = page_size > 1 && shapes.iter().any(|shape| shape.topk > 1);
            let layouts = if is_tree { &[Layout::Dense, Layout::Holey][..] } else { &[Layout::Dense] };
            for (&layout, is_split) in layouts.iter().flat_map(|layout| [(layout, false), (layout, true)]) {
                let target = is_split.then(|| group("target", page_size, false, Layout::Dense, None));
                let groups = target.into_iter().chain([group("draft", page_size, true, layout, None)]).collect();
                let len = if depth == 2 { 3 } else { 4 + page_size };
                let mut config = LedgerConfig::new(groups, shapes.to_vec(), 1, len);
                config.overlap_depth = depth;
                let names: Vec<String> =
                    shapes.iter().map(|s| format!("{}/{}/{}", s.num_steps, s.topk, s.num_draft_tokens)).collect();
                let placement = if is_split { "split" } else { "shared" };
                let name = format!("rounds P={page_size} {} D={depth} {layout:?} {placement} L={len}", names.join("+"));
                let alphabet =
                    Alphabet { trims: false, cancels: false, ..Alphabet::plain(&[1, 2], depth as usize + 2) };
                let is_quick = depth == 0;
                cases.push(Case { is_minimal: true, is_quick, ..case(name, config, 0, alphabet, None) });
            }
        }
    }
    cases
}

/// Two or three rows that compete for hardly more pages than one row needs.
fn pools() -> Vec<Case> {
    let mut cases = Vec::new();
    for (page_size, slack, depth, num_rows) in [(1, 0, 0, 2), (2, 0, 0, 2), (2, 0, 0, 3), (1, 1, 1, 2), (2, 0, 1, 2)] {
        for page_fencing in [true, false] {
            let kv = group("kv", page_size, true, Layout::Dense, None);
            let shapes = if num_rows == 3 { vec![] } else { vec![shape(1, 1, 2)] };
            let mut config = LedgerConfig::new(vec![kv], shapes, num_rows, 2);
            (config.overlap_depth, config.page_fencing) = (depth, page_fencing);
            let alphabet = Alphabet { batches: num_rows == 2, ..Alphabet::plain(&[1, 2], 2) };
            let name = format!("pool P={page_size} +{slack} D={depth} rows={num_rows} fencing={page_fencing}");
            cases.push(case(name, config, slack, alphabet, (depth > 0).then_some(CUT)));
        }
    }
    cases
}

/// Prefixes, forks and the copies of their tails.
fn sharing() -> Vec<Case> {
    let mut cases = Vec::new();
    let verbs = [
        ("prefixes", 1, false, false),
        ("forks", 0, true, false),
        ("prefixes+forks", 1, true, false),
        ("prefixes+failures", 1, false, true),
        ("forks+failures", 0, true, true),
    ];
    for (sizes, len) in [(&[2][..], 2), (&[2], 3), (&[3], 3), (&[2, 3], 3)] {
        for ((verb, max_prefixes, forks, failures), trims) in verbs.into_iter().flat_map(|v| [(v, false), (v, true)]) {
            for page_fencing in [true, false] {
                let name = |at: usize| if at == 0 { "draft" } else { "target" };
                let groups = sizes.iter().enumerate();
                let groups = groups.map(|(at, &size)| group(name(at), size, at == 0, Layout::Dense, None)).collect();
                let mut config = LedgerConfig::new(groups, vec![], 2, len);
                config.page_fencing = page_fencing;
                let plain = Alphabet { cancels: false, trims, ..Alphabet::plain(&[1, 2], 2) };
                let alphabet = Alphabet { max_prefixes, forks, failures, ..plain };
                let limit = (trims && (len > 2 || failures || (forks && max_prefixes > 0))).then_some(CUT / 2);
                let cuts = if trims { "+trims" } else { "" };
                let name = format!("sharing P={sizes:?} L={len} {verb}{cuts} fencing={page_fencing}");
                let is_quick = len == 2 && !trims;
                cases.push(Case { is_quick, ..case(name, config, 1, alphabet, limit) });
            }
        }
    }
    cases
}

/// Sliding windows: alone, beside a full group, with sessions, and shared.
fn windows() -> Vec<Case> {
    let mut cases = Vec::new();
    for (page_size, window, len) in [(1, 1, 3), (1, 2, 4), (2, 1, 4), (2, 2, 4), (2, 3, 5), (3, 2, 5)] {
        for (beside, depth, sessions) in [(false, 0, true), (false, 1, false), (true, 0, true)] {
            let full = beside.then(|| group("full", 2, true, Layout::Dense, None));
            let sliding = group("window", page_size, !beside, Layout::Dense, Some(window));
            let groups = full.into_iter().chain([sliding]).collect();
            let mut config = LedgerConfig::new(groups, vec![shape(1, 1, 2)], 1, len);
            (config.overlap_depth, config.sessions, config.max_chunk) = (depth, sessions, Some(2));
            let alphabet = Alphabet { turns: sessions, ..Alphabet::plain(&[1, 2], 2) };
            let name = format!("window P={page_size} w={window} D={depth} beside={beside} sessions={sessions}");
            let is_quick = page_size == 2 && window == 1 && depth == 1;
            cases.push(Case { is_quick, ..case(name, config, 0, alphabet, None) });
        }
    }
    for (page_size, window, failures) in [(1, 2, false), (2, 2, false), (2, 3, false), (2, 1, true)] {
        let sliding = group("window", page_size, true, Layout::Dense, Some(window));
        let mut config = LedgerConfig::new(vec![sliding], vec![], 2, 3);
        (config.sessions, config.max_chunk) = (true, Some(2));
        let alphabet = Alphabet { turns: true, forks: true, max_prefixes: 1, failures, ..Alphabet::plain(&[1, 2], 2) };
        let name = format!("window sharing P={page_size} w={window} failures={failures}");
        cases.push(case(name, config, 1, alphabet, Some(CUT)));
    }
    cases
}

/// Windows beside a sink: alone with sessions, with rounds in flight, and shared.
fn sinks() -> Vec<Case> {
    let mut cases = Vec::new();
    for (page_size, window, sink, len) in [(1, 1, 1, 3), (1, 2, 1, 5), (1, 1, 2, 5), (2, 1, 1, 5), (2, 2, 2, 6)] {
        for (depth, sessions) in [(0, true), (1, false)] {
            let sliding = Group { sink, ..group("window", page_size, true, Layout::Dense, Some(window)) };
            let mut config = LedgerConfig::new(vec![sliding], vec![shape(1, 1, 2)], 1, len);
            (config.overlap_depth, config.sessions, config.max_chunk) = (depth, sessions, Some(2));
            let alphabet = Alphabet { turns: sessions, ..Alphabet::plain(&[1, 2], 2) };
            let name = format!("sink P={page_size} w={window} sink={sink} D={depth} sessions={sessions}");
            let is_quick = page_size == 1 && window == 1 && sink == 1;
            cases.push(Case { is_quick, ..case(name, config, 0, alphabet, None) });
        }
    }
    for (page_size, failures) in [(1, false), (2, false), (1, true)] {
        let sliding = Group { sink: 1, ..group("window", page_size, true, Layout::Dense, Some(1)) };
        let mut config = LedgerConfig::new(vec![sliding], vec![], 2, 4);
        (config.sessions, config.max_chunk) = (true, Some(2));
        let alphabet = Alphabet { turns: true, forks: true, max_prefixes: 1, failures, ..Alphabet::plain(&[1, 2], 2) };
        let name = format!("sink sharing P={page_size} w=1 sink=1 failures={failures}");
        cases.push(case(name, config, 1, alphabet, Some(CUT)));
    }
    for page_size in [1, 2] {
        let sliding = Group { sink: 1, ..group("window", page_size, true, Layout::Dense, Some(1)) };
        let mut config = LedgerConfig::new(vec![sliding], vec![], 1, 5);
        config.max_chunk = Some(2);
        let alphabet = Alphabet { cancels: false, max_exports: 1, ..Alphabet::plain(&[1, 2], 2) };
        let name = format!("sink moving P={page_size} w=1 sink=1");
        cases.push(case(name, config, 1, alphabet, Some(CUT)));
    }
    cases
}

/// A prefix cache outside the ledger: pages that are lent, rows on them, and rows that are bound to them.
fn lending() -> Vec<Case> {
    let mut cases = Vec::new();
    for (sizes, len, window) in [(&[1][..], 2, None), (&[2], 3, None), (&[1, 2], 2, None), (&[1], 3, Some(2))] {
        for (trims, undrafted, failures, page_fencing) in [
            (false, false, false, true),
            (true, false, false, true),
            (false, true, false, true),
            (false, false, true, true),
            (true, false, false, false),
        ] {
            let groups = sizes.iter().enumerate();
            let groups = groups.map(|(at, &size)| group(["draft", "target"][at], size, at == 0, Layout::Dense, window));
            let mut config = LedgerConfig::new(groups.collect(), vec![], 2, len);
            config.page_fencing = page_fencing;
            config.max_chunk = window.map(|_| 2);
            let plain = Alphabet { cancels: false, trims, undrafted, failures, ..Alphabet::plain(&[1, 2], 2) };
            let name = format!(
                "lending P={sizes:?} L={len} w={window:?} trims={trims} undrafted={undrafted} failures={failures} \
                 fencing={page_fencing}"
            );
            let limit = (len > 2 || sizes.len() > 1 || trims || undrafted).then_some(CUT / 2);
            // With failures there is all that there is without.
            let is_quick = sizes == [1] && window.is_none() && failures;
            cases.push(Case { is_quick, ..case(name, config, 1, Alphabet { max_lent: 2, ..plain }, limit) });
        }
    }
    // The window cases above are cut. This bound of theirs ends: one row, and one page lent.
    for page_fencing in [true, false] {
        let mut config = LedgerConfig::new(vec![group("draft", 1, true, Layout::Dense, Some(2))], vec![], 1, 3);
        (config.page_fencing, config.max_chunk) = (page_fencing, Some(2));
        let alphabet = Alphabet { cancels: false, trims: true, max_lent: 1, ..Alphabet::plain(&[1, 2], 2) };
        cases.push(case(format!("lending alone w=2 fencing={page_fencing}"), config, 1, alphabet, None));
    }
    // One row with a sink, and all that it holds lent.
    for (page_size, sink, len) in [(1, 1, 4), (2, 1, 6)] {
        let sliding = Group { sink, ..group("draft", page_size, true, Layout::Dense, Some(1)) };
        let mut config = LedgerConfig::new(vec![sliding], vec![], 1, len);
        config.max_chunk = Some(2);
        let alphabet = Alphabet { cancels: false, trims: true, max_lent: 2, ..Alphabet::plain(&[1, 2], 2) };
        cases.push(case(format!("sink lending P={page_size} w=1 sink={sink}"), config, 1, alphabet, Some(CUT)));
    }
    cases
}

/// Rows that leave for another ledger, and rows that come from one.
fn moving() -> Vec<Case> {
    let mut cases = Vec::new();
    for (sizes, len, window) in [(&[1][..], 2, None), (&[2], 3, None), (&[1, 2], 2, None), (&[2], 4, Some(2))] {
        for (trims, failures, page_fencing) in
            [(false, false, true), (true, false, true), (false, true, true), (false, false, false)]
        {
            let groups = sizes.iter().enumerate();
            let groups = groups.map(|(at, &size)| group(["draft", "target"][at], size, at == 0, Layout::Dense, window));
            let mut config = LedgerConfig::new(groups.collect(), vec![], 2, len);
            config.page_fencing = page_fencing;
            config.max_chunk = window.map(|_| 2);
            let plain = Alphabet { cancels: false, trims, failures, ..Alphabet::plain(&[1, 2], 2) };
            let name = format!(
                "moving P={sizes:?} L={len} w={window:?} trims={trims} failures={failures} fencing={page_fencing}"
            );
            let limit = (len > 2 || sizes.len() > 1 || trims).then_some(CUT / 2);
            let is_quick = sizes == [1] && !trims && !failures && !page_fencing;
            cases.push(Case { is_quick, ..case(name, config, 1, Alphabet { max_exports: 1, ..plain }, limit) });
        }
    }
    cases
}

/// The settings of a state group: slots beyond the least, flush, and eager.
type Slots = (i64, i64, bool);

/// A state slot for each row, or fewer.
fn with_slots(mut config: LedgerConfig, (more, flush, eager): Slots) -> LedgerConfig {
    let num_slots = 1 + i64::from(config.sessions) + more;
    config.states = vec![StateGroup { name: "states".into(), num_slots, flush, eager }];
    config
}

/// Every (slots beyond the least, flush, eager).
fn slots() -> impl Iterator<Item = Slots> {
    let flushes = [0, 1].into_iter().flat_map(|more| [1, 2].map(|flush| (more, flush)));
    flushes.flat_map(|(more, flush)| [false, true].map(|eager| (more, flush, eager)))
}

/// Recurrent states beside pages of one token: one row and rounds, so that every ring is sufficient and minimal; one
/// row and each verb that moves a state; and two rows that compete for slots, but not for pages.
fn states() -> Vec<Case> {
    let mut cases = Vec::new();
    for (depth, drafts) in [(0, true), (0, false), (1, true), (1, false)] {
        for (more, flush, eager) in slots() {
            let config = |num_rows: i64, sessions: bool| {
                let (kv, shapes) = (group("kv", 1, true, Layout::Dense, None), drafts.then(|| shape(1, 1, 2)));
                let len = if depth > 0 || num_rows > 1 { 3 } else { 4 };
                let mut config = LedgerConfig::new(vec![kv], shapes.into_iter().collect(), num_rows, len);
                (config.overlap_depth, config.sessions) = (depth, sessions);
                with_slots(config, (more, flush, eager))
            };
            let is_small = depth == 0 && !drafts && more == 0 && flush == 1 && !eager;
            let new = |verbs: &str, config: LedgerConfig, pages: i64, alphabet: Alphabet, limit: Option<u64>| {
                let shapes = if drafts { "1/1/2" } else { "0/1/1" };
                let name = format!("states {verbs} {shapes} D={depth} +{more} flush={flush} eager={eager}");
                Case { is_quick: is_small, ..case(name, config, pages, alphabet, limit) }
            };
            let plain = Alphabet::plain(&[1, 2], 2);
            let rounds = Alphabet { trims: false, cancels: false, ..Alphabet::plain(&[1, 2], depth as usize + 2) };
            let mut long = config(1, false);
            // The ring of some ledgers is full only in the fourth round, or in the fifth.
            long.max_context_len = 4 + i64::from(eager && depth == 1 && flush == 2);
            let is_quick = more == 0 && (depth == 0 || !drafts);
            cases.push(Case { is_minimal: true, is_quick, ..new("rounds", long, 0, rounds, None) });
            cases.push(new("turns", config(1, true), 0, Alphabet { turns: true, ..plain.clone() }, None));
            cases.push(new("failures", config(1, false), 0, Alphabet { failures: true, ..plain.clone() }, None));
            let limit = (depth > 0 && drafts).then_some(FEW);
            let rows = Alphabet { batches: true, trims: false, ..plain.clone() };
            cases.push(new("rows", config(2, false), 4, rows, limit));
            let forks = Alphabet { forks: true, trims: false, ..plain.clone() };
            cases.push(new("forks", config(2, false), 4, forks.clone(), limit));
            let moves = Alphabet { max_exports: 1, trims: false, cancels: false, ..plain.clone() };
            cases.push(new("moves alone", config(1, false), 0, moves.clone(), None));
            cases.push(Case { is_quick: false, ..new("moves", config(2, false), 4, moves, Some(FEW)) });
            let all = Alphabet { trims: true, turns: true, failures: true, batches: true, ..forks };
            let verbs = new("all verbs", config(2, true), 4, all, Some(FEW));
            cases.push(Case { is_quick: false, ..verbs });
        }
    }
    cases
}

/// The verbs beside prefills, rounds, hits and `index` that a case of [`states_kept`] has.
const KEPT_VERBS: [&str; 7] = ["plain", "trims", "cancels", "failures", "turns", "forks", "moves"];

/// States that outlive the next fold of their rows: soft marks, and those of a prefix index.
///
/// One row serves requests that begin with one of two texts, on pages for hardly more than itself or for all that can be
/// indexed. Two rows serve one short text, so that a state can be waiting, shared, and known already.
fn states_kept() -> Vec<Case> {
    let mut cases = Vec::new();
    for (num_rows, drafts, depth, (more, flush, eager), pages, has_cuts) in [
        (1, false, 0, (0, 1, false), 0, true),
        (1, false, 0, (1, 1, false), 0, true),
        (1, false, 0, (0, 2, true), 0, true),
        (1, false, 0, (1, 1, false), 3, false),
        (1, true, 0, (1, 2, false), 0, false),
        (1, false, 1, (1, 1, false), 0, false),
        (2, false, 0, (0, 1, false), 3, false),
        (2, false, 0, (1, 1, false), 3, false),
    ] {
        let is_used = |verbs: &&str| match *verbs {
            // With more pages, drafts, overlap or another row, cuts lead to too many states.
            "trims" | "turns" => has_cuts,
            "forks" => num_rows > 1,
            "moves" => num_rows == 1 && pages == 0,
            _ => true,
        };
        for verbs in KEPT_VERBS.into_iter().filter(is_used) {
            let (kv, shapes) = (group("kv", 1, true, Layout::Dense, None), drafts.then(|| shape(1, 1, 2)));
            let len = if num_rows > 1 { 2 } else { 3 };
            let mut config = LedgerConfig::new(vec![kv], shapes.into_iter().collect(), num_rows, len);
            (config.overlap_depth, config.sessions) = (depth, verbs == "turns");
            let config = with_slots(config, (more, flush, eager));
            let texts = if num_rows > 1 { vec![vec![0, 0]] } else { vec![vec![0, 0, 0], vec![0, 1, 0]] };
            let alphabet = Alphabet {
                keeps: true,
                texts,
                forgets: num_rows == 1,
                trims: verbs == "trims",
                cancels: verbs == "cancels",
                failures: verbs == "failures",
                turns: verbs == "turns",
                forks: verbs == "forks",
                max_exports: usize::from(verbs == "moves"),
                ..Alphabet::plain(&[1, 2], 2)
            };
            let shapes = if drafts { "1/1/2" } else { "0/1/1" };
            let name = format!(
                "states kept {verbs} {shapes} D={depth} rows={num_rows} +{more} flush={flush} eager={eager} pages=+{pages}"
            );
            let is_quick =
                num_rows == 1 && more + pages == 0 && !eager && ["plain", "cancels", "failures"].contains(&verbs);
            // Rows that come have any length, with and without draft KV.
            let limit = (verbs == "moves").then_some(CUT);
            cases.push(Case { is_quick, ..case(name, config, pages, alphabet, limit) });
        }
    }
    cases
}

/// Recurrent states beside pages of several tokens, windows and sinks, and on one stream.
fn states_beside() -> Vec<Case> {
    let mut cases = Vec::new();
    for (page_size, window, sink, flush) in [
        (1, None, 0, 1),
        (2, None, 0, 1),
        (2, None, 0, 2),
        (1, Some(1), 0, 2),
        (1, Some(2), 0, 3),
        (2, Some(1), 0, 2),
        (1, Some(1), 1, 2),
    ] {
        for (num_rows, failures, page_fencing) in
            [(1, false, true), (2, false, true), (2, true, true), (2, false, false)]
        {
            let kv = Group { sink, ..group("kv", page_size, true, Layout::Dense, window) };
            let mut config = LedgerConfig::new(vec![kv], vec![], num_rows, 4);
            (config.sessions, config.page_fencing, config.max_chunk) = (true, page_fencing, window.map(|_| 2));
            let config = with_slots(config, (1, flush, false));
            let alphabet = Alphabet { turns: true, forks: num_rows > 1, failures, ..Alphabet::plain(&[1, 2], 2) };
            let name = format!(
                "states beside P={page_size} w={window:?} sink={sink} flush={flush} rows={num_rows} \
                 failures={failures} fencing={page_fencing}"
            );
            let limit = (num_rows > 1).then_some(FEW);
            cases.push(case(name, config, 2, alphabet, limit));
        }
    }
    cases
}

/// Failed forwards, rounds without draft KV, pending deltas as part of the state, and the upstream policy.
fn others() -> Vec<Case> {
    let kv_group = |page_size| vec![group("kv", page_size, true, Layout::Holey, None)];
    let chain = vec![shape(1, 1, 2)];
    let mut alone = LedgerConfig::new(kv_group(2), chain.clone(), 1, 3);
    alone.overlap_depth = 1;
    let mut failures = LedgerConfig::new(kv_group(2), chain.clone(), 2, 3);
    failures.overlap_depth = 1;
    let behind = LedgerConfig::new(kv_group(2), vec![], 1, 4);
    let no_draft_kv = LedgerConfig { draft_kv: false, ..alone.clone() };
    let deltas = LedgerConfig::new(kv_group(2), chain, 1, 3);
    let mut upstream = LedgerConfig::new(kv_group(2), vec![shape(2, 2, 3), shape(1, 1, 2)], 1, 3);
    (upstream.overlap_depth, upstream.policy) = (1, Policy::DoubleBuffer);
    let plain = Alphabet::plain(&[1, 2], 2);
    let failing = Alphabet { failures: true, ..plain.clone() };
    let undrafted = Alphabet { undrafted: true, ..plain.clone() };
    let pinned = Alphabet { max_prefixes: 1, trims: false, cancels: false, ..failing.clone() };
    let lasting = Alphabet { deltas: true, ..plain.clone() };
    vec![
        case("undrafted P=2 D=1".into(), alone.clone(), 0, undrafted.clone(), None),
        case("no draft KV P=2 D=1".into(), no_draft_kv, 0, undrafted, None),
        Case { is_quick: true, ..case("deltas P=2".into(), deltas, 0, lasting, None) },
        Case { is_quick: true, ..case("failures P=2 D=1 rows=1".into(), alone, 0, failing.clone(), None) },
        Case { is_quick: true, ..case("failures behind a prefix P=2".into(), behind, 1, pinned, None) },
        case("failures P=2 D=1 rows=2".into(), failures, 0, failing, Some(CUT)),
        case("upstream P=2 D=1".into(), upstream, 0, plain, None),
    ]
}

/// Every case of the proof.
#[must_use]
pub fn all() -> Vec<Case> {
    [
        others(),
        windows(),
        sinks(),
        states(),
        states_kept(),
        states_beside(),
        sharing(),
        lending(),
        moving(),
        pools(),
        rounds(),
    ]
    .concat()
}
