// A prefix cache for an engine with rows of its own, in C++: a second request with the same prompt takes the first
// one's blocks.
//
//   c++ -std=c++17 engine.cpp -I../include -lspecpool -o engine && ./engine
#include <iostream>
#include <numeric>

#include "specpool.hpp"

int main() {
  specpool::Pool pool(8, 4);  // 8 blocks of 4 tokens
  specpool::Ints prompt(13);
  std::iota(prompt.begin(), prompt.end(), 100);

  specpool::Ints first = pool.take(4, {}, "request-1");
  pool.put(prompt, first);  // its KV is computed: three blocks are whole
  pool.drop(first);

  specpool::Ints hit = pool.match(prompt);
  specpool::Ints rest = pool.take(4 - hit.size(), hit, "request-2");
  std::cout << hit.size() << " of 4 blocks come from the cache\n";

  try {
    pool.take(8, {}, "request-3");
  } catch (const specpool::Error &error) {
    std::cout << error.what() << " (" << error.shortage.need << " needed)\n";
  }
  hit.insert(hit.end(), rest.begin(), rest.end());
  pool.drop(hit);
  try {
    pool.drop(hit);
  } catch (const specpool::Error &error) {
    std::cout << error.what() << "\n";
  }
  pool.check();
  const auto info = pool.info();
  return info.num_free + info.num_cached == 8 ? 0 : 1;
}
