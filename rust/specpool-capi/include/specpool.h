// specpool: the KV-cache memory manager for speculative decoding, for C and C++ (docs/c_api.md).
//
// Made from rust/specpool-capi by `make capi`. Do not edit.
//
// Every call returns SPECPOOL_OK, or what went wrong; specpool_error_message() then has the numbers. A refused call
// changes nothing. A handle may be used from any thread, one call at a time: a call while another is inside returns
// SPECPOOL_BUSY. A handle that was destroyed, or never made, returns SPECPOOL_BAD_HANDLE. Arrays are read and written
// only during the call, except where a comment says how long a pointer is valid. A pointer may be NULL where its count
// is 0. Texts are UTF-8 and end with NUL; a tag may be NULL.

#ifndef SPECPOOL_H
#define SPECPOOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// What a call returns.
typedef enum {
  // Done.
  SPECPOOL_OK = 0,
  // Too few pages or blocks: specpool_error_shortage() has the numbers.
  SPECPOOL_OUT_OF_PAGES = 1,
  // Every row is taken.
  SPECPOOL_OUT_OF_ROWS = 2,
  // The machine has too little memory.
  SPECPOOL_OUT_OF_MEMORY = 3,
  // A claim would pass the end of a row.
  SPECPOOL_ROW_OVERFLOW = 4,
  // Rows have reached the end of the context: specpool_error_rows() lists them.
  SPECPOOL_CONTEXT_END = 5,
  // A page or block is not in the state that the call needs: freed twice, foreign, still in use.
  SPECPOOL_PAGE_STATE = 6,
  // A step was prepared with a row that has been released since: cancel it.
  SPECPOOL_STALE_PLAN = 7,
  // A call out of order.
  SPECPOOL_ORDER = 8,
  // A row cannot take part yet.
  SPECPOOL_NOT_READY = 9,
  // The draft KV of a row is behind its target KV.
  SPECPOOL_DRAFT_LAG = 10,
  // An argument has a wrong value, length or combination; a pointer is NULL.
  SPECPOOL_BAD_ARGUMENT = 11,
  // A configuration that cannot work.
  SPECPOOL_CONFIG = 12,
  // An audit found a broken invariant, or a call before this one panicked.
  SPECPOOL_CORRUPT = 13,
  // An event log cannot be written.
  SPECPOOL_RECORD = 14,
  // The handle was destroyed or never made.
  SPECPOOL_BAD_HANDLE = 15,
  // Another thread is inside a call of this handle.
  SPECPOOL_BUSY = 16,
} specpool_status;

// What an event says.
typedef enum {
  // Positions start..end of the row hold verified KV, and every step that writes them is complete.
  SPECPOOL_COMMIT = 0,
  // A page copy of verified KV is done: `copy` says from where to where.
  SPECPOOL_MOVE = 1,
  // Positions start..end of the row have left its pages in the group.
  SPECPOOL_EVICT = 2,
  // What lies at position `start` or behind it in the row is void, in every group; 0: the row was given back.
  SPECPOOL_REWIND = 3,
} specpool_kv_event_kind;

// The numbers of SPECPOOL_OUT_OF_PAGES.
typedef struct {
  // Pages that the call needs.
  size_t need;
  // Pages that hold nothing.
  size_t free;
  // Pages that only the prefix index holds; they can be handed out too.
  size_t cached;
  // Freed pages that a launched step may still touch: they come back with specpool_ledger_complete.
  size_t fenced;
  // Pages whose every holder is idle.
  size_t reclaimable;
} specpool_shortage;

// What a pool is built from. Start with specpool_pool_config_default().
typedef struct {
  // Blocks in all.
  int64_t num_blocks;
  // Tokens of a block.
  int64_t block_size;
  // The id of the first block: 0, or 1 if the engine keeps block 0 for padding.
  int64_t first_id;
  // Whether specpool_pool_put keeps what blocks hold.
  bool caching;
  // Whether specpool_pool_drop may name a step that still touches the blocks.
  bool fencing;
  // Whether a digest of the calls is kept.
  bool digest;
  // The file of the event log; NULL: none.
  const char *record;
  // Most bytes of the log.
  uint64_t record_limit;
} specpool_pool_config;

