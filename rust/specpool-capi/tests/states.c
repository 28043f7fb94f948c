// A hybrid model: the device has state slots and rings beside the pages, and checks that each state that a plan names is
// that of the row's tokens. A second request with the same prompt computes one token.
#include "specpool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NUM_ROWS = 2, NUM_SLOTS = 5, PROMPT = 9, ANSWER = 12, LONGEST = 64, PAGE = 4 };

static specpool_ledger ledger;
static size_t ring_len;
static int32_t texts[NUM_ROWS + 1][LONGEST];              // what each row has computed
static uint64_t states[NUM_SLOTS + 1];                    // by slot: a hash of the tokens that it contains
static struct { int32_t position, token; } ring[NUM_ROWS + 1][LONGEST];  // recorded inputs, position p at p % R
static int num_folded;

static void must(specpool_status status) {
  if (status != SPECPOOL_OK) {
    fprintf(stderr, "%s\n", specpool_error_message());
    exit(1);
  }
}

static void expect(bool holds, const char *what) {
  if (!holds) {
    fprintf(stderr, "%s\n", what);
    exit(1);
  }
}

static uint64_t fold(uint64_t state, int32_t token) { return state * 1099511628211u + (uint64_t)token + 1; }

static void record(int32_t row, int32_t position, int32_t token) {
  ring[row][(size_t)position % ring_len].position = position;
  ring[row][(size_t)position % ring_len].token = token;
}

// A lane: read the slot, fold the records of [from, to), write a slot. An extend computes its tokens first.
static void run(const specpool_plan *plan, size_t lane, const int32_t *tokens, int32_t root, int32_t count) {
  int32_t row = plan->rows[lane], from = plan->state_from[lane], to = plan->state_to[lane];
  uint64_t expected = 0;
  for (int32_t at = 0; at < from; at++) expected = fold(expected, texts[row][at]);
  uint64_t state = plan->state_src[lane] == 0 ? 0 : states[plan->state_src[lane]];
  expect(state == expected, "the slot has another state");
  for (int32_t at = 0; at < count; at++) texts[row][root + at] = tokens[root + at];
  for (int32_t at = from; at < to; at++) {
    // What an extend computes is at hand; older tokens are in the ring.
    if (at < root) {
      expect(ring[row][(size_t)at % ring_len].position == at, "a record was overwritten");
      expect(ring[row][(size_t)at % ring_len].token == texts[row][at], "a record has another token");
    }
    state = fold(state, texts[row][at]);
  }
  num_folded += to - from;
  if (plan->state_dst[lane] != 0) states[plan->state_dst[lane]] = state;
  int32_t first = root + count - (int32_t)ring_len > root ? root + count - (int32_t)ring_len : root;
  for (int32_t at = first; at < root + count; at++) record(row, at, texts[row][at]);
}

// One request: a prompt, and an answer in rounds that draft a chain of two. Returns how many prompt tokens it computed.
static int32_t serve(const int32_t *tokens, bool keeps) {
  int32_t row, hit, known, len, slot;
  specpool_plan plan;
  specpool_row_state_info state;
  must(specpool_ledger_match_state(ledger, tokens, PROMPT, NULL, 0, -1, &slot, &len));
  must(specpool_ledger_known_prefix(ledger, tokens, PROMPT, NULL, 0, -1, &known));
  must(specpool_ledger_admit_cached(ledger, tokens, PROMPT, NULL, 0, -1, false, "request", &row, &hit));
  expect(hit <= known, "a hit goes no further than the KV");
  must(specpool_ledger_row_state(ledger, 0, row, &state));
  expect(len == hit && slot == state.slot && (slot == 0) == (hit == 0), "the row shares the slot that was named");
  if (hit > 0) {
    must(specpool_ledger_match_state(ledger, tokens, PROMPT, NULL, 0, len - 1, &slot, &len));
    expect(slot == 0 && len == 0, "the text has no shorter state");
  }
  memcpy(texts[row], tokens, (size_t)hit * sizeof *tokens);
  int32_t new_len = PROMPT, lane = 0;
  must(specpool_ledger_prepare_extend_keeping(ledger, &row, &new_len, 1, &lane, keeps, true, &plan));
  expect(plan.num_states == 1 && plan.state_to[0] == PROMPT - 1, "an extend folds all but its last token");
  must(specpool_ledger_launch(ledger, plan.step));
  run(&plan, 0, tokens, hit, PROMPT - hit);
  len = PROMPT;
  uint64_t extend = plan.step;
  for (int32_t round = 0; len < PROMPT + ANSWER; round++) {
    int32_t shape = 1, accepted = 1 + round % 3;
    must(specpool_ledger_prepare_decode(ledger, &row, &shape, 1, true, &plan));
    expect(plan.state_to[0] <= len, "a round folds what is resolved");
    must(specpool_ledger_launch(ledger, plan.step));
    run(&plan, 0, tokens, len, accepted);
    if (extend != 0) {
      // The prompt can be indexed once its step is complete. Its state has gone on by now: the soft mark has it.
      must(specpool_ledger_complete(ledger, extend));
      must(specpool_ledger_index(ledger, row, tokens, PROMPT, NULL, 0, &known));
      expect(known == PROMPT, "the index knows the prompt");
      extend = 0;
    }
    must(specpool_ledger_resolve(ledger, plan.step, &accepted, 1));
    must(specpool_ledger_complete(ledger, plan.step));
    len += accepted;
  }
  must(specpool_ledger_row_state(ledger, 0, row, &state));
  expect(state.len <= len && len - state.len <= (int32_t)ring_len && state.num_soft_marks == 0, "what is not folded is recorded");
  must(specpool_ledger_index(ledger, row, tokens, (size_t)len, NULL, 0, NULL));
  must(specpool_ledger_finish(ledger, row));
  return PROMPT - hit;
}

