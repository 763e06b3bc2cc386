// Cross-entropy between two rows of logits, and its slope, in the place of the one that learns.
//
// A row is as long as the vocabulary. Three passes over it: the largest logits, the sums, the slopes; only the first one
// reads from memory, because two rows of bf16 stay in a core's cache.
#include "simd.hpp"
#include "threads.hpp"

namespace paceline {
namespace {

struct SoftLoss {
  int64_t num_rows, size;
  int32_t num_threads;
  float scale, soft_cap;        // logits are tanh(scale * product / soft_cap) * soft_cap; soft_cap 0: scale * product
  bf16* products;               // [num_rows, size], replaced by the slopes
  const bf16* teacher;          // [any, size]
  const int64_t* teacher_rows;  // [num_rows]
  const float* bias;            // [size] or null
  float* losses;                // [num_rows]
};

struct Row {
  const SoftLoss& call;
  bf16* own;
  const bf16* teacher;

  v16f logits(int64_t at) const {
    v16f found = load(own + at);
    if (call.bias) found += load(call.bias + at);
    return finished(found);
  }
  v16f finished(v16f product) const {
    product *= call.scale;
    return call.soft_cap == 0.0f ? product : hyperbolic_tangent(product / call.soft_cap) * call.soft_cap;
  }
  // Derivative of the logits by the products.
  v16f slope(v16f logits) const {
    if (call.soft_cap == 0.0f) return splat(call.scale);
    const v16f part = logits / call.soft_cap;
    return call.scale * (1.0f - part * part);
  }

  // Loss of the row; what is left over of sixteen is given to `rest` one by one in vectors padded with -inf.
  float run() {
    const int64_t whole = call.size / LANES * LANES;
    const v16f own_rest = padded_logits(whole), teacher_rest = padded(teacher + whole, call.size - whole);
    v16f best = own_rest, best_wanted = teacher_rest;
    for (int64_t at = 0; at < whole; at += LANES) {
      best = maximum(best, logits(at));
      best_wanted = maximum(best_wanted, load(teacher + at));
    }
    const float top = maximum(best), top_wanted = maximum(best_wanted);
    v16f mass = {}, mass_wanted = {}, agreed = {};
    auto add = [&](v16f own_logits, v16f wanted_logits) {
      const v16f wanted = exponential(wanted_logits - top_wanted);
      mass += exponential(own_logits - top);
      mass_wanted += wanted;
      agreed += wanted * (own_logits - top);
    };
    for (int64_t at = 0; at < whole; at += LANES) add(logits(at), load(teacher + at));
    if (whole < call.size) {
      // Lanes beside the row weigh exp(-87), nothing beside the largest logit: minus infinity times no weight is none.
      v16f own_padded = own_rest, teacher_padded = teacher_rest;
      for (int lane = call.size - whole; lane < LANES; lane++)
        own_padded[lane] = top - 87.0f, teacher_padded[lane] = top_wanted - 87.0f;
      add(own_padded, teacher_padded);
    }
    const float total = sum(mass), total_wanted = sum(mass_wanted);
    const v16f per_own = splat(1.0f / total), per_wanted = splat(1.0f / total_wanted);
    auto slope_at = [&](v16f own_logits, v16f wanted_logits) {
      const v16f gap =
          exponential(own_logits - top) * per_own - exponential(wanted_logits - top_wanted) * per_wanted;
      return gap * slope(own_logits);
    };
    for (int64_t at = 0; at < whole; at += LANES) store(own + at, slope_at(logits(at), load(teacher + at)));
    const v16f last = slope_at(own_rest, teacher_rest);
    for (int64_t at = whole; at < call.size; at++) own[at] = narrow(last[at - whole]);
    return std::log(total) - sum(agreed) / total_wanted;
  }

 private:
  static v16f padded(const bf16* from, int64_t count) {
    v16f found = splat(-INFINITY);
    for (int64_t i = 0; i < count; i++) found[i] = widen(from[i]);
    return found;
  }
  v16f padded_logits(int64_t from) const {
    v16f found = splat(-INFINITY);
    for (int64_t i = 0; from + i < call.size; i++)
      found[i] = finished(splat(widen(own[from + i]) + (call.bias ? call.bias[from + i] : 0.0f)))[0];
    return found;
  }
};

}  // namespace
}  // namespace paceline

extern "C" void paceline_soft_loss(const paceline::SoftLoss* call) {
  paceline::Pool& pool = paceline::shared_pool(call->num_threads);
  pool.run([&](int thread) {
    for (int64_t row = thread; row < call->num_rows; row += pool.size()) {
      paceline::Row one{*call, call->products + row * call->size,
                        call->teacher + call->teacher_rows[row] * call->size};
      call->losses[row] = one.run();
    }
  });
}
