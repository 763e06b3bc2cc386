// Phrase drafting in one call: the head's MLP, the softmax over all phrases, the worth of every trie node, and the
// most valuable nodes as a draft tree.
//
// The rows of the output layer are packed in the order of the phrases' tokens, so the phrases beneath a trie node
// lie side by side and its worth is one difference of a running sum (vocabularies/trie.py).
#include <algorithm>
#include <queue>
#include <vector>

#include "layers.hpp"
#include "linear.hpp"
#include "threads.hpp"

namespace paceline {

struct PhraseHead {
  const Linear* layers;  // fp32, `depth` of them.
  const Norm* norms;     // One behind each.
  Linear output;
  int32_t depth, num_inputs, input_size;
  int32_t output_dtype;  // 0: fp32, 1: bf16.
  float norm_eps, input_eps;
};

struct Trie {
  const int32_t* tokens;
  const int32_t* parents;  // -1 below the root.
  const int32_t* depths;
  const int32_t* starts;  // First phrase beneath each node, and the one behind the last.
  const int32_t* ends;
  int32_t num_nodes, num_entries;
  double tie;  // Of nodes of equal worth the upper one comes first: worth times (1 - tie * depth).
};

struct Drafts {
  int32_t num_rows, max_nodes;
  const float* inputs;    // [rows, num_inputs * input_size]
  const int64_t* roots;   // [rows] newest tokens.
  int64_t* tokens;        // [rows, max_nodes + 1], roots first, parents before children.
  int64_t* parents;
  float* values;
  int64_t* counts;  // [rows] nodes of each tree, the root included.
};

class PhraseDrafter {
 public:
  PhraseDrafter(const PhraseHead& head, const Trie& trie, int num_threads)
      : head_(head), trie_(trie), num_threads_(num_threads), running_(num_threads) {
    layers_.assign(head.layers, head.layers + head.depth);
    norms_.assign(head.norms, head.norms + head.depth);
  }

  void draft(const Drafts& call) {
    const int rows_up = (call.num_rows + 15) / 16 * 16, scores_stride = num_pairs(head_.output) * PAIR;
    widest_ = head_.num_inputs * head_.input_size;
    for (const Linear& layer : layers_) widest_ = std::max(widest_, padded(layer.out));
    float* state = state_.get(size_t(rows_up) * widest_);
    float* update = update_.get(size_t(rows_up) * widest_);
    bf16* narrow_state = narrow_.get(size_t(rows_up) * padded(head_.output.in));
    float* scores = scores_.get(size_t(rows_up) * scores_stride);
    Pool& pool = shared_pool(num_threads_);
    pool.run([&](int thread) {
      auto each_row = [&](auto&& work) {
        for (int row = thread; row < call.num_rows; row += pool.size()) work(row);
        pool.barrier();
      };
      open_tiles();
      each_row([&](int row) { read_inputs(call, row, state + size_t(row) * widest_); });
      for (int layer = 0; layer < head_.depth; layer++) {
        product<float>(pool, thread, layers_[layer], state, widest_, call.num_rows, update, widest_);
        each_row([&](int row) {
          advance(layer, state + size_t(row) * widest_, update + size_t(row) * widest_);
          if (layer + 1 == head_.depth)
            for (int d = 0; d < head_.output.in; d += LANES)
              store(narrow_state + size_t(row) * padded(head_.output.in) + d,
                    load(state + size_t(row) * widest_ + d));
        });
      }
      if (head_.output_dtype == 1)
        product<bf16>(pool, thread, head_.output, narrow_state, padded(head_.output.in), call.num_rows, scores,
                      scores_stride);
      else
        product<float>(pool, thread, head_.output, state, widest_, call.num_rows, scores, scores_stride);
      close_tiles();
      each_row([&](int row) { choose(call, row, scores + size_t(row) * scores_stride, running_[thread]); });
    });
  }

 private:
  struct Node {
    double worth;
    int32_t number;
    bool operator<(const Node& other) const {
      return worth > other.worth || (worth == other.worth && number < other.number);
    }
  };

  template <class T>
  void product(Pool& pool, int thread, const Linear& linear, const T* rows, int stride, int num_rows, float* out,
               int out_stride) {
    multiply_share<T>(pool, thread, linear, rows, stride, num_rows, nullptr,
                      [&](int row, int pair, v16f left, v16f right) {
                        float* to = out + size_t(row) * out_stride + pair * PAIR;
                        store(to, left);
                        store(to + LANES, right);
                      });
    pool.barrier();
  }

