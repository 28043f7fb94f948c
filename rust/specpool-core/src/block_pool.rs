//! Blocks without rows (docs/contract.md, Blocks): for an engine that keeps its own rows and lengths.
//!
//! A *block* is a page of `block_size` tokens. The pool is the ledger's page pool, and the index is its prefix index, of
//! whole entries only: one block each. There are no rows, no steps and no context length.
//!
//! Files: this one builds a pool and answers questions; `verbs` changes it; `log` records that.

mod log;
mod verbs;

pub use log::ReplayedCall;

use std::sync::Arc;

use crate::check::in_range;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::ids::{Page, Row};
use crate::ledger::check_salt;
use crate::log::recorder::Recorder;
use crate::memory::{with_room, zeroed};
use crate::state::page_pool::{PagePool, PageState};
use crate::state::prefix_index::{NONE, PrefixIndex};
use crate::verb::Verb;

/// Stands in a page's line for an entry of an index that the caller keeps.
const KEPT: u32 = u32::MAX;

/// The row that the page pool notes as the owner of every block.
const OWNER: Row = Row(0);

/// What a [`BlockPool`] is built from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "each switches one thing")]
pub struct BlockPoolConfig {
    /// Blocks in all.
    pub num_blocks: i64,
    /// Tokens of a block.
    pub block_size: i64,
    /// The id of the first block: 0, or 1 if the engine keeps block 0 for padding.
    pub first_id: i64,
    /// Whether `put` keeps what blocks hold.
    pub caching: bool,
    /// Whether `drop` may name a step that still touches the blocks.
    pub fencing: bool,
    /// Whether a digest of the calls is kept.
    pub digest: bool,
}

impl BlockPoolConfig {
    /// A pool with caching, whose first block is 0.
    #[must_use]
    pub fn new(num_blocks: i64, block_size: i64) -> Self {
        Self { num_blocks, block_size, first_id: 0, caching: true, fencing: false, digest: false }
    }
}

/// The pool's line for one block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockRecord<'a> {
    /// The block.
    pub block: i32,
    /// Its state; `Shared` if it is read-only: held twice or more, or held and in the index.
    pub state: PageState,
    /// How often it is held, the index not counted.
    pub refs: u32,
    /// Whether the index knows what it holds.
    pub is_indexed: bool,
    /// The tag of the `take` that gave it last.
    pub tag: Option<&'a str>,
    /// The latest step named when it was dropped; 0 if none since it was taken.
    pub fence: u64,
    /// The verb that touched it last.
    pub last_verb: Verb,
    /// The tag of the `drop` that named it last, if that was the last verb.
    pub dropped_by: Option<&'a str>,
}

/// The name of a request.
#[derive(Debug)]
struct Tag(Box<str>);

fn tag_at(tags: &[Option<Arc<Tag>>], page: Page) -> Option<&str> {
    tags.get(page.at()).and_then(Option::as_ref).map(|tag| &*tag.0)
}

/// Blocks, who holds them, and what they hold.
///
/// A block is *free*, *held* (once or more), *cached* (held by nobody, its content known) or *fenced* (dropped, but a
/// step may still touch it). Cached blocks are given up when free ones do not suffice: the one that was used least
/// recently, and those that continue it before.
///
/// ```
/// use specpool_core::{BlockPool, BlockPoolConfig};
///
/// let mut pool = BlockPool::new(BlockPoolConfig::new(8, 4))?; // 8 blocks of 4 tokens
/// let prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13];
/// let blocks = pool.take(3, &[], Some("request-1"))?;
/// pool.put(&prompt, &blocks, 0, b"")?; // the KV of the prompt is computed: two blocks are whole
/// pool.drop(&blocks, None)?;
/// assert_eq!((pool.num_free(), pool.num_cached()), (6, 2));
///
/// let hit = pool.match_prefix(&prompt, b"", None)?; // another request with the same prompt
/// assert_eq!(hit, blocks[..2]);
/// let new = pool.take(1, &hit, Some("request-2"))?; // it holds the hit, and one block of its own
/// pool.drop(&[hit, new].concat(), None)?;
/// assert!(pool.drop(&blocks, None).is_err()); // nobody holds them
/// pool.check()?;
/// # Ok::<(), specpool_core::Error>(())
/// ```
#[derive(Debug)]
pub struct BlockPool {
    pool: PagePool,
    index: PrefixIndex,
    config: BlockPoolConfig,
    /// The tag of each block's last `take`; as long as the blocks that were handed out, once there was a tag.
    tags: Vec<Option<Arc<Tag>>>,
    /// The tag of each block's last `drop`, as long as it has to be.
    droppers: Vec<Option<Arc<Tag>>>,
    /// Zeros; counts how often a call names each block.
    marks: Vec<u32>,
    completed: u64,
    num_evictions: u64,
    /// Blocks that an index of the caller's knows.
    num_kept: usize,
    recorder: Recorder,
    is_closed: bool,
}