// A pool of blocks for an engine with rows and lengths of its own. {0} is no pool.
typedef struct {
  // The number behind the handle.
  uint64_t id;
} specpool_pool;

// The counts of a pool: free + cached + fenced + held = num_blocks.
typedef struct {
  // Blocks in all.
  size_t num_blocks;
  // Blocks that hold nothing.
  size_t num_free;
  // Blocks that nobody holds and whose content is known; they can be taken too.
  size_t num_cached;
  // Blocks that were dropped and that a step may still touch.
  size_t num_fenced;
  // Blocks that the index knows.
  size_t num_indexed;
  // How many blocks the index gave up to make room.
  uint64_t num_evictions;
  // The digest of the calls; 0 without one.
  uint64_t digest;
} specpool_pool_info;

// Pages, rows and lengths, and the rules between them (docs/contract.md). {0} is no ledger.
typedef struct {
  // The number behind the handle.
  uint64_t id;
} specpool_ledger;

// The state of a state group: free + cached + fenced + held = num_slots.
typedef struct {
  // State slots in all.
  size_t num_slots;
  // Slots that hold nothing.
  size_t num_free;
  // Slots that only soft marks and the prefix index keep.
  size_t num_cached;
  // Slots given back that a launched step may still touch.
  size_t num_fenced;
  // Slots whose every holder is idle.
  size_t num_reclaimable;
  // R: records that the device's ring of one row must hold. Position p lies at p % R.
  int64_t ring_len;
} specpool_state_group_info;

// The states of a row. Slot 0 is a state of no tokens.
typedef struct {
  // The row's slot.
  int32_t slot;
  // c: tokens that it contains.
  int32_t len;
  // The slot that specpool_ledger_end_turn keeps for the row.
  int32_t kept_slot;
  // Tokens that this contains.
  int32_t kept_len;
  // Soft marks that wait for specpool_ledger_index.
  size_t num_soft_marks;
} specpool_row_state_info;

// A group: layers that share one page table.
typedef struct {
  // The name in errors.
  const char *name;
  // P: slots of a page.
  int64_t page_size;
  // Number of pages.
  int64_t num_pages;
  // Whether the draft model's branches lie in its rows.
  bool hosts_drafts;
  // Whether each branch has pages of its own (for readers of whole pages); false: dense.
  bool holey;
  // A query sees only the last `window` positions; 0: all of them.
  int64_t window;
  // Beside its window, a query sees the first `sink` positions; 0: none. Only a group with a window has them.
  int64_t sink;
} specpool_group_config;

// What one round of one row may do.
typedef struct {
  // S: draft depth.
  uint32_t num_steps;
  // K: branches.
  uint32_t topk;
  // N: nodes verified, including the root.
  uint32_t num_draft_tokens;
} specpool_shape;

// A state group: one slot a row for the states of all recurrent layers. A ledger has one at most.
typedef struct {
  // The name in errors.
  const char *name;
  // State slots, besides slot 0: at least 1, with sessions 2.
  int64_t num_slots;
  // A round folds if at least this many resolved tokens are not in the slot, at least 1. A greater number saves writes
  // of states, and makes the ring longer.
  int64_t flush;
  // Whether a round of one node with nothing in flight folds its root too.
  bool eager;
} specpool_state_group_config;

// What a ledger is built from. Start with specpool_ledger_config_default().
typedef struct {
  // The groups, at least one.
  const specpool_group_config *groups;
  // Their number.
  size_t num_groups;
  // All shapes that may ever run. Shape 0, a plain round of one token, is put first if it is not there.
  const specpool_shape *shapes;
  // Their number.
  size_t num_shapes;
  // Rows, besides row 0.
  int64_t num_rows;
  // L: tokens of the longest sequence.
  int64_t max_context_len;
  // Most rows in one step; 0: all.
  int64_t max_batch;
  // D: rounds that may be prepared before the previous one is resolved.
  int64_t overlap_depth;
  // Whether to reserve lo + (D+1) * W for a round, as SGLang does, instead of what it can write.
  bool double_buffer;
  // Whether drafting depends on draft KV.
  bool draft_kv;
  // Most tokens of one extend; 0: no limit.
  int64_t max_chunk;
  // Whether specpool_ledger_end_turn is used.
  bool sessions;
  // Whether freed pages wait for the launched steps that may touch them.
  bool page_fencing;
  // Whether a digest of the calls is kept.
  bool digest;
  // The file of the event log; NULL: none.
  const char *record;
  // Most bytes of the log.
  uint64_t record_limit;
  // The state groups of a hybrid model; NULL: none.
  const specpool_state_group_config *states;
  // Their number, at most 1.
  size_t num_states;
} specpool_ledger_config;

