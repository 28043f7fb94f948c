// specpool for C++17: handles that destroy themselves, and errors as exceptions (docs/c_api.md). `Ledger` has every verb
// of specpool.h but `take_delta` and `ack_delta`, which fill arrays of the caller, and a selection of the queries. For the
// others call specpool.h with `get()`.
#ifndef SPECPOOL_HPP
#define SPECPOOL_HPP

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "specpool.h"

namespace specpool {

// What a refused call throws. Nothing was changed.
class Error : public std::runtime_error {
 public:
  explicit Error(specpool_status status)
      : std::runtime_error(specpool_error_message()), status(status), shortage(specpool_error_shortage()) {
    rows.resize(specpool_error_rows(nullptr, 0));
    specpool_error_rows(rows.data(), rows.size());
  }

  specpool_status status;
  // The numbers of SPECPOOL_OUT_OF_PAGES.
  specpool_shortage shortage;
  // The rows of SPECPOOL_CONTEXT_END.
  std::vector<int32_t> rows;
};

inline void must(specpool_status status) {
  if (status != SPECPOOL_OK) throw Error(status);
}

using Ints = std::vector<int32_t>;

inline const uint8_t *bytes(const std::string &salt) { return reinterpret_cast<const uint8_t *>(salt.data()); }

// A handle that is destroyed with its object. It moves, and is not copied.
template <typename Handle, specpool_status (*destroy)(Handle)>
class Owner {
 public:
  Owner() = default;
  Owner(Owner &&other) noexcept : handle_(std::exchange(other.handle_, Handle{})) {}
  Owner &operator=(Owner &&other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owner() {
    if (handle_.id != 0) destroy(handle_);
  }
  // For the calls of specpool.h.
  Handle get() const { return handle_; }

 protected:
  Handle handle_{};
};

// Blocks, who holds them, and what they hold.
class Pool : public Owner<specpool_pool, specpool_pool_destroy> {
 public:
  explicit Pool(const specpool_pool_config &config) { must(specpool_pool_create(&config, &handle_)); }
  Pool(int64_t num_blocks, int64_t block_size) : Pool(specpool_pool_config_default(num_blocks, block_size)) {}

  Ints take(size_t count, const Ints &hold = {}, const char *tag = nullptr) {
    // The library asks whether it fits first, so that a wild count is refused before memory is taken for it.
    if (!fits(count, hold)) count = std::min(count, info().num_blocks + 1);
    Ints blocks(count);
    must(specpool_pool_take(handle_, count, hold.data(), hold.size(), tag, blocks.data()));
    return blocks;
  }
  bool fits(size_t count, const Ints &hold = {}) const {
    bool fits;
    must(specpool_pool_fits(handle_, count, hold.data(), hold.size(), &fits));
    return fits;
  }
  void drop(const Ints &blocks, int64_t after = -1) {
    must(specpool_pool_drop(handle_, blocks.data(), blocks.size(), after));
  }
  // The blocks of the longest beginning that the index knows, of at most `limit` blocks.
  Ints match(const Ints &tokens, const std::string &salt = {}, size_t limit = SIZE_MAX) const {
    Ints blocks(std::min(limit, tokens.size()));
    size_t count;
    must(specpool_pool_match(handle_, tokens.data(), tokens.size(), bytes(salt), salt.size(), blocks.data(),
                             blocks.size(), &count));
    blocks.resize(count);
    return blocks;
  }
  void put(const Ints &tokens, const Ints &blocks, size_t start = 0, const std::string &salt = {}) {
    must(specpool_pool_put(handle_, tokens.data(), tokens.size(), blocks.data(), blocks.size(), start, bytes(salt),
                           salt.size(), nullptr));
  }
  // The caller's own index knows what these blocks hold.
  void keep(const Ints &blocks) { must(specpool_pool_keep(handle_, blocks.data(), blocks.size())); }
  void unkeep(const Ints &blocks) { must(specpool_pool_unkeep(handle_, blocks.data(), blocks.size())); }
  // What take(count) would give, in order, or all that can be taken.
  Ints preview(size_t count) const {
    Ints blocks(std::min(count, info().num_blocks));
    must(specpool_pool_preview(handle_, blocks.data(), blocks.size(), &count));
    blocks.resize(count);
    return blocks;
  }
  void forget() { must(specpool_pool_forget_all(handle_)); }
  void forget(const std::string &salt) { must(specpool_pool_forget(handle_, bytes(salt), salt.size())); }
  void complete(uint64_t step) { must(specpool_pool_complete(handle_, step)); }
  specpool_pool_info info() const {
    specpool_pool_info info;
    must(specpool_pool_info_of(handle_, &info));
    return info;
  }
  void check() const { must(specpool_pool_check(handle_)); }
};

// Pages, rows and lengths, and the rules between them.
class Ledger : public Owner<specpool_ledger, specpool_ledger_destroy> {
 public:
  explicit Ledger(const specpool_ledger_config &config) { must(specpool_ledger_create(&config, &handle_)); }