impl BlockPool {
    /// A pool of free blocks.
    ///
    /// # Errors
    /// [`Error::Config`] that names the setting, its value and what is allowed.
    pub fn new(config: BlockPoolConfig) -> Result<Self> {
        in_range("num_blocks", config.num_blocks, 1, i64::from(i32::MAX) - 1)?;
        let block_size = in_range("block_size", config.block_size, 1, 1 << 20)?;
        in_range("first_id", config.first_id, 0, 1)?;
        Ok(Self {
            pool: PagePool::new(config.num_blocks)?,
            index: PrefixIndex::new(std::iter::once(block_size), block_size as i32),
            config,
            tags: Vec::new(),
            droppers: Vec::new(),
            marks: Vec::new(),
            completed: 0,
            num_evictions: 0,
            num_kept: 0,
            recorder: Recorder::new(config.digest),
            is_closed: false,
        })
    }

    /// What the pool was built from.
    #[must_use]
    pub fn config(&self) -> &BlockPoolConfig {
        &self.config
    }

    /// Blocks that hold nothing and can be taken. O(1).
    #[must_use]
    pub fn num_free(&self) -> usize {
        self.pool.num_free()
    }

    /// Blocks that nobody holds and whose content is known; they can be taken too. O(1).
    #[must_use]
    pub fn num_cached(&self) -> usize {
        self.pool.num_cached()
    }

    /// Blocks that were dropped and that a step may still touch. O(1).
    #[must_use]
    pub fn num_fenced(&self) -> usize {
        self.pool.num_fenced()
    }

    /// Blocks whose content is known, here or in an index of the caller's, and how many were given up to make room. O(1).
    #[must_use]
    pub fn index_size(&self) -> (usize, u64) {
        (self.index.num_entries() + self.num_kept, self.num_evictions)
    }

    /// Bytes that the index takes in memory. O(blocks).
    #[must_use]
    pub fn index_bytes(&self) -> usize {
        self.index.num_bytes()
    }

    /// The latest step named to [`complete`](Self::complete).
    #[must_use]
    pub fn completed(&self) -> u64 {
        self.completed
    }

    fn block_size(&self) -> usize {
        self.index.span()
    }

    fn id(&self, page: Page) -> i32 {
        page.0 - 1 + self.config.first_id as i32
    }

    /// The page of a block.
    ///
    /// # Errors
    /// [`Error::Shape`] if the pool has no such block.
    fn page(&self, verb: &str, block: i32) -> Result<Page> {
        let page = i64::from(block) - self.config.first_id + 1;
        if (1..=self.config.num_blocks).contains(&page) {
            return Ok(Page(page as i32));
        }
        let first = self.config.first_id;
        let last = first + self.config.num_blocks - 1;
        Err(Error::Shape(format!("{verb} of block {block}: the pool's blocks are {first} to {last}")))
    }

