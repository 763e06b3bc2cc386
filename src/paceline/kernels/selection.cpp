// The largest logit of each row. torch's argmax walks bf16 one number at a time on a CPU.
#include "simd.hpp"

namespace paceline {

// Two passes: the largest value in vectors, then the first place where it stands, so that equal logits are
// settled by the lowest id.
template <class T>
int64_t argmax(const T* row, int64_t size) {
  const int64_t whole = size / LANES * LANES;
  v16f best = splat(-INFINITY);
  for (int64_t i = 0; i < whole; i += LANES) best = maximum(load(row + i), best);
  float most = maximum(best);
  auto at = [&](int64_t i) {
    if constexpr (sizeof(T) == 2) return widen(row[i]);
    else return row[i];
  };
  for (int64_t i = whole; i < size; i++) most = at(i) > most ? at(i) : most;
  for (int64_t i = 0; i < whole; i += LANES) {
    const v16i hits = load(row + i) == most;
    int32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= hits[lane];
    if (!any) continue;
    for (int lane = 0; lane < LANES; lane++)
      if (hits[lane]) return i + lane;
  }
  for (int64_t i = whole; i < size; i++)
    if (at(i) == most) return i;
  return 0;
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
