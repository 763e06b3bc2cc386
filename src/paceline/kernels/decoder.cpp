// The decoder layers of a transformer, one call per forward.
//
// Python describes the model once (weights packed, see linear.hpp) and then hands over rows of embeddings with
// their places in the key-value cache. Residuals are kept in fp32; every product takes and gives the dtype of
// the weights. Threads split each product by columns, everything else by rows, and meet at a barrier between.
#include <algorithm>
#include <memory>
#include <vector>

#include "attention.hpp"
#include "layers.hpp"
#include "linear.hpp"
#include "threads.hpp"
#include "tile_attention.hpp"

namespace paceline {

struct Layer {
  Linear qkv, attention_out, mlp_in, mlp_out;
  Norm before_attention, after_attention, before_mlp, after_mlp;
  const float* query_norm;
  const float* key_norm;
  int32_t window;  // Sliding window; 0: all positions.
  int32_t rope;    // Which table of cosines and sines; -1: none.
};

struct Model {
  const Layer* layers;
  Norm final_norm;
  AttentionShape attention;
  int32_t num_layers, hidden_size, mlp_size;
  int32_t dtype;  // 0: fp32, 1: bf16.
  int32_t norm_kind, activation;
  int32_t is_gated;       // mlp_in holds gate and up, sixteen columns of each in turn.
  int32_t is_parallel;    // Attention and MLP read the same residual.
  int32_t norms_whole_qk; // Query and key norms run over all heads at once, not head by head.
  int32_t rotary_dim;
  float norm_eps;
  // Draft layers: attention reads the embedding of a token, normed, side by side with the residual.
  int32_t joins_embedding;
  int32_t keeps_normed;  // The normed residual takes the residual's place.
  Norm embedding_norm;
};

struct Forward {
  Rows rows;
  int32_t num_features;
  int32_t num_positions;  // Rows of each table of cosines and sines.
  float* residual;     // [rows, hidden_size]: embeddings, overwritten.
  const float* cosines;  // [tables, num_positions, rotary_dim / 2]
  const float* sines;
  void* const* keys;     // Per layer: [slots, kv heads, capacity, head_dim].
  void* const* values;
  int64_t slot_stride, head_stride;  // In elements.
  void* hidden;                      // [rows, hidden_size] after the final norm.
  const int32_t* feature_layers;     // Whose inputs go to `features`, each [rows, hidden_size].
  void* const* features;
  const float* embedding;  // [rows, hidden_size], where it is joined.
};

template <class T>
struct Scratch {
  Buffer<T> normed, normed_mlp, attended, inner, input;
  Buffer<float> qkv, branch;
};

class Decoder {
 public:
  Decoder(const Model& model, int num_threads)
      : model_(model), num_threads_(num_threads), attention_(num_threads) {
    layers_.assign(model.layers, model.layers + model.num_layers);
#if defined(PACELINE_AMX)
    if (model.dtype == 1 && TileAttention::fits(model.attention)) tile_attention_.resize(num_threads);
#endif
  }

  void forward(const Forward& call) {
    pool_ = &shared_pool(num_threads_);
    if (model_.dtype == 1) forward_as(call, bf16_);
    else forward_as(call, fp32_);
  }

  void multiply(const Linear& linear, const void* rows, int num_rows, void* out) {
    pool_ = &shared_pool(num_threads_);
    if (model_.dtype == 1) multiply_as<bf16>(linear, rows, num_rows, out, bf16_);
    else multiply_as<float>(linear, rows, num_rows, out, fp32_);
  }

 private:
  static int stride_of(int size) { return padded(size); }

  template <class T>
  void multiply_as(const Linear& linear, const void* input, int num_rows, void* out, Scratch<T>& scratch) {
    const int stride = stride_of(linear.in), rows_up = (num_rows + 15) / 16 * 16;
    T* rows = scratch.input.get(size_t(rows_up) * stride);
    for (int row = 0; row < num_rows; row++) {
      std::memcpy(rows + size_t(row) * stride, static_cast<const T*>(input) + size_t(row) * linear.in,
                  linear.in * sizeof(T));
      std::memset(rows + size_t(row) * stride + linear.in, 0, (stride - linear.in) * sizeof(T));
    }
    auto keep = [&](int row, int pair, v16f left, v16f right) {
      T* to = static_cast<T*>(out) + size_t(row) * linear.out + pair * PAIR;
      const int room = linear.out - pair * PAIR;
      if (room >= PAIR) {
        store(to, left);
        store(to + LANES, right);
        return;
      }
      T both[PAIR];
      store(both, left);
      store(both + LANES, right);
      std::memcpy(to, both, room * sizeof(T));
    };
    pool_->run([&](int thread) {
      open_tiles();
      multiply_share<T>(*pool_, thread, linear, rows, stride, num_rows, nullptr, keep);
      close_tiles();
    });
  }

