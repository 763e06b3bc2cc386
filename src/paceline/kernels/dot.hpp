// One row of a table times one vector.
#pragma once
#include "simd.hpp"

namespace paceline {

constexpr int LINE = 64, SUMS = 4;

inline void prefetch(const void* from, int64_t num_bytes) {
  for (int64_t at = 0; at < num_bytes; at += LINE) __builtin_prefetch(static_cast<const char*>(from) + at);
}

template <class T>
float dot(const T* row, const float* hidden, int64_t size) {
  v16f sums[SUMS] = {};
  int64_t i = 0;
  for (; i + SUMS * LANES <= size; i += SUMS * LANES)
    for (int part = 0; part < SUMS; part++)
      sums[part] += load(row + i + part * LANES) * load(hidden + i + part * LANES);
  for (; i + LANES <= size; i += LANES) sums[0] += load(row + i) * load(hidden + i);
  float rest = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < size; i++) {
    if constexpr (sizeof(T) == 2) rest += widen(row[i]) * hidden[i];
    else rest += row[i] * hidden[i];
  }
  return rest;
}

}  // namespace paceline
