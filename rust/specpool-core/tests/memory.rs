//! Law: if memory is short, a call is refused and the state is unchanged. The call works again once there is memory.
//!
//! The allocator of this test can refuse the n-th block above a size, on this thread only. Each call is made with n =
//! 0, 1, 2, .. until it succeeds, so that each of its allocations is refused once. An allocation whose refusal the
//! code cannot handle ends the test with an abort.

use std::alloc::{GlobalAlloc, Layout as Block, System};
use std::cell::Cell;
use std::collections::BTreeMap;

use specpool_core::forward::attention::{Lane, Layer, Scratch, attend};
use specpool_core::forward::draft_cells::{Drafts, advance_ancestors};
use specpool_core::forward::mask::{MaskLanes, attention_bias, attention_mask};
use specpool_core::forward::moves::{SlotLayout, SlotMoves};
use specpool_core::forward::slots::{TableView, check_moves, compact_moves, page_csr, slot_ranges, slots_at};
use specpool_core::tree::build::{Candidates, Tree, build_tree};
use specpool_core::tree::sample::{SampleParams, sample_margins, sample_tokens};
use specpool_core::tree::verify::verify_tree;
use specpool_core::{
    BlockPool, BlockPoolConfig, Error, Group, Layout, Ledger, LedgerConfig, Page, Row, Shape, StateGroup,
};

/// Blocks up to this size are messages, nodes and the like: they are never refused.
const SMALL: usize = 512;

thread_local! {
    /// How many more blocks above `SMALL` are granted; `None` grants all.
    static GRANTED: Cell<Option<usize>> = const { Cell::new(None) };
}

fn is_refused(size: usize) -> bool {
    size > SMALL
        && match GRANTED.get() {
            Some(0) => {
                GRANTED.set(None); // Refuse one block only: reporting an abort needs more.
                true
            }
            Some(granted) => {
                GRANTED.set(Some(granted - 1));
                false
            }
            None => false,
        }
}

struct Refusing;

// SAFETY: calls the system's allocator, or returns no block at all.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, block: Block) -> *mut u8 {
        if is_refused(block.size()) { std::ptr::null_mut() } else { unsafe { System.alloc(block) } }
    }

    unsafe fn alloc_zeroed(&self, block: Block) -> *mut u8 {
        if is_refused(block.size()) { std::ptr::null_mut() } else { unsafe { System.alloc_zeroed(block) } }
    }

    unsafe fn realloc(&self, old: *mut u8, block: Block, size: usize) -> *mut u8 {
        if is_refused(size) { std::ptr::null_mut() } else { unsafe { System.realloc(old, block, size) } }
    }

    unsafe fn dealloc(&self, old: *mut u8, block: Block) {
        unsafe { System.dealloc(old, block) }
    }
}

#[global_allocator]
static ALLOCATOR: Refusing = Refusing;

/// Runs `call` with `granted` blocks.
fn with<T>(granted: usize, call: impl FnOnce() -> T) -> T {
    GRANTED.set(Some(granted));
    let result = call();
    GRANTED.set(None);
    result
}

/// Refuses each block of `call` in turn, then lets it succeed; returns how many blocks it took. Every refusal leaves
/// `state` as it was.
fn refused_in_turn<T, S: PartialEq + std::fmt::Debug, W>(
    name: &str,
    world: &mut W,
    state: impl Fn(&W) -> S,
    mut call: impl FnMut(&mut W) -> Result<T, Error>,
) -> (T, usize) {
    let before = state(world);
    for granted in 0..10_000 {
        match with(granted, || call(world)) {
            Ok(given) => return (given, granted),
            Err(Error::OutOfMemory { .. }) => assert!(state(world) == before, "{name}: block {granted} left a trace"),
            Err(other) => panic!("{name}: block {granted}: {other}"),
        }
    }
    panic!("{name} never ends");
}

/// The same for a call on arrays, which took one block or more.
fn pure<T>(name: &str, mut call: impl FnMut() -> Result<T, Error>) -> T {
    let (given, blocks) = refused_in_turn(name, &mut (), |()| (), |()| call());
    assert!(blocks > 0, "{name} takes no memory");
    given
}

