//! `BlockPool` for C.

use std::ffi::c_char;
use std::path::Path;

use specpool_core::{BlockPool, BlockPoolConfig};

use crate::handle::{Table, guard};
use crate::slice::{given, has_room, optional, put, read, text, write};
use crate::status::Status;

static POOLS: Table<BlockPool> = Table::new();

/// A pool of blocks for an engine with rows and lengths of its own. {0} is no pool.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    /// The number behind the handle.
    pub id: u64,
}

/// What a pool is built from. Start with specpool_pool_config_default().
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PoolConfig {
    /// Blocks in all.
    pub num_blocks: i64,
    /// Tokens of a block.
    pub block_size: i64,
    /// The id of the first block: 0, or 1 if the engine keeps block 0 for padding.
    pub first_id: i64,
    /// Whether specpool_pool_put keeps what blocks hold.
    pub caching: bool,
    /// Whether specpool_pool_drop may name a step that still touches the blocks.
    pub fencing: bool,
    /// Whether a digest of the calls is kept.
    pub digest: bool,
    /// The file of the event log; NULL: none.
    pub record: *const c_char,
    /// Most bytes of the log.
    pub record_limit: u64,
}

/// The counts of a pool: free + cached + fenced + held = num_blocks.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PoolInfo {
    /// Blocks in all.
    pub num_blocks: usize,
    /// Blocks that hold nothing.
    pub num_free: usize,
    /// Blocks that nobody holds and whose content is known; they can be taken too.
    pub num_cached: usize,
    /// Blocks that were dropped and that a step may still touch.
    pub num_fenced: usize,
    /// Blocks that the index knows.
    pub num_indexed: usize,
    /// How many blocks the index gave up to make room.
    pub num_evictions: u64,
    /// The digest of the calls; 0 without one.
    pub digest: u64,
}

/// A configuration with caching, whose first block is 0.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_pool_config_default(num_blocks: i64, block_size: i64) -> PoolConfig {
    let BlockPoolConfig { num_blocks, block_size, first_id, caching, fencing, digest } =
        BlockPoolConfig::new(num_blocks, block_size);
    PoolConfig {
        num_blocks,
        block_size,
        first_id,
        caching,
        fencing,
        digest,
        record: std::ptr::null(),
        record_limit: 1 << 30,
    }
}

/// Makes a pool of free blocks.
///
/// # Safety
/// `config` and `pool` point to their structures.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_pool_create(config: *const PoolConfig, pool: *mut Pool) -> Status {
    guard(|| {
        // SAFETY: the caller's promise; so in every call below.
        let (config, record) = unsafe {
            has_room("pool", pool, 1, 1)?;
            let config = given("config", config)?;
            (config, text("record", config.record)?)
        };
        let &PoolConfig { num_blocks, block_size, first_id, caching, fencing, digest, record_limit, .. } = config;
        let built = BlockPoolConfig { num_blocks, block_size, first_id, caching, fencing, digest };
        let made = match record {
            Some(path) => BlockPool::recorded(built, Path::new(path), record_limit)?,
            None => BlockPool::new(built)?,
        };
        unsafe { put("pool", Pool { id: POOLS.insert(made) }, pool) }
    })
}

/// Destroys the pool; an event log is closed.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_pool_destroy(pool: Pool) -> Status {
    guard(|| POOLS.remove(pool.id))
}

/// Takes `count` blocks, and holds those of `hold` once more (a match, or blocks of another request): both or neither.
/// If free blocks do not suffice, cached ones are given up. `blocks` has room for `count`. O(blocks).
///
/// # Safety
/// The arrays have the lengths that are said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_pool_take(
    pool: Pool,
    count: usize,
    hold: *const i32,
    num_hold: usize,
    tag: *const c_char,
    blocks: *mut i32,
) -> Status {
    guard(|| unsafe {
        has_room("blocks", blocks, count, count)?;
        let (hold, tag) = (read("hold", hold, num_hold)?, text("tag", tag)?);
        let taken = POOLS.with(pool.id, |pool| Ok(pool.take(count, hold, tag)?))?;
        write("blocks", &taken, blocks, count)
    })
}

