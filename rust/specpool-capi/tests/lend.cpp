// A prefix cache of the caller's own, over the pool (keep, unkeep, preview) and over the ledger (lend, rebind,
// admit_lent, release_lent): what the calls do, and what they refuse.
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

template <typename Call>
void refused(Call call, specpool_status status, const char *words, int line) {
  try {
    call();
    expect(false, line);
  } catch (const specpool::Error &error) {
    expect(error.status == status && std::strstr(error.what(), words) != nullptr, line);
  }
}

#define EXPECT(holds) expect((holds), __LINE__)
#define REFUSED(call, status, words) refused([&] { call; }, status, words, __LINE__)

void kept_blocks() {
  specpool::Pool pool(4, 4);
  const Ints held = pool.take(2);
  pool.keep({held[0]});
  pool.drop(held);
  EXPECT(pool.info().num_cached == 1 && pool.info().num_free == 3);
  EXPECT(pool.match({1, 2, 3, 4}).empty());
  // The kept block is given last; a preview changes nothing.
  const Ints next = pool.preview(SIZE_MAX);
  EXPECT(next.size() == 4 && next.back() == held[0] && pool.preview(2) == Ints(next.begin(), next.begin() + 2));
  const Ints again = pool.take(1, {held[0]});
  EXPECT(again == Ints{next[0]} && pool.info().num_cached == 0);
  REFUSED(pool.keep({next[1]}), SPECPOOL_PAGE_STATE, "nobody holds it");
  pool.drop({again[0], held[0]});
  pool.unkeep({held[0]});
  EXPECT(pool.info().num_cached == 0 && pool.info().num_free == 4);

  const Ints known = pool.take(1);
  pool.put({1, 2, 3, 4}, known);
  REFUSED(pool.keep(known), SPECPOOL_PAGE_STATE, "the pool's own index knows it");
  REFUSED(pool.unkeep(known), SPECPOOL_PAGE_STATE, "the pool's own index knows it");
  REFUSED(pool.keep({9}), SPECPOOL_BAD_ARGUMENT, "0 to 3");
  EXPECT(specpool_pool_keep(pool.get(), nullptr, 1) == SPECPOOL_BAD_ARGUMENT);
  EXPECT(specpool_pool_unkeep(pool.get(), nullptr, 1) == SPECPOOL_BAD_ARGUMENT);
  size_t count = 7;
  EXPECT(specpool_pool_preview(pool.get(), nullptr, 2, &count) == SPECPOOL_BAD_ARGUMENT && count == 7);
  EXPECT(specpool_pool_preview(pool.get(), nullptr, 0, nullptr) == SPECPOOL_BAD_ARGUMENT);
  EXPECT(specpool_pool_preview({0}, nullptr, 0, &count) == SPECPOOL_BAD_HANDLE);
  pool.drop(known);
  pool.check();
}

// A row whose first `len` tokens are computed.
int32_t prefilled(specpool::Ledger &ledger, int32_t len) {
  const int32_t row = ledger.admit();
  const auto plan = ledger.prepare_extend({row}, {len});
  ledger.launch(plan.step);
  ledger.complete(plan.step);
  return row;
}

