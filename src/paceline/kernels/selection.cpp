// The largest logit of each row. torch's argmax walks bf16 one number at a time on a CPU.
#include <algorithm>

#include "simd.hpp"

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

extern "C" {

// rows [num_rows, size] of bf16 (dtype 1) or fp32 (0) -> places of the largest values.
void paceline_argmax(const void* rows, int32_t dtype, int64_t num_rows, int64_t size, int64_t* places) {
  for (int64_t row = 0; row < num_rows; row++)
    places[row] = dtype == 1 ? paceline::argmax(static_cast<const paceline::bf16*>(rows) + row * size, size)
                             : paceline::argmax(static_cast<const float*>(rows) + row * size, size);
}

}  // extern "C"
