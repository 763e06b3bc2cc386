// Attention with AMX tiles, for bf16: the same rows and the same sums as attention.hpp describes, 32 positions and
// up to 16 queries at a time.
//
// Keys are the left operand as they lie in the cache, so scores come out as [places][queries] and are turned once.
// Every place of the cache is scored, those of other branches of a draft tree too: that costs less than gathering
// each row's own path, whose scores are then picked into the order of the text. A softmax runs over the positions
// of one query. Values are added in blocks of 32 positions of the text, which are tile products as long as they are
// whole, and position by position in the last, unfinished block: what is added in which order depends on a row's
// position alone, so it gets the same bits wherever its ancestors lie.
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

// A line of a tile, one cache line.
struct alignas(64) Line {
  uint32_t words[LANES];
};

class TileAttention {
 public:
  static bool fits(const AttentionShape& shape) {
    return has_amx() && shape.head_dim % BLOCK == 0 && shape.head_dim <= 256 && group_of(shape) <= LANES;
  }
  // Rows whose queries of one kv head fill the columns of a tile.
  static int rows_per_tile(const AttentionShape& shape) { return LANES / group_of(shape); }

  // As Attention::run, for any number of rows of one slot.
  void run(const AttentionShape& shape, const Rows& rows, int first, int last, int kv_head, int window,
           const bf16* keys, const bf16* values, const float* queries, int query_stride, bf16* out,
           int out_stride) {
    const int group = group_of(shape), dim = shape.head_dim, heads_at = kv_head * group * dim;
    find_blocks(rows, first, last, window);
    turn_values(values, dim);
    for (int row = first; row < last; row += rows_per_tile(shape)) {
      const int end = std::min(row + rows_per_tile(shape), last);
      load_queries(queries + size_t(row) * query_stride + heads_at, query_stride, end - row, group, dim);
      for (int block = 0; block < num_blocks_; block++) score(block, keys, dim);
      for (int q = 0; q < (end - row) * group; q++) weigh(shape, rows, row + q / group, q, window);
      add_whole_blocks(rows, row, end, group, values, dim);
      for (int r = row; r < end; r++)
        finish(rows, r, (r - row) * group, group, values, dim, out + size_t(r) * out_stride + heads_at);
    }
  }

 private:
  static int group_of(const AttentionShape& shape) { return shape.num_heads / shape.num_kv_heads; }

  static int first_seen(const Rows& rows, int row, int window) {
    return window > 0 ? std::max(0, rows.position[row] + 1 - window) : 0;
  }
  // Where a position of a row's text lies in the cache.
  static int place(const Rows& rows, int row, int j) {
    return j < rows.num_shared[row] ? j : rows.tail[rows.tail_start[row] + j - rows.num_shared[row]];
  }
  // Whole blocks of a row's text, counted from position 0, and those of them that lie in order.
  static int num_whole(const Rows& rows, int row) { return (rows.position[row] + 1) / BLOCK; }
  static int num_in_order(const Rows& rows, int row) {
    return std::min(num_whole(rows, row), rows.num_shared[row] / BLOCK);
  }

  // Blocks of places that these rows see, and those of them that hold values in the order of the text.
  void find_blocks(const Rows& rows, int first, int last, int window) {
    int low = first_seen(rows, first, window), high = 0, in_order = 0;
    for (int row = first; row < last; row++) {
      low = std::min(low, first_seen(rows, row, window));
      high = std::max(high, place(rows, row, rows.position[row]));
      in_order = std::max(in_order, num_in_order(rows, row));
    }
    first_block_ = low / BLOCK;
    num_blocks_ = high / BLOCK + 1 - first_block_;
    num_turned_ = std::max(0, in_order - first_block_);
    score_stride_ = num_blocks_ * BLOCK;
    grow(scores_, size_t(LANES) * score_stride_);
    grow(weights_, size_t(LANES) * std::max(num_turned_, 1));
  }
  template <class T>
  static void grow(std::vector<T>& items, size_t size) {
    if (items.size() < size) items.resize(size);
  }

  // Values of the blocks in order, as right operands: [block][dim / 16] tiles of [16 pairs of positions][16 dims].
  void turn_values(const bf16* values, int dim) {
    grow(value_tiles_, size_t(num_turned_) * dim);
    for (int block = 0; block < num_turned_; block++) {
      const bf16* from = values + size_t(first_block_ + block) * BLOCK * dim;
      for (int i = 0; i < LANES; i++)
        turn_pair(from + size_t(2 * i) * dim, from + size_t(2 * i + 1) * dim, dim,
                  value_tiles_.data() + size_t(block) * dim + i);
    }
  }
  static void turn_pair(const bf16* even, const bf16* odd, int dim, Line* to) {
    for (int d = 0; d < dim; d += LANES, to += LANES)
      _mm512_store_si512(to, pair_up(_mm256_loadu_si256((const __m256i*)(even + d)),
                                     _mm256_loadu_si256((const __m256i*)(odd + d))));
  }

  // Queries become columns: [dim / 32] tiles of [16 pairs of dims][16 queries].
  void load_queries(const float* queries, int stride, int num_rows, int group, int dim) {
    grow(query_tiles_, size_t(dim) / BLOCK * LANES);
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
    // Lines of queries that a block does not hold whole, or that are not there, count for nothing.
    std::memset(weights_.data(), 0, size_t(num_turned_) * LANES * sizeof(Line));
  }

