// Logarithms of sums of exponentials.
#pragma once
#include <algorithm>
#include <cmath>

#include "simd.hpp"

namespace paceline {

// Sum of exponentials that are seen one after the other. The reference is the first score: it moves only where
// one comes along that is so much larger that sums might overflow.
struct Mass {
  float reference = -INFINITY;
  v16f total = {};

  void add(v16f scores) {
    if (reference == -INFINITY && (reference = maximum(scores)) == -INFINITY) {
      total += scores == scores ? v16f{} : scores;
      return;
    }
    if (any_above(scores, reference + 40.0f)) {
      const float higher = maximum(scores);
      total *= exponential(splat(reference - higher));
      reference = higher;
    }
    const v16f parts = scores == -INFINITY ? v16f{} : exponential(scores - reference);
    total += scores == scores ? parts : scores;  // What is no number makes the mass none.
  }
  // Logarithm of two sums together.
  static float joined(float left, float right) {
    if (left != left || right != right) return NAN;
    const float most = std::max(left, right), least = std::min(left, right);
    return least == -INFINITY ? most : most + std::log1p(std::exp(least - most));
  }
  float log() const {
    const float all = sum(total);
    return all == 0.0f ? -INFINITY : reference + std::log(all);
  }
};

}  // namespace paceline
