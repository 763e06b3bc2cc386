// What stands between products: norms, activations, and buffers.
#pragma once
#include <cstdlib>
#include <memory>

#include "simd.hpp"

namespace paceline {

enum NormKind : int32_t { RMS_NORM = 0, LAYER_NORM = 1 };
enum Activation : int32_t { SILU = 0, GELU_TANH = 1, GELU_ERF = 2, RELU = 3 };

struct Norm {
  const float* weight;  // Null: no norm here.
  const float* bias;
};

inline v16f activate(v16f x, int32_t kind) {
  switch (kind) {
    case SILU:
      return x / (1.0f + exponential(-x));
    case GELU_TANH:
      return 0.5f * x * (1.0f + hyperbolic_tangent(0.7978845608f * (x + 0.044715f * x * x * x)));
    case GELU_ERF: {
      // erf to 1.5e-7: Abramowitz and Stegun 7.1.26.
      const v16f z = maximum(x, -x) * 0.70710678f;
      const v16f t = 1.0f / (1.0f + 0.3275911f * z);
      v16f p = splat(1.061405429f);
      p = p * t - 1.453152027f;
      p = p * t + 1.421413741f;
      p = p * t - 0.284496736f;
      p = p * t + 0.254829592f;
      const v16f erf = 1.0f - p * t * exponential(-z * z);
      return 0.5f * x * (1.0f + (x < 0.0f ? -erf : erf));
    }
    default:
      return maximum(x, v16f{});
  }
}

inline float inverse_rms(const float* x, int size, float eps) {
  v16f squares = {};
  for (int d = 0; d < size; d += LANES) squares += load(x + d) * load(x + d);
  return 1.0f / std::sqrt(sum(squares) / size + eps);
}

template <class To>
void normalise(const Norm& norm, int32_t kind, float eps, const float* x, int size, To* out) {
  if (!norm.weight) {
    for (int d = 0; d < size; d += LANES) store(out + d, load(x + d));
    return;
  }
  float mean = 0.0f, factor;
  if (kind == LAYER_NORM) {
    v16f total = {}, squares = {};
    for (int d = 0; d < size; d += LANES) total += load(x + d);
    mean = sum(total) / size;
    for (int d = 0; d < size; d += LANES) {
      const v16f centred = load(x + d) - mean;
      squares += centred * centred;
    }
    factor = 1.0f / std::sqrt(sum(squares) / size + eps);
  } else {
    factor = inverse_rms(x, size, eps);
  }
  for (int d = 0; d < size; d += LANES) {
    v16f y = (load(x + d) - mean) * factor * load(norm.weight + d);
    if (norm.bias) y += load(norm.bias + d);
    store(out + d, y);
  }
}

// Memory that only grows, zero at first, aligned for tiles.
template <class T>
class Buffer {
 public:
  T* get(size_t count) {
    if (count > size_) {
      owned_.reset(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)), std::free);
      std::memset(owned_.get(), 0, count * sizeof(T));
      size_ = count;
    }
    return owned_.get();
  }

 private:
  std::shared_ptr<T> owned_;
  size_t size_ = 0;
};

}  // namespace paceline
