// Linear layers over packed weights: rows of activations times a weight matrix, 32 outputs at a time.
//
// Packed layout (made in Python, `kernels/packing.py`), P = ceil(out / 32) pairs of 16 output columns:
//   fp32  [P][in][32]: one step of the inner dimension after the other.
//   bf16  [P][in / 32][2][16][16][2]: for every 32 inner steps one tile per 16 columns; a tile has 16 rows of
//         two inner steps each, interleaved column by column. That is the operand of AMX's tile product and,
//         row by row, of AVX-512's dot product of bf16 pairs. `in` is padded to a multiple of 32 with zeros.
// A pair of columns is read from memory once, in order, however many rows there are.
#pragma once
#include <algorithm>

#include "simd.hpp"
#include "threads.hpp"
#if defined(__AMX_BF16__) && defined(__linux__)
#define PACELINE_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace paceline {

constexpr int PAIR = 2 * LANES;

struct Linear {
  const void* weights;
  const float* bias;  // One per output (padded to whole pairs), or null.
  int32_t in;
  int32_t out;
};

inline int padded(int in) { return (in + PAIR - 1) / PAIR * PAIR; }

// Bytes of one pair of columns.
template <class T>
size_t pair_bytes(const Linear& linear) {
  return size_t(sizeof(T) == 2 ? padded(linear.in) : linear.in) * PAIR * sizeof(T);
}

// Weights that are needed next, asked for a few lines at a time while others are in use: memory would be idle
// whenever the arithmetic of many rows, or a phase without weights, keeps the processor busy.
struct Ahead {
  const char* at = nullptr;
  const char* end = nullptr;
  void fetch(int lines) {
    const char* last = at + lines * 64 < end ? at + lines * 64 : end;
    for (; at < last; at += 64) __builtin_prefetch(at, 0, 2);
  }
};

inline int num_pairs(const Linear& linear) { return (linear.out + PAIR - 1) / PAIR; }
// Pairs of columns that a thread takes at once.
inline int chunk_of(const Linear& linear, const Pool& pool) {
  return std::max(1, num_pairs(linear) / (8 * pool.size()));
}
template <class T>
Ahead ahead_of(const Linear& linear, int pair) {
  if (pair >= num_pairs(linear)) return {};
  const char* at = static_cast<const char*>(linear.weights) + pair * pair_bytes<T>(linear);
  return {at, at + pair_bytes<T>(linear)};
}

// ---- AMX -------------------------------------------------------------------------------------------------

#if defined(PACELINE_AMX)
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Linux hands out the tile registers on request, once for the whole process.
inline bool request_amx() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
inline bool has_amx() {
  static const bool granted = request_amx();
  return granted;
}
inline void open_tiles() {
  // Static: the compiler believes that only the first eight bytes are read.
  static constexpr TileConfig config{};
  if (has_amx()) _tile_loadconfig(&config);
}
inline void close_tiles() {
  if (has_amx()) _tile_release();
}
// The compiler does not know that tile loads read memory: what was just written must be written before them.
inline void settle() { asm volatile("" ::: "memory"); }

