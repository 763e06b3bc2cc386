// Attention with AMX tiles, for bf16: the same rows and the same sums as attention.hpp describes, 32 positions and
// up to 16 queries at a time.
//
// Keys are the left operand as they lie in the cache, so scores come out as [positions][queries] and are turned once;
// a softmax then runs over the positions of one query. Blocks start at multiples of 32 positions of the text: a row
// gets the same bits wherever its ancestors lie.
#pragma once
#include <vector>

#include "attention.hpp"
#include "linear.hpp"

#if defined(PACELINE_AMX)
namespace paceline {

constexpr int BLOCK = 32;

// 16 x 16 words of 32 bits.
inline void transpose(const __m512i* in, __m512i* out) {
  __m512i a[16], b[16];
  for (int i = 0; i < 8; i++) {
    a[2 * i] = _mm512_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
    a[4 + i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    a[8 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    a[12 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    out[i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0x88);
    out[8 + i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0xdd);
    out[4 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0x88);
    out[12 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0xdd);
  }
}

// Two rows of bf16 as one row of pairs.
inline __m512i pair_up(__m256i even, __m256i odd) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

class TileAttention {
 public:
  static bool fits(const AttentionShape& shape) {
    return has_amx() && shape.head_dim % BLOCK == 0 && shape.head_dim <= 256 &&
           shape.num_heads / shape.num_kv_heads <= LANES;
  }

  // As Attention::run; at most 16 queries.
  void run(const AttentionShape& shape, const Rows& rows, int first, int last, int kv_head, int window,
           const bf16* keys, const bf16* values, const float* queries, int query_stride, bf16* out,
           int out_stride) {
    const int group = shape.num_heads / shape.num_kv_heads, dim = shape.head_dim;
    load_queries(queries + size_t(first) * query_stride + kv_head * group * dim, query_stride, last - first,
                 group, dim);
    find_blocks(rows, first, last, window);
    prepare(dim);
    for (size_t block = 0; block < blocks_.size(); block++) score(block, keys, dim);
    float totals[LANES];
    std::memset(weights_.data(), 0, weights_.size() * sizeof(Line));
    for (int q = 0; q < (last - first) * group; q++)
      totals[q] = softmax(shape, q, first + q / group, seen_from_[q / group], rows.position[first + q / group]);
    add_values(values, dim);
    for (int q = 0; q < (last - first) * group; q++) {
      bf16* to = out + size_t(first + q / group) * out_stride + (kv_head * group + q % group) * dim;
      const float factor = 1.0f / totals[q];
      for (int d = 0; d < dim; d += LANES) store(to + d, load(sums_.data() + q * dim + d) * factor);
    }
  }

 private:
  // 32 positions of the text from `base` on, as all rows see them (row -1) or one row does.
  struct Block {
    int base, row;
    int32_t places[BLOCK];  // Where they lie in the cache; for one row only.
  };

  // Queries become columns: [dim / 32] tiles of [16 pairs of dims][16 queries].
  void load_queries(const float* queries, int stride, int num_rows, int group, int dim) {
    query_tiles_.resize(dim / BLOCK * LANES);
    for (int step = 0; step < dim / BLOCK; step++) {
      __m512i lines[LANES];
      for (int q = 0; q < LANES; q++) {
        lines[q] = _mm512_setzero_si512();
        if (q >= num_rows * group) continue;
        const float* from = queries + size_t(q / group) * stride + (q % group) * dim + step * BLOCK;
        const __m512bh narrowed = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + LANES), _mm512_loadu_ps(from));
        std::memcpy(&lines[q], &narrowed, 64);
      }
      transpose(lines, reinterpret_cast<__m512i*>(query_tiles_.data() + step * LANES));
    }
  }

  void find_blocks(const Rows& rows, int first, int last, int window) {
    int low = rows.position[first], shared = rows.num_shared[first];
    for (int row = first; row < last; row++) {
      seen_from_[row - first] = window > 0 ? std::max(0, rows.position[row] + 1 - window) : 0;
      low = std::min(low, seen_from_[row - first]);
      shared = std::min(shared, rows.num_shared[row]);
    }
    low = low / BLOCK * BLOCK;
    shared = std::max(shared / BLOCK * BLOCK, low);
    blocks_.clear();
    for (int base = low; base < shared; base += BLOCK) blocks_.push_back({base, -1, {}});
    for (int row = first; row < last; row++)
      for (int base = shared; base <= rows.position[row]; base += BLOCK) {
        blocks_.push_back({base, row, {}});
        for (int i = 0; i < BLOCK; i++) blocks_.back().places[i] = place(rows, row, base + i);
      }
  }

  void prepare(int dim) {
    scores_.resize(blocks_.size() * BLOCK * LANES);
    weights_.resize(blocks_.size() * LANES);
    sums_.resize(size_t(LANES) * dim);
    gathered_.resize(size_t(BLOCK) * dim);
    value_tiles_.resize(size_t(dim / LANES) * LANES);
  }

  // Positions behind the row's own count for nothing; they read its own place.
  static int place(const Rows& rows, int row, int position) {
    const int j = std::min(position, rows.position[row]);
    return j < rows.num_shared[row] ? j : rows.tail[rows.tail_start[row] + j - rows.num_shared[row]];
  }

  // One block of scores as [queries][positions].
  void score(size_t number, const bf16* keys, int dim) {
    const Block& block = blocks_[number];
    const bf16* from = keys + size_t(block.base) * dim;
    if (block.row >= 0) {
      for (int i = 0; i < BLOCK; i++)
        std::memcpy(gathered_.data() + i * dim, keys + size_t(block.places[i]) * dim, dim * 2);
      from = gathered_.data();
    }
    _tile_zero(0);
    _tile_zero(1);
    for (int step = 0; step < dim / BLOCK; step++) {
      _tile_loadd(6, query_tiles_.data() + step * LANES, 64);
      _tile_loadd(4, from + step * BLOCK, dim * 2);
      _tile_loadd(5, from + size_t(LANES) * dim + step * BLOCK, dim * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
    }
    __m512i raw[BLOCK], turned[LANES];
    _tile_stored(0, raw, 64);
    _tile_stored(1, raw + LANES, 64);
    float* to = scores_.data() + number * BLOCK * LANES;
    for (int half = 0; half < 2; half++) {
      transpose(raw + half * LANES, turned);
      for (int q = 0; q < LANES; q++) _mm512_storeu_si512(to + q * BLOCK + half * LANES, turned[q]);
    }
  }

  // Scores of one query over the positions [first, last] become weights, line `q` of every block's tile; returns their
  // sum.
  float softmax(const AttentionShape& shape, int q, int row, int first, int last) {
    const v16i lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const v16f lowest = splat(-3.0e38f);
    v16f most = lowest;
    for (size_t number = 0; number < blocks_.size(); number++) {
      if (blocks_[number].row >= 0 && blocks_[number].row != row) continue;
      float* at = scores_.data() + number * BLOCK * LANES + q * BLOCK;
      for (int half = 0; half < BLOCK; half += LANES) {
        v16f s = load(at + half) * shape.scale;
        if (shape.soft_cap > 0) s = hyperbolic_tangent(s / shape.soft_cap) * shape.soft_cap;
        const v16i position = lanes + (blocks_[number].base + half);
        s = (position >= first) & (position <= last) ? s : lowest;
        store(at + half, s);
        most = maximum(most, s);
      }
    }
    const float highest = maximum(most);
    v16f total = {};
    for (size_t number = 0; number < blocks_.size(); number++) {
      if (blocks_[number].row >= 0 && blocks_[number].row != row) continue;
      const float* at = scores_.data() + number * BLOCK * LANES + q * BLOCK;
      v16f halves[2];
      for (int half = 0; half < 2; half++) {
        const v16f s = load(at + half * LANES);
        halves[half] = s > lowest ? exponential(s - highest) : v16f{};
        total += halves[half];
      }
      const __m512bh narrowed = _mm512_cvtne2ps_pbh((__m512)halves[1], (__m512)halves[0]);
      std::memcpy(&weights_[number * LANES + q], &narrowed, 64);
    }
    return sum(total);
  }

  // sums[q] = sum over positions of weight * value.
  void add_values(const bf16* values, int dim) {
    for (int column = 0; column < dim; column += 4 * LANES) {
      const int tiles = std::min(4, (dim - column) / LANES);
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (size_t number = 0; number < blocks_.size(); number++) {
        const Block& block = blocks_[number];
        const bf16* from = values + size_t(block.base) * dim + column;
        for (int i = 0; i < LANES; i++) {
          const bf16 *even = from + size_t(2 * i) * dim, *odd = even + dim;
          if (block.row >= 0) {
            even = values + size_t(block.places[2 * i]) * dim + column;
            odd = values + size_t(block.places[2 * i + 1]) * dim + column;
          }
          for (int tile = 0; tile < tiles; tile++)
            _mm512_store_si512(&value_tiles_[tile * LANES + i],
                               pair_up(_mm256_loadu_si256((const __m256i*)(even + tile * LANES)),
                                       _mm256_loadu_si256((const __m256i*)(odd + tile * LANES))));
        }
        _tile_loadd(4, weights_.data() + number * LANES, 64);
        _tile_loadd(5, value_tiles_.data(), 64);
        _tile_dpbf16ps(0, 4, 5);
        if (tiles > 1) {
          _tile_loadd(6, value_tiles_.data() + LANES, 64);
          _tile_dpbf16ps(1, 4, 6);
        }
        if (tiles > 2) {
          _tile_loadd(5, value_tiles_.data() + 2 * LANES, 64);
          _tile_dpbf16ps(2, 4, 5);
        }
        if (tiles > 3) {
          _tile_loadd(6, value_tiles_.data() + 3 * LANES, 64);
          _tile_dpbf16ps(3, 4, 6);
        }
      }
      float* to = sums_.data() + column;
      _tile_stored(0, to, dim * 4);
      if (tiles > 1) _tile_stored(1, to + LANES, dim * 4);
      if (tiles > 2) _tile_stored(2, to + 2 * LANES, dim * 4);
      if (tiles > 3) _tile_stored(3, to + 3 * LANES, dim * 4);
    }
  }

  struct alignas(64) Line {
    uint32_t words[LANES];
  };
  std::vector<Block> blocks_;
  int seen_from_[LANES];
  std::vector<Line> query_tiles_, weights_, value_tiles_;
  std::vector<float> scores_, sums_;
  std::vector<bf16> gathered_;
};

}  // namespace paceline
#endif
