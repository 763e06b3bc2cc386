// Attention of a few query rows over the cached keys they may see.
//
// What a row sees is a list of positions in the order of the text: first the cached ones that lie in order
// (`num_shared`), then, for a node of a draft tree, its ancestors and itself (`tail`), wherever they lie. Scores
// are sums over the head size in order, the softmax adds lanes chosen by position modulo 16, and values are added
// in the order of the text. So the result does not depend on the shape of the tree around the row.
#pragma once
#include <vector>

#include "simd.hpp"

namespace paceline {

struct Rows {
  int32_t num_rows;
  const int32_t* slot;        // Cache slot of each row.
  const int32_t* write;       // Where in the slot its own key and value go.
  const int32_t* position;    // Its place in the text.
  const int32_t* num_shared;  // Cached positions that it sees and that lie in order.
  const int32_t* tail_start;  // [num_rows + 1]: its part of `tail`.
  const int32_t* tail;        // Cache positions of the rest.
};

struct AttentionShape {
  int32_t num_heads, num_kv_heads, head_dim;
  float scale, soft_cap;  // Soft-cap 0: none.
};

// Keys of sixteen positions, transposed: [head_dim][16].
inline void gather_keys(const bf16* keys, int head_dim, const int32_t* index, float* out) {
#if defined(__AVX512F__)
  const __m512i offsets = _mm512_mullo_epi32(_mm512_loadu_si512(index), _mm512_set1_epi32(head_dim / 2));
  for (int d = 0; d < head_dim; d += 2) {
    const __m512i pair = _mm512_i32gather_epi32(offsets, keys + d, 4);
    _mm512_storeu_si512(out + d * LANES, _mm512_slli_epi32(pair, 16));
    _mm512_storeu_si512(out + (d + 1) * LANES, _mm512_and_si512(pair, _mm512_set1_epi32(int(0xffff0000u))));
  }
#else
  for (int i = 0; i < LANES; i++)
    for (int d = 0; d < head_dim; d++) out[d * LANES + i] = widen(keys[size_t(index[i]) * head_dim + d]);
#endif
}
inline void gather_keys(const float* keys, int head_dim, const int32_t* index, float* out) {
  for (int i = 0; i < LANES; i++)
    for (int d = 0; d < head_dim; d++) out[d * LANES + i] = keys[size_t(index[i]) * head_dim + d];
}

template <int Q>
void score(const float* const* queries, const float* keys, int head_dim, float* const* scores) {
  v16f sums[Q] = {};
  for (int d = 0; d < head_dim; d++) {
    const v16f key = load(keys + d * LANES);
    for (int q = 0; q < Q; q++) sums[q] += queries[q][d] * key;
  }
  for (int q = 0; q < Q; q++) store(scores[q], sums[q]);
}

// out[q] += sum over j of weights[q][j] * value(j), for 16 * V columns.
template <int Q, int V, class T, class Index>
void accumulate(const float* const* weights, const T* values, int stride, int begin, int end, Index&& index,
                float* const* out) {
  v16f sums[Q][V];
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < V; v++) sums[q][v] = load(out[q] + v * LANES);
  for (int j = begin; j < end; j++) {
    const T* value = values + size_t(index(j)) * stride;
    v16f columns[V];
    for (int v = 0; v < V; v++) columns[v] = load(value + v * LANES);
    for (int q = 0; q < Q; q++)
      for (int v = 0; v < V; v++) sums[q][v] += weights[q][j] * columns[v];
  }
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < V; v++) store(out[q] + v * LANES, sums[q][v]);
}

template <class T, class Index>
void accumulate_all(int num_queries, const float* const* weights, const T* values, int head_dim, int begin,
                    int end, Index&& index, float* const* out) {
  if (begin >= end) return;
  for (int column = 0; column < head_dim;) {
    const int vectors = (head_dim - column) / LANES >= 4 ? 4 : 1;
    for (int q = 0; q < num_queries;) {
      const int group = num_queries - q >= 4 ? 4 : 1;
      float* parts[4];
      for (int i = 0; i < group; i++) parts[i] = out[q + i] + column;
      const T* part = values + column;
      if (group == 4 && vectors == 4) accumulate<4, 4>(weights + q, part, head_dim, begin, end, index, parts);
      else if (group == 4) accumulate<4, 1>(weights + q, part, head_dim, begin, end, index, parts);
      else if (vectors == 4) accumulate<1, 4>(weights + q, part, head_dim, begin, end, index, parts);
      else accumulate<1, 1>(weights + q, part, head_dim, begin, end, index, parts);
      q += group;
    }
    column += vectors * LANES;
  }
}