  // Scores of one block of places, for all queries: [queries][places].
  void score(int block, const bf16* keys, int dim) {
    const bf16* from = keys + size_t(first_block_ + block) * BLOCK * dim;
    settle();
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
    for (int half = 0; half < 2; half++) {
      transpose(raw + half * LANES, turned);
      float* to = scores_.data() + block * BLOCK + half * LANES;
      for (int q = 0; q < LANES; q++) _mm512_storeu_si512(to + size_t(q) * score_stride_, turned[q]);
    }
  }

  // Scores of one query become weights: those of whole blocks in order as lines of tiles, all of them as floats.
  void weigh(const AttentionShape& shape, const Rows& rows, int row, int q, int window) {
    const int base = first_block_ * BLOCK, first = first_seen(rows, row, window) - base;
    const int end = rows.position[row] + 1 - base;
    float* scores = scores_.data() + size_t(q) * score_stride_;
    // A node lies at or behind its position, and behind its parent: nothing is overwritten before it is read.
    for (int j = std::max(rows.num_shared[row] - base, 0); j < end; j++)
      scores[j] = scores[place(rows, row, j + base) - base];
    const v16i lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const v16f lowest = splat(-3.0e38f);
    v16f most = lowest;
    for (int j = 0; j < end; j += LANES) {
      v16f s = load(scores + j) * shape.scale;
      if (shape.soft_cap > 0) s = hyperbolic_tangent(s / shape.soft_cap) * shape.soft_cap;
      if (j < first || j + LANES > end) s = (lanes + j >= first) & (lanes + j < end) ? s : lowest;
      store(scores + j, s);
      most = maximum(most, s);
    }
    const float highest = maximum(most);
    v16f total = {};
    for (int j = 0; j < end; j += LANES) {
      v16f weight = exponential(load(scores + j) - highest);
      if (j < first || j + LANES > end) weight = (lanes + j >= first) & (lanes + j < end) ? weight : v16f{};
      store(scores + j, weight);
      total += weight;
    }
    totals_[q] = sum(total);
    for (int block = 0; block < num_in_order(rows, row) - first_block_; block++)
      narrow(scores + block * BLOCK, &weights_[size_t(block) * LANES + q]);
  }
  static void narrow(const float* weights, Line* to) {
    const __m512bh narrowed = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(weights + LANES), _mm512_loadu_ps(weights));
    std::memcpy(to, &narrowed, 64);
  }

  // sums[q] = sum over the positions of whole blocks of weight * value.
  void add_whole_blocks(const Rows& rows, int first, int last, int group, const bf16* values, int dim) {
    grow(sums_, size_t(LANES) * dim);
    for (int column = 0; column < dim; column += 2 * LANES) {
      _tile_zero(0);
      _tile_zero(1);
      for (int block = 0; block < num_turned_; block++)
        add_block(&weights_[size_t(block) * LANES], &value_tiles_[size_t(block) * dim + column]);
      for (int row = first; row < last; row++)
        for (int block = std::max(num_in_order(rows, row), first_block_); block < num_whole(rows, row); block++)
          add_scattered(rows, row, (row - first) * group, group, block, values, dim, column);
      _tile_stored(0, sums_.data() + column, dim * 4);
      _tile_stored(1, sums_.data() + column + LANES, dim * 4);
    }
  }
  // Two tiles of values, 32 columns, under one tile of weights.
  static void add_block(const Line* weights, const Line* values) {
    settle();
    _tile_loadd(4, weights, 64);
    _tile_loadd(5, values, 64);
    _tile_loadd(6, values + LANES, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
  }
  // A whole block of one row with nodes of a draft tree in it, which may lie anywhere.
  void add_scattered(const Rows& rows, int row, int q, int group, int block, const bf16* values, int dim,
                     int column) {
    Line weights[LANES] = {}, tiles[2 * LANES];
    for (int i = 0; i < group; i++)
      narrow(scores_.data() + size_t(q + i) * score_stride_ + (block - first_block_) * BLOCK, &weights[q + i]);
    for (int i = 0; i < LANES; i++) {
      const bf16* even = values + size_t(place(rows, row, block * BLOCK + 2 * i)) * dim + column;
      const bf16* odd = values + size_t(place(rows, row, block * BLOCK + 2 * i + 1)) * dim + column;
      turn_pair(even, odd, 2 * LANES, tiles + i);
    }
    add_block(weights, tiles);
  }

  // The unfinished block of a row, then its results.
  void finish(const Rows& rows, int row, int q, int group, const bf16* values, int dim, bf16* out) {
    const int begin = std::max(num_whole(rows, row), first_block_) * BLOCK;
    for (int i = 0; i < group; i++) {
      const float* weights = scores_.data() + size_t(q + i) * score_stride_ - first_block_ * BLOCK;
      const float factor = 1.0f / totals_[q + i];
      for (int column = 0; column < dim; column += BLOCK) {
        float* sums = sums_.data() + (q + i) * dim + column;
        v16f left = load(sums), right = load(sums + LANES);
        for (int j = begin; j <= rows.position[row]; j++) {
          const bf16* value = values + size_t(place(rows, row, j)) * dim + column;
          left += weights[j] * load(value);
          right += weights[j] * load(value + LANES);
        }
        store(out + i * dim + column, left * factor);
        store(out + i * dim + column + LANES, right * factor);
      }
    }
  }

  int first_block_ = 0, num_blocks_ = 0, num_turned_ = 0, score_stride_ = 0;
  float totals_[LANES];
  std::vector<Line> query_tiles_, weights_, value_tiles_;
  std::vector<float> scores_, sums_;
};

}  // namespace paceline
#endif