    /// The line of a block.
    ///
    /// # Errors
    /// [`Error::Shape`] if the pool has no such block.
    pub fn record_of(&self, block: i32) -> Result<BlockRecord<'_>> {
        self.page("query", block).map(|page| self.line(page))
    }

    fn line(&self, page: Page) -> BlockRecord<'_> {
        let seen = self.pool.seen(page);
        let is_indexed = self.pool.entry_of(page) != NONE;
        BlockRecord {
            block: self.id(page),
            state: seen.state,
            refs: seen.holders.saturating_sub(is_indexed.into()),
            is_indexed,
            tag: tag_at(&self.tags, page),
            fence: seen.fence,
            last_verb: seen.last_verb,
            dropped_by: tag_at(&self.droppers, page).filter(|_| seen.last_verb == Verb::Drop),
        }
    }

    /// How often the block is held, the index not counted. O(1).
    ///
    /// # Errors
    /// As [`record_of`](Self::record_of).
    pub fn refs(&self, block: i32) -> Result<u32> {
        Ok(self.record_of(block)?.refs)
    }

    /// Whether the index knows what the block holds. O(1).
    ///
    /// # Errors
    /// As [`record_of`](Self::record_of).
    pub fn is_indexed(&self, block: i32) -> Result<bool> {
        Ok(self.record_of(block)?.is_indexed)
    }

    /// The blocks that nobody may take now: held or fenced, ascending. O(blocks).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn taken(&self) -> Result<Vec<i32>> {
        let mut taken = with_room(self.pool.num_mapped(), "the taken blocks")?;
        let is_taken = |state| !matches!(state, PageState::Free | PageState::Cached);
        let records = self.pool.records(self.pool.num_mapped());
        taken.extend(records.filter(|record| is_taken(record.state)).map(|record| self.id(record.page)));
        Ok(taken)
    }

    /// The blocks of the longest beginning of `tokens` that the index knows under the salt: whole blocks, of at most
    /// `limit` tokens (all by default). It changes nothing; hold them with [`take`](Self::take). O(tokens).
    ///
    /// # Errors
    /// [`Error::Shape`] (a limit of more tokens than there are, a salt of more than 256 bytes), [`Error::OutOfMemory`].
    pub fn match_prefix(&self, tokens: &[i32], salt: &[u8], limit: Option<usize>) -> Result<Vec<i32>> {
        check_salt(salt)?;
        let limit = limit.unwrap_or(tokens.len());
        if limit > tokens.len() {
            return Err(Error::Shape(format!("the limit of a match must be in [0, {}], got {limit}", tokens.len())));
        }
        let mut blocks = with_room(limit / self.block_size(), "the blocks of a match")?;
        let mut parent = self.index.root(salt);
        for piece in tokens[..limit].chunks_exact(self.block_size()) {
            let Some(entry) = self.child(parent, piece) else { break };
            blocks.push(self.id(self.page_of(entry)));
            parent = entry;
        }
        Ok(blocks)
    }

    /// The entry behind `parent` with exactly these tokens.
    fn child(&self, parent: u32, piece: &[i32]) -> Option<u32> {
        let (_, nearest) = self.index.nearest_child(parent, piece);
        nearest.filter(|&(_, agree)| agree == piece.len()).map(|(entry, _)| entry)
    }

    fn page_of(&self, entry: u32) -> Page {
        Page(self.index.pages(entry, 0)[0])
    }

    /// The blocks that `take(count)` would give, in order; all that can be taken if these are fewer. It changes nothing.
    /// O(blocks).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn preview(&self, count: usize) -> Result<Vec<i32>> {
        let count = count.min(self.num_free() + self.num_cached());
        let mut pages: Vec<Page> = with_room(count, "the next blocks")?;
        pages.extend(self.pool.free_pages().take(count));
        let mut is_given = zeroed(self.pool.num_mapped(), "the next blocks")?;
        let mut oldest = self.pool.cached_pages();
        while pages.len() < count {
            let Some(page) = oldest.next() else { break };
            let entry = self.pool.entry_of(page);
            let before = if entry == KEPT { Vec::new() } else { self.index.leaves_first(entry)? };
            let before = before.into_iter().map(|entry| self.page_of(entry));
            for page in before.chain([page]).filter(|&page| self.pool.is_cached(page)) {
                if pages.len() < count && !std::mem::replace(&mut is_given[page.at()], true) {
                    pages.push(page);
                }
            }
        }
        let mut blocks = with_room(count, "the next blocks")?;
        blocks.extend(pages.into_iter().map(|page| self.id(page)));
        Ok(blocks)
    }

    /// Whether `take(count, hold)` would find enough blocks. O(hold).
    ///
    /// # Errors
    /// As [`take`](Self::take), for a wrong `hold`.
    pub fn fits(&mut self, count: usize, hold: &[i32]) -> Result<bool> {
        let cached = self.num_cached_of("fits", hold)?;
        Ok(count <= self.num_free() + self.num_cached() - cached)
    }

    /// A hash of everything that decides what the pool will do. O(blocks).
    #[must_use]
    pub fn state_hash(&self) -> u64 {
        let mut digest = Digest::new();
        self.pool.hash(&mut digest);
        self.index.hash(&mut digest);
        digest.word(self.completed);
        digest.numbers(self.kept_pages().map(|page| page.0));
        digest.value()
    }

    fn kept_pages(&self) -> impl Iterator<Item = Page> + '_ {
        let mapped = if self.num_kept > 0 { self.pool.num_mapped() } else { 0 };
        (1..mapped).map(|page| Page(page as i32)).filter(|&page| self.pool.entry_of(page) == KEPT)
    }

    /// Every broken rule, with the numbers; none if all is well. O(blocks).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn audit(&self) -> Result<Vec<String>> {
        let broken = self.pool.broken(self.completed)?;
        let mut report: Vec<String> = broken.into_iter().map(|(_, text)| text).collect();
        report.extend(self.index.broken());
        let mut num_indexed = 0;
        for entry in self.index.all() {
            let page = self.page_of(entry);
            num_indexed += 1;
            if page == Page::SINK || self.pool.entry_of(page) != entry {
                report.push(format!("entry {entry} names page {}, which is not in the index", page.0));
            }
        }
        let listed =
            self.pool.records(self.pool.num_mapped() - 1).filter(|record| self.pool.entry_of(record.page) != NONE);
        let listed = listed.count() - self.kept_pages().count();
        if listed != num_indexed {
            report.push(format!("{listed} pages say that they are in the index, which has {num_indexed}"));
        }
        Ok(report)
    }

    /// Checks every rule.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with the first broken one, [`Error::OutOfMemory`].
    pub fn check(&self) -> Result<()> {
        self.audit()?.into_iter().next().map_or(Ok(()), |broken| Err(Error::Corrupt(broken)))
    }
}
