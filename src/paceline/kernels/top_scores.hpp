// The k largest scores of a long row, exactly.
//
// One pass with a rising threshold: what is above it is put aside, and whenever twice as many lie there as are wanted,
// the smaller half is dropped and the threshold raised. Nearly all of a vocabulary is passed over sixteen at a time.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "simd.hpp"

namespace paceline {

class TopScores {
 public:
  explicit TopScores(int64_t wanted) : wanted_(wanted), room_(std::max<int64_t>(2 * wanted, 64) + LANES) {
    scores_.resize(room_);
    ids_.resize(room_);
  }

  void clear() {
    held_ = 0;
    edge_ = -INFINITY;
    is_full_ = false;
  }

  // Scores of ids [first, last) in rising order of ids; sixteen(id) gives a vector, one(id) a single score.
  template <class Sixteen, class One>
  void add(int64_t first, int64_t last, Sixteen&& sixteen, One&& one) {
    int64_t i = first;
    for (; i + LANES <= last; i += LANES) {
      const v16f scores = sixteen(i);
      if (is_full_ && !any_above(scores, edge_)) continue;
      if (held_ + LANES > room_) shrink();
      for (int lane = 0; lane < LANES; lane++) offer(scores[lane], i + lane);
    }
    for (; i < last; i++) {
      if (held_ == room_) shrink();
      offer(one(i), i);
    }
  }

  // What another collection holds; its ids lie behind all of this one's.
  void add(const TopScores& behind) {
    for (int64_t i = 0; i < behind.held_; i++) {
      if (held_ == room_) shrink();
      offer(behind.scores_[i], behind.ids_[i]);
    }
  }

  // Ids of the largest scores, ascending; of equal ones at the edge the lowest ids.
  void take(int64_t* out) {
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

}  // namespace paceline
