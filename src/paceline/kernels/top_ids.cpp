// The k largest scores of each row; see top_scores.hpp.
#include "threads.hpp"
#include "top_scores.hpp"

// scores [num_rows, size] -> ids [num_rows, wanted], ascending; wanted is at most size, and no score is NaN.
extern "C" void paceline_top_ids(const float* scores, int64_t num_rows, int64_t size, int64_t wanted, int64_t* ids,
                                 int32_t num_threads) {
  auto take = [&](int64_t first, int64_t step) {
    paceline::TopScores top(wanted);
    for (int64_t row = first; row < num_rows; row += step) {
      const float* own = scores + row * size;
      top.clear();
      top.add(0, size, [&](int64_t id) { return paceline::load(own + id); }, [&](int64_t id) { return own[id]; });
      top.take(ids + row * wanted);
    }
  };
  if (num_threads == 1 || num_rows == 1) return take(0, 1);
  paceline::Pool& pool = paceline::shared_pool(num_threads);
  pool.run([&](int thread) { take(thread, pool.size()); });
}