/// Whether specpool_pool_take of the same `count` and `hold` would succeed.
///
/// # Safety
/// The arrays have the lengths that are said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_pool_fits(
    pool: Pool,
    count: usize,
    hold: *const i32,
    num_hold: usize,
    fits: *mut bool,
) -> Status {
    guard(|| unsafe {
        let hold = read("hold", hold, num_hold)?;
        put("fits", POOLS.with(pool.id, |pool| Ok(pool.fits(count, hold)?))?, fits)
    })
}

/// Lets go of each block once, the last one first. `after` is the last step that may still touch them, or -1.
///
/// # Safety
/// The array has the length that is said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_pool_drop(pool: Pool, blocks: *const i32, num_blocks: usize, after: i64) -> Status {
    guard(|| unsafe {
        let (blocks, after) = (read("blocks", blocks, num_blocks)?, optional("after", after)?);
        POOLS.with(pool.id, |pool| Ok(pool.drop(blocks, after)?))
    })
}

/// Finds the blocks of the longest beginning of the tokens that the index knows, at most `capacity` of them, and writes
/// how many to `num_found`. It changes nothing: take them with specpool_pool_take's `hold`. O(tokens).
///
/// # Safety
/// The arrays have the lengths that are said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_pool_match(
    pool: Pool,
    tokens: *const i32,
    num_tokens: usize,
    salt: *const u8,
    salt_len: usize,
    blocks: *mut i32,
    capacity: usize,
    num_found: *mut usize,
) -> Status {
    guard(|| unsafe {
        has_room("num_found", num_found, 1, 1)?;
        has_room("blocks", blocks, capacity, capacity)?;
        let (tokens, salt) = (read("tokens", tokens, num_tokens)?, read("salt", salt, salt_len)?);
        let matched = POOLS.with(pool.id, |pool| {
            let max_tokens = capacity.saturating_mul(pool.config().block_size as usize);
            Ok(pool.match_prefix(tokens, salt, Some(num_tokens.min(max_tokens)))?)
        })?;
        write("blocks", &matched, blocks, capacity)?;
        put("num_found", matched.len(), num_found)
    })
}

/// Notes that `blocks[i]` holds the i-th block of the tokens; `blocks` has one entry for each whole block, or more.
/// Blocks before `start` were noted before, or come from a match. `known`, which may be NULL, gets for each whole block
/// from `start` on the one that the index has: the same, or another that was first. O(tokens), and O(tokens behind
/// `start`) if the index knows the block two before `start`.
///
/// # Safety
/// The arrays have the lengths that are said; `known` has room for the whole blocks from `start` on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_pool_put(
    pool: Pool,
    tokens: *const i32,
    num_tokens: usize,
    blocks: *const i32,
    num_blocks: usize,
    start: usize,
    salt: *const u8,
    salt_len: usize,
    known: *mut i32,
) -> Status {
    guard(|| unsafe {
        let (tokens, blocks) = (read("tokens", tokens, num_tokens)?, read("blocks", blocks, num_blocks)?);
        let salt = read("salt", salt, salt_len)?;
        let kept = POOLS.with(pool.id, |pool| {
            let size = pool.config().block_size as usize;
            // Behind a block that the index knows, what lies before needs no look.
            let anchor = start.checked_sub(2).and_then(|at| blocks.get(at).copied());
            let anchor = anchor.filter(|&block| {
                start <= blocks.len() && tokens.len() / size >= start && pool.is_indexed(block).unwrap_or(false)
            });
            Ok(match anchor {
                Some(_) => pool.put_behind(anchor, &tokens[(start - 1) * size..], &blocks[start - 1..], 1, salt)?,
                None => pool.put(tokens, blocks, start, salt)?,
            })
        })?;
        if known.is_null() { Ok(()) } else { write("known", &kept, known, kept.len()) }
    })
}

