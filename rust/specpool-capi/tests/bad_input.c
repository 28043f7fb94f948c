// Everything that a caller can get wrong: one code and one line for each, and the pool and the ledger stay as they were.
#include "specpool.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static specpool_pool pool;
static specpool_ledger ledger;
static uint64_t before;

static uint64_t state(void) {
  specpool_pool_info info;
  uint64_t digest = 0;
  if (specpool_pool_info_of(pool, &info) != SPECPOOL_OK || specpool_ledger_digest(ledger, &digest) != SPECPOOL_OK) abort();
  if (specpool_pool_check(pool) != SPECPOOL_OK || specpool_ledger_check(ledger) != SPECPOOL_OK) abort();
  return digest * 31 + info.digest + info.num_free;
}

#define REFUSED(call, code, words)                                                                          \
  do {                                                                                                      \
    specpool_status status = (call);                                                                        \
    if (status != (code) || !strstr(specpool_error_message(), words) || state() != before) {                \
      fprintf(stderr, "line %d: status %d, %s\n", __LINE__, (int)status, specpool_error_message());         \
      exit(1);                                                                                              \
    }                                                                                                       \
  } while (0)

#define DONE(call)                                                                                          \
  do {                                                                                                      \
    specpool_status status = (call);                                                                        \
    if (status != SPECPOOL_OK) {                                                                            \
      fprintf(stderr, "line %d: status %d, %s\n", __LINE__, (int)status, specpool_error_message());         \
      exit(1);                                                                                              \
    }                                                                                                       \
    before = state();                                                                                       \
  } while (0)

static void *other_thread(void *message) {
  int32_t block;
  specpool_pool none = {0};
  *(char *)message = specpool_error_message()[0];  // the main thread's error is not this thread's
  if (specpool_pool_take(none, 1, NULL, 0, NULL, &block) != SPECPOOL_BAD_HANDLE) abort();
  return NULL;
}

static void on_event(void *context, const specpool_kv_event *event) {
  int32_t pages[64];
  size_t count;
  // The ledger can be asked while events are told.
  if (specpool_ledger_row_pages(ledger, (size_t)event->group, event->row, pages, 64, &count) != SPECPOOL_OK) abort();
  *(int *)context += event->kind == SPECPOOL_COMMIT && event->start == 0 && event->end == 9 && pages[0] > 0;
}

// Takes a block and gives it back, many times. Another thread may be inside the pool: then the call is refused.
static void *hammer(void *unused) {
  for (int turn = 0; turn < 200; turn++) {
    int32_t block;
    specpool_status status = specpool_pool_take(pool, 1, NULL, 0, "hammer", &block);
    if (status != SPECPOOL_OK && status != SPECPOOL_BUSY && status != SPECPOOL_OUT_OF_PAGES) abort();
    while (status == SPECPOOL_OK) {
      specpool_status dropped = specpool_pool_drop(pool, &block, 1, -1);
      if (dropped == SPECPOOL_OK) break;
      if (dropped != SPECPOOL_BUSY) abort();
    }
  }
  return unused;
}

static void on_nested(void *context, const specpool_kv_event *event) {
  (void)event;
  *(int *)context += 100;
}

// Asks for events again, and destroys the ledger that tells them.
static void on_last_event(void *context, const specpool_kv_event *event) {
  *(int *)context += 1;
  if (specpool_ledger_poll_kv_events(ledger, on_nested, context) != (*(int *)context == 1 ? SPECPOOL_OK : SPECPOOL_BAD_HANDLE)) abort();
  specpool_status destroyed = specpool_ledger_destroy(ledger);
  if (destroyed != (*(int *)context == 1 ? SPECPOOL_OK : SPECPOOL_BAD_HANDLE) || event->row < 1) abort();
}