// The state of a row.
typedef struct {
  // r: tokens whose KV is final.
  int32_t resolved_len;
  // k: rounds prepared and not resolved.
  int32_t in_flight;
  // Draft KV is valid below this.
  int32_t drafted_len;
  // Counts the cuts and releases of the row.
  uint64_t epoch;
  // Whether a request has the row.
  bool is_live;
  // Whether it is between two turns of a session.
  bool is_idle;
  // Whether a round may be prepared: an extend of the row has launched since it was admitted or cut.
  bool has_root;
} specpool_row_info;

// The state of a group: free + cached + fenced + held = num_pages.
typedef struct {
  // Pages in all.
  size_t num_pages;
  // Pages that hold nothing.
  size_t num_free;
  // Pages that only the prefix index holds.
  size_t num_cached;
  // Freed pages that a launched step may still touch.
  size_t num_fenced;
  // Pages whose every holder is idle.
  size_t num_reclaimable;
  // Columns of the page table.
  size_t pages_per_row;
  // Slots of a row.
  int64_t row_width;
} specpool_group_info;

// What a prefix or an export has in one group.
typedef struct {
  // Its tokens.
  int32_t len;
  // Draft KV is valid below this position.
  int32_t drafted_len;
  // Column of its first page behind the sink. What lies between the sink and it is below the window.
  size_t first_column;
  // Its pages in the group, one for each column: first those of the sink, then those from first_column on.
  size_t num_pages;
  // Its first pages that are of the group's sink: their columns are 0, 1, and so on. 0 without a sink, and if the window
  // reaches back to the sink.
  size_t num_sinks;
  // The state slot that contains the tokens of an export; 0 without a state group.
  int32_t state_slot;
} specpool_prefix_info;

// Copies the first `tokens` slots of page `src` to page `dst`, in every layer of the group.
typedef struct {
  // The group's index.
  int32_t group;
  // The page that is read.
  int32_t src;
  // The page that is written.
  int32_t dst;
  // Slots that are copied.
  int32_t tokens;
} specpool_page_copy;

// What a prepare decided. The pointers are valid until the step is over (complete, and a decode resolved), is
// cancelled, or the ledger is destroyed; `step` stays.
typedef struct {
  // The step's number.
  uint64_t step;
  // b: rows that take part.
  size_t num_lanes;
  // [b]: the rows.
  const int32_t *rows;
  // [b]: the shapes of a decode.
  const int32_t *shapes;
  // [b]: the epochs of the rows.
  const uint64_t *epochs;
  // [b]: the least length that a row can have when the step runs.
  const int32_t *lo;
  // [b]: the greatest.
  const int32_t *hi;
  // [b]: an extend writes from here on.
  const int32_t *start;
  // [b]: an extend writes up to here.
  const int32_t *new_len;
  // [num_groups, b]: slots that the row had.
  const int32_t *allocated_before;
  // [num_groups, b]: slots that it has now.
  const int32_t *allocated_after;
  // Number of state groups: 0 or 1. Without one the four pointers that follow are NULL.
  size_t num_states;
  // [num_states, b]: the state slot that each lane reads; 0 is a state of zeros.
  const int32_t *state_src;
  // [num_states, b]: the state slot that each lane writes; 0 if it folds nothing.
  const int32_t *state_dst;
  // [num_states, b]: tokens that state_src contains.
  const int32_t *state_from;
  // [num_states, b]: each lane folds the tokens from state_from up to here.
  const int32_t *state_to;
  // Copies to be made in this order, before the step's forward.
  const specpool_page_copy *page_copies;
  // Their number.
  size_t num_page_copies;
} specpool_plan;