  template <class T>
  void forward_as(const Forward& call, Scratch<T>& scratch) {
    const Model& m = model_;
    const int rows_up = (call.rows.num_rows + 15) / 16 * 16;
    const int width = m.attention.num_heads * m.attention.head_dim;
    State<T> s;
    s.hidden_stride = stride_of(m.hidden_size);
    s.normed_stride = m.joins_embedding ? stride_of(2 * m.hidden_size) : s.hidden_stride;
    s.width_stride = stride_of(width);
    s.inner_stride = stride_of(m.mlp_size);
    s.qkv_stride = stride_of(width + 2 * m.attention.num_kv_heads * m.attention.head_dim);
    s.normed = scratch.normed.get(size_t(rows_up) * s.normed_stride);
    s.normed_mlp = scratch.normed_mlp.get(size_t(rows_up) * s.hidden_stride);
    s.attended = scratch.attended.get(size_t(rows_up) * s.width_stride);
    s.inner = scratch.inner.get(size_t(rows_up) * s.inner_stride);
    s.qkv = scratch.qkv.get(size_t(rows_up) * s.qkv_stride);
    s.branch = scratch.branch.get(size_t(rows_up) * s.hidden_stride);
    s.blocks = row_blocks(call.rows);
    pool_->run([&](int thread) {
      open_tiles();
      for (int number = 0; number < m.num_layers; number++) run_layer(call, s, number, thread);
      T* out = static_cast<T*>(call.hidden);
      each_row(call, thread, [&](int row) {
        normalise(m.final_norm, m.norm_kind, m.norm_eps, residual(call, row), m.hidden_size,
                  out + size_t(row) * m.hidden_size);
      });
      close_tiles();
    });
  }

  template <class T>
  struct State {
    int hidden_stride, normed_stride, width_stride, inner_stride, qkv_stride;
    T *normed, *normed_mlp, *attended, *inner;
    float *qkv, *branch;
    std::vector<std::pair<int, int>> blocks;
  };

  float* residual(const Forward& call, int row) { return call.residual + size_t(row) * model_.hidden_size; }

  // Rows are dealt out in turn; no work counter, no sharing.
  template <class Work>
  void each_row(const Forward& call, int thread, Work&& work) {
    for (int row = thread; row < call.rows.num_rows; row += pool_->size()) work(row);
  }

  template <class T>
  void run_layer(const Forward& call, State<T>& s, int number, int thread) {
    const Model& m = model_;
    const Layer& layer = layers_[number];
    const int rows = call.rows.num_rows, size = m.hidden_size;
    each_row(call, thread, [&](int row) {
      float* x = residual(call, row);
      for (int i = 0; i < call.num_features; i++)
        if (call.feature_layers[i] == number)
          copy_row(x, static_cast<T*>(call.features[i]) + size_t(row) * size, size);
      T* normed = s.normed + size_t(row) * s.normed_stride;
      if (m.joins_embedding) {
        normalise(m.embedding_norm, m.norm_kind, m.norm_eps, call.embedding + size_t(row) * size, size, normed);
        normed += size;
      }
      normalise(layer.before_attention, m.norm_kind, m.norm_eps, x, size, normed);
      if (m.keeps_normed) normalise(layer.before_attention, m.norm_kind, m.norm_eps, x, size, x);
      if (m.is_parallel)
        normalise(layer.before_mlp, m.norm_kind, m.norm_eps, x, size,
                  s.normed_mlp + size_t(row) * s.hidden_stride);
    });
    pool_->barrier();
    auto keep_qkv = [&](int row, int pair, v16f left, v16f right) {
      float* to = s.qkv + size_t(row) * s.qkv_stride + pair * PAIR;
      store(to, left);
      store(to + LANES, right);
    };
    multiply_share<T>(*pool_, thread, layer.qkv, s.normed, s.normed_stride, rows, &layer.attention_out, keep_qkv);
    pool_->barrier();
    each_row(call, thread, [&](int row) { rotate_and_cache<T>(call, s, layer, number, row); });
    pool_->barrier();
    attend<T>(call, s, layer, number, thread);
    pool_->barrier();
    add_branch(call, s, layer.attention_out, s.attended, s.width_stride, layer.after_attention, &layer.mlp_in,
               thread);
    pool_->barrier();
    if (!m.is_parallel) {
      each_row(call, thread, [&](int row) {
        normalise(layer.before_mlp, m.norm_kind, m.norm_eps, residual(call, row), size,
                  s.normed_mlp + size_t(row) * s.hidden_stride);
      });
      pool_->barrier();
    }
    auto keep_inner = [&](int row, int pair, v16f left, v16f right) {
      T* to = s.inner + size_t(row) * s.inner_stride;
      if (m.is_gated) {
        store(to + pair * LANES, activate(left, m.activation) * right);
      } else {
        store(to + pair * PAIR, activate(left, m.activation));
        store(to + pair * PAIR + LANES, activate(right, m.activation));
      }
    };
    multiply_share<T>(*pool_, thread, layer.mlp_in, s.normed_mlp, s.hidden_stride, rows, &layer.mlp_out, keep_inner);
    pool_->barrier();
    add_branch(call, s, layer.mlp_out, s.inner, s.inner_stride, layer.after_mlp,
               number + 1 < m.num_layers ? &layers_[number + 1].qkv : nullptr, thread);
    pool_->barrier();
  }

