// The largest logit of each row, and the mass of a row. torch's argmax walks bf16 one number at a time on a CPU, and its
// logsumexp goes over the row five times.
#include <algorithm>

#include "mass.hpp"
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

// take(row) for every row, on all cores where that pays.
template <class Take>
void for_rows(int64_t num_rows, int64_t num_bytes, int num_threads, Take&& take) {
  if (num_threads == 1 || num_rows == 1 || num_bytes < WORTH_SHARING) {
    for (int64_t row = 0; row < num_rows; row++) take(row);
    return;
  }
  paceline::Pool& pool = paceline::shared_pool(num_threads);
  pool.run([&](int thread) {
    for (int64_t row = thread; row < num_rows; row += pool.size()) take(row);
  });
}

template <class T>
void argmax_all(const T* rows, int64_t num_rows, int64_t size, int64_t* places, int num_threads) {
  for_rows(num_rows, num_rows * size * sizeof(T), num_threads,
           [&](int64_t row) { places[row] = paceline::argmax(rows + row * size, size); });
}

template <class T>
float log_sum_exp(const T* row, int64_t size) {
  paceline::Mass mass;
  int64_t i = 0;
  for (; i + paceline::LANES <= size; i += paceline::LANES) mass.add(paceline::load(row + i));
  if (i < size) {
    paceline::v16f rest = paceline::splat(-INFINITY);
    for (int lane = 0; i + lane < size; lane++) {
      if constexpr (sizeof(T) == 2) rest[lane] = paceline::widen(row[i + lane]);
      else rest[lane] = row[i + lane];
    }
    mass.add(rest);
  }
  return mass.log();
}

template <class T>
void log_sum_exp_all(const T* rows, int64_t num_rows, int64_t size, float* out, int num_threads) {
  for_rows(num_rows, num_rows * size * sizeof(T), num_threads,
           [&](int64_t row) { out[row] = log_sum_exp(rows + row * size, size); });
}

}  // namespace

extern "C" {

// rows [num_rows, size] of bf16 (dtype 1) or fp32 (0) -> places of the largest values.
void paceline_argmax(const void* rows, int32_t dtype, int64_t num_rows, int64_t size, int64_t* places,
                     int32_t num_threads) {
  if (dtype == 1) argmax_all(static_cast<const paceline::bf16*>(rows), num_rows, size, places, num_threads);
  else argmax_all(static_cast<const float*>(rows), num_rows, size, places, num_threads);
}

// The same rows -> logarithms of their summed exponentials.
void paceline_log_sum_exp(const void* rows, int32_t dtype, int64_t num_rows, int64_t size, float* out,
                          int32_t num_threads) {
  if (dtype == 1) log_sum_exp_all(static_cast<const paceline::bf16*>(rows), num_rows, size, out, num_threads);
  else log_sum_exp_all(static_cast<const float*>(rows), num_rows, size, out, num_threads);
}

}  // extern "C"