// A change of verified KV, for a connector that copies it elsewhere.
typedef struct {
  // What happened.
  specpool_kv_event_kind kind;
  // The row.
  int32_t row;
  // The group's index; -1 for SPECPOOL_REWIND.
  int32_t group;
  // The first position; 0 for SPECPOOL_MOVE.
  int32_t start;
  // Behind the last position; 0 for SPECPOOL_MOVE, INT32_MAX for SPECPOOL_REWIND.
  int32_t end;
  // The pages of SPECPOOL_MOVE.
  specpool_page_copy copy;
} specpool_kv_event;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The message of this thread's last error: one line with the numbers; "" if there was none. Valid until this thread's
// next call that fails.
const char *specpool_error_message(void);

// The numbers of this thread's last error, all 0 if it was not SPECPOOL_OUT_OF_PAGES.
specpool_shortage specpool_error_shortage(void);

// The rows of this thread's last error, none if it was not SPECPOOL_CONTEXT_END. Writes up to `capacity` of them and
// returns how many there are.
// `rows` points to `capacity` integers, or `capacity` is 0.
size_t specpool_error_rows(int32_t *rows, size_t capacity);

// The version of the library, such as "0.1.0".
const char *specpool_version(void);

// A configuration with caching, whose first block is 0.
specpool_pool_config specpool_pool_config_default(int64_t num_blocks, int64_t block_size);

// Makes a pool of free blocks.
// `config` and `pool` point to their structures.
specpool_status specpool_pool_create(const specpool_pool_config *config, specpool_pool *pool);

// Destroys the pool; an event log is closed.
specpool_status specpool_pool_destroy(specpool_pool pool);

// Takes `count` blocks, and holds those of `hold` once more (a match, or blocks of another request): both or neither.
// If free blocks do not suffice, cached ones are given up. `blocks` has room for `count`. O(blocks).
// The arrays have the lengths that are said.
specpool_status specpool_pool_take(specpool_pool pool,
                                   size_t count,
                                   const int32_t *hold,
                                   size_t num_hold,
                                   const char *tag,
                                   int32_t *blocks);

// Whether specpool_pool_take of the same `count` and `hold` would succeed.
// The arrays have the lengths that are said.
specpool_status specpool_pool_fits(specpool_pool pool, size_t count, const int32_t *hold, size_t num_hold, bool *fits);

// Lets go of each block once, the last one first. `after` is the last step that may still touch them, or -1.
// The array has the length that is said.
specpool_status specpool_pool_drop(specpool_pool pool, const int32_t *blocks, size_t num_blocks, int64_t after);

// Finds the blocks of the longest beginning of the tokens that the index knows, at most `capacity` of them, and writes
// how many to `num_found`. It changes nothing: take them with specpool_pool_take's `hold`. O(tokens).
// The arrays have the lengths that are said.
specpool_status specpool_pool_match(specpool_pool pool,
                                    const int32_t *tokens,
                                    size_t num_tokens,
                                    const uint8_t *salt,
                                    size_t salt_len,
                                    int32_t *blocks,
                                    size_t capacity,
                                    size_t *num_found);

// Notes that `blocks[i]` holds the i-th block of the tokens; `blocks` has one entry for each whole block, or more.
// Blocks before `start` were noted before, or come from a match. `known`, which may be NULL, gets for each whole block
// from `start` on the one that the index has: the same, or another that was first. O(tokens), and O(tokens behind
// `start`) if the index knows the block two before `start`.
// The arrays have the lengths that are said; `known` has room for the whole blocks from `start` on.
specpool_status specpool_pool_put(specpool_pool pool,
                                  const int32_t *tokens,
                                  size_t num_tokens,
                                  const int32_t *blocks,
                                  size_t num_blocks,
                                  size_t start,
                                  const uint8_t *salt,
                                  size_t salt_len,
                                  int32_t *known);

// Notes that the caller's own index knows what the blocks hold: when nobody holds them any more they are cached, not
// free. specpool_pool_match does not find them. A block that is kept already stays as it is. O(blocks).
// The array has the length that is said.
specpool_status specpool_pool_keep(specpool_pool pool, const int32_t *blocks, size_t num_blocks);

