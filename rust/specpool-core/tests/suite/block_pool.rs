//! Laws of `BlockPool`: random calls beside a plain pool, and by example. (`tests/core/test_block_pool.py` has the
//! oracle that predicts every id.)

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use specpool_core::{
    BlockPool, BlockPoolConfig, Error, Group, Layout, Ledger, LedgerConfig, LogEnd, PageState, Replay, Verb,
};

const SALTS: [&[u8]; 2] = [b"", b"a"];

/// What the pool promises, without saying which block is given.
#[derive(Default)]
struct Plain {
    refs: BTreeMap<i32, u32>,
    /// Salt and tokens from the start -> block.
    known: BTreeMap<(usize, Vec<i32>), i32>,
    /// Blocks that nobody holds, and the step that may still touch them.
    fenced: BTreeMap<i32, u64>,
    fences: BTreeMap<i32, u64>,
    completed: u64,
}

impl Plain {
    fn is_known(&self, block: i32) -> bool {
        self.known.values().any(|&other| other == block)
    }

    fn cached(&self) -> BTreeSet<i32> {
        let is_cached = |block: &i32| !self.refs.contains_key(block) && !self.fenced.contains_key(block);
        self.known.values().copied().filter(is_cached).collect()
    }

    fn hit(&self, tokens: &[i32], salt: usize, size: usize) -> Vec<i32> {
        let ends = (1..=tokens.len() / size).map(|num| num * size);
        ends.map_while(|end| self.known.get(&(salt, tokens[..end].to_vec())).copied()).collect()
    }
}

#[derive(Debug, Clone)]
enum Do {
    Come { text: Vec<i32>, same: usize, salt: usize, held: usize },
    Note { request: usize, end: usize },
    Go { request: usize, is_fenced: bool },
    Forget { salt: Option<usize> },
    Complete { lag: u64 },
}

fn act() -> impl Strategy<Value = Do> {
    prop_oneof![
        4 => (prop::collection::vec(0..3, 0..14), 0..14_usize, 0..2_usize, 0..9_usize)
            .prop_map(|(text, same, salt, held)| Do::Come { text, same, salt, held }),
        4 => (0..9_usize, 0..14_usize).prop_map(|(request, end)| Do::Note { request, end }),
        3 => (0..9_usize, any::<bool>()).prop_map(|(request, is_fenced)| Do::Go { request, is_fenced }),
        1 => prop::option::of(0..2_usize).prop_map(|salt| Do::Forget { salt }),
        2 => (0..3_u64).prop_map(|lag| Do::Complete { lag }),
    ]
}

struct World {
    pool: BlockPool,
    plain: Plain,
    size: usize,
    /// Tokens, blocks, salt of each request.
    requests: Vec<(Vec<i32>, Vec<i32>, usize)>,
    step: u64,
}

impl World {
    fn new(num_blocks: i64, size: usize, first_id: i64) -> Self {
        let config = BlockPoolConfig { first_id, fencing: true, ..BlockPoolConfig::new(num_blocks, size as i64) };
        let pool = BlockPool::new(config).unwrap();
        Self { pool, plain: Plain::default(), size, requests: Vec::new(), step: 0 }
    }

    fn act(&mut self, what: Do) {
        match what {
            Do::Come { text, same, salt, held } => self.come(&text, same, salt, held),
            Do::Note { request, end } if request < self.requests.len() => self.note(request, end),
            Do::Go { request, is_fenced } if request < self.requests.len() => self.go(request, is_fenced),
            Do::Forget { salt } => {
                self.pool.forget(salt.map(|salt| SALTS[salt])).unwrap();
                self.plain.known.retain(|(of, _), _| salt.is_some_and(|salt| salt != *of));
            }
            Do::Complete { lag } => {
                let step = self.step.saturating_sub(lag).max(self.plain.completed);
                self.pool.complete(step).unwrap();
                self.plain.completed = step;
                self.plain.fenced.retain(|_, &mut fence| fence > step);
            }
            _ => {}
        }
        self.check();
    }