  // Every input vector is divided by its root mean square.
  void read_inputs(const Drafts& call, int row, float* state) {
    const int size = head_.input_size;
    const float* from = call.inputs + size_t(row) * head_.num_inputs * size;
    for (int input = 0; input < head_.num_inputs; input++) {
      const float factor = inverse_rms(from + input * size, size, head_.input_eps);
      for (int d = 0; d < size; d += LANES)
        store(state + input * size + d, load(from + input * size + d) * factor);
    }
  }

  // Norm and activation, added to the state where the width stays.
  void advance(int layer, float* state, float* update) {
    const Linear& linear = layers_[layer];
    normalise(norms_[layer], LAYER_NORM, head_.norm_eps, update, linear.out, update);
    for (int d = 0; d < linear.out; d += LANES) {
      const v16f y = activate(load(update + d), GELU_ERF);
      store(state + d, linear.in == linear.out ? load(state + d) + y : y);
    }
  }

  void choose(const Drafts& call, int row, float* scores, std::vector<double>& running) {
    const int size = trie_.num_entries;
    // Columns behind the last phrase are padding.
    for (int i = size; i % LANES; i++) scores[i] = -INFINITY;
    v16f highest = splat(-INFINITY);
    for (int i = 0; i < size; i += LANES) highest = maximum(load(scores + i), highest);
    const float most = maximum(highest);
    for (int i = 0; i < size; i += LANES) store(scores + i, exponential(load(scores + i) - most));
    running.resize(size + 1);
    running[0] = 0.0;
    for (int i = 0; i < size; i++) running[i + 1] = running[i] + scores[i];
    const double whole = running[size];
    // A heap of the best so far, the least of them on top.
    std::priority_queue<Node> best;
    double least = 0.0;
    for (int node = 0; node < trie_.num_nodes; node++) {
      const double mass = running[trie_.ends[node]] - running[trie_.starts[node]];
      if (mass <= least) continue;
      const double worth = mass * (1.0 - trie_.tie * trie_.depths[node]);
      if (int(best.size()) == call.max_nodes) {
        if (!(Node{worth, node} < best.top())) continue;
        best.pop();
      }
      best.push({worth, node});
      if (int(best.size()) == call.max_nodes) least = best.top().worth;
    }
    std::vector<int32_t> nodes;
    for (; !best.empty(); best.pop()) nodes.push_back(best.top().number);
    std::sort(nodes.begin(), nodes.end());
    write(call, row, nodes, running, whole);
  }

  // Parents have lower numbers than their children, so sorted nodes are a tree in the right order.
  void write(const Drafts& call, int row, const std::vector<int32_t>& nodes, const std::vector<double>& running,
             double whole) {
    const size_t at = size_t(row) * (call.max_nodes + 1);
    call.tokens[at] = call.roots[row];
    call.parents[at] = -1;
    call.values[at] = 1.0f;
    for (size_t i = 0; i < nodes.size(); i++) {
      const int node = nodes[i], parent = trie_.parents[node];
      call.tokens[at + 1 + i] = trie_.tokens[node];
      call.parents[at + 1 + i] =
          parent < 0 ? 0 : std::lower_bound(nodes.begin(), nodes.end(), parent) - nodes.begin() + 1;
      const double mass = running[trie_.ends[node]] - running[trie_.starts[node]];
      call.values[at + 1 + i] = float(std::min(1.0, mass / whole));
    }
    call.counts[row] = int64_t(nodes.size()) + 1;
  }

  PhraseHead head_;
  Trie trie_;
  const int num_threads_;
  int widest_ = 0;
  std::vector<Linear> layers_;
  std::vector<Norm> norms_;
  std::vector<std::vector<double>> running_;
  Buffer<float> state_, update_, scores_;
  Buffer<bf16> narrow_;
};

}  // namespace paceline

extern "C" {

void* paceline_phrase_new(const paceline::PhraseHead* head, const paceline::Trie* trie, int32_t num_threads) {
  return new paceline::PhraseDrafter(*head, *trie, num_threads);
}
void paceline_phrase_free(void* drafter) { delete static_cast<paceline::PhraseDrafter*>(drafter); }
void paceline_phrase_draft(void* drafter, const paceline::Drafts* call) {
  static_cast<paceline::PhraseDrafter*>(drafter)->draft(*call);
}

}  // extern "C"