// Undoes specpool_pool_keep: a block that nobody holds is free. A block that is not kept stays as it is. O(blocks).
// The array has the length that is said.
specpool_status specpool_pool_unkeep(specpool_pool pool, const int32_t *blocks, size_t num_blocks);

// Writes the blocks that specpool_pool_take would give, in order, and their number: `capacity` of them, or all that can
// be taken if these are fewer. It changes nothing: caches outside can give up what they know of these blocks. O(blocks).
// `blocks` has room for `capacity` entries; `num_found` points to a number.
specpool_status specpool_pool_preview(specpool_pool pool,
                                      int32_t *blocks,
                                      size_t capacity,
                                      size_t *num_found);

// Gives up everything that the index knows under the salt. Blocks that are held stay held.
// The array has the length that is said.
specpool_status specpool_pool_forget(specpool_pool pool, const uint8_t *salt, size_t salt_len);

// Gives up everything that the index knows, under every salt.
specpool_status specpool_pool_forget_all(specpool_pool pool);

// Says that this step and every step before it are complete, and frees what was dropped after them.
specpool_status specpool_pool_complete(specpool_pool pool, uint64_t step);

// How often the block is held, the index not counted. O(1).
// `refs` points to a number.
specpool_status specpool_pool_refs(specpool_pool pool, int32_t block, uint32_t *refs);

// The counts of the pool. O(1).
// `info` points to the structure.
specpool_status specpool_pool_info_of(specpool_pool pool, specpool_pool_info *info);

// Audits the pool: SPECPOOL_CORRUPT with the first finding. O(blocks).
specpool_status specpool_pool_check(specpool_pool pool);

// Ends the event log and writes it out. Verbs are refused from then on.
specpool_status specpool_pool_close(specpool_pool pool);

// The state of a state group. O(1).
// `info` points to the structure.
specpool_status specpool_ledger_state_group(specpool_ledger ledger, size_t group, specpool_state_group_info *info);

// The states of a row in a state group. O(soft marks).
// `info` points to the structure.
specpool_status specpool_ledger_row_state(specpool_ledger ledger,
                                          size_t group,
                                          int32_t row,
                                          specpool_row_state_info *info);

// A configuration of a synchronous ledger with the exact policy. The arrays must live until the ledger is made.
// The pointers are only kept here.
specpool_ledger_config specpool_ledger_config_default(const specpool_group_config *groups,
                                                      size_t num_groups,
                                                      const specpool_shape *shapes,
                                                      size_t num_shapes,
                                                      int64_t num_rows,
                                                      int64_t max_context_len);

// Makes an empty ledger.
// `config`, its arrays and `ledger` point to what is said.
specpool_status specpool_ledger_create(const specpool_ledger_config *config, specpool_ledger *ledger);

// Destroys the ledger; an event log is closed.
specpool_status specpool_ledger_destroy(specpool_ledger ledger);

// Takes a free row: `tag` names the request in errors.
// `tag` is a text or NULL, `row` points to a number.
specpool_status specpool_ledger_admit(specpool_ledger ledger, const char *tag, int32_t *row);

// Takes a free row that begins with the KV of the longest indexed beginning of the tokens, up to `limit` of them (-1:
// all but the last), and writes its length. With `needs_draft` only as far as draft KV is valid. O(tokens).
// The arrays have the lengths that are said; `row` and `len` point to numbers.
specpool_status specpool_ledger_admit_cached(specpool_ledger ledger,
                                             const int32_t *tokens,
                                             size_t num_tokens,
                                             const uint8_t *salt,
                                             size_t salt_len,
                                             int64_t limit,
                                             bool needs_draft,
                                             const char *tag,
                                             int32_t *row,
                                             int32_t *len);

// The length that specpool_ledger_admit_cached would give. It changes nothing. O(tokens).
// The arrays have the lengths that are said; `len` points to a number.
specpool_status specpool_ledger_match_prefix(specpool_ledger ledger,
                                             const int32_t *tokens,
                                             size_t num_tokens,
                                             const uint8_t *salt,
                                             size_t salt_len,
                                             int64_t limit,
                                             bool needs_draft,
                                             int32_t *len);