  // residual += norm(input * weights)
  template <class T>
  void add_branch(const Forward& call, State<T>& s, const Linear& linear, const T* input, int stride,
                  const Norm& norm, const Linear* following, int thread) {
    const int size = model_.hidden_size;
    auto add = [&](int row, int pair, v16f left, v16f right) {
      const int column = pair * PAIR;
      if (norm.weight) {
        float* to = s.branch + size_t(row) * s.hidden_stride + column;
        store(to, left);
        store(to + LANES, right);
        return;
      }
      float* to = residual(call, row) + column;
      store(to, load(to) + left);
      if (column + PAIR <= size) store(to + LANES, load(to + LANES) + right);
    };
    multiply_share<T>(*pool_, thread, linear, input, stride, call.rows.num_rows, following, add);
    if (!norm.weight) return;
    pool_->barrier();
    each_row(call, thread, [&](int row) {
      float* branch = s.branch + size_t(row) * s.hidden_stride;
      normalise(norm, model_.norm_kind, model_.norm_eps, branch, size, branch);
      float* x = residual(call, row);
      for (int d = 0; d < size; d += LANES) store(x + d, load(x + d) + load(branch + d));
    });
  }

  // Norms of queries and keys, rotary positions, and this row's key and value into the cache.
  template <class T>
  void rotate_and_cache(const Forward& call, State<T>& s, const Layer& layer, int number, int row) {
    const AttentionShape& a = model_.attention;
    const int dim = a.head_dim, num_heads = a.num_heads, num_kv = a.num_kv_heads;
    float* queries = s.qkv + size_t(row) * s.qkv_stride;
    float* keys = queries + num_heads * dim;
    const float* values = keys + num_kv * dim;
    const int span_q = model_.norms_whole_qk ? num_heads * dim : dim;
    const int span_k = model_.norms_whole_qk ? num_kv * dim : dim;
    if (layer.query_norm)
      for (int at = 0; at < num_heads * dim; at += span_q)
        normalise(Norm{layer.query_norm, nullptr}, RMS_NORM, model_.norm_eps, queries + at, span_q, queries + at);
    if (layer.key_norm)
      for (int at = 0; at < num_kv * dim; at += span_k)
        normalise(Norm{layer.key_norm, nullptr}, RMS_NORM, model_.norm_eps, keys + at, span_k, keys + at);
    if (layer.rope >= 0) {
      const int half = model_.rotary_dim / 2;
      const size_t at = (size_t(layer.rope) * call.num_positions + call.rows.position[row]) * half;
      for (int head = 0; head < num_heads + num_kv; head++)
        rotate(queries + head * dim, call.cosines + at, call.sines + at, half);
    }
    for (int head = 0; head < num_kv; head++) {
      const size_t to = cache_offset(call, call.rows.slot[row], head) + size_t(call.rows.write[row]) * dim;
      copy_row(keys + head * dim, static_cast<T*>(call.keys[number]) + to, dim);
      copy_row(values + head * dim, static_cast<T*>(call.values[number]) + to, dim);
    }
  }

