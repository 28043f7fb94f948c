// Random calls of every function: right, wrong, NULL, stale and huge. A refused call has one line and changes nothing, no call
// breaks the books, and nothing is written beyond an array (valgrind looks). Arguments: number of calls, first seed.
#include "specpool.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 64  // entries of every array; no group has as many pages

static uint64_t rng;
static specpool_pool pool;
static specpool_ledger ledger;
static int num_calls[64][2];  // by function: refused, done
static size_t num_events;
static bool has_states;
static int32_t row;  // the latest

static uint32_t any(uint32_t below) {
  rng = rng * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(rng >> 33) % below;
}

// A number that may be right, or one of those that arithmetic trips over.
static int64_t number(void) {
  static const int64_t odd[] = {-1, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, 1ll << 32, -2, 0};
  return any(12) ? (int64_t)any(6) : odd[any(sizeof odd / sizeof *odd)];
}

static int32_t small(void) { return (int32_t)number(); }

// Lengths of rows, chunks and prefixes.
static int32_t length(void) { return any(8) ? (int32_t)any(44) : small(); }

// A right length for an array that is there, and any for one that is NULL. `claims`: a length that no array can have.
static size_t count_of(const void *array, bool claims) {
  if (array == NULL && any(2)) return any(2) ? SIZE_MAX : (size_t)1 << 40;
  if (claims && any(16) == 0) return SIZE_MAX - any(2);
  return any(7);
}

// A row: mostly the one that was admitted last.
static int32_t some_row(void) { return any(3) ? row : small(); }

static const char *text(void) {
  static const char *texts[] = {NULL, "a", "", "\xff\xfe", "a longer tag, with commas"};
  return texts[any(5)];
}

// An array of small numbers, some of them odd; sometimes NULL.
static const int32_t *list(int32_t *values) {
  for (int at = 0; at < MOST; at++) values[at] = any(24) ? (int32_t)any(7) : small();
  return any(12) ? values : NULL;
}

// The same tokens again and again, so that the index finds them.
static const int32_t *tokens(int32_t *values) {
  for (int at = 0; at < MOST; at++) values[at] = any(40) ? at % 5 : small();
  return any(12) ? values : NULL;
}

static void *out(void *where) { return any(10) ? where : NULL; }

static uint64_t state(void) {
  specpool_pool_info info;
  uint64_t digest = 0;
  if (specpool_pool_info_of(pool, &info) != SPECPOOL_OK || specpool_ledger_digest(ledger, &digest) != SPECPOOL_OK) abort();
  if (specpool_pool_check(pool) != SPECPOOL_OK || specpool_ledger_check(ledger) != SPECPOOL_OK) {
    fprintf(stderr, "%s\n", specpool_error_message());
    abort();
  }
  uint64_t found = digest * 31 + info.digest + info.num_free + info.num_cached * 64 + info.num_fenced * 4096;
  for (size_t group = 0; group < 2; group++) {
    specpool_group_info of_group;
    if (specpool_ledger_group(ledger, group, &of_group) != SPECPOOL_OK) abort();
    found = found * 31 + of_group.num_free + of_group.num_cached * 64 + of_group.num_fenced * 4096;
  }
  specpool_state_group_info of_states;
  if (specpool_ledger_state_group(ledger, 0, &of_states) != (has_states ? SPECPOOL_OK : SPECPOOL_BAD_ARGUMENT)) abort();
  if (has_states) found = found * 31 + of_states.num_free + of_states.num_cached * 64 + of_states.num_fenced * 4096;
  return found;
}

static void on_event(void *context, const specpool_kv_event *event) { *(size_t *)context += event->row > 0; }