// Activations must be readable up to a multiple of 16 rows.
template <class Epilogue>
void multiply_amx(const Linear& linear, const bf16* rows, int stride, int num_rows, int pair, Ahead& ahead,
                  Epilogue&& epilogue) {
  const int steps = padded(linear.in) / PAIR;
  const char* weights = static_cast<const char*>(linear.weights) + size_t(pair) * steps * 2048;
  const int lines = 32 / ((num_rows + 31) / 32) + 1;
  alignas(64) float sums[4][256];
  settle();
  for (int first = 0; first < num_rows; first += 32) {
    const bool two = num_rows - first > 16;
    const bf16* upper = rows + size_t(first) * stride;
    const bf16* lower = upper + size_t(16) * stride;
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
      _tile_zero(2);
      _tile_zero(3);
      for (int step = 0; step < steps; step++) {
        ahead.fetch(lines);
        _tile_loadd(6, weights + size_t(step) * 2048, 64);
        _tile_loadd(4, upper + step * PAIR, stride * 2);
        _tile_loadd(7, weights + size_t(step) * 2048 + 1024, 64);
        _tile_loadd(5, lower + step * PAIR, stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
    } else {
      for (int step = 0; step < steps; step++) {
        ahead.fetch(lines);
        _tile_loadd(6, weights + size_t(step) * 2048, 64);
        _tile_loadd(7, weights + size_t(step) * 2048 + 1024, 64);
        _tile_loadd(4, upper + step * PAIR, stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
      }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    for (int row = first; row < num_rows && row < first + 32; row++) {
      const int half = row - first >= 16 ? 2 : 0, line = (row - first) % 16 * LANES;
      epilogue(row, load(sums[half] + line), load(sums[half + 1] + line));
    }
  }
}
#else
inline bool has_amx() { return false; }
inline void open_tiles() {}
inline void close_tiles() {}
#endif

// ---- vectors ---------------------------------------------------------------------------------------------

// R rows at once; the sum over the inner dimension runs in the same order for every R.
template <int R, class Epilogue>
void multiply_rows(const Linear& linear, const bf16* rows, int stride, int first, int pair,
                   Epilogue&& epilogue) {
  const int steps = padded(linear.in) / PAIR;
  const char* weights = static_cast<const char*>(linear.weights) + size_t(pair) * steps * 2048;
  const bf16* row = rows + size_t(first) * stride;
#if defined(__AVX512BF16__)
  __m512 left[R], right[R];
  for (int r = 0; r < R; r++) left[r] = right[r] = _mm512_setzero_ps();
  for (int step = 0; step < steps; step++, weights += 2048)
    for (int i = 0; i < LANES; i++) {
      const __m512bh b0 = (__m512bh)_mm512_loadu_si512(weights + i * 64);
      const __m512bh b1 = (__m512bh)_mm512_loadu_si512(weights + 1024 + i * 64);
      for (int r = 0; r < R; r++) {
        int32_t both;
        std::memcpy(&both, row + size_t(r) * stride + step * PAIR + 2 * i, 4);
        const __m512bh a = (__m512bh)_mm512_set1_epi32(both);
        left[r] = _mm512_dpbf16_ps(left[r], a, b0);
        right[r] = _mm512_dpbf16_ps(right[r], a, b1);
      }
    }
  for (int r = 0; r < R; r++) epilogue(first + r, v16f(left[r]), v16f(right[r]));
#else
  v16f left[R] = {}, right[R] = {};
  for (int step = 0; step < steps; step++, weights += 2048)
    for (int i = 0; i < LANES; i++) {
      const v16u b0 = *reinterpret_cast<const v16u*>(weights + i * 64);
      const v16u b1 = *reinterpret_cast<const v16u*>(weights + 1024 + i * 64);
      const v16u even0 = b0 << 16, odd0 = b0 & 0xffff0000u, even1 = b1 << 16, odd1 = b1 & 0xffff0000u;
      for (int r = 0; r < R; r++) {
        const bf16* both = row + size_t(r) * stride + step * PAIR + 2 * i;
        left[r] += widen(both[0]) * reinterpret_cast<const v16f&>(even0);
        left[r] += widen(both[1]) * reinterpret_cast<const v16f&>(odd0);
        right[r] += widen(both[0]) * reinterpret_cast<const v16f&>(even1);
        right[r] += widen(both[1]) * reinterpret_cast<const v16f&>(odd1);
      }
    }
  for (int r = 0; r < R; r++) epilogue(first + r, left[r], right[r]);
#endif
}

template <int R, class Epilogue>
void multiply_rows(const Linear& linear, const float* rows, int stride, int first, int pair,
                   Epilogue&& epilogue) {
  const float* weights = static_cast<const float*>(linear.weights) + size_t(pair) * linear.in * PAIR;
  const float* row = rows + size_t(first) * stride;
  v16f left[R] = {}, right[R] = {};
  for (int k = 0; k < linear.in; k++, weights += PAIR) {
    const v16f b0 = load(weights), b1 = load(weights + LANES);
    for (int r = 0; r < R; r++) {
      const float a = row[size_t(r) * stride + k];
      left[r] += a * b0;
      right[r] += a * b1;
    }
  }
  for (int r = 0; r < R; r++) epilogue(first + r, left[r], right[r]);
}

template <class T, class Epilogue>
void multiply_vectors(const Linear& linear, const T* rows, int stride, int num_rows, int pair,
                      Epilogue&& epilogue) {
  constexpr int WIDEST = sizeof(v16f) == 64 ? 8 : 4;
  int row = 0;
  for (; row + WIDEST <= num_rows; row += WIDEST)
    multiply_rows<WIDEST>(linear, rows, stride, row, pair, epilogue);
  if (num_rows - row >= 4) {
    multiply_rows<4>(linear, rows, stride, row, pair, epilogue);
    row += 4;
  }
  if (num_rows - row >= 2) {
    multiply_rows<2>(linear, rows, stride, row, pair, epilogue);
    row += 2;
  }
  if (row < num_rows) multiply_rows<1>(linear, rows, stride, row, pair, epilogue);
}

// ---- one pair of columns for all rows --------------------------------------------------------------------

// epilogue(row, left, right): sums of columns [32 pair, 32 pair + 16) and the sixteen behind, bias included.
template <class T, class Epilogue>
void multiply_pair(const Linear& linear, const T* rows, int stride, int num_rows, int pair, Ahead& ahead,
                   Epilogue&& epilogue) {
  auto with_bias = [&](int row, v16f left, v16f right) {
    if (linear.bias) {
      left += load(linear.bias + pair * PAIR);
      right += load(linear.bias + pair * PAIR + LANES);
    }
    epilogue(row, left, right);
  };
#if defined(PACELINE_AMX)
  if constexpr (sizeof(T) == 2)
    if (has_amx()) return multiply_amx(linear, rows, stride, num_rows, pair, ahead, with_bias);
#endif
  multiply_vectors<T>(linear, rows, stride, num_rows, pair, with_bias);
}

// This thread's share of a product. While a pair of columns is in use the next one is fetched, after the last
// one the first of the product that `following` begins with.
template <class T, class Epilogue>
void multiply_share(Pool& pool, int thread, const Linear& linear, const T* rows, int stride, int num_rows,
                    const Linear* following, Epilogue&& epilogue) {
  const int pairs = num_pairs(linear), chunk = chunk_of(linear, pool);
  int begin = thread * chunk;
  while (begin < pairs) {
    const int next = pool.next_chunk() * chunk, end = std::min(begin + chunk, pairs);
    for (int pair = begin; pair < end; pair++) {
      Ahead ahead;
      if (pair + 1 < end) ahead = ahead_of<T>(linear, pair + 1);
      else if (next < pairs) ahead = ahead_of<T>(linear, next);
      else if (following) ahead = ahead_of<T>(*following, thread * chunk_of(*following, pool));
      multiply_pair<T>(linear, rows, stride, num_rows, pair, ahead,
                       [&](int row, v16f left, v16f right) { epilogue(row, pair, left, right); });
    }
    begin = next;
  }
}

}  // namespace paceline