// How many of the tokens, up to `limit` (-1: all but the last), have their KV in the prefix index, whatever the states
// that it has: end an extend one token behind them and keep its lane, and the next text that begins with them finds its
// state. O(tokens).
// The arrays have the lengths that are said; `len` points to a number.
specpool_status specpool_ledger_known_prefix(specpool_ledger ledger,
                                             const int32_t *tokens,
                                             size_t num_tokens,
                                             const uint8_t *salt,
                                             size_t salt_len,
                                             int64_t limit,
                                             int32_t *len);

// The state slot that specpool_ledger_admit_cached would share, and the tokens that it contains; both 0 if there is none.
// With these tokens less one as the next `limit` it walks the states of a text, from the longest on. O(tokens).
// The arrays have the lengths that are said; `slot` and `len` point to a number each.
specpool_status specpool_ledger_match_state(specpool_ledger ledger,
                                            const int32_t *tokens,
                                            size_t num_tokens,
                                            const uint8_t *salt,
                                            size_t salt_len,
                                            int64_t limit,
                                            int32_t *slot,
                                            int32_t *len);

// Adds the row's tokens to the prefix index and writes how many the index knows. O(tokens).
// The arrays have the lengths that are said; `known`, which may be NULL, points to a number.
specpool_status specpool_ledger_index(specpool_ledger ledger,
                                      int32_t row,
                                      const int32_t *tokens,
                                      size_t num_tokens,
                                      const uint8_t *salt,
                                      size_t salt_len,
                                      int32_t *known);

// Gives up what is indexed under the salt. Rows keep their pages.
// The array has the length that is said.
specpool_status specpool_ledger_forget(specpool_ledger ledger, const uint8_t *salt, size_t salt_len);

// Gives up everything that is indexed.
specpool_status specpool_ledger_forget_all(specpool_ledger ledger);

// Takes a free row with the same tokens as `parent`: whole pages are shared, the tail is copied by the next step.
// `tag` is a text or NULL, `row` points to a number.
specpool_status specpool_ledger_fork(specpool_ledger ledger, int32_t parent, const char *tag, int32_t *row);

// Holds the whole pages of the row's first `len` tokens, whatever becomes of the row.
// `prefix` points to a number.
specpool_status specpool_ledger_pin_prefix(specpool_ledger ledger, int32_t row, int32_t len, uint64_t *prefix);

// Lets go of a pinned prefix.
specpool_status specpool_ledger_release_prefix(specpool_ledger ledger, uint64_t prefix);

// Takes a free row on the first `len` tokens of a pinned prefix (-1: all).
// `tag` is a text or NULL, `row` points to a number.
specpool_status specpool_ledger_admit_on(specpool_ledger ledger,
                                         uint64_t prefix,
                                         int64_t len,
                                         const char *tag,
                                         int32_t *row);

// Cuts the row to at most `len` tokens and writes how many it has then: feed tokens from there.
// `cut` points to a number.
specpool_status specpool_ledger_trim(specpool_ledger ledger, int32_t row, int32_t len, int32_t *cut);

// Trims the row of a session that stays: its pages become reclaimable until its next prepare.
// `cut` points to a number.
specpool_status specpool_ledger_end_turn(specpool_ledger ledger, int32_t row, int32_t len, int32_t *cut);

// Takes everything from a row whose request will come back later.
specpool_status specpool_ledger_retract(specpool_ledger ledger, int32_t row);

// Takes everything from a row whose request is done.
specpool_status specpool_ledger_finish(specpool_ledger ledger, int32_t row);

// Takes everything from a row whose request was given up.
specpool_status specpool_ledger_abort(specpool_ledger ledger, int32_t row);

// Writes the row's line of the page table, and how many columns it has. Page 0 means none.
// `pages` has room for `capacity` entries; `count` points to a number.
specpool_status specpool_ledger_row_pages(specpool_ledger ledger,
                                          size_t group,
                                          int32_t row,
                                          int32_t *pages,
                                          size_t capacity,
                                          size_t *count);