  int32_t admit(const char *tag = nullptr) {
    int32_t row;
    must(specpool_ledger_admit(handle_, tag, &row));
    return row;
  }
  // The row, and how many tokens it begins with.
  std::pair<int32_t, int32_t> admit_cached(const Ints &tokens, const std::string &salt = {}, int64_t limit = -1,
                                           bool needs_draft = false, const char *tag = nullptr) {
    int32_t row, len;
    must(specpool_ledger_admit_cached(handle_, tokens.data(), tokens.size(), bytes(salt), salt.size(), limit,
                                      needs_draft, tag, &row, &len));
    return {row, len};
  }
  int32_t index(int32_t row, const Ints &tokens, const std::string &salt = {}) {
    int32_t known;
    must(specpool_ledger_index(handle_, row, tokens.data(), tokens.size(), bytes(salt), salt.size(), &known));
    return known;
  }
  // How many of the tokens have their KV in the index, whatever its states.
  int32_t known_prefix(const Ints &tokens, const std::string &salt = {}, int64_t limit = -1) const {
    int32_t len;
    must(specpool_ledger_known_prefix(handle_, tokens.data(), tokens.size(), bytes(salt), salt.size(), limit, &len));
    return len;
  }
  // The state slot that admit_cached would share, and the tokens that it contains; zeros if there is none.
  std::pair<int32_t, int32_t> match_state(const Ints &tokens, const std::string &salt = {}, int64_t limit = -1) const {
    int32_t slot, len;
    must(specpool_ledger_match_state(handle_, tokens.data(), tokens.size(), bytes(salt), salt.size(), limit, &slot,
                                     &len));
    return {slot, len};
  }
  void forget(const std::string &salt) { must(specpool_ledger_forget(handle_, bytes(salt), salt.size())); }
  void forget_all() { must(specpool_ledger_forget_all(handle_)); }
  int32_t fork(int32_t parent, const char *tag = nullptr) {
    int32_t row;
    must(specpool_ledger_fork(handle_, parent, tag, &row));
    return row;
  }
  // For a prefix cache outside the ledger. Pages are one for each column, group after group.
  void lend(int32_t row, int32_t start, int32_t end) { must(specpool_ledger_lend(handle_, row, start, end)); }
  void rebind(int32_t row, int32_t start, int32_t end, const Ints &pages) {
    must(specpool_ledger_rebind(handle_, row, start, end, pages.data(), pages.size()));
  }
  int32_t admit_lent(const Ints &pages, int32_t len, const char *tag = nullptr) {
    int32_t row;
    must(specpool_ledger_admit_lent(handle_, pages.data(), pages.size(), len, tag, &row));
    return row;
  }
  void release_lent(size_t group, const Ints &pages) {
    must(specpool_ledger_release_lent(handle_, group, pages.data(), pages.size()));
  }
  Ints lent_pages(size_t group_at) const {
    Ints pages(static_cast<size_t>(group(group_at).num_pages));
    size_t count;
    must(specpool_ledger_lent_pages(handle_, group_at, pages.data(), pages.size(), &count));
    pages.resize(count);
    return pages;
  }
  // Gives the row back and keeps its pages as a prefix, to be read and sent.
  uint64_t export_row(int32_t row) {
    uint64_t prefix;
    must(specpool_ledger_export(handle_, row, &prefix));
    return prefix;
  }
  int32_t import_row(int32_t len, int32_t drafted_len, const char *tag = nullptr) {
    int32_t row;
    must(specpool_ledger_import_row(handle_, len, drafted_len, tag, &row));
    return row;
  }
  specpool_prefix_info prefix(uint64_t prefix, size_t group) const {
    specpool_prefix_info info;
    must(specpool_ledger_prefix_pages(handle_, prefix, group, nullptr, 0, &info));
    return info;
  }
  Ints prefix_pages(uint64_t id, size_t group) const {
    Ints pages(prefix(id, group).num_pages);
    specpool_prefix_info info;
    must(specpool_ledger_prefix_pages(handle_, id, group, pages.data(), pages.size(), &info));
    return pages;
  }
  uint64_t pin_prefix(int32_t row, int32_t len) {
    uint64_t prefix;
    must(specpool_ledger_pin_prefix(handle_, row, len, &prefix));
    return prefix;
  }
  int32_t admit_on(uint64_t prefix, int64_t len = -1, const char *tag = nullptr) {
    int32_t row;
    must(specpool_ledger_admit_on(handle_, prefix, len, tag, &row));
    return row;
  }
  void release_prefix(uint64_t prefix) { must(specpool_ledger_release_prefix(handle_, prefix)); }
  // The row's line of the page table.
  Ints pages_of(int32_t row, size_t group_at) const {
    Ints pages(static_cast<size_t>(group(group_at).pages_per_row));
    size_t count;
    must(specpool_ledger_row_pages(handle_, group_at, row, pages.data(), pages.size(), &count));
    return pages;
  }
  specpool_plan prepare_extend(const Ints &rows, const Ints &new_lens, bool writes_draft = true) {
    same_size(rows, new_lens, "new_lens");
    specpool_plan plan;
    must(specpool_ledger_prepare_extend(handle_, rows.data(), new_lens.data(), rows.size(), writes_draft, &plan));
    return plan;
  }
  // The lanes `keep` leave a soft mark on their states, for `index`.
  specpool_plan prepare_extend_keeping(const Ints &rows, const Ints &new_lens, const Ints &keep,
                                       bool writes_draft = true) {
    same_size(rows, new_lens, "new_lens");
    specpool_plan plan;
    must(specpool_ledger_prepare_extend_keeping(handle_, rows.data(), new_lens.data(), rows.size(), keep.data(),
                                                keep.size(), writes_draft, &plan));
    return plan;
  }
  specpool_plan prepare_decode(const Ints &rows, const Ints &shapes, bool writes_draft = true) {
    same_size(rows, shapes, "shapes");
    specpool_plan plan;
    must(specpool_ledger_prepare_decode(handle_, rows.data(), shapes.data(), rows.size(), writes_draft, &plan));
    return plan;
  }
  void launch(uint64_t step) { must(specpool_ledger_launch(handle_, step)); }
  void resolve(uint64_t step, const Ints &accept_lens) {
    must(specpool_ledger_resolve(handle_, step, accept_lens.data(), accept_lens.size()));
  }
  void complete(uint64_t step) { must(specpool_ledger_complete(handle_, step)); }
  void cancel(uint64_t step) { must(specpool_ledger_cancel(handle_, step)); }
  void abandon(uint64_t step) { must(specpool_ledger_abandon(handle_, step)); }
  int32_t trim(int32_t row, int32_t len) {
    int32_t cut;
    must(specpool_ledger_trim(handle_, row, len, &cut));
    return cut;
  }
  // Trims the row of a session that stays.
  int32_t end_turn(int32_t row, int32_t len) {
    int32_t cut;
    must(specpool_ledger_end_turn(handle_, row, len, &cut));
    return cut;
  }
  void retract(int32_t row) { must(specpool_ledger_retract(handle_, row)); }
  void finish(int32_t row) { must(specpool_ledger_finish(handle_, row)); }
  void abort(int32_t row) { must(specpool_ledger_abort(handle_, row)); }
  specpool_row_info row(int32_t row) const {
    specpool_row_info info;
    must(specpool_ledger_row(handle_, row, &info));
    return info;
  }
  specpool_group_info group(size_t group) const {
    specpool_group_info info;
    must(specpool_ledger_group(handle_, group, &info));
    return info;
  }
  specpool_state_group_info state_group(size_t group = 0) const {
    specpool_state_group_info info;
    must(specpool_ledger_state_group(handle_, group, &info));
    return info;
  }
  specpool_row_state_info row_state(int32_t row, size_t group = 0) const {
    specpool_row_state_info info;
    must(specpool_ledger_row_state(handle_, group, row, &info));
    return info;
  }
  void check() const { must(specpool_ledger_check(handle_)); }
  void watch_kv() { must(specpool_ledger_watch_kv(handle_)); }
  // Calls `on_event` for each change of verified KV. What it throws comes out here, after the last event.
  void poll_kv_events(const std::function<void(const specpool_kv_event &)> &on_event) {
    struct Context {
      const std::function<void(const specpool_kv_event &)> &call;
      std::exception_ptr thrown;
    } context{on_event, nullptr};
    auto relay = [](void *it, const specpool_kv_event *event) {
      auto &context = *static_cast<Context *>(it);
      try {
        context.call(*event);
      } catch (...) {
        if (!context.thrown) context.thrown = std::current_exception();
      }
    };
    must(specpool_ledger_poll_kv_events(handle_, relay, &context));
    if (context.thrown) std::rethrow_exception(context.thrown);
  }

 private:
  static void same_size(const Ints &rows, const Ints &other, const char *name) {
    if (rows.size() != other.size())
      throw std::invalid_argument(std::to_string(rows.size()) + " rows, " + std::to_string(other.size()) + " " + name);
  }
};

}  // namespace specpool

#endif