// A row leaves as an export and comes again on a slot and pages of its own: it goes on from its state.
static void move(const int32_t *tokens) {
  int32_t row, moved, new_len = PROMPT;
  uint64_t prefix;
  specpool_plan plan;
  specpool_prefix_info info;
  specpool_row_state_info state;
  must(specpool_ledger_admit(ledger, NULL, &row));
  must(specpool_ledger_prepare_extend(ledger, &row, &new_len, 1, true, &plan));
  must(specpool_ledger_launch(ledger, plan.step));
  run(&plan, 0, tokens, 0, PROMPT);
  must(specpool_ledger_complete(ledger, plan.step));
  must(specpool_ledger_export(ledger, row, &prefix));
  must(specpool_ledger_prefix_pages(ledger, prefix, 0, NULL, 0, &info));
  expect(info.len == PROMPT - 1 && info.state_slot != 0, "an export has the tokens of its state");
  must(specpool_ledger_import_row(ledger, info.len, info.drafted_len, "moved", &moved));
  must(specpool_ledger_row_state(ledger, 0, moved, &state));
  expect(state.len == info.len && state.slot != info.state_slot, "a row that comes has a slot of its own");
  states[state.slot] = states[info.state_slot];
  must(specpool_ledger_release_prefix(ledger, prefix));
  memcpy(texts[moved], tokens, (size_t)info.len * sizeof *tokens);
  must(specpool_ledger_prepare_extend(ledger, &moved, &new_len, 1, true, &plan));
  must(specpool_ledger_launch(ledger, plan.step));
  run(&plan, 0, tokens, info.len, PROMPT - info.len);
  must(specpool_ledger_complete(ledger, plan.step));
  must(specpool_ledger_finish(ledger, moved));
}

int main(void) {
  specpool_group_config group = {.name = "kv", .page_size = PAGE, .num_pages = 40, .hosts_drafts = true};
  specpool_state_group_config of_states = {.name = "states", .num_slots = NUM_SLOTS, .flush = 2};
  specpool_shape chain = {.num_steps = 2, .topk = 1, .num_draft_tokens = 3};
  specpool_ledger_config config = specpool_ledger_config_default(&group, 1, &chain, 1, NUM_ROWS, LONGEST);
  config.states = &of_states, config.num_states = 1;
  must(specpool_ledger_create(&config, &ledger));
  specpool_state_group_info info;
  must(specpool_ledger_state_group(ledger, 0, &info));
  ring_len = (size_t)info.ring_len;
  expect(ring_len == 3 + 3 + 2 - 1 && info.num_free == NUM_SLOTS, "(D + 1) * A + N + flush - 1 records");

  int32_t tokens[LONGEST], other[LONGEST];
  for (int32_t at = 0; at < LONGEST; at++) tokens[at] = at * 7 % 11, other[at] = at < 6 ? tokens[at] : at;
  expect(serve(tokens, true) == PROMPT, "nothing is known yet");
  expect(serve(tokens, true) == 1, "an identical prompt computes its last token alone");
  expect(serve(other, false) == PROMPT, "the first branch has the KV of its beginning, but no state there");
  int32_t before = num_folded;
  expect(serve(tokens, true) == 1 && num_folded - before < PROMPT + ANSWER, "and again");

  must(specpool_ledger_state_group(ledger, 0, &info));
  expect(info.num_cached > 0 && info.num_free + info.num_cached == info.num_slots, "what is kept is cached");
  must(specpool_ledger_forget_all(ledger));
  must(specpool_ledger_state_group(ledger, 0, &info));
  expect(info.num_free == NUM_SLOTS && info.num_reclaimable == 0 && info.num_fenced == 0, "a slot leaked");
  move(tokens);
  must(specpool_ledger_state_group(ledger, 0, &info));
  expect(info.num_free == NUM_SLOTS, "a move leaked a slot");
  // What a ledger with states refuses.
  int32_t row, keep[2] = {0, 0};
  uint64_t prefix;
  specpool_plan plan;
  must(specpool_ledger_admit(ledger, NULL, &row));
  int32_t new_len = PROMPT;
  expect(specpool_ledger_prepare_extend_keeping(ledger, &row, &new_len, 1, keep, 2, true, &plan) == SPECPOOL_BAD_ARGUMENT, "a lane twice");
  keep[0] = 1;
  expect(specpool_ledger_prepare_extend_keeping(ledger, &row, &new_len, 1, keep, 1, true, &plan) == SPECPOOL_BAD_ARGUMENT, "no such lane");
  expect(strstr(specpool_error_message(), "0..1") != NULL, specpool_error_message());
  expect(specpool_ledger_pin_prefix(ledger, row, 1, &prefix) == SPECPOOL_CONFIG, "a pin has no state");
  must(specpool_ledger_check(ledger));
  must(specpool_ledger_destroy(ledger));
  puts("every state was that of its tokens");
  return 0;
}