static void make(void) {
  static specpool_group_config groups[] = {
      {.name = "target", .page_size = 4, .num_pages = 40},
      {.name = "draft", .page_size = 2, .num_pages = 50, .hosts_drafts = true, .holey = true, .window = 9}};
  static const specpool_shape shapes[] = {{3, 1, 4}, {2, 2, 5}};
  groups[1].sink = any(2) ? 3 : 0;
  specpool_ledger_config config = specpool_ledger_config_default(groups, 1 + 1, shapes, 2, 5, 40);
  config.overlap_depth = any(2), config.double_buffer = any(2), config.sessions = true, config.draft_kv = any(2);
  config.page_fencing = any(2), config.digest = true;
  static specpool_state_group_config states = {.name = "states", .num_slots = 3, .flush = 2};
  states.eager = any(2);
  has_states = any(2);
  if (has_states) config.states = &states, config.num_states = 1;
  specpool_pool_config of_pool = specpool_pool_config_default(40, 4);
  of_pool.caching = any(2), of_pool.fencing = any(2), of_pool.digest = true, of_pool.first_id = any(2);
  if (specpool_pool_create(&of_pool, &pool) != SPECPOOL_OK || specpool_ledger_create(&config, &ledger) != SPECPOOL_OK ||
      specpool_ledger_watch_kv(ledger) != (has_states ? SPECPOOL_CONFIG : SPECPOOL_OK)) {
    fprintf(stderr, "%s\n", specpool_error_message());
    abort();
  }
}

