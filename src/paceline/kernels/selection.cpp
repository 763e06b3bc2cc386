// The largest logit of each row. torch's argmax walks bf16 one number at a time on a CPU.
#include <algorithm>

#include "simd.hpp"
#include "threads.hpp"

namespace paceline {

// Every lane remembers the first place of its largest value; of lanes with equal values the lowest place wins, so
// that equal logits are settled by the lowest id.
template <class T>
int64_t argmax(const T* row, int64_t size) {
  const int64_t whole = size / LANES * LANES;
  v16f best = splat(-INFINITY);
  v16i at = {};
  for (int64_t i = 0; i < whole; i += LANES) {
    const v16f values = load(row + i);
    const v16i is_better = values > best;
    best = is_better ? values : best;
    at = is_better ? v16i{} + int32_t(i) : at;
  }
  float most = -INFINITY;
  int64_t place = 0;
  if (whole) {
    most = maximum(best);
    place = size;
    for (int lane = 0; lane < LANES; lane++)
      if (best[lane] == most) place = std::min(place, int64_t(at[lane]) + lane);
  }
  for (int64_t i = whole; i < size; i++) {
    float value;
    if constexpr (sizeof(T) == 2) value = widen(row[i]);
    else value = row[i];
    if (value > most) most = value, place = i;
  }
  return place;
}

}  // namespace paceline

namespace {

// Below so many bytes waking the other threads takes longer than reading.
constexpr int64_t WORTH_SHARING = 1 << 20;

template <class T>
void argmax_all(const T* rows, int64_t num_rows, int64_t size, int64_t* places, int num_threads) {
  auto take = [&](int64_t from, int64_t step) {
    for (int64_t row = from; row < num_rows; row += step) places[row] = paceline::argmax(rows + row * size, size);
  };
  if (num_threads == 1 || num_rows == 1 || int64_t(num_rows * size * sizeof(T)) < WORTH_SHARING) return take(0, 1);
  paceline::Pool& pool = paceline::shared_pool(num_threads);
  pool.run([&](int thread) { take(thread, pool.size()); });
}

}  // namespace

extern "C" {

// rows [num_rows, size] of bf16 (dtype 1) or fp32 (0) -> places of the largest values.
void paceline_argmax(const void* rows, int32_t dtype, int64_t num_rows, int64_t size, int64_t* places,
                     int32_t num_threads) {
  if (dtype == 1) argmax_all(static_cast<const paceline::bf16*>(rows), num_rows, size, places, num_threads);
  else argmax_all(static_cast<const float*>(rows), num_rows, size, places, num_threads);
}

}  // extern "C"
