// Logits of chosen rows of an output layer, without a copy of those rows.
//
// Rows lie anywhere in a table of hundreds of megabytes, so all that counts is how many cache lines are on their way at
// once: rows are asked for some way ahead of the one that is being multiplied.
#include <algorithm>

#include "dot.hpp"
#include "simd.hpp"
#include "threads.hpp"

namespace paceline {
namespace {

struct GatherDot {
  int32_t dtype, num_threads;  // 0: fp32, 1: bf16
  int64_t num_rows, num_ids, size, num_weights;
  int64_t weight_stride, index_stride;  // in elements; index_stride 0: all rows share the ids
  const void* hidden;                   // [num_rows, size] fp32
  const void* weights;
  const int64_t* index;
  const float* bias;  // [num_weights] or null
  float* out;         // [num_rows, num_ids]
};

constexpr int AHEAD = 8;
// Below so many ids waking the other threads takes longer than the work.
constexpr int64_t WORTH_SHARING = 512;

template <class T>
void run(const GatherDot& call) {
  const T* weights = static_cast<const T*>(call.weights);
  const float* hidden = static_cast<const float*>(call.hidden);
  const bool is_shared = call.index_stride == 0;
  const int64_t num_bytes = call.size * sizeof(T);
  const int64_t total = is_shared ? call.num_ids : call.num_rows * call.num_ids;
  auto id_at = [&](int64_t place) {
    return is_shared ? call.index[place] : call.index[place / call.num_ids * call.index_stride + place % call.num_ids];
  };
  auto weight_row = [&](int64_t place) { return weights + id_at(place) * call.weight_stride; };
  auto work = [&](int64_t first, int64_t last) {
    for (int64_t place = first; place < std::min(first + AHEAD, last); place++) prefetch(weight_row(place), num_bytes);
    for (int64_t place = first; place < last; place++) {
      if (place + AHEAD < last) prefetch(weight_row(place + AHEAD), num_bytes);
      const T* row = weight_row(place);
      const float added = call.bias ? call.bias[id_at(place)] : 0.0f;
      if (!is_shared) {
        call.out[place] = dot(row, hidden + place / call.num_ids * call.size, call.size) + added;
        continue;
      }
      for (int64_t m = 0; m < call.num_rows; m++)
        call.out[m * call.num_ids + place] = dot(row, hidden + m * call.size, call.size) + added;
    }
  };
  if (call.num_threads == 1 || total < WORTH_SHARING) return work(0, total);
  Pool& pool = shared_pool(call.num_threads);
  pool.run([&](int thread) { work(total * thread / pool.size(), total * (thread + 1) / pool.size()); });
}

}  // namespace
}  // namespace paceline

// Place of the first id outside the table, in the order of `index`, and nothing computed; -1 when all is well.
extern "C" int64_t paceline_gather_dot(const paceline::GatherDot* call) {
  const int64_t num_lists = call->index_stride ? call->num_rows : 1;
  for (int64_t list = 0; list < num_lists; list++)
    for (int64_t i = 0; i < call->num_ids; i++) {
      const int64_t id = call->index[list * call->index_stride + i];
      if (id < 0 || id >= call->num_weights) return list * call->num_ids + i;
    }
  if (call->dtype == 1) paceline::run<paceline::bf16>(*call);
  else paceline::run<float>(*call);
  return -1;
}