/// Notes that the caller's own index knows what the blocks hold: when nobody holds them any more they are cached, not
/// free. specpool_pool_match does not find them. A block that is kept already stays as it is. O(blocks).
///
/// # Safety
/// The array has the length that is said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_pool_keep(pool: Pool, blocks: *const i32, num_blocks: usize) -> Status {
    guard(|| {
        let blocks = unsafe { read("blocks", blocks, num_blocks)? };
        POOLS.with(pool.id, |pool| Ok(pool.keep(blocks)?))
    })
}

/// Undoes specpool_pool_keep: a block that nobody holds is free. A block that is not kept stays as it is. O(blocks).
///
/// # Safety
/// The array has the length that is said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_pool_unkeep(pool: Pool, blocks: *const i32, num_blocks: usize) -> Status {
    guard(|| {
        let blocks = unsafe { read("blocks", blocks, num_blocks)? };
        POOLS.with(pool.id, |pool| Ok(pool.unkeep(blocks)?))
    })
}

/// Writes the blocks that specpool_pool_take would give, in order, and their number: `capacity` of them, or all that can
/// be taken if these are fewer. It changes nothing: caches outside can give up what they know of these blocks. O(blocks).
///
/// # Safety
/// `blocks` has room for `capacity` entries; `num_found` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_pool_preview(
    pool: Pool,
    blocks: *mut i32,
    capacity: usize,
    num_found: *mut usize,
) -> Status {
    guard(|| unsafe {
        has_room("num_found", num_found, 1, 1)?;
        has_room("blocks", blocks, capacity, capacity)?;
        let next = POOLS.with(pool.id, |pool| Ok(pool.preview(capacity)?))?;
        write("blocks", &next, blocks, capacity)?;
        put("num_found", next.len(), num_found)
    })
}

/// Gives up everything that the index knows under the salt. Blocks that are held stay held.
///
/// # Safety
/// The array has the length that is said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_pool_forget(pool: Pool, salt: *const u8, salt_len: usize) -> Status {
    guard(|| unsafe {
        let salt = read("salt", salt, salt_len)?;
        POOLS.with(pool.id, |pool| Ok(pool.forget(Some(salt))?))
    })
}

/// Gives up everything that the index knows, under every salt.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_pool_forget_all(pool: Pool) -> Status {
    guard(|| POOLS.with(pool.id, |pool| Ok(pool.forget(None)?)))
}

/// Says that this step and every step before it are complete, and frees what was dropped after them.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_pool_complete(pool: Pool, step: u64) -> Status {
    guard(|| POOLS.with(pool.id, |pool| Ok(pool.complete(step)?)))
}

/// How often the block is held, the index not counted. O(1).
///
/// # Safety
/// `refs` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_pool_refs(pool: Pool, block: i32, refs: *mut u32) -> Status {
    guard(|| unsafe { put("refs", POOLS.with(pool.id, |pool| Ok(pool.refs(block)?))?, refs) })
}

/// The counts of the pool. O(1).
///
/// # Safety
/// `info` points to the structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_pool_info_of(pool: Pool, info: *mut PoolInfo) -> Status {
    guard(|| unsafe { put("info", POOLS.with(pool.id, |pool| Ok(counts(pool)))?, info) })
}

fn counts(pool: &BlockPool) -> PoolInfo {
    let (num_indexed, num_evictions) = pool.index_size();
    PoolInfo {
        num_blocks: pool.config().num_blocks as usize,
        num_free: pool.num_free(),
        num_cached: pool.num_cached(),
        num_fenced: pool.num_fenced(),
        num_indexed,
        num_evictions,
        digest: pool.digest().unwrap_or(0),
    }
}

/// Audits the pool: SPECPOOL_CORRUPT with the first finding. O(blocks).
#[unsafe(no_mangle)]
pub extern "C" fn specpool_pool_check(pool: Pool) -> Status {
    guard(|| POOLS.with(pool.id, |pool| Ok(pool.check()?)))
}

/// Ends the event log and writes it out. Verbs are refused from then on.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_pool_close(pool: Pool) -> Status {
    guard(|| POOLS.with(pool.id, |pool| Ok(pool.close()?)))
}