const ROWS: i32 = 300;

fn groups() -> Vec<Group> {
    let group = |name: &str, page_size, hosts_drafts, layout, window| Group {
        name: name.into(),
        page_size,
        num_pages: 1 << 16,
        hosts_drafts,
        layout,
        window,
        sink: 0,
    };
    vec![
        group("full", 4, false, Layout::Dense, None),
        group("draft", 4, true, Layout::Holey, None),
        group("window", 2, false, Layout::Dense, Some(700)),
    ]
}

fn config() -> LedgerConfig {
    let shapes = vec![Shape::eagle(3, 2, 6).unwrap()];
    let config = LedgerConfig::new(groups(), shapes, ROWS.into(), 4_000);
    LedgerConfig { overlap_depth: 1, sessions: true, digest: true, ..config }
}

type Seen = (u64, Option<u64>, Vec<(u64, &'static str)>, Vec<u64>, Vec<usize>);

/// Everything of a ledger that can be observed, including counters and digest.
fn seen(ledger: &Ledger) -> Seen {
    let steps = ledger.steps().map(|(step, _, state)| (step, state.name())).collect();
    let pending = (0..ledger.num_groups()).map(|at| ledger.pending_cells(at).count());
    let pages = (0..ledger.num_groups()).map(|at| ledger.free_pages(at).unwrap());
    let counts = pending.chain(pages).chain([ledger.num_free_rows()]).collect();
    (ledger.state_hash(), ledger.digest(), steps, ledger.prefixes().collect(), counts)
}

/// A ledger, and how many refusals each of its verbs took.
struct World {
    ledger: Ledger,
    refusals: BTreeMap<&'static str, usize>,
}

impl World {
    fn new(ledger: Ledger) -> Self {
        Self { ledger, refusals: BTreeMap::new() }
    }

    /// Calls a verb that may be refused, and is refused at each of its blocks.
    fn taking<T>(&mut self, verb: &'static str, call: impl FnMut(&mut Ledger) -> Result<T, Error>) -> T {
        let (given, blocks) = refused_in_turn(verb, &mut self.ledger, seen, call);
        *self.refusals.entry(verb).or_default() += blocks;
        given
    }

    /// Calls a verb that gives back: it works without any memory.
    fn giving<T>(&mut self, call: impl FnOnce(&mut Ledger) -> Result<T, Error>) -> T {
        with(0, || call(&mut self.ledger)).unwrap()
    }

    fn admit(&mut self) -> Row {
        if !self.ledger.num_free_rows().is_multiple_of(64) {
            return self.ledger.admit(None).unwrap();
        }
        let tag = "t".repeat(SMALL + 1);
        self.taking("admit", |ledger| ledger.admit(Some(&tag)))
    }

    fn extend(&mut self, rows: &[i32], lens: &[i32]) -> u64 {
        self.taking("prepare_extend", |ledger| ledger.prepare_extend(rows, lens, true)).step
    }

    fn run(&mut self, step: u64) {
        self.giving(|ledger| ledger.launch(step));
        self.giving(|ledger| ledger.complete(step));
    }
}

fn live(world: &mut World, checks: usize) {
    let rows: Vec<i32> = (0..ROWS - 20).map(|_| world.admit().0).collect();
    let lens: Vec<i32> = rows.iter().map(|row| 30 + row % 7).collect();
    let step = world.extend(&rows, &lens);
    world.taking("take_delta", |ledger| ledger.take_delta(step));
    world.giving(|ledger| ledger.ack_delta(step));
    world.run(step);
    // One long row with a pinned prefix, a row on that prefix, and a fork.
    let long = Row(rows[0]);
    let step = world.extend(&[long.0], &[3_001]);
    world.run(step);
    let prefix = world.taking("pin_prefix", |ledger| ledger.pin_prefix(long, 3_000));
    let on = world.taking("admit_on", |ledger| ledger.admit_on(prefix, Some(2_999), None));
    let step = world.extend(&[on.0], &[3_002]);
    let twin = world.taking("fork", |ledger| ledger.fork(long, None));
    world.giving(|ledger| ledger.cancel(step)); // the copy that rode on it waits again, before the fork's
    for _ in 0..checks {
        assert_eq!(world.taking("audit", |ledger| ledger.audit()), []);
    }
    let step = world.extend(&[on.0, twin.0], &[3_002, 3_003]);
    world.run(step);
    // Rounds of all rows: two in flight, some rows cut in between, one abandon.
    let shapes: Vec<i32> = rows.iter().map(|row| row % 2).collect();
    let decode = |ledger: &mut Ledger| ledger.prepare_decode(&rows, &shapes, true);
    let first = world.taking("prepare_decode", decode).step;
    world.giving(|ledger| ledger.launch(first));
    let second = world.taking("prepare_decode", decode).step;
    world.giving(|ledger| ledger.launch(second));
    world.giving(|ledger| ledger.finish(Row(rows[5])));
    let accept: Vec<i32> = shapes.iter().map(|shape| 1 + shape).collect();
    world.taking("resolve", |ledger| ledger.resolve(first, &accept));
    world.giving(|ledger| ledger.abandon(second));
    world.giving(|ledger| ledger.complete(second));
    assert_eq!(world.ledger.num_free_rows(), ROWS as usize - 2);
    // A session whose window has moved past its checkpoint.
    world.giving(|ledger| ledger.end_turn(on, 3_002));
    world.giving(|ledger| ledger.reclaimable_pages(0));
    let step = world.extend(&[on.0], &[3_700]);
    world.run(step);
    let step = world.extend(&[on.0], &[3_900]);
    world.run(step);
    assert_eq!(world.giving(|ledger| ledger.trim(on, 3_002)), 3_002);
    world.giving(|ledger| ledger.retract(twin));
    // A cache outside: a row on what it has, and a row that has computed the same.
    let (pages, [hit, same]) = lending(world);
    world.giving(|ledger| ledger.abort(hit));
    world.giving(|ledger| ledger.abort(same));
    for (group, pages) in pages.iter().enumerate() {
        world.taking("release_lent", |ledger| ledger.release_lent(group, pages));
    }
    // A row that comes from another ledger and leaves again.
    let moved = world.taking("import_row", |ledger| ledger.import_row(2_000, 1_000, Some("moved")));
    let export = world.taking("export", |ledger| ledger.export(moved));
    world.giving(|ledger| ledger.release_prefix(export));
    let snapshot = world.taking("snapshot", Ledger::snapshot);
    world.giving(|ledger| ledger.release_prefix(prefix));
    world.giving(|ledger| ledger.abort(on));
    world.taking("restore", |ledger| ledger.restore(&snapshot));
    world.giving(|ledger| ledger.abort(on));
    world.giving(|ledger| ledger.release_prefix(prefix));
    world.ledger.check().unwrap();
    assert_eq!(world.ledger.num_free_rows(), ROWS as usize);
    world.giving(Ledger::close);
}

/// Lends the first 2,000 tokens of a row that goes. Returns the pages, and two rows that hold them now.
fn lending(world: &mut World) -> (Vec<Vec<i32>>, [Row; 2]) {
    let long = |world: &mut World| {
        let row = world.taking("admit", |ledger| ledger.admit(None));
        for len in [2_000, 2_003] {
            let step = world.extend(&[row.0], &[len]);
            world.run(step);
        }
        row
    };
    let row = long(world);
    world.giving(|ledger| ledger.lend(row, 0, 2_000));
    world.giving(|ledger| ledger.finish(row));
    let pages: Vec<Vec<i32>> = (0..3).map(|group| world.ledger.lent_pages(group).unwrap()).collect();
    let same = long(world);
    let mut all: Vec<i32> = Vec::new();
    for (group, columns) in [500, 500, 1_000].into_iter().enumerate() {
        all.resize(all.len() + columns - pages[group].len(), 0);
        all.extend(&pages[group]);
    }
    let hit = world.taking("admit_lent", |ledger| ledger.admit_lent(&all, 2_000, None));
    world.taking("rebind", |ledger| ledger.rebind(same, 0, 2_000, &all));
    (pages, [hit, same])
}

#[test]
fn a_verb_without_memory_changes_nothing_and_what_gives_back_needs_none() {
    let mut world = World::new(Ledger::new(config()).unwrap());
    live(&mut world, 1);
    // The memory of the prepare is enough for the resolve, unless what it wrote has gone to a log. So is that of
    // `admit_lent` for the next calls with as many pages, and that of earlier rows for one that comes.
    let reuse = ["resolve", "rebind", "release_lent", "import_row"];
    let is_idle = |(verb, refusals): &(&&str, &usize)| **refusals == 0 && !reuse.contains(verb);
    let idle: Vec<_> = world.refusals.iter().filter(is_idle).collect();
    assert_eq!(idle, [], "verbs that took no memory show nothing");
}

/// The same while every call is recorded. The log is complete afterwards.
#[test]
fn a_recorded_ledger_without_memory_keeps_its_log() {
    let path = std::env::temp_dir().join(format!("specpool-memory-{}.log", std::process::id()));
    let mut world = World::new(Ledger::recorded(config(), &path, 1 << 30).unwrap());
    live(&mut world, 0);
    let mut replay = specpool_core::Replay::open(&path).unwrap();
    let mut again = replay.ledger().unwrap();
    while replay.advance(&mut again).unwrap().is_some() {}
    std::fs::remove_file(&path).unwrap();
    assert_eq!(again.digest(), world.ledger.digest());
}

/// Each row has a slot, keeps it at the end of its turn, and folds into another one.
#[test]
fn states_without_memory_change_nothing() {
    let states = vec![StateGroup { name: "ssm".into(), num_slots: 3 * i64::from(ROWS), flush: 1, eager: false }];
    let mut world = World::new(Ledger::new(LedgerConfig { states, ..config() }).unwrap());
    let rows: Vec<i32> = (0..ROWS - 20).map(|_| world.admit().0).collect();
    let lens = |more: i32| rows.iter().map(|row| 30 + row % 7 + more).collect::<Vec<i32>>();
    let step = world.extend(&rows, &lens(0));
    world.run(step);
    for &row in &rows {
        assert!(world.giving(|ledger| ledger.end_turn(Row(row), 99)) >= 30);
    }
    let step = world.extend(&rows, &lens(9));
    world.giving(|ledger| ledger.cancel(step));
    let step = world.extend(&rows, &lens(9));
    world.run(step);
    assert_eq!(world.ledger.free_state_slots(0), Ok(3 * ROWS as usize - 2 * rows.len()));
    world.taking("fork", |ledger| ledger.fork(Row(rows[0]), None));
    let snapshot = world.taking("snapshot", Ledger::snapshot);
    let shapes = vec![1; rows.len()];
    let decode = |ledger: &mut Ledger| ledger.prepare_decode(&rows, &shapes, true);
    let step = world.taking("prepare_decode", decode).step;
    world.giving(|ledger| ledger.launch(step));
    // The first row shares pages with its fork, so it can be cut at page edges alone.
    for &row in &rows[1..] {
        assert!(world.giving(|ledger| ledger.trim(Row(row), 36)) >= 29);
    }
    world.giving(|ledger| ledger.abandon(step));
    world.giving(|ledger| ledger.complete(step));
    world.taking("audit", |ledger| ledger.audit());
    world.taking("restore", |ledger| ledger.restore(&snapshot));
    for &row in &rows {
        world.giving(|ledger| ledger.finish(Row(row)));
    }
    world.ledger.check().unwrap();
    assert_eq!(world.ledger.free_state_slots(0), Ok(3 * ROWS as usize - 1)); // the fork's
}

/// The index takes a state of each row, and a row begins on one. With `keeps` each row leaves a soft mark on it.
fn index_states_without_memory(keeps: bool) {
    let states = vec![StateGroup { name: "ssm".into(), num_slots: 3 * i64::from(ROWS), flush: 1, eager: false }];
    let mut world = World::new(Ledger::new(LedgerConfig { states, ..config() }).unwrap());
    let rows: Vec<i32> = (0..ROWS - 20).map(|_| world.admit().0).collect();
    let lens = vec![30; rows.len()];
    let keep: Vec<i32> = (0..rows.len() as i32).filter(|_| keeps).collect();
    let extend = |ledger: &mut Ledger| ledger.prepare_extend_keeping(&rows, &lens, &keep, true);
    let step = world.taking("prepare_extend", extend).step;
    world.giving(|ledger| ledger.cancel(step));
    let step = extend(&mut world.ledger).unwrap().step;
    world.run(step);
    let text = |row: i32| (0..30).map(|at| 100 * row + at).collect::<Vec<i32>>();
    for &row in &rows {
        assert_eq!(world.taking("index", |ledger| ledger.index(Row(row), &text(row), b"")), 30);
    }
    for &row in &rows {
        world.giving(|ledger| ledger.finish(Row(row)));
    }
    assert_eq!(world.ledger.cached_state_slots(0), Ok(rows.len()));
    let tokens = text(rows[3]);
    let row = world.taking("admit_cached", |ledger| ledger.admit_cached(&tokens, b"", None, false, None));
    assert_eq!(world.ledger.state_len(0).unwrap()[row.at()], 29);
    world.giving(|ledger| ledger.forget(None));
    world.giving(|ledger| ledger.finish(row));
    world.ledger.check().unwrap();
    assert_eq!(world.ledger.free_state_slots(0), Ok(3 * ROWS as usize));
}

#[test]
fn kept_states_without_memory_change_nothing() {
    index_states_without_memory(true);
    index_states_without_memory(false);
}

/// Everything that grows with a text is taken before the first change, and giving up needs nothing.
#[test]
fn an_index_without_memory_changes_nothing() {
    let group =
        |name: &str, page_size| Group { name: name.into(), page_size, num_pages: 9_000, ..groups().swap_remove(0) };
    let mut config = LedgerConfig::new(vec![group("one", 1), group("three", 3)], vec![], 4, 3_000);
    (config.overlap_depth, config.sessions, config.digest) = (0, true, true);
    let mut ledger = Ledger::new(config).unwrap();
    let computed = |ledger: &mut Ledger, len: i32| {
        let row = ledger.admit(None).unwrap();
        let step = ledger.prepare_extend(&[row.0], &[len], true).unwrap().step;
        ledger.launch(step).unwrap();
        ledger.complete(step).unwrap();
        row
    };
    let mut num_blocks = 0;
    // A text, one that parts from it in its middle, the same under another salt, and many short ones.
    let text = |of: i32| (0..2_000).map(|at| if at < 1_000 { at } else { of }).collect::<Vec<i32>>();
    let texts = [(text(1), &b""[..]), (text(2), b""), (text(1), &[7; 256])];
    let short = (0..400).map(|of| (vec![9_000 + of, 1], &b""[..]));
    for (tokens, salt) in texts.iter().cloned().chain(short) {
        let row = computed(&mut ledger, tokens.len() as i32);
        let (known, blocks) = refused_in_turn("index", &mut ledger, seen, |ledger| ledger.index(row, &tokens, salt));
        assert_eq!(known, tokens.len() as i32);
        num_blocks += blocks;
        with(0, || ledger.finish(row)).unwrap();
    }
    assert!(num_blocks > 10, "{num_blocks} blocks");
    let tokens = text(2);
    let (found, _) =
        refused_in_turn("match_prefix", &mut ledger, seen, |ledger| ledger.match_prefix(&tokens, b"", None, false));
    assert_eq!(found.len, 1_999);
    let admit = |ledger: &mut Ledger| ledger.admit_cached(&tokens, b"", None, false, None);
    let (row, blocks) = refused_in_turn("admit_cached", &mut ledger, seen, admit);
    assert!(blocks > 0 && ledger.resolved_len()[row.at()] == 1_999);
    // The notes of a clone's calls have no memory yet.
    with(0, || ledger.finish(row)).unwrap();
    refused_in_turn("admit_cached", &mut ledger.clone(), seen, admit);
    let row = admit(&mut ledger).unwrap();
    with(0, || ledger.trim(row, 1_500)).unwrap();
    with(0, || ledger.finish(row)).unwrap();
    with(0, || ledger.forget(None)).unwrap();
    ledger.check().unwrap();
    assert_eq!(ledger.free_pages(0), Ok(9_000));
}

/// The same for a pool of blocks: what takes is refused at each of its blocks, what gives back needs none.
#[test]
fn a_block_pool_without_memory_changes_nothing() {
    let config = BlockPoolConfig { fencing: true, digest: true, ..BlockPoolConfig::new(20_000, 2) };
    let mut pool = BlockPool::new(config).unwrap();
    let hash = |pool: &BlockPool| (pool.state_hash(), pool.num_free());
    let mut num_refusals = BTreeMap::new();
    for (at, salt) in (0..6).zip([&b""[..], &[7; 256]].into_iter().cycle()) {
        let tokens: Vec<i32> = (0..4_000).map(|place| if place < 1_000 { place } else { at }).collect();
        let tag = "t".repeat(600);
        let take = |pool: &mut BlockPool| pool.take(2_000, &[], Some(&tag));
        let (blocks, refusals) = refused_in_turn("take", &mut pool, hash, take);
        *num_refusals.entry("take").or_insert(0) += refusals;
        let put = |pool: &mut BlockPool| pool.put(&tokens, &blocks, 0, salt);
        let (known, refusals) = refused_in_turn("put", &mut pool, hash, put);
        *num_refusals.entry("put").or_insert(0) += refusals;
        assert_eq!(known.len(), 2_000);
        let find = |pool: &mut BlockPool| pool.match_prefix(&tokens, salt, None);
        let (hit, refusals) = refused_in_turn("match", &mut pool, hash, find);
        *num_refusals.entry("match").or_insert(0) += refusals;
        assert_eq!(hit, known);
        with(0, || pool.drop(&blocks, Some(at as u64))).unwrap();
    }
    assert!(num_refusals.values().all(|&refusals| refusals > 0), "{num_refusals:?}");
    with(0, || pool.complete(9)).unwrap();
    with(0, || pool.forget(None)).unwrap();
    pool.check().unwrap();
    assert_eq!(pool.num_free(), 20_000);
}

#[test]
fn a_ledger_without_memory_is_not_built() {
    let (ledger, blocks) = refused_in_turn("new", &mut (), |()| (), |()| Ledger::new(config()));
    assert!(blocks > 10);
    pure("page_record", || ledger.ownership_map(0));
    assert_eq!(ledger.page_record(0, Page(1)).unwrap().holders, 0);
}

#[test]
fn a_table_without_memory_is_not_read() {
    const N: usize = 300;
    let cells: Vec<i32> = (0..2 * 400).map(|cell| cell % 400).collect();
    let table = TableView::new(&cells, 400, 4).unwrap();
    let (rows, ones) = (vec![1; N], vec![1; N]);
    let roots: Vec<i32> = (0..N as i32).map(|lane| 101 + lane % 3).collect();
    pure("slots_at", || slots_at(&table, &rows, &roots));
    pure("slot_ranges", || slot_ranges(&table, &rows, &roots, &ones));
    pure("page_csr", || page_csr(&table, &rows, &roots));
    let accept: Vec<i32> = (0..N as i32).flat_map(|lane| [lane * 4, lane * 4 + 2, -1]).collect();
    pure("compact_moves", || compact_moves(&table, &rows, &roots, &accept, 4));
    let slots: Vec<i64> = (0..N as i64).collect();
    pure("check_moves", || check_moves(&slots, &slots, N));
    let drafts = Drafts::new(3, 2, 4, Layout::Holey).unwrap();
    pure("write_positions", || drafts.write_positions(&roots));
    pure("write_slots", || drafts.write_slots(&table, &rows, &roots));
    pure("read_indices", || drafts.read_indices(&table, &rows, &roots, 1, None));
    pure("visibility", || drafts.visibility(&roots, 2, None));
    pure("branch_pages", || drafts.branch_pages(&table, &rows, &roots, 2));
    pure("prefix_tail_moves", || drafts.prefix_tail_moves(&table, &rows, &roots));
    let parents = vec![1; 2 * N];
    pure("branch_copy_moves", || drafts.branch_copy_moves(&table, &rows, &roots, 2, &parents));
    let mut ancestors = vec![0; 2 * N];
    pure("advance_ancestors", || advance_ancestors(&mut ancestors, &[1; 2], 2, 3));
}

#[test]
fn a_round_without_memory_is_not_run() {
    const N: usize = 300;
    let mut buffers = (vec![0.5; 40 * 40], vec![7; 40 * 40], vec![0; 40 * 41]);
    let mut candidates = Candidates::new(40, 1, 40, &mut buffers.0, &mut buffers.1, &mut buffers.2).unwrap();
    pure("select", || candidates.select(0, &[0.5; 1_600], &[7; 1_600], &[]));
    pure("organize", || candidates.organize(40));
    let chosen: Vec<i64> = (0..N as i64).collect();
    pure("build_tree", || build_tree(&[], &chosen, 1, N));
    let parents: Vec<i32> = (-1..N as i32 - 1).collect();
    let tree = pure("from_parents", || Tree::from_parents(&parents, N));
    let tokens = vec![5; N];
    pure("verify_tree", || verify_tree(&tokens, &tree.first_child, &tree.next_sibling, &tokens, N, N));
    let starts = vec![3; N];
    let lanes = MaskLanes {
        starts: &starts,
        q_lens: &starts,
        num_queries: 3,
        own_mask: None,
        q_positions: None,
        own_positions: None,
        own_width: 0,
        window: None,
        sink: 0,
    };
    pure("attention_mask", || attention_mask(&lanes, 9));
    pure("attention_bias", || attention_bias(&lanes, 9));
    let params = vec![SampleParams { temperature: 1.0, top_k: 9, top_p: 0.5, min_p: 0.1, u: 0.5 }; N];
    let logits: Vec<f32> = (0..N * 100).map(|at| f32::from((at % 31) as u8)).collect();
    pure("sample_tokens", || sample_tokens(&logits, 100, &params));
    pure("sample_margins", || sample_margins(&logits, 100, &params));
}

#[test]
fn attention_without_memory_is_not_begun() {
    const HEADS: usize = 16;
    let (keys, values, q) = (vec![1.0; 40 * HEADS * 20], vec![2.0; 40 * HEADS * 20], vec![0.5; 9 * HEADS * 20]);
    let layer = Layer {
        keys: &keys,
        values: &values,
        page_size: 4,
        kv_heads: HEADS,
        heads: HEADS,
        k_dim: 20,
        v_dim: 20,
        scaling: 0.1,
        softcap: None,
        sinks: None,
        window: None,
    };
    let lane = Lane { pages: &[3, 0, 7], kv_len: 11, q_len: 9, q: &q, bias: None, num_columns: 0 };
    layer.check().unwrap();
    layer.check_lane(0, &lane).unwrap();
    let mut scratch = Scratch::default();
    pure("attend", || attend(&layer, &lane, 0..HEADS, &mut scratch));
    assert!(scratch.out().iter().all(|number| (number - 2.0).abs() < 1e-6));
    // Memory that was reserved is not asked for again.
    let mut scratch = Scratch::default();
    pure("reserve", || scratch.reserve(&layer, 9, HEADS));
    with(0, || attend(&layer, &lane, 0..HEADS, &mut scratch)).unwrap();
}

#[test]
fn moves_without_memory_move_nothing() {
    let (src, dst): (Vec<i64>, Vec<i64>) = (0..900).map(|slot| (slot, (slot + 7) % 900)).unzip();
    let moves = pure("new", || SlotMoves::new(&src, &dst, 900));
    let layout = SlotLayout::new([1, 900, 100], vec![100]).unwrap();
    let mut bytes: Vec<u8> = (0..90_000).map(|at| (at / 100 % 251) as u8).collect();
    let apply = |bytes: &mut Vec<u8>| moves.apply(&mut [(&layout, bytes)]);
    let ((), blocks) = refused_in_turn("apply", &mut bytes, Clone::clone, apply);
    assert!(blocks > 0);
    assert_eq!(bytes[700], 0);
}