// The state of a row. O(1).
// `info` points to the structure.
specpool_status specpool_ledger_row(specpool_ledger ledger, int32_t row, specpool_row_info *info);

// The state of a group. O(1).
// `info` points to the structure.
specpool_status specpool_ledger_group(specpool_ledger ledger, size_t group, specpool_group_info *info);

// The digest of the calls; 0 without one.
// `digest` points to a number.
specpool_status specpool_ledger_digest(specpool_ledger ledger, uint64_t *digest);

// Audits the ledger: SPECPOOL_CORRUPT with the first finding. O(pages).
specpool_status specpool_ledger_check(specpool_ledger ledger);

// Ends the event log and writes it out. Verbs are refused from then on.
specpool_status specpool_ledger_close(specpool_ledger ledger);

// Makes a prefix cache outside the ledger a holder of the row's pages of the tokens start..end, in every group.
// specpool_ledger_row_pages says which they are. They are read-only from now on, and outlive the row until
// specpool_ledger_release_lent. Both bounds are multiples of every group's page size. O(pages).
specpool_status specpool_ledger_lend(specpool_ledger ledger, int32_t row, int32_t start, int32_t end);

// Puts lent pages in place of the row's own pages of the tokens start..end, which hold the same: the row becomes a
// holder of them and gives its own back. One page for each column, group after group; 0 where a window has passed.
// O(pages of the row).
// The array has the length that is said.
specpool_status specpool_ledger_rebind(specpool_ledger ledger,
                                       int32_t row,
                                       int32_t start,
                                       int32_t end,
                                       const int32_t *pages,
                                       size_t num_pages);

// Takes a free row on `len` tokens whose KV is in lent pages, and shares them. One page for each column, group after
// group; 0 for those below the group's window. O(pages).
// The array has the length that is said; `tag` is a text or NULL, `row` points to a number.
specpool_status specpool_ledger_admit_lent(specpool_ledger ledger,
                                           const int32_t *pages,
                                           size_t num_pages,
                                           int32_t len,
                                           const char *tag,
                                           int32_t *row);

// Notes that the cache outside holds these pages of the group no longer. Rows that share them keep them. All or none.
// O(pages).
// The array has the length that is said.
specpool_status specpool_ledger_release_lent(specpool_ledger ledger,
                                             size_t group,
                                             const int32_t *pages,
                                             size_t num_pages);

// Writes the pages of the group that are lent, ascending, and their number. O(pages).
// `pages` has room for `capacity` entries; `count` points to a number.
specpool_status specpool_ledger_lent_pages(specpool_ledger ledger,
                                           size_t group,
                                           int32_t *pages,
                                           size_t capacity,
                                           size_t *count);

// Gives the row back, and keeps the pages of all its tokens as a prefix, also a partly filled last one. They are
// read-only until specpool_ledger_release_prefix: read them and send them. specpool_ledger_admit_on makes a row of them
// again. Nothing of the row may be in flight. With a state group the prefix has the tokens that the row's state contains,
// and its slot. O(pages).
// `prefix` points to a number.
specpool_status specpool_ledger_export(specpool_ledger ledger,
                                       int32_t row,
                                       uint64_t *prefix);

// Takes a free row of `len` tokens on pages of its own, for KV that comes from elsewhere; draft KV is valid below
// `drafted_len`. Write the pages, which specpool_ledger_row_pages names, before the next launch and behind every
// launched forward. With a state group, write the row's slot too, which specpool_ledger_row_state names. If the KV does
// not arrive, specpool_ledger_abort takes the row back. O(pages).
// `tag` is a text or NULL, `row` points to a number.
specpool_status specpool_ledger_import_row(specpool_ledger ledger,
                                           int32_t len,
                                           int32_t drafted_len,
                                           const char *tag,
                                           int32_t *row);

// Writes what a prefix or an export has in the group, and its pages there. With a capacity of 0 and NULL, only the
// former. O(pages).
// `pages` has room for `capacity` entries; `info` points to a structure.
specpool_status specpool_ledger_prefix_pages(specpool_ledger ledger,
                                             uint64_t prefix,
                                             size_t group,
                                             int32_t *pages,
                                             size_t capacity,
                                             specpool_prefix_info *info);