class Attention {
 public:
  // Rows [first, last) of one slot, one kv head. `queries` [rows][stride] holds all heads of a row side by side,
  // rotated; `out` takes the same columns in the dtype of the cache.
  template <class T>
  void run(const AttentionShape& shape, const Rows& rows, int first, int last, int kv_head, int window,
           const T* keys, const T* values, const float* queries, int query_stride, T* out, int out_stride) {
    const int group = shape.num_heads / shape.num_kv_heads, dim = shape.head_dim;
    const int num_queries = (last - first) * group;
    int low = rows.position[first], shared = rows.num_shared[first], high = 0;
    for (int row = first; row < last; row++) {
      low = std::min(low, first_seen(rows, row, window));
      shared = std::min(shared, rows.num_shared[row]);
      high = std::max(high, rows.position[row]);
    }
    low = low / LANES * LANES;
    shared = std::max(shared, low);
    prepare(num_queries, dim, high + 1 - low);
    for (int q = 0; q < num_queries; q++) {
      const int row = first + q / group, head = kv_head * group + q % group;
      query_[q] = queries + size_t(row) * query_stride + head * dim;
      score_[q] = scores_.data() + size_t(q) * width_ - low;  // Indexed by position.
      sum_[q] = sums_.data() + size_t(q) * dim;
      std::memset(sum_[q], 0, dim * sizeof(float));
    }
    auto in_order = [](int j) { return j; };
    int32_t index[LANES];
    for (int j = low; j < shared; j += LANES) {
      for (int i = 0; i < LANES; i++) index[i] = std::min(j + i, shared - 1);
      gather_keys(keys, dim, index, keys_.data());
      score_queries(0, num_queries, j, dim);
    }
    for (int row = first; row < last; row++)
      for (int j = shared; j <= rows.position[row]; j += LANES) {
        for (int i = 0; i < LANES; i++) index[i] = where(rows, row, std::min(j + i, rows.position[row]));
        gather_keys(keys, dim, index, keys_.data());
        score_queries((row - first) * group, group, j, dim);
      }
    for (int q = 0; q < num_queries; q++) {
      const int row = first + q / group;
      total_[q] = softmax(score_[q], low, first_seen(rows, row, window), rows.position[row], shape);
    }
    accumulate_all(num_queries, score_.data(), values, dim, low, shared, in_order, sum_.data());
    for (int row = first; row < last; row++) {
      const int q = (row - first) * group;
      auto by_list = [&](int j) { return where(rows, row, j); };
      accumulate_all(group, score_.data() + q, values, dim, shared, rows.position[row] + 1, by_list,
                     sum_.data() + q);
    }
    for (int q = 0; q < num_queries; q++) {
      const int row = first + q / group, head = kv_head * group + q % group;
      const float factor = 1.0f / total_[q];
      T* to = out + size_t(row) * out_stride + head * dim;
      for (int d = 0; d < dim; d += LANES) store(to + d, load(sum_[q] + d) * factor);
    }
  }

 private:
  static int first_seen(const Rows& rows, int row, int window) {
    return window > 0 ? std::max(0, rows.position[row] + 1 - window) : 0;
  }
  static int where(const Rows& rows, int row, int j) {
    return j < rows.num_shared[row] ? j : rows.tail[rows.tail_start[row] + j - rows.num_shared[row]];
  }
  void prepare(int num_queries, int dim, int num_positions) {
    width_ = (num_positions + 2 * LANES - 1) / LANES * LANES + LANES;
    if (query_.size() < size_t(num_queries)) {
      query_.resize(num_queries);
      score_.resize(num_queries);
      sum_.resize(num_queries);
      total_.resize(num_queries);
    }
    if (scores_.size() < size_t(num_queries) * width_) scores_.resize(size_t(num_queries) * width_);
    if (sums_.size() < size_t(num_queries) * dim) sums_.resize(size_t(num_queries) * dim);
    if (keys_.size() < size_t(dim) * LANES) keys_.resize(size_t(dim) * LANES);
  }
  void score_queries(int begin, int count, int j, int dim) {
    float* to[8];
    for (int q = begin; q < begin + count;) {
      const int left = begin + count - q, taken = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
      for (int i = 0; i < taken; i++) to[i] = score_[q + i] + j;
      if (taken == 8) score<8>(&query_[q], keys_.data(), dim, to);
      else if (taken == 4) score<4>(&query_[q], keys_.data(), dim, to);
      else if (taken == 2) score<2>(&query_[q], keys_.data(), dim, to);
      else score<1>(&query_[q], keys_.data(), dim, to);
      q += taken;
    }
  }
  // Scores of [first, last] become weights, zero outside; returns their sum.
  static float softmax(float* scores, int low, int first, int last, const AttentionShape& shape) {
    const v16i lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const v16f lowest = splat(-3.0e38f);
    v16f best = lowest;
    for (int j = low; j <= last; j += LANES) {
      v16f s = load(scores + j) * shape.scale;
      if (shape.soft_cap > 0) s = hyperbolic_tangent(s / shape.soft_cap) * shape.soft_cap;
      const v16i at = lanes + j;
      s = (at >= first) & (at <= last) ? s : lowest;
      store(scores + j, s);
      best = maximum(best, s);
    }
    const float most = maximum(best);
    v16f total = {};
    for (int j = low; j <= last; j += LANES) {
      const v16i at = lanes + j;
      v16f weight = exponential(load(scores + j) - most);
      weight = (at >= first) & (at <= last) ? weight : v16f{};
      store(scores + j, weight);
      total += weight;
    }
    return sum(total);
  }

  int width_ = 0;
  std::vector<const float*> query_;
  std::vector<float*> score_, sum_;
  std::vector<float> scores_, sums_, keys_, total_;
};

}  // namespace paceline
