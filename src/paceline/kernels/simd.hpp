// Vectors of sixteen floats in the compiler's portable vector types, and bf16.
//
// A build for the machine at hand (-march=native) turns them into one AVX-512 register, two AVX2 or four NEON
// ones. Every sum in this folder adds in an order that does not depend on how many rows are computed at once:
// a token gets the same bits in a wide draft tree as in plain decoding.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace paceline {

constexpr int LANES = 16;
typedef float v16f __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t v16u __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t v16h __attribute__((vector_size(32), aligned(2), may_alias));
typedef int32_t v16i __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t bf16;

inline v16f load(const float* p) { return *reinterpret_cast<const v16f*>(p); }
inline void store(float* p, v16f v) { *reinterpret_cast<v16f*>(p) = v; }
inline v16f splat(float x) { return v16f{} + x; }

inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Round to nearest, ties to even; a NaN stays one.
inline bf16 narrow(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline v16f widen(v16h h) {
  v16u bits = __builtin_convertvector(h, v16u) << 16;
  return reinterpret_cast<v16f&>(bits);
}
inline v16f load(const bf16* p) { return widen(*reinterpret_cast<const v16h*>(p)); }
inline void store(bf16* p, v16f v) {
#if defined(__AVX512BF16__)
  __m512 wide;
  std::memcpy(&wide, &v, 64);
  __m256bh narrowed = _mm512_cvtneps_pbh(wide);
  std::memcpy(p, &narrowed, 32);
#else
  for (int i = 0; i < LANES; i++) p[i] = narrow(v[i]);
#endif
}

inline v16f maximum(v16f a, v16f b) { return a > b ? a : b; }
inline v16f minimum(v16f a, v16f b) { return a < b ? a : b; }
inline float sum(v16f v) {  // A fixed tree: halves are added to each other.
  float lanes[LANES];
  store(lanes, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}
inline float maximum(v16f v) {
  float best = v[0];
  for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
  return best;
}

// Whether any of the sixteen is above x.
inline bool any_above(v16f v, float x) {
#if defined(__AVX512F__)
  __m512 wide;
  std::memcpy(&wide, &v, 64);
  return _mm512_cmp_ps_mask(wide, _mm512_set1_ps(x), _CMP_GT_OQ) != 0;
#else
  return maximum(v) > x;
#endif
}

// exp in fp32 to about 2 units in the last place: 2^n times a polynomial on [-ln2 / 2, ln2 / 2].
inline v16f exponential(v16f x) {
  x = minimum(maximum(x, splat(-87.0f)), splat(88.0f));
  v16f scaled = x * 1.44269504f;
  v16f shifted = scaled + 12582912.0f;  // 1.5 * 2^23: the low bits now hold the nearest integer.
  v16f n = shifted - 12582912.0f;
  v16f r = x - n * 0.693359375f - n * -2.12194440e-4f;
  v16f p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  v16i exponent = (__builtin_convertvector(n, v16i) + 127) << 23;
  return p * reinterpret_cast<v16f&>(exponent);
}

inline v16f hyperbolic_tangent(v16f x) {
  v16f e = exponential(minimum(maximum(x, splat(-15.0f)), splat(15.0f)) * 2.0f);
  return (e - 1.0f) / (e + 1.0f);
}

}  // namespace paceline