// Claims pages for a prefill or a chunk of every row: its tokens up to `new_lens[i]`. All rows or none.
// The arrays have `num_rows` entries; `plan` points to its structure.
specpool_status specpool_ledger_prepare_extend(specpool_ledger ledger,
                                               const int32_t *rows,
                                               const int32_t *new_lens,
                                               size_t num_rows,
                                               bool writes_draft,
                                               specpool_plan *plan);

// A specpool_ledger_prepare_extend whose lanes `keep`, ascending, leave a soft mark on their states, of new_len - 1
// tokens each: specpool_ledger_index then finds them, although a round has folded on before.
// `rows` and `new_lens` have `num_rows` entries, `keep` has `num_kept`; `plan` points to its structure.
specpool_status specpool_ledger_prepare_extend_keeping(specpool_ledger ledger,
                                                       const int32_t *rows,
                                                       const int32_t *new_lens,
                                                       size_t num_rows,
                                                       const int32_t *keep,
                                                       size_t num_kept,
                                                       bool writes_draft,
                                                       specpool_plan *plan);

// Claims pages for one round of every row. All rows or none.
// The arrays have `num_rows` entries; `plan` points to its structure.
specpool_status specpool_ledger_prepare_decode(specpool_ledger ledger,
                                               const int32_t *rows,
                                               const int32_t *shapes,
                                               size_t num_rows,
                                               bool writes_draft,
                                               specpool_plan *plan);

// The slots that specpool_ledger_prepare_decode of the same rows would claim, per group. It changes nothing.
// `rows` and `shapes` have `num_rows` entries, `tokens` has `num_groups`.
specpool_status specpool_ledger_tokens_required(specpool_ledger ledger,
                                                const int32_t *rows,
                                                const int32_t *shapes,
                                                size_t num_rows,
                                                int64_t *tokens,
                                                size_t num_groups);

// Marks the step as enqueued. Call it in step order, before the first copy, table delta or kernel of the step.
specpool_status specpool_ledger_launch(specpool_ledger ledger, uint64_t step);

// Counts a round's tokens: `accept_lens[lane]`, the bonus token included.
// The array has `num_lanes` entries.
specpool_status specpool_ledger_resolve(specpool_ledger ledger,
                                        uint64_t step,
                                        const int32_t *accept_lens,
                                        size_t num_lanes);

// Says that this step and every step before it have finished on the device.
specpool_status specpool_ledger_complete(specpool_ledger ledger, uint64_t step);

// Undoes the newest step that is not launched.
specpool_status specpool_ledger_cancel(specpool_ledger ledger, uint64_t step);

// Gives up a launched step whose forward failed: its rows are retracted.
specpool_status specpool_ledger_abandon(specpool_ledger ledger, uint64_t step);

// Writes the pending changes of one group's page table, `table[rows[i]][columns[i]] = pages[i]`, and their number. They
// stay pending until specpool_ledger_ack_delta: with too little room the call can be made again.
// The arrays have room for `capacity` entries each; `count` points to a number.
specpool_status specpool_ledger_take_delta(specpool_ledger ledger,
                                           uint64_t step,
                                           size_t group,
                                           int32_t *rows,
                                           int32_t *columns,
                                           int32_t *pages,
                                           size_t capacity,
                                           size_t *count);

// Says that the changes taken for the step, of every group, are applied.
specpool_status specpool_ledger_ack_delta(specpool_ledger ledger, uint64_t step);

// Starts to note the events that specpool_ledger_poll_kv_events tells.
specpool_status specpool_ledger_watch_kv(specpool_ledger ledger);

// Calls `on_event` for each change of verified KV since the last call: first what is void, then what was copied, then
// what is verified. Call it before each launch: then no position that was told is overwritten before its rewind or
// evict. The ledger is not locked while `on_event` runs, so it may ask for pages. It must not throw or jump out.
// `on_event` is a function that may be called with `context`.
specpool_status specpool_ledger_poll_kv_events(specpool_ledger ledger,
                                               void (*on_event)(void *context, const specpool_kv_event *event),
                                               void *context);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SPECPOOL_H */
