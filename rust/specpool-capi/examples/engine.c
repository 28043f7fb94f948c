// A scheduler in 100 lines of C: four requests share three rows and a small pool, and draft chains of three tokens. The
// "model" is a random accept length; what matters is who holds which page.
//
//   cc engine.c -I../include -lspecpool -o engine && ./engine
#include "specpool.h"

#include <stdio.h>
#include <stdlib.h>

enum { NUM_REQUESTS = 4, NUM_ROWS = 3, PROMPT = 10, WANTED = 40 };

typedef struct { int32_t row; bool done; } request;  // row 0: it waits

static void must(specpool_status status) {
  if (status != SPECPOOL_OK) {
    fprintf(stderr, "%s\n", specpool_error_message());
    exit(1);
  }
}

// A connector that would copy verified KV to another machine: here it only counts.
static void on_event(void *context, const specpool_kv_event *event) {
  long *verified = context;
  if (event->kind == SPECPOOL_COMMIT) *verified += event->end - event->start;
}

// Runs one step on the "device": the page table is brought up to date, then the forward would be enqueued.
static void launch(specpool_ledger ledger, const specpool_plan *plan, int32_t *table, size_t width) {
  int32_t rows[256], columns[256], pages[256];
  size_t count;
  must(specpool_ledger_launch(ledger, plan->step));
  must(specpool_ledger_take_delta(ledger, plan->step, 0, rows, columns, pages, 256, &count));
  for (size_t at = 0; at < count; at++) table[rows[at] * width + columns[at]] = pages[at];
  must(specpool_ledger_ack_delta(ledger, plan->step));
}

int main(void) {
  specpool_group_config group = {.name = "kv", .page_size = 4, .num_pages = 36, .hosts_drafts = true};
  specpool_shape chain = {.num_steps = 3, .topk = 1, .num_draft_tokens = 4};
  specpool_ledger_config config = specpool_ledger_config_default(&group, 1, &chain, 1, NUM_ROWS, 80);
  specpool_ledger ledger;
  specpool_group_info info;
  must(specpool_ledger_create(&config, &ledger));
  must(specpool_ledger_watch_kv(ledger));
  must(specpool_ledger_group(ledger, 0, &info));
  int32_t *table = calloc((NUM_ROWS + 1) * info.pages_per_row, sizeof *table);

  request requests[NUM_REQUESTS] = {0};
  long rounds = 0, retractions = 0, verified = 0;
  for (int left = NUM_REQUESTS; left > 0;) {
    int32_t rows[NUM_ROWS], lens[NUM_ROWS], shapes[NUM_ROWS];
    request *of_lane[NUM_ROWS];
    specpool_plan plan;
    size_t count = 0;
    // Prefill what waits, as far as rows go.
    for (int at = 0; at < NUM_REQUESTS; at++) {
      request *it = &requests[at];
      char tag[32];
      snprintf(tag, sizeof tag, "request-%d", at);
      if (it->done || it->row != 0 || specpool_ledger_admit(ledger, tag, &it->row) == SPECPOOL_OUT_OF_ROWS) continue;
      rows[0] = it->row, lens[0] = PROMPT;
      if (specpool_ledger_prepare_extend(ledger, rows, lens, 1, true, &plan) == SPECPOOL_OUT_OF_PAGES) {
        must(specpool_ledger_retract(ledger, it->row)), it->row = 0;
        continue;
      }
      launch(ledger, &plan, table, info.pages_per_row);
      must(specpool_ledger_complete(ledger, plan.step));
    }
    // One round of drafts for every row. Who does not fit makes room: the last one waits again.
    for (int at = 0; at < NUM_REQUESTS; at++)
      if (requests[at].row != 0) of_lane[count] = &requests[at], shapes[count] = 1, rows[count++] = requests[at].row;
    specpool_status status;
    while ((status = specpool_ledger_prepare_decode(ledger, rows, shapes, count, true, &plan)) != SPECPOOL_OK) {
      if (status != SPECPOOL_OUT_OF_PAGES || count == 1) must(status);
      must(specpool_ledger_retract(ledger, rows[--count]));
      of_lane[count]->row = 0, retractions++;
    }
    launch(ledger, &plan, table, info.pages_per_row);
    for (size_t lane = 0; lane < count; lane++) lens[lane] = 1 + rand() % 4;  // what the model accepts
    must(specpool_ledger_resolve(ledger, plan.step, lens, count));
    must(specpool_ledger_complete(ledger, plan.step));
    must(specpool_ledger_poll_kv_events(ledger, on_event, &verified));
    rounds++;
    for (size_t lane = 0; lane < count; lane++) {
      specpool_row_info row;
      must(specpool_ledger_row(ledger, rows[lane], &row));
      if (row.resolved_len < PROMPT + WANTED) continue;
      must(specpool_ledger_finish(ledger, rows[lane]));
      of_lane[lane]->row = 0, of_lane[lane]->done = true, left--;
    }
  }
  must(specpool_ledger_check(ledger));
  must(specpool_ledger_group(ledger, 0, &info));
  printf("%ld rounds, %ld retractions, %ld tokens verified, %zu of %zu pages free\n", rounds, retractions, verified,
         info.num_free, info.num_pages);
  free(table);
  must(specpool_ledger_destroy(ledger));
  return info.num_free == info.num_pages ? 0 : 1;
}