int main(void) {
  specpool_pool_config wrong = specpool_pool_config_default(0, 4);
  specpool_pool_config right = specpool_pool_config_default(8, 4);
  right.digest = true;
  specpool_group_config group = {.name = "kv", .page_size = 4, .num_pages = 20, .hosts_drafts = true};
  specpool_shape shapes[] = {{.num_steps = 3, .topk = 1, .num_draft_tokens = 4}};
  specpool_ledger_config config = specpool_ledger_config_default(&group, 1, shapes, 1, 2, 40);
  config.digest = true;
  if (specpool_pool_create(&right, &pool) != SPECPOOL_OK) return 1;
  DONE(specpool_ledger_create(&config, &ledger));

  // Construction.
  specpool_pool unused;
  REFUSED(specpool_pool_create(&wrong, &unused), SPECPOOL_CONFIG, "num_blocks");
  REFUSED(specpool_pool_create(NULL, &unused), SPECPOOL_BAD_ARGUMENT, "config is NULL");
  REFUSED(specpool_pool_create(&right, NULL), SPECPOOL_BAD_ARGUMENT, "pool is NULL");
  specpool_ledger no_ledger;
  specpool_ledger_config bad = config;
  bad.groups = NULL;
  REFUSED(specpool_ledger_create(&bad, &no_ledger), SPECPOOL_BAD_ARGUMENT, "groups is NULL, and should have 1 entries");
  bad = config, bad.num_groups = 0;
  REFUSED(specpool_ledger_create(&bad, &no_ledger), SPECPOOL_CONFIG, "at least one group");
  specpool_group_config nameless = group;
  nameless.name = NULL;
  bad = config, bad.groups = &nameless;
  REFUSED(specpool_ledger_create(&bad, &no_ledger), SPECPOOL_BAD_ARGUMENT, "group 0 has no name");
  nameless.name = "\xff";
  REFUSED(specpool_ledger_create(&bad, &no_ledger), SPECPOOL_BAD_ARGUMENT, "UTF-8");
  specpool_group_config sinking = group;
  sinking.sink = 3;
  bad = config, bad.groups = &sinking;
  REFUSED(specpool_ledger_create(&bad, &no_ledger), SPECPOOL_CONFIG, "sink 3 needs a window");
  sinking.window = 5, sinking.sink = -1;
  REFUSED(specpool_ledger_create(&bad, &no_ledger), SPECPOOL_CONFIG, "sink must be in [0, 2147483647], got -1");
  sinking.sink = INT64_MAX;
  REFUSED(specpool_ledger_create(&bad, &no_ledger), SPECPOOL_CONFIG, "got 9223372036854775807");
  specpool_state_group_config states = {.name = "states", .num_slots = 2, .flush = 1};
  bad = config, bad.num_states = 1;
  REFUSED(specpool_ledger_create(&bad, &no_ledger), SPECPOOL_BAD_ARGUMENT, "states is NULL, and should have 1 entries");
  bad.states = &states, states.flush = 0;
  REFUSED(specpool_ledger_create(&bad, &no_ledger), SPECPOOL_CONFIG, "flush must be in [1, 2147483647], got 0");
  states.flush = 1, states.num_slots = INT64_MIN;
  REFUSED(specpool_ledger_create(&bad, &no_ledger), SPECPOOL_CONFIG, "got -9223372036854775808");
  states.num_slots = 2, states.name = NULL;
  REFUSED(specpool_ledger_create(&bad, &no_ledger), SPECPOOL_BAD_ARGUMENT, "state group 0 has no name");
  specpool_state_group_config two[2] = {{.name = "a", .num_slots = 2, .flush = 1}, {.name = "b", .num_slots = 2, .flush = 1}};
  bad.states = two, bad.num_states = 2;
  REFUSED(specpool_ledger_create(&bad, &no_ledger), SPECPOOL_CONFIG, "2");
  bad = config, bad.record = "/nowhere/at/all.log";
  REFUSED(specpool_ledger_create(&bad, &no_ledger), SPECPOOL_RECORD, "/nowhere/at/all.log");

  // Handles.
  specpool_pool none = {0}, wild = {0xdeadbeefcafe};
  int32_t blocks[8], other[8], row, hit;
  REFUSED(specpool_pool_take(none, 1, NULL, 0, NULL, blocks), SPECPOOL_BAD_HANDLE, "0x0 is no handle of a BlockPool");
  REFUSED(specpool_pool_drop(wild, blocks, 0, -1), SPECPOOL_BAD_HANDLE, "0xdeadbeefcafe");
  specpool_pool freed;
  DONE(specpool_pool_create(&right, &freed));
  DONE(specpool_pool_destroy(freed));
  REFUSED(specpool_pool_destroy(freed), SPECPOOL_BAD_HANDLE, "destroyed");
  REFUSED(specpool_pool_complete(freed, 1), SPECPOOL_BAD_HANDLE, "destroyed");

  // Blocks.
  REFUSED(specpool_pool_take(pool, 9, NULL, 0, "much", (int32_t[9]){0}), SPECPOOL_OUT_OF_PAGES, "need 9");
  if (specpool_error_shortage().need != 9 || specpool_error_shortage().free != 8) return 1;
  REFUSED(specpool_pool_take(pool, 1, NULL, 0, NULL, NULL), SPECPOOL_BAD_ARGUMENT, "blocks is NULL");
  REFUSED(specpool_pool_take(pool, 1, NULL, 1, NULL, blocks), SPECPOOL_BAD_ARGUMENT, "hold is NULL");
  REFUSED(specpool_pool_take(pool, 1, blocks, SIZE_MAX, NULL, other), SPECPOOL_BAD_ARGUMENT, "hold cannot have");
  REFUSED(specpool_pool_take(pool, SIZE_MAX, NULL, 0, NULL, blocks), SPECPOOL_OUT_OF_PAGES, "need");
  DONE(specpool_pool_take(pool, 2, NULL, 0, "one", blocks));
  REFUSED(specpool_pool_drop(pool, (int32_t[]){blocks[0], blocks[0]}, 2, -1), SPECPOOL_PAGE_STATE, "more often");
  REFUSED(specpool_pool_drop(pool, (int32_t[]){7}, 1, -1), SPECPOOL_PAGE_STATE, "nobody holds it");
  REFUSED(specpool_pool_drop(pool, (int32_t[]){8}, 1, -1), SPECPOOL_BAD_ARGUMENT, "0 to 7");
  REFUSED(specpool_pool_drop(pool, (int32_t[]){-1}, 1, -1), SPECPOOL_BAD_ARGUMENT, "0 to 7");
  REFUSED(specpool_pool_drop(pool, blocks, 1, 3), SPECPOOL_BAD_ARGUMENT, "without fencing");
  REFUSED(specpool_pool_drop(pool, blocks, 1, -2), SPECPOOL_BAD_ARGUMENT, "after");
  int32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  REFUSED(specpool_pool_put(pool, tokens, 8, blocks, 1, 0, NULL, 0, NULL), SPECPOOL_BAD_ARGUMENT, "blocks");
  REFUSED(specpool_pool_put(pool, tokens, 8, blocks, 2, 9, NULL, 0, NULL), SPECPOOL_BAD_ARGUMENT, "from block 9 on");
  DONE(specpool_pool_put(pool, tokens, 8, blocks, 2, 0, NULL, 0, other));
  if (other[0] != blocks[0] || other[1] != blocks[1]) return 1;
  size_t count;
  DONE(specpool_pool_match(pool, tokens, 8, NULL, 0, other, 8, &count));
  if (count != 2 || other[1] != blocks[1]) return 1;
  DONE(specpool_pool_match(pool, tokens, 8, NULL, 0, other, 1, &count));
  if (count != 1) return 1;
  uint8_t long_salt[257] = {0};
  REFUSED(specpool_pool_match(pool, tokens, 8, long_salt, 257, other, 8, &count), SPECPOOL_BAD_ARGUMENT, "256");

  // Rows and steps.
  specpool_plan plan;
  REFUSED(specpool_ledger_finish(ledger, 1), SPECPOOL_BAD_ARGUMENT, "row 1 is not admitted");
  REFUSED(specpool_ledger_admit(ledger, "\xff", &row), SPECPOOL_BAD_ARGUMENT, "UTF-8");
  REFUSED(specpool_ledger_admit(ledger, NULL, NULL), SPECPOOL_BAD_ARGUMENT, "row is NULL");
  DONE(specpool_ledger_watch_kv(ledger));
  DONE(specpool_ledger_admit(ledger, "one", &row));
  REFUSED(specpool_ledger_prepare_decode(ledger, &row, (int32_t[]){1}, 1, true, &plan), SPECPOOL_NOT_READY, "one");
  REFUSED(specpool_ledger_prepare_extend(ledger, &row, (int32_t[]){41}, 1, true, &plan), SPECPOOL_CONTEXT_END, "40");
  if (specpool_error_rows(&hit, 1) != 1 || hit != row) return 1;
  REFUSED(specpool_ledger_launch(ledger, 77), SPECPOOL_ORDER, "77");
  // A ledger without states.
  specpool_state_group_info group_of_states;
  specpool_row_state_info state_of_row;
  REFUSED(specpool_ledger_state_group(ledger, 0, &group_of_states), SPECPOOL_BAD_ARGUMENT, "0");
  REFUSED(specpool_ledger_row_state(ledger, 0, row, &state_of_row), SPECPOOL_BAD_ARGUMENT, "0");
  REFUSED(specpool_ledger_row_state(ledger, 0, 9, &state_of_row), SPECPOOL_BAD_ARGUMENT, "row 9");
  REFUSED(specpool_ledger_prepare_extend_keeping(ledger, &row, (int32_t[]){9}, 1, (int32_t[]){0}, 1, true, &plan), SPECPOOL_CONFIG, "keep names 1 lanes");
  REFUSED(specpool_ledger_prepare_extend_keeping(ledger, &row, (int32_t[]){9}, 1, NULL, 1, true, &plan), SPECPOOL_BAD_ARGUMENT, "keep is NULL");
  REFUSED(specpool_ledger_known_prefix(ledger, NULL, 3, NULL, 0, -1, &hit), SPECPOOL_BAD_ARGUMENT, "tokens is NULL");
  REFUSED(specpool_ledger_known_prefix(ledger, (int32_t[]){1, 2}, 2, NULL, 0, 3, &hit), SPECPOOL_BAD_ARGUMENT, "[0, 2], got 3");
  REFUSED(specpool_ledger_match_state(ledger, NULL, 3, NULL, 0, -1, &hit, &hit), SPECPOOL_BAD_ARGUMENT, "tokens is NULL");
  REFUSED(specpool_ledger_match_state(ledger, (int32_t[]){1, 2}, 2, NULL, 0, 3, &hit, &hit), SPECPOOL_BAD_ARGUMENT, "[0, 2], got 3");
  REFUSED(specpool_ledger_match_state(ledger, (int32_t[]){1, 2}, 2, NULL, 0, -1, NULL, &hit), SPECPOOL_BAD_ARGUMENT, "slot is NULL");
  REFUSED(specpool_ledger_take_delta(ledger, 1, 5, NULL, NULL, NULL, 0, &count), SPECPOOL_BAD_ARGUMENT, "group 5");
  DONE(specpool_ledger_prepare_extend(ledger, &row, (int32_t[]){9}, 1, true, &plan));
  if (plan.num_lanes != 1 || plan.new_len[0] != 9 || plan.allocated_after[0] != 12) return 1;
  DONE(specpool_ledger_launch(ledger, plan.step));
  REFUSED(specpool_ledger_take_delta(ledger, plan.step, 0, NULL, NULL, NULL, 0, &count), SPECPOOL_BAD_ARGUMENT, "needs 3");
  if (count != 3) return 1;
  REFUSED(specpool_ledger_row_pages(ledger, 0, 9, blocks, 8, &count), SPECPOOL_BAD_ARGUMENT, "row 9");
  DONE(specpool_ledger_complete(ledger, plan.step));
  DONE(specpool_ledger_prepare_decode(ledger, &row, (int32_t[]){1}, 1, true, &plan));
  DONE(specpool_ledger_launch(ledger, plan.step));
  REFUSED(specpool_ledger_resolve(ledger, plan.step, NULL, 1), SPECPOOL_BAD_ARGUMENT, "accept_lens is NULL");
  REFUSED(specpool_ledger_resolve(ledger, plan.step, (int32_t[]){1, 1}, 2), SPECPOOL_BAD_ARGUMENT, "1 lanes, 2 accept");
  REFUSED(specpool_ledger_resolve(ledger, plan.step, (int32_t[]){5}, 1), SPECPOOL_BAD_ARGUMENT, "[1, 4], got 5");
  REFUSED(specpool_ledger_poll_kv_events(ledger, NULL, NULL), SPECPOOL_BAD_ARGUMENT, "on_event is NULL");
  int num_commits = 0;
  DONE(specpool_ledger_poll_kv_events(ledger, on_event, &num_commits));
  if (num_commits != 1) return 1;
  DONE(specpool_ledger_resolve(ledger, plan.step, (int32_t[]){2}, 1));
  DONE(specpool_ledger_complete(ledger, plan.step));

  // Threads: each has an error of its own.
  char of_other = '?';
  pthread_t thread;
  REFUSED(specpool_pool_destroy(none), SPECPOOL_BAD_HANDLE, "0x0");
  pthread_create(&thread, NULL, other_thread, &of_other);
  pthread_join(thread, NULL);
  if (of_other != 0 || !strstr(specpool_error_message(), "0x0")) return 1;

  pthread_t threads[4];
  specpool_pool_info info, after;
  if (specpool_pool_info_of(pool, &info) != SPECPOOL_OK) return 1;
  for (int at = 0; at < 4; at++) pthread_create(&threads[at], NULL, hammer, NULL);
  for (int at = 0; at < 4; at++) pthread_join(threads[at], NULL);
  if (specpool_pool_info_of(pool, &after) != SPECPOOL_OK || specpool_pool_check(pool) != SPECPOOL_OK) return 1;
  if (after.num_free + after.num_cached != info.num_free + info.num_cached) return 1;

  // A callback that calls back, and destroys what it was called for: the other events are still told.
  DONE(specpool_ledger_finish(ledger, row));
  DONE(specpool_ledger_admit(ledger, "last", &row));
  DONE(specpool_ledger_prepare_extend(ledger, &row, (int32_t[]){9}, 1, true, &plan));
  DONE(specpool_ledger_launch(ledger, plan.step));
  DONE(specpool_ledger_complete(ledger, plan.step));
  int num_told = 0;
  if (specpool_ledger_poll_kv_events(ledger, on_last_event, &num_told) != SPECPOOL_OK || num_told < 2) return 1;
  if (specpool_ledger_poll_kv_events(ledger, on_last_event, &num_told) != SPECPOOL_BAD_HANDLE) return 1;

  if (specpool_pool_destroy(pool) != SPECPOOL_OK) return 1;
  puts("every bad input was refused");
  return 0;
}