    fn come(&mut self, text: &[i32], same: usize, salt: usize, held: usize) {
        let mut tokens = vec![0; same.min(text.len())];
        tokens.extend_from_slice(&text[tokens.len()..]);
        let hit = self.pool.match_prefix(&tokens, SALTS[salt], None).unwrap();
        assert_eq!(hit, self.plain.hit(&tokens, salt, self.size));
        let hold = &hit[..hit.len().min(held)];
        let count = tokens.len().div_ceil(self.size) - hold.len();
        let cached = self.plain.cached();
        let room = self.pool.num_free() + cached.len() - hold.iter().filter(|block| cached.contains(block)).count();
        assert_eq!(self.pool.fits(count, hold), Ok(count <= room));
        let before = self.pool.state_hash();
        let new = match self.pool.take(count, hold, Some("one")) {
            Err(Error::OutOfBlocks { need, free, cached, .. }) => {
                assert!(need == count && count > room && free + cached == room);
                assert_eq!(self.pool.state_hash(), before);
                return;
            }
            new => new.unwrap(),
        };
        assert!(count <= room && new.len() == count);
        for &block in hold {
            *self.plain.refs.entry(block).or_default() += 1;
            self.plain.fenced.remove(&block);
        }
        for &block in &new {
            assert!(!self.plain.refs.contains_key(&block) && !self.plain.fenced.contains_key(&block));
            self.plain.refs.insert(block, 1);
            self.plain.fences.insert(block, 0);
        }
        self.forget_evicted(&new);
        self.requests.push((tokens, [hold, &new].concat(), salt));
    }

    /// Drops what the pool gave up: the blocks taken anew, and texts behind them. What is left is still found.
    fn forget_evicted(&mut self, new: &[i32]) {
        let size = self.size;
        let keys: Vec<_> = self.plain.known.keys().cloned().collect();
        for (salt, text) in keys {
            let hit = self.pool.match_prefix(&text, SALTS[salt], None).unwrap();
            if hit.len() < text.len() / size {
                let block = self.plain.known.remove(&(salt, text)).unwrap();
                // A block that nobody takes was given up only because it continues one that was taken. A holder or a
                // fence keeps it; else it is free now.
                let is_kept = self.plain.refs.contains_key(&block) || self.plain.fenced.contains_key(&block);
                assert!(new.contains(&block) || is_kept || self.pool.num_free() > 0);
            }
        }
    }

    fn note(&mut self, request: usize, end: usize) {
        let (tokens, blocks, salt) = self.requests[request].clone();
        let tokens = &tokens[..end.min(tokens.len())];
        let known = self.plain.hit(tokens, salt, self.size);
        let clashes = |(at, &block): (usize, &i32)| self.plain.is_known(block) && known.get(at) != Some(&block);
        let whole = tokens.len() / self.size;
        let before = self.pool.state_hash();
        let given = self.pool.put(tokens, &blocks, 0, SALTS[salt]);
        if blocks[..whole].iter().enumerate().any(clashes) {
            assert!(matches!(given, Err(Error::BlockState { .. })));
            assert_eq!(self.pool.state_hash(), before);
            return;
        }
        for (at, &block) in blocks[..whole].iter().enumerate().skip(known.len()) {
            self.plain.known.insert((salt, tokens[..(at + 1) * self.size].to_vec()), block);
        }
        assert_eq!(given.unwrap(), self.plain.hit(tokens, salt, self.size));
    }

    fn go(&mut self, request: usize, is_fenced: bool) {
        let (_, blocks, _) = self.requests.swap_remove(request);
        self.step += 1;
        let after = is_fenced.then_some(self.step);
        self.pool.drop(&blocks, after).unwrap();
        for block in blocks {
            let fence = self.plain.fences.entry(block).or_default();
            *fence = (*fence).max(after.unwrap_or(0));
            let fence = *fence;
            let refs = self.plain.refs.get_mut(&block).unwrap();
            *refs -= 1;
            if *refs == 0 {
                self.plain.refs.remove(&block);
                if fence > self.plain.completed {
                    self.plain.fenced.insert(block, fence);
                }
            }
        }
    }

