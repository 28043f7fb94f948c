// A row moves from one ledger to another: its KV arrives on other pages, nothing leaks on either side, and what cannot
// move is refused.
#include <cstring>
#include <iostream>

#include "specpool.hpp"

namespace {

using specpool::Ints;

int failures = 0;

void expect(bool holds, int line) {
  if (holds) return;
  std::cerr << "line " << line << ": " << specpool_error_message() << "\n";
  ++failures;
}

#define EXPECT(holds) expect((holds), __LINE__)
#define REFUSED(call, status, words) \
  expect((call) == (status) && std::strstr(specpool_error_message(), words) != nullptr, __LINE__)

// A ledger, and the KV of its pages: one number for each slot of a group.
struct Side {
  explicit Side(int64_t sink = 0) : ledger(make(sink)), kv{Ints(25 * 4), Ints(49 * 2)} {}

  static specpool::Ledger make(int64_t sink) {
    specpool_group_config groups[] = {{"draft", 4, 24, true, false, 0, 0}, {"window", 2, 48, false, false, 5, sink}};
    specpool_shape shape = {3, 1, 4};
    return specpool::Ledger(specpool_ledger_config_default(groups, 2, &shape, 1, 3, 40));
  }
  bool is_empty() const { return ledger.group(0).num_free == 24 && ledger.group(1).num_free == 48; }