int main(int argc, char **argv) {
  int most = argc > 1 ? atoi(argv[1]) : 1200;
  rng = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
  static int32_t a[MOST], b[MOST], c[MOST], len;
  static specpool_pool_info pool_info;
  static specpool_row_info row_info;
  static specpool_group_info group_info;
  static specpool_prefix_info prefix_info;
  static specpool_state_group_info states_info;
  static specpool_row_state_info row_states_info;
  static uint64_t digest;
  static uint32_t refs;
  static bool fits;
  static int64_t wide[MOST];
  static uint8_t salt_bytes[257];
  static specpool_plan plan;
  static uint64_t step, prefix;
  static size_t count;
  make();
  for (int call = 0; call < most; call++) {
    uint64_t before = state();
    specpool_pool p = any(40) ? pool : (specpool_pool){any(2) ? ledger.id ^ 7 : (uint64_t)number()};
    specpool_ledger l = any(40) ? ledger : (specpool_ledger){any(2) ? pool.id ^ 7 : (uint64_t)number()};
    const uint8_t *salt = any(6) ? NULL : salt_bytes;
    size_t salt_len = salt ? any(257 + 1) : any(20) ? 0 : SIZE_MAX;
    uint64_t a_step = any(6) ? step : (uint64_t)number(), a_prefix = any(6) ? prefix : (uint64_t)number();
    size_t group = any(12) ? any(2) : (size_t)number();
    const int32_t *one = list(a), *two = list(b), *told = tokens(c);
    specpool_status status = SPECPOOL_OK;
    bool reads = false;  // the call changes nothing if it succeeds
    uint32_t which = any(76);
    if (which > 59) which = (uint32_t[]){44, 51, 53, 47, 51, 52, 53, 15, 56, 51, 53, 47, 51, 52, 53, 20}[which - 60];
    size_t n = count_of(one && two ? one : NULL, true), m = count_of(told, true);
    int32_t *into = out(a);
    size_t room = into ? any(4) ? MOST : any(3) : count_of(NULL, false);
    bool has_room_for = which == 4 || which == 9 || which == 32 || which == 40 || which == 43;  // writes `room` entries at most
    for (size_t at = room; has_room_for && into && at < MOST; at++) into[at] = 12345;
    switch (which) {
      case 0: status = specpool_pool_take(p, any(12) ? any(5) : (size_t)number(), two, count_of(two, true), text(), out(a)); break;
      case 1: reads = true, status = specpool_pool_fits(p, (size_t)number(), two, count_of(two, true), out(&fits)); break;
      case 2: case 3: status = specpool_pool_drop(p, one, count_of(one, true), any(2) ? -1 : number()); break;
      case 4: reads = true, status = specpool_pool_match(p, told, m, salt, salt_len, into, room, out(&count)); break;
      case 5: case 6: status = specpool_pool_put(p, told, m, two, count_of(two, true), any(8) ? any(2) : (size_t)number(), salt, salt_len, out(a)); break;
      case 7: status = specpool_pool_keep(p, one, count_of(one, true)); break;
      case 8: status = specpool_pool_unkeep(p, one, count_of(one, true)); break;
      case 9: reads = true, status = specpool_pool_preview(p, into, room, out(&count)); break;
      case 10: status = specpool_pool_forget(p, salt, salt_len); break;
      case 11: status = any(8) ? SPECPOOL_OK : specpool_pool_forget_all(p); break;
      case 12: status = specpool_pool_complete(p, (uint64_t)number()); break;
      case 13: reads = true, status = specpool_pool_refs(p, small(), out(&refs)); break;
      case 14: reads = true, status = specpool_pool_info_of(p, out(&pool_info)); break;
      case 15: case 16: case 17: status = specpool_ledger_admit(l, text(), out(&row)); break;
      case 18: status = specpool_ledger_admit_cached(l, told, m, salt, salt_len, number(), any(2), text(), out(&row), out(&len)); break;
      case 19: reads = true, status = specpool_ledger_match_prefix(l, told, m, salt, salt_len, number(), any(2), out(&len)); break;
      case 20: status = specpool_ledger_index(l, some_row(), told, any(2) ? m : (size_t)any(44), salt, salt_len, out(&len)); break;
      case 21: status = specpool_ledger_forget(l, salt, salt_len); break;
      case 22: status = any(8) ? SPECPOOL_OK : specpool_ledger_forget_all(l); break;
      case 23: status = specpool_ledger_fork(l, some_row(), text(), out(&row)); break;
      case 24: status = specpool_ledger_pin_prefix(l, some_row(), length(), out(&prefix)); break;
      case 25: status = specpool_ledger_release_prefix(l, a_prefix); break;
      case 26: status = specpool_ledger_admit_on(l, a_prefix, any(2) ? -1 : length(), text(), out(&row)); break;
      case 27: status = any(4) ? SPECPOOL_OK : specpool_ledger_trim(l, some_row(), length(), out(&len)); break;
      case 28: status = any(4) ? SPECPOOL_OK : specpool_ledger_end_turn(l, some_row(), length(), out(&len)); break;
      case 29: status = any(4) ? SPECPOOL_OK : specpool_ledger_retract(l, some_row()); break;
      case 30: status = any(4) ? SPECPOOL_OK : specpool_ledger_finish(l, some_row()); break;
      case 31: status = any(4) ? SPECPOOL_OK : specpool_ledger_abort(l, some_row()); break;
      case 32: reads = true, status = specpool_ledger_row_pages(l, group, some_row(), into, room, out(&count)); break;
      case 33: reads = true, status = specpool_ledger_row(l, some_row(), out(&row_info)); break;
      case 34: reads = true, status = specpool_ledger_group(l, group, out(&group_info)); break;
      case 35: reads = true, status = specpool_ledger_digest(l, out(&digest)); break;
      case 36: status = specpool_ledger_lend(l, some_row(), any(3) * 4, length() / 4 * 4); break;
      case 37: status = specpool_ledger_rebind(l, some_row(), any(3) * 4, length() / 4 * 4, one, count_of(one, true)); break;
      case 38: status = specpool_ledger_admit_lent(l, one, count_of(one, true), length(), text(), out(&row)); break;
      case 39: status = specpool_ledger_release_lent(l, group, one, count_of(one, true)); break;
      case 40: reads = true, status = specpool_ledger_lent_pages(l, group, into, room, out(&count)); break;
      case 41: status = specpool_ledger_export(l, some_row(), out(&prefix)); break;
      case 42: status = specpool_ledger_import_row(l, length(), length(), text(), out(&row)); break;
      case 43: reads = true, status = specpool_ledger_prefix_pages(l, a_prefix, group, into, room, out(&prefix_info)); break;
      case 44: case 45: case 46:
        for (int at = 0; at < MOST; at++) b[at] = length();
        if (any(6)) a[0] = row, n = one && two ? 1 : n;
        status = specpool_ledger_prepare_extend(l, one, two, n, any(4) > 0, out(&plan));
        if (status == SPECPOOL_OK) step = plan.step;
        break;
      case 47: case 48: case 49:
        for (int at = 0; at < MOST; at++) b[at] = any(20) ? (int32_t)any(3) : small();
        if (any(6)) a[0] = row, n = one && two ? 1 : n;
        status = specpool_ledger_prepare_decode(l, one, two, n, any(4) > 0, out(&plan));
        if (status == SPECPOOL_OK) step = plan.step;
        break;
      case 50: reads = true, status = specpool_ledger_tokens_required(l, one, two, n, out(wide), any(4) ? 2 : (size_t)number()); break;
      case 51: status = specpool_ledger_launch(l, a_step); break;
      case 52: status = specpool_ledger_resolve(l, a_step, one, any(8) && one ? 1 : count_of(one, true)); break;
      case 53: status = specpool_ledger_complete(l, a_step); break;
      case 54: status = any(3) ? specpool_ledger_cancel(l, a_step) : specpool_ledger_abandon(l, a_step); break;
      case 56:
        for (int at = 0; at < MOST; at++) b[at] = length();
        for (int at = 0; at < MOST; at++) c[at] = any(20) ? at : small();
        if (any(6)) a[0] = row, n = one && two ? 1 : n;
        status = specpool_ledger_prepare_extend_keeping(l, one, two, n, told, any(4) && told ? any(2) : count_of(told, true), any(4) > 0, out(&plan));
        if (status == SPECPOOL_OK) step = plan.step;
        break;
      case 57:
        reads = true;
        if (any(2)) status = specpool_ledger_known_prefix(l, told, m, salt, salt_len, number(), out(&len));
        else status = specpool_ledger_match_state(l, told, m, salt, salt_len, number(), out(a), out(&len));
        break;
      case 58: reads = true, status = specpool_ledger_state_group(l, any(4) ? 0 : (size_t)number(), out(&states_info)); break;
      case 59: reads = true, status = specpool_ledger_row_state(l, any(4) ? 0 : (size_t)number(), some_row(), out(&row_states_info)); break;
      case 55:
        if (any(2)) {
          reads = true, status = specpool_ledger_take_delta(l, a_step, group, out(a), out(b), out(c), any(4) ? MOST : any(3), out(&count));
        } else if (any(2)) {
          status = specpool_ledger_ack_delta(l, a_step);
        } else {
          status = specpool_ledger_poll_kv_events(l, any(8) ? on_event : NULL, &num_events);
        }
        break;
    }
    for (size_t at = room; has_room_for && into && at < MOST; at++) {
      if (into[at] != 12345) return fprintf(stderr, "function %u writes entry %zu of %zu\n", which, at, room), 1;
    }
    num_calls[which][status == SPECPOOL_OK] += 1;
    const char *message = specpool_error_message();
    bool is_told = status == SPECPOOL_OK || (strlen(message) > 3 && strlen(message) < 1000 && !strchr(message, '\n'));
    bool is_ours = status != SPECPOOL_CORRUPT && status != SPECPOOL_BUSY && status != SPECPOOL_OUT_OF_MEMORY;
    if (!is_told || !is_ours || ((reads || status != SPECPOOL_OK) && state() != before)) {
      fprintf(stderr, "call %d of function %u: status %d, %s\n", call, which, (int)status, message);
      return 1;
    }
    if (any(500) == 0) {  // others follow, and the old handles are stale
      if (any(2) && (specpool_pool_close(pool) != SPECPOOL_OK || specpool_ledger_close(ledger) != SPECPOOL_OK)) return 1;
      if (specpool_pool_destroy(pool) != SPECPOOL_OK || specpool_ledger_destroy(ledger) != SPECPOOL_OK) return 1;
      if (specpool_pool_destroy(pool) != SPECPOOL_BAD_HANDLE || specpool_ledger_close(ledger) != SPECPOOL_BAD_HANDLE) return 1;
      step = prefix = 0;
      make();
    }
  }
  if (argc > 3) {
    for (int which = 0; which < 60; which++) printf("%2d: %d refused, %d done\n", which, num_calls[which][0], num_calls[which][1]);
    printf("%zu events\n", num_events);
  }
  if (specpool_pool_destroy(pool) != SPECPOOL_OK || specpool_ledger_destroy(ledger) != SPECPOOL_OK) return 1;
  puts("every call was done or refused");
  return 0;
}