    fn check(&mut self) {
        self.pool.check().unwrap();
        let (pool, plain) = (&self.pool, &self.plain);
        let cached = plain.cached();
        assert_eq!((pool.num_cached(), pool.num_fenced()), (cached.len(), plain.fenced.len()));
        assert_eq!(pool.index_size().0, plain.known.len());
        let held = plain.refs.len();
        assert_eq!(pool.num_free() + cached.len() + plain.fenced.len() + held, pool.config().num_blocks as usize);
        let taken: BTreeSet<i32> = plain.refs.keys().chain(plain.fenced.keys()).copied().collect();
        assert_eq!(pool.taken().unwrap(), taken.into_iter().collect::<Vec<_>>());
        for (&block, &refs) in &plain.refs {
            assert_eq!((pool.refs(block), pool.is_indexed(block)), (Ok(refs), Ok(plain.is_known(block))));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, max_shrink_iters: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn random_calls_keep_every_law(
        num_blocks in 1..14_i64, size in 1..4_usize, first_id in 0..2_i64, acts in prop::collection::vec(act(), 1..60)
    ) {
        let mut world = World::new(num_blocks, size, first_id);
        for what in acts {
            world.act(what);
        }
        while !world.requests.is_empty() {
            world.act(Do::Go { request: 0, is_fenced: false });
        }
        world.act(Do::Complete { lag: 0 });
        prop_assert_eq!(world.pool.taken(), Ok(vec![]));
    }
}

fn pool(num_blocks: i64, block_size: i64) -> BlockPool {
    BlockPool::new(BlockPoolConfig::new(num_blocks, block_size)).unwrap()
}

#[test]
fn what_was_used_least_recently_goes_first_and_the_end_of_a_text_before_its_beginning() {
    let mut pool = pool(6, 2);
    let texts = [[1, 2, 3, 4], [5, 6, 7, 8]];
    for text in texts {
        let blocks = pool.take(2, &[], None).unwrap();
        pool.put(&text, &blocks, 0, b"").unwrap();
        pool.drop(&blocks, None).unwrap();
    }
    // The first text is put once more: now the second one is the oldest.
    let again = pool.take(2, &[], None).unwrap();
    assert_eq!(pool.put(&texts[0], &again, 0, b""), Ok(vec![0, 1]));
    assert_eq!(pool.put(&texts[0], &again, 1, b""), Ok(vec![1]));
    let found = |pool: &BlockPool| texts.map(|text| pool.match_prefix(&text, b"", None).unwrap().len());
    let sizes = [[2, 1], [2, 0], [1, 0], [0, 0]].map(|expected| {
        pool.take(1, &[], None).unwrap();
        (found(&pool), expected)
    });
    for (found, expected) in sizes {
        assert_eq!(found, expected);
    }
    assert_eq!(pool.index_size(), (0, 4));
    assert!(pool.index_bytes() > 0);
    assert!(matches!(pool.take(1, &[], None), Err(Error::OutOfBlocks { need: 1, free: 0, cached: 0, .. })));
}

#[test]
fn a_fenced_block_is_given_up_with_the_block_that_it_continues_and_stays_fenced() {
    let mut pool = BlockPool::new(BlockPoolConfig { fencing: true, ..BlockPoolConfig::new(3, 1) }).unwrap();
    let first = pool.take(1, &[], None).unwrap();
    pool.put(&[5], &first, 0, b"").unwrap();
    let second = pool.take(2, &[], None).unwrap();
    assert_eq!(pool.put(&[5, 6], &second, 0, b""), Ok(vec![0, 2]));
    pool.drop(&second, Some(1)).unwrap();
    pool.drop(&first, None).unwrap();
    assert_eq!((pool.num_free(), pool.num_cached(), pool.num_fenced()), (0, 1, 2));
    assert_eq!(pool.take(1, &[], None), Ok(vec![0]));
    assert_eq!((pool.index_size().0, pool.is_indexed(2)), (0, Ok(false)));
    assert_eq!((pool.num_free(), pool.num_fenced()), (0, 2));
    pool.check().unwrap();
    pool.complete(1).unwrap();
    assert_eq!(pool.take(2, &[], None), Ok(vec![2, 1]));
}

#[test]
fn a_text_goes_on_behind_blocks_that_are_not_read_again() {
    let mut pool = pool(8, 2);
    let blocks = pool.take(3, &[], None).unwrap();
    pool.put(&[1, 2, 3, 4], &blocks, 0, b"s").unwrap();
    assert_eq!(pool.put_behind(Some(0), &[3, 4, 5, 6], &blocks[1..], 1, b"s"), Ok(vec![2]));
    assert_eq!(pool.match_prefix(&[1, 2, 3, 4, 5, 6, 7], b"s", Some(5)), Ok(vec![0, 1]));
    assert_eq!(pool.match_prefix(&[1, 2, 3, 4, 5, 6, 7], b"s", None), Ok(vec![0, 1, 2]));
    let wrong = pool.put_behind(Some(0), &[3, 4], &blocks[1..], 1, b"other").unwrap_err();
    assert!(wrong.to_string().starts_with("put behind of block 0: it is not known under this salt"), "{wrong}");
    let wrong = pool.put_behind(Some(0), &[3, 4], &[], 0, b"s").unwrap_err();
    assert!(wrong.to_string().contains("from block 0 on: they fill 1 blocks, 0 are given"), "{wrong}");
    pool.check().unwrap();
}

#[test]
fn a_record_says_who_had_a_block() {
    let mut pool = BlockPool::new(BlockPoolConfig { fencing: true, ..BlockPoolConfig::new(4, 2) }).unwrap();
    let first = pool.take(1, &[], None).unwrap();
    let second = pool.take(1, &[], Some("request-7")).unwrap();
    pool.drop(&first, Some(3)).unwrap();
    let record = pool.record_of(0).unwrap();
    assert_eq!((record.state, record.refs, record.tag, record.fence), (PageState::Fenced, 0, None, 3));
    let record = pool.record_of(second[0]).unwrap();
    assert_eq!((record.state, record.tag, record.last_verb), (PageState::Owned, Some("request-7"), Verb::Take));
    pool.complete(3).unwrap();
    assert_eq!((pool.completed(), pool.num_free()), (3, 3));
    assert_eq!(pool.complete(2), Err(Error::Order("complete of step 2: step 3 is complete already".into())));
    // The next taker has no tag.
    assert_eq!(pool.take(1, &[], None), Ok(vec![0]));
    assert_eq!(pool.record_of(0).unwrap().tag, None);
    let twice = pool.drop(&[1, 1], None).unwrap_err();
    let says = "drop of block 1: it is named more often than the 1 times that it is held; it is owned, last tag \
                \"request-7\", last verb take";
    assert_eq!(twice.to_string(), says);
    assert_eq!(pool.refs(1), Ok(1));
    pool.drop(&[0, 1], None).unwrap();
    assert!(pool.drop(&[1], None).unwrap_err().to_string().contains("nobody holds it"));
}

#[test]
fn a_recorded_run_replays_and_a_damaged_one_says_where() {
    let path = std::env::temp_dir().join(format!("specpool-blocks-{}.log", std::process::id()));
    let config = BlockPoolConfig { fencing: true, first_id: 1, ..BlockPoolConfig::new(6, 2) };
    let mut pool = BlockPool::recorded(config, &path, 1 << 20).unwrap();
    let mut twin = BlockPool::new(BlockPoolConfig { digest: true, ..config }).unwrap();
    let text: Vec<i32> = (0..8).collect();
    let mut digests = vec![];
    for pool in [&mut pool, &mut twin] {
        let blocks = pool.take(4, &[], Some("one")).unwrap();
        pool.put(&text, &blocks, 0, b"salt").unwrap();
        pool.put_behind(Some(blocks[0]), &text[2..], &blocks[1..], 1, b"salt").unwrap();
        pool.drop(&blocks, Some(1)).unwrap();
        assert!(pool.take(9, &[], None).is_err()); // leaves no trace
        pool.complete(1).unwrap();
        pool.take(1, &blocks[..1], None).unwrap();
        pool.forget(Some(b"salt")).unwrap();
        pool.keep(&blocks[..1]).unwrap();
        pool.unkeep(&blocks[..1]).unwrap();
        pool.forget(None).unwrap();
        pool.drop(&blocks[..1], None).unwrap();
        digests.push((pool.digest().unwrap(), pool.state_hash()));
    }
    assert_eq!(digests[0], digests[1]);
    pool.close().unwrap();
    pool.close().unwrap();
    assert_eq!(pool.take(1, &[], None), Err(Error::Order("the pool is closed".into())));
    assert_eq!(pool.num_free(), 5);
    let (again, num_calls, end) = BlockPool::replay(&path).unwrap();
    assert_eq!((again.digest().unwrap(), again.state_hash()), digests[0]);
    assert_eq!((num_calls, end), (11, LogEnd::Closed));
    assert_eq!(again.record_of(2).unwrap().tag, Some("one"));

    let bytes = std::fs::read(&path).unwrap();
    let replayed = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        BlockPool::replay(&path).map(|(_, num_calls, end)| (num_calls, end)).map_err(|error| error.to_string())
    };
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        let why = replayed(&damaged).unwrap_err();
        assert!(why.contains("at byte "), "{why}");
    }
    let ends: Vec<_> = (0..bytes.len()).filter_map(|len| replayed(&bytes[..len]).ok()).collect();
    assert_eq!(ends, (0..=11).map(|num_calls| (num_calls, LogEnd::Open)).collect::<Vec<_>>());
    // The other kind of log, both ways.
    let group = Group {
        name: "kv".into(),
        page_size: 2,
        num_pages: 4,
        hosts_drafts: false,
        layout: Layout::Dense,
        window: None,
        sink: 0,
    };
    let config = LedgerConfig::new(vec![group], vec![], 2, 8);
    Ledger::recorded(config, &path, 1 << 20).unwrap().close().unwrap();
    let why = BlockPool::replay(&path).map(drop).unwrap_err().to_string();
    assert!(why.ends_with("it is the log of a Ledger: specpool replay reads it"), "{why}");
    std::fs::write(&path, &bytes).unwrap();
    let why = Replay::open(&path).map(drop).unwrap_err().to_string();
    assert!(why.ends_with("it is the log of a BlockPool: BlockPool.replay reads it"), "{why}");
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_kept_block_goes_after_the_free_ones_and_is_found_by_nobody() {
    let mut pool = pool(4, 2);
    let blocks = pool.take(3, &[], Some("one")).unwrap();
    pool.put(&[1, 2], &blocks[..1], 0, b"").unwrap();
    pool.keep(&blocks[1..2]).unwrap();
    for refused in [
        pool.keep(&[1, 0]),
        pool.unkeep(&[1, 0]),
        pool.keep(&[3]),
        pool.put_behind(Some(1), &[1, 2, 3, 4], &blocks[1..], 1, b"").map(drop),
    ] {
        assert!(matches!(refused, Err(Error::BlockState { .. })), "{refused:?}");
    }
    assert_eq!((pool.index_size(), pool.is_indexed(1)), ((2, 0), Ok(true)));
    pool.drop(&blocks[1..], None).unwrap();
    pool.drop(&blocks[..1], None).unwrap();
    assert_eq!((pool.num_free(), pool.num_cached()), (2, 2));
    assert_eq!(pool.preview(9), Ok(vec![2, 3, 1, 0]));
    assert_eq!(pool.take(3, &[], None), Ok(vec![2, 3, 1]));
    pool.check().unwrap();
    assert_eq!(pool.match_prefix(&[1, 2], b"", None), Ok(vec![0]));
    pool.keep(&[2, 3]).unwrap();
    pool.unkeep(&[3, 1]).unwrap();
    pool.forget(None).unwrap();
    pool.check().unwrap();
    assert_eq!((pool.index_size(), pool.num_free()), ((0, 1), 1));
}

#[test]
fn another_order_has_another_digest() {
    let digests = [[1, 2], [2, 1]].map(|counts| {
        let mut pool = BlockPool::new(BlockPoolConfig { digest: true, ..BlockPoolConfig::new(4, 1) }).unwrap();
        for count in counts {
            pool.take(count, &[], None).unwrap();
        }
        pool.digest()
    });
    assert_ne!(digests[0], digests[1]);
    assert_eq!(pool(4, 1).digest(), None);
}

#[test]
fn states_that_differ_have_different_hashes() {
    let taken = |blocks: &[i32], text: &[i32]| {
        let mut pool = pool(4, 1);
        pool.take(2, &[], None).unwrap();
        pool.put(text, &[0, 1], 0, b"").unwrap();
        pool.drop(blocks, None).unwrap();
        pool.state_hash()
    };
    let hashes = [taken(&[], &[]), taken(&[0], &[]), taken(&[1], &[]), taken(&[], &[1]), taken(&[], &[2])];
    for (at, hash) in hashes.iter().enumerate() {
        assert!(!hashes[..at].contains(hash), "{at}");
    }
}

fn says<T>(outcome: Result<T, Error>, text: &str) {
    let error = outcome.err().expect("it should be refused").to_string();
    assert!(error.contains(text), "{error}");
}

#[test]
fn a_setting_out_of_its_range_is_refused_with_the_range() {
    let most = i64::from(i32::MAX);
    let new = |num_blocks, block_size, first_id| {
        BlockPool::new(BlockPoolConfig { first_id, ..BlockPoolConfig::new(num_blocks, block_size) })
    };
    says(new(0, 1, 0), "num_blocks must be in [1, 2147483646], got 0");
    says(new(most, 1, 0), "num_blocks must be in [1, 2147483646], got 2147483647");
    says(new(1, (1 << 20) + 1, 0), "block_size must be in [1, 1048576], got 1048577");
    says(new(1, 1, 2), "first_id must be in [0, 1], got 2");
    assert!(new(most - 1, 1 << 20, 1).is_ok());
}

#[test]
fn a_block_of_no_pool_is_refused_with_those_that_there_are() {
    for (first_id, text) in [(0, "the pool's blocks are 0 to 3"), (1, "the pool's blocks are 1 to 4")] {
        let mut pool = BlockPool::new(BlockPoolConfig { first_id, ..BlockPoolConfig::new(4, 2) }).unwrap();
        let blocks = pool.take(4, &[], None).unwrap();
        for block in [blocks[0] - 1, blocks[3] + 1, i32::MIN, i32::MAX] {
            says(pool.refs(block), &format!("query of block {block}: {text}"));
            says(pool.drop(&[blocks[0], block], None), &format!("drop of block {block}: {text}"));
            says(pool.put(&[1, 2], &[block], 0, b""), &format!("put of block {block}: {text}"));
        }
        assert_eq!(pool.taken(), Ok(blocks));
    }
}

#[test]
fn a_block_must_be_held_to_be_noted_and_named_once() {
    let mut pool = pool(6, 2);
    let blocks = pool.take(3, &[], None).unwrap();
    says(pool.put(&[1, 2, 3, 4], &[blocks[0], 4], 0, b""), "put of block 4: nobody holds it");
    says(pool.put(&[1, 2, 3, 4], &[blocks[0], blocks[0]], 0, b""), "put of block 0: it is named twice");
    says(pool.take(1, &[blocks[0], 5], None), "take of block 5: nobody holds it and it is not cached");
    says(pool.fits(1, &[5]), "fits of block 5: nobody holds it and it is not cached");
    assert_eq!(pool.index_size().0, 0);
    assert_eq!(pool.put(&[1, 2, 3, 4], &blocks[..2], 0, b""), Ok(vec![0, 1]));
    // The text is known: a block that is put for it must be held, too, and hold nothing else.
    says(pool.put(&[1, 2, 3, 4], &[0, 4], 1, b""), "put of block 4: nobody holds it");
    says(pool.put(&[1, 2, 3, 4], &[1, 0], 0, b""), "put of block 1: it is known to hold other tokens");
    says(pool.put(&[7, 8], &[1], 0, b""), "put of block 1: it is known to hold other tokens");
    pool.drop(&blocks[..2], None).unwrap();
    says(pool.put(&[1, 2, 3, 4], &[0, 1], 1, b""), "put of block 1: nobody holds it");
    assert_eq!(pool.put(&[1, 2, 3, 4], &[0, 1], 2, b""), Ok(vec![]));
    assert_eq!(pool.taken(), Ok(vec![2]));
    pool.check().unwrap();
}

#[test]
fn a_salt_of_more_than_256_bytes_is_refused_by_every_verb() {
    let mut pool = pool(2, 1);
    let salt = [b'a'; 257];
    pool.take(1, &[], None).unwrap();
    says(pool.match_prefix(&[1], &salt, None), "257");
    says(pool.put(&[1], &[0], 0, &salt), "257");
    says(pool.forget(Some(&salt)), "257");
    assert_eq!(pool.put(&[1], &[0], 0, &salt[1..]), Ok(vec![0]));
}

#[test]
fn without_caching_a_put_names_the_blocks_themselves() {
    let mut pool = BlockPool::new(BlockPoolConfig { caching: false, ..BlockPoolConfig::new(4, 1) }).unwrap();
    let blocks = pool.take(3, &[], None).unwrap();
    assert_eq!(pool.put(&[1, 2, 3], &blocks, 1, b""), Ok(vec![1, 2]));
    assert_eq!(pool.put(&[1], &blocks, 2, b""), Ok(vec![]));
    pool.keep(&blocks).unwrap();
    assert_eq!((pool.index_size(), pool.match_prefix(&[1, 2], b"", None)), ((0, 0), Ok(vec![])));
}

#[test]
fn without_fencing_a_step_is_refused() {
    let mut pool = pool(2, 1);
    pool.take(1, &[], None).unwrap();
    says(pool.drop(&[0], Some(1)), "drop after step 1: the pool was built without fencing");
    says(pool.complete(1), "complete of step 1: the pool was built without fencing");
    assert_eq!(pool.refs(0), Ok(1));
}

#[test]
fn a_preview_is_what_is_taken_and_no_block_twice() {
    let mut pool = pool(7, 1);
    let blocks = pool.take(6, &[], None).unwrap();
    pool.put(&[1, 2, 3], &blocks[..3], 0, b"").unwrap();
    pool.put(&[1, 9], &[0, 3], 0, b"").unwrap();
    pool.keep(&blocks[4..5]).unwrap();
    for given in [&blocks[..3], &blocks[3..]] {
        pool.drop(given, None).unwrap();
    }
    let all = pool.preview(usize::MAX).unwrap();
    assert_eq!((all.len(), all.iter().collect::<BTreeSet<_>>().len()), (7, 7));
    for count in 0..=7 {
        assert_eq!(pool.preview(count).unwrap(), all[..count], "{count}");
    }
    assert_eq!(pool.take(7, &[], None), Ok(all));
}

#[test]
fn dropped_blocks_are_given_again_in_their_order() {
    let mut pool = pool(4, 1);
    let blocks = pool.take(4, &[], None).unwrap();
    pool.drop(&blocks, None).unwrap();
    assert_eq!(pool.take(4, &[], None), Ok(blocks));
}

#[test]
fn tags_are_of_the_last_take_and_the_last_drop() {
    let mut pool = pool(8, 1);
    let tagged = pool.take(2, &[], Some("one")).unwrap();
    pool.drop_by(&tagged, None, Some("two")).unwrap();
    let record = pool.record_of(1).unwrap();
    assert_eq!((record.tag, record.dropped_by, record.last_verb), (Some("one"), Some("two"), Verb::Drop));
    says(pool.drop(&[1], None), "last tag \"one\", last verb drop by \"two\"");
    // Now without tags, beside blocks that had none before.
    let blocks = pool.take(8, &[], None).unwrap();
    for &block in &blocks {
        let record = pool.record_of(block).unwrap();
        assert_eq!((record.tag, record.dropped_by), (None, None));
    }
    pool.drop(&blocks, None).unwrap();
    assert_eq!(pool.record_of(1).unwrap().dropped_by, None);
    pool.take(8, &[], None).unwrap();
    pool.drop_by(&[6], None, Some("three")).unwrap();
    assert_eq!(pool.record_of(6).unwrap().dropped_by, Some("three"));
    assert_eq!(pool.record_of(7).unwrap().dropped_by, None);
}

#[test]
fn a_closed_pool_refuses_every_verb_and_answers_questions() {
    let mut pool = BlockPool::new(BlockPoolConfig { fencing: true, ..BlockPoolConfig::new(4, 1) }).unwrap();
    pool.take(2, &[], None).unwrap();
    pool.put(&[1], &[0], 0, b"").unwrap();
    pool.keep(&[1]).unwrap();
    pool.close().unwrap();
    let before = pool.state_hash();
    let refused = [
        pool.take(1, &[], None).map(drop),
        pool.drop(&[0], None),
        pool.put(&[1], &[0], 0, b"").map(drop),
        pool.keep(&[1]),
        pool.unkeep(&[1]),
        pool.forget(None),
        pool.complete(1),
    ];
    for outcome in refused {
        assert_eq!(outcome, Err(Error::Order("the pool is closed".into())));
    }
    assert_eq!((pool.state_hash(), pool.fits(2, &[]), pool.taken()), (before, Ok(true), Ok(vec![0, 1])));
}

#[test]
fn what_is_kept_and_what_is_complete_is_part_of_the_state() {
    let made = |kept: &[i32], step| {
        let mut pool = BlockPool::new(BlockPoolConfig { fencing: true, ..BlockPoolConfig::new(4, 1) }).unwrap();
        pool.take(2, &[], None).unwrap();
        pool.keep(kept).unwrap();
        pool.complete(step).unwrap();
        pool.check().unwrap();
        pool.state_hash()
    };
    let hashes = [made(&[], 0), made(&[], 1), made(&[0], 0), made(&[1], 0), made(&[0, 1], 0)];
    assert_eq!(hashes.iter().collect::<BTreeSet<_>>().len(), hashes.len());
}