  specpool::Ledger ledger;
  Ints kv[2];
};

constexpr int64_t kPageSize[] = {4, 2};

int32_t prefilled(Side &side, int32_t len) {
  const int32_t row = side.ledger.admit();
  const auto plan = side.ledger.prepare_extend({row}, {len});
  side.ledger.launch(plan.step);
  for (size_t group = 0; group < 2; ++group) {
    const Ints pages = side.ledger.pages_of(row, group);
    for (int32_t at = 0; at < len; ++at) {
      const int64_t size = kPageSize[group];
      if (pages[at / size] > 0) side.kv[group][pages[at / size] * size + at % size] = 1000 + at;
    }
  }
  side.ledger.complete(plan.step);
  return row;
}

void moves() {
  Side here, there;
  there.ledger.admit();  // so that rows and pages differ
  const int32_t row = prefilled(here, 11);
  const uint64_t prefix = here.ledger.export_row(row);
  const specpool_prefix_info info = here.ledger.prefix(prefix, 0), window = here.ledger.prefix(prefix, 1);
  EXPECT(info.len == 11 && info.drafted_len == 11 && info.first_column == 0 && info.num_pages == 3);
  EXPECT(window.first_column == 3 && window.num_pages == 3);  // a query sees the tokens 7 to 11
  const int32_t moved = there.ledger.import_row(info.len, info.drafted_len, "moved");
  for (size_t group = 0; group < 2; ++group) {
    const Ints from = here.ledger.prefix_pages(prefix, group), to = there.ledger.pages_of(moved, group);
    const size_t first = here.ledger.prefix(prefix, group).first_column, size = kPageSize[group];
    for (size_t at = 0; at < from.size(); ++at)
      std::copy_n(&here.kv[group][from[at] * size], size, &there.kv[group][to[first + at] * size]);
    for (int32_t at = group == 0 ? 0 : 7; at < 11; ++at)
      EXPECT(there.kv[group][to[at / size] * size + at % size] == 1000 + at);
  }
  here.ledger.release_prefix(prefix);  // it has arrived
  EXPECT(here.is_empty());
  EXPECT(there.ledger.row(moved).resolved_len == 11 && there.ledger.row(moved).drafted_len == 11);
  const auto plan = there.ledger.prepare_extend({moved}, {12});  // and it goes on
  there.ledger.launch(plan.step);
  there.ledger.complete(plan.step);
  there.ledger.finish(moved);
  EXPECT(there.is_empty());

  // A move that fails: the row goes on here, and is given back there.
  const int32_t stays = prefilled(here, 6);
  const uint64_t failed = here.ledger.export_row(stays);
  there.ledger.abort(there.ledger.import_row(6, 6));
  const int32_t again = here.ledger.admit_on(failed);
  here.ledger.release_prefix(failed);
  EXPECT(here.ledger.row(again).resolved_len == 6 && there.is_empty());
  here.ledger.finish(again);
  EXPECT(here.is_empty());
  here.ledger.check();
  there.ledger.check();
}

// The first 3 tokens stay beside the window: 2 pages, which lie before the others.
void moves_with_a_sink() {
  Side here(3), there(3);
  there.ledger.admit();
  const uint64_t prefix = here.ledger.export_row(prefilled(here, 13));
  const specpool_prefix_info info = here.ledger.prefix(prefix, 1), full = here.ledger.prefix(prefix, 0);
  EXPECT(info.num_sinks == 2 && info.first_column == 4 && info.num_pages == 5 && full.num_sinks == 0);
  const int32_t moved = there.ledger.import_row(info.len, info.drafted_len);
  const Ints from = here.ledger.prefix_pages(prefix, 1), to = there.ledger.pages_of(moved, 1);
  EXPECT(from.size() == 5 && to[2] == 0 && to[3] == 0);
  for (size_t at = 0; at < from.size(); ++at) {
    const size_t column = at < info.num_sinks ? at : info.first_column + at - info.num_sinks;
    EXPECT(to[column] > 0);
    std::copy_n(&here.kv[1][from[at] * 2], 2, &there.kv[1][to[column] * 2]);
  }
  for (const int32_t at : {0, 1, 2, 9, 10, 11, 12}) EXPECT(there.kv[1][to[at / 2] * 2 + at % 2] == 1000 + at);
  here.ledger.release_prefix(prefix);
  there.ledger.finish(moved);
  EXPECT(here.is_empty() && there.is_empty());
  here.ledger.check();
  there.ledger.check();
}

void refusals() {
  Side side;
  const specpool_ledger ledger = side.ledger.get(), none_such = {0};
  uint64_t prefix = 7;
  int32_t row = 7, pages[3];
  specpool_prefix_info info;
  REFUSED(specpool_ledger_export(ledger, 1, &prefix), SPECPOOL_BAD_ARGUMENT, "row 1");
  REFUSED(specpool_ledger_export(ledger, side.ledger.admit(), &prefix), SPECPOOL_BAD_ARGUMENT, "it has no tokens");
  REFUSED(specpool_ledger_export(ledger, 1, nullptr), SPECPOOL_BAD_ARGUMENT, "prefix is NULL");
  const auto plan = side.ledger.prepare_extend({1}, {4});
  side.ledger.launch(plan.step);
  REFUSED(specpool_ledger_export(ledger, 1, &prefix), SPECPOOL_NOT_READY, "");
  side.ledger.complete(plan.step);
  REFUSED(specpool_ledger_import_row(ledger, 0, 0, nullptr, &row), SPECPOOL_BAD_ARGUMENT, "[1, 40], got 0");
  REFUSED(specpool_ledger_import_row(ledger, INT32_MAX, 0, nullptr, &row), SPECPOOL_BAD_ARGUMENT, "[1, 40]");
  REFUSED(specpool_ledger_import_row(ledger, 4, 5, nullptr, &row), SPECPOOL_BAD_ARGUMENT, "[0, 4], got 5");
  REFUSED(specpool_ledger_import_row(ledger, 4, 4, "\xff", &row), SPECPOOL_BAD_ARGUMENT, "UTF-8");
  REFUSED(specpool_ledger_import_row(ledger, 4, 4, nullptr, nullptr), SPECPOOL_BAD_ARGUMENT, "row is NULL");
  REFUSED(specpool_ledger_import_row(none_such, 4, 4, nullptr, &row), SPECPOOL_BAD_HANDLE, "");
  EXPECT(prefix == 7 && row == 7);
  prefix = side.ledger.export_row(1);
  REFUSED(specpool_ledger_prefix_pages(ledger, prefix, 1, pages, 1, &info), SPECPOOL_BAD_ARGUMENT, "needs 2");
  REFUSED(specpool_ledger_prefix_pages(ledger, prefix, 1, nullptr, 9, &info), SPECPOOL_BAD_ARGUMENT, "pages is NULL");
  REFUSED(specpool_ledger_prefix_pages(ledger, prefix, 2, pages, 3, &info), SPECPOOL_BAD_ARGUMENT, "group 2");
  REFUSED(specpool_ledger_prefix_pages(ledger, 99, 0, pages, 3, &info), SPECPOOL_BAD_ARGUMENT, "99");
  REFUSED(specpool_ledger_prefix_pages(ledger, prefix, 0, pages, 3, nullptr), SPECPOOL_BAD_ARGUMENT, "info is NULL");
  side.ledger.release_prefix(prefix);
  for (int at = 0; at < 3; ++at) side.ledger.import_row(2, 2);
  REFUSED(specpool_ledger_import_row(ledger, 4, 4, nullptr, &row), SPECPOOL_OUT_OF_ROWS, "");
  for (int at = 1; at <= 3; ++at) side.ledger.abort(at);
  EXPECT(side.is_empty());
  side.ledger.check();
}

}  // namespace

int main() {
  moves();
  moves_with_a_sink();
  refusals();
  if (failures > 0) return 1;
  std::cout << "every row arrived or came back\n";
  return 0;
}