void lent_pages() {
  specpool_group_config groups[] = {{"draft", 4, 24, true, false, 0, 0}, {"target", 2, 48, false, false, 0, 0}};
  specpool_shape shape = {3, 1, 4};
  specpool::Ledger ledger(specpool_ledger_config_default(groups, 2, &shape, 1, 3, 40));
  const int32_t row = prefilled(ledger, 10);
  const Ints draft = ledger.pages_of(row, 0), target = ledger.pages_of(row, 1);
  ledger.lend(row, 0, 8);
  REFUSED(ledger.lend(row, 0, 8), SPECPOOL_PAGE_STATE, "lent already");
  REFUSED(ledger.lend(row, 0, 6), SPECPOOL_BAD_ARGUMENT, "multiples of 4");
  REFUSED(ledger.lend(7, 0, 4), SPECPOOL_BAD_ARGUMENT, "row 7");
  Ints pages(draft.begin(), draft.begin() + 2);
  pages.insert(pages.end(), target.begin(), target.begin() + 4);
  EXPECT(ledger.lent_pages(0).size() == 2 && ledger.lent_pages(1).size() == 4);
  ledger.finish(row);

  // Two rows on the pages: one that begins with them, and one that has computed them itself.
  const int32_t hit = ledger.admit_lent(pages, 8, "hit");
  EXPECT(ledger.row(hit).resolved_len == 8 && ledger.row(hit).drafted_len == 8);
  const int32_t late = prefilled(ledger, 9);
  ledger.rebind(late, 0, 8, pages);
  EXPECT(ledger.pages_of(late, 1)[3] == pages[5] && ledger.pages_of(hit, 0)[0] == pages[0]);
  REFUSED(ledger.admit_lent(pages, 6), SPECPOOL_BAD_ARGUMENT, "multiple of 4");
  REFUSED(ledger.admit_lent({pages[0]}, 8), SPECPOOL_BAD_ARGUMENT, "6 pages");
  REFUSED(ledger.rebind(late, 0, 8, {}), SPECPOOL_BAD_ARGUMENT, "6 pages");
  REFUSED(ledger.release_lent(0, {pages[0], pages[0]}), SPECPOOL_BAD_ARGUMENT, "twice");
  REFUSED(ledger.release_lent(2, {}), SPECPOOL_BAD_ARGUMENT, "group 2");
  const Ints none(6, 0);
  REFUSED(ledger.admit_lent(none, 8), SPECPOOL_BAD_ARGUMENT, "outside the window");

  ledger.finish(hit);
  ledger.finish(late);
  EXPECT(ledger.group(0).num_free == 22 && ledger.group(1).num_free == 44);
  ledger.release_lent(0, {pages[0], pages[1]});
  ledger.release_lent(1, Ints(pages.begin() + 2, pages.end()));
  REFUSED(ledger.release_lent(0, {pages[0]}), SPECPOOL_PAGE_STATE, "not lent");
  REFUSED(ledger.admit_lent(pages, 8), SPECPOOL_PAGE_STATE, "not lent");
  EXPECT(ledger.group(0).num_free == 24 && ledger.group(1).num_free == 48);

  int32_t other = 0;
  size_t count = 7;
  const specpool_ledger none_such = {0};
  EXPECT(specpool_ledger_lend(none_such, 1, 0, 4) == SPECPOOL_BAD_HANDLE);
  EXPECT(specpool_ledger_rebind(ledger.get(), 1, 0, 4, nullptr, 3) == SPECPOOL_BAD_ARGUMENT);
  EXPECT(specpool_ledger_admit_lent(ledger.get(), nullptr, 3, 4, nullptr, &other) == SPECPOOL_BAD_ARGUMENT);
  EXPECT(specpool_ledger_admit_lent(ledger.get(), pages.data(), 6, 8, nullptr, nullptr) == SPECPOOL_BAD_ARGUMENT);
  EXPECT(specpool_ledger_admit_lent(ledger.get(), pages.data(), 6, 8, "\xff", &other) == SPECPOOL_BAD_ARGUMENT);
  EXPECT(specpool_ledger_release_lent(ledger.get(), 0, nullptr, 1) == SPECPOOL_BAD_ARGUMENT);
  EXPECT(specpool_ledger_lent_pages(ledger.get(), 5, nullptr, 0, &count) == SPECPOOL_BAD_ARGUMENT && count == 7);
  ledger.check();
}

// The same with what the ledger keeps itself: pinned prefixes, idle rows, the prefix index.
void kept_rows() {
  specpool_group_config group = {"kv", 4, 24, true, false, 0, 0};
  specpool_shape shape = {3, 1, 4};
  auto config = specpool_ledger_config_default(&group, 1, &shape, 1, 3, 40);
  config.sessions = true;
  specpool::Ledger ledger(config);
  const int32_t row = prefilled(ledger, 10);
  const uint64_t prefix = ledger.pin_prefix(row, 8);
  const int32_t hit = ledger.admit_on(prefix);
  EXPECT(ledger.row(hit).resolved_len == 8);
  ledger.release_prefix(prefix);
  ledger.finish(hit);
  EXPECT(ledger.end_turn(row, 9) == 9 && ledger.row(row).resolved_len == 9);
  REFUSED(ledger.end_turn(7, 9), SPECPOOL_BAD_ARGUMENT, "row 7");
  REFUSED(ledger.pin_prefix(7, 9), SPECPOOL_BAD_ARGUMENT, "row 7");

  const Ints tokens = {1, 2, 3, 4, 5, 6, 7, 8}, prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  const int32_t other = prefilled(ledger, 10);
  EXPECT(ledger.index(row, tokens, "a") == 8 && ledger.index(other, tokens, "b") == 8);
  ledger.finish(row);
  ledger.finish(other);
  const auto begins_with = [&](const std::string &salt) {
    const auto [cached, len] = ledger.admit_cached(prompt, salt);
    ledger.finish(cached);
    return len;
  };
  EXPECT(begins_with("a") == 8 && begins_with("b") == 8);
  ledger.forget("a");
  EXPECT(begins_with("a") == 0 && begins_with("b") == 8);
  ledger.forget_all();
  EXPECT(begins_with("b") == 0 && ledger.group(0).num_free == 24);
  ledger.check();
}

}  // namespace

int main() {
  kept_blocks();
  lent_pages();
  kept_rows();
  if (failures > 0) return 1;
  std::cout << "every lent page came back\n";
  return 0;
}