  static void rotate(float* x, const float* cosines, const float* sines, int half) {
    for (int d = 0; d < half; d++) {
      const float first = x[d], second = x[d + half];
      x[d] = first * cosines[d] - second * sines[d];
      x[d + half] = second * cosines[d] + first * sines[d];
    }
  }

  template <class T>
  static void copy_row(const float* from, T* to, int size) {
    for (int d = 0; d < size; d += LANES) store(to + d, load(from + d));
  }

  static size_t cache_offset(const Forward& call, int slot, int head) {
    return size_t(slot) * call.slot_stride + size_t(head) * call.head_stride;
  }

  template <class T>
  void attend(const Forward& call, State<T>& s, const Layer& layer, int number, int thread) {
    const int heads = model_.attention.num_kv_heads, total = int(s.blocks.size()) * heads;
    for (int task = thread; task < total; task = pool_->next_chunk()) {
      const auto [first, last] = s.blocks[task / heads];
      const int head = task % heads;
      const size_t at = cache_offset(call, call.rows.slot[first], head);
#if defined(PACELINE_AMX)
      if constexpr (sizeof(T) == 2)
        if (!tile_attention_.empty()) {
          tile_attention_[thread].run(model_.attention, call.rows, first, last, head, layer.window,
                                      static_cast<const T*>(call.keys[number]) + at,
                                      static_cast<const T*>(call.values[number]) + at, s.qkv, s.qkv_stride,
                                      s.attended, s.width_stride);
          continue;
        }
#endif
      attention_[thread].template run<T>(model_.attention, call.rows, first, last, head, layer.window,
                                         static_cast<const T*>(call.keys[number]) + at,
                                         static_cast<const T*>(call.values[number]) + at, s.qkv, s.qkv_stride,
                                         s.attended, s.width_stride);
    }
  }

  // Neighbouring rows of a slot that attend together: enough queries to reuse a loaded key, enough blocks for
  // all threads.
  std::vector<std::pair<int, int>> row_blocks(const Rows& rows) {
    const AttentionShape& a = model_.attention;
    int longest = std::max(1, 24 / (a.num_heads / a.num_kv_heads));
#if defined(PACELINE_AMX)
    if (!tile_attention_.empty()) {
      // Values are prepared once per block of rows, so the fewer the better.
      const int tile = TileAttention::rows_per_tile(a);
      const int shares = (2 * pool_->size() + a.num_kv_heads - 1) / a.num_kv_heads;
      longest = std::max(tile, (rows.num_rows / shares + tile - 1) / tile * tile);
    }
#endif
    std::vector<std::pair<int, int>> blocks;
    for (int first = 0; first < rows.num_rows;) {
      int last = first + 1;
      while (last < rows.num_rows && last - first < longest && rows.slot[last] == rows.slot[first]) last++;
      blocks.emplace_back(first, last);
      first = last;
    }
    return blocks;
  }

  Model model_;
  std::vector<Layer> layers_;
  const int num_threads_;
  Pool* pool_ = nullptr;
  std::vector<Attention> attention_;
#if defined(PACELINE_AMX)
  std::vector<TileAttention> tile_attention_;
#endif
  Scratch<float> fp32_;
  Scratch<bf16> bf16_;
};

}  // namespace paceline

extern "C" {

void* paceline_decoder_new(const paceline::Model* model, int32_t num_threads) {
  return new paceline::Decoder(*model, num_threads);
}
void paceline_decoder_free(void* decoder) { delete static_cast<paceline::Decoder*>(decoder); }
void paceline_decoder_forward(void* decoder, const paceline::Forward* call) {
  static_cast<paceline::Decoder*>(decoder)->forward(*call);
}
// rows [num_rows, in] -> out [num_rows, out], both in the model's dtype.
void paceline_decoder_multiply(void* decoder, const paceline::Linear* linear, const void* rows,
                               int32_t num_rows, void* out) {
  static_cast<paceline::Decoder*>(decoder)->multiply(*linear, rows, num_rows, out);
}
// How products of bf16 are computed here: 2 AMX tiles, 1 AVX-512 pairs, 0 fp32 arithmetic.
int32_t paceline_bf16_kernel() {
  if (paceline::has_amx()) return 2;
#if defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}

}  // extern "C"
