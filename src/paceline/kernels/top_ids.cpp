// The k largest scores of a long row, exactly.
//
// One pass with a rising threshold: what is above it is put aside, and whenever twice as many lie there as are wanted,
// the smaller half is dropped and the threshold raised. Nearly all of a vocabulary is passed over sixteen at a time.
#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.hpp"
#include "threads.hpp"

namespace paceline {
namespace {

class TopScores {
 public:
  explicit TopScores(int64_t wanted) : wanted_(wanted), room_(std::max<int64_t>(2 * wanted, 64) + LANES) {
    scores_.resize(room_);
    ids_.resize(room_);
  }

  // Ids of the largest scores, ascending; of equal ones at the edge the lowest ids.
  void take(const float* row, int64_t size, int64_t* out) {
    held_ = 0;
    edge_ = -INFINITY;
    is_full_ = false;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      if (is_full_ && !any_above(load(row + i), edge_)) continue;
      for (int lane = 0; lane < LANES; lane++) offer(row[i + lane], i + lane);
      if (held_ + LANES > room_) shrink();
    }
    for (; i < size; i++) {
      offer(row[i], i);
      if (held_ + 1 > room_) shrink();
    }
    if (held_ > wanted_) shrink();
    std::copy_n(ids_.begin(), wanted_, out);
  }

 private:
  void offer(float score, int64_t id) {
    // A score equal to the edge comes too late: those that lie there have lower ids.
    if (is_full_ && !(score > edge_)) return;
    scores_[held_] = score;
    ids_[held_++] = id;
  }

  void shrink() {
    kept_.assign(scores_.begin(), scores_.begin() + held_);
    std::nth_element(kept_.begin(), kept_.begin() + (wanted_ - 1), kept_.end(), std::greater<float>());
    edge_ = kept_[wanted_ - 1];
    is_full_ = true;
    const int64_t num_above = std::count_if(kept_.begin(), kept_.begin() + wanted_, [&](float s) { return s > edge_; });
    int64_t num_equal = wanted_ - num_above, to = 0;
    for (int64_t from = 0; from < held_; from++) {
      if (!(scores_[from] > edge_) && !(scores_[from] == edge_ && num_equal-- > 0)) continue;
      scores_[to] = scores_[from];
      ids_[to++] = ids_[from];
    }
    held_ = to;
  }

  int64_t wanted_, room_, held_ = 0;
  float edge_ = -INFINITY;
  bool is_full_ = false;
  std::vector<float> scores_, kept_;
  std::vector<int64_t> ids_;
};

}  // namespace
}  // namespace paceline

// scores [num_rows, size] -> ids [num_rows, wanted], ascending; wanted is at most size, and no score is NaN.
extern "C" void paceline_top_ids(const float* scores, int64_t num_rows, int64_t size, int64_t wanted, int64_t* ids,
                                 int32_t num_threads) {
  auto take = [&](int64_t first, int64_t step) {
    paceline::TopScores top(wanted);
    for (int64_t row = first; row < num_rows; row += step) top.take(scores + row * size, size, ids + row * wanted);
  };
  if (num_threads == 1 || num_rows == 1) return take(0, 1);
  paceline::Pool& pool = paceline::shared_pool(num_threads);
  pool.run([&](int thread) { take(thread, pool.size()); });
}
