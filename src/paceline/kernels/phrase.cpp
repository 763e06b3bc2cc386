// Phrase drafting in one call: the head's MLP, the softmax over all phrases, the worth of every trie node, and the
// most valuable nodes as a draft tree.
//
// The rows of the output layer are packed in the order of the phrases' tokens, so the phrases beneath a trie node
// lie side by side and its worth is one difference of a running sum (vocabularies/trie.py). A head with a step also
// guesses the phrases behind the likeliest first ones; vocabularies/chains.py tells how the two are merged.
#include <algorithm>
#include <vector>

#include "dot.hpp"
#include "guess.hpp"
#include "layers.hpp"
#include "linear.hpp"
#include "mass.hpp"
#include "merged_tree.hpp"
#include "threads.hpp"
#include "top_scores.hpp"

namespace paceline {

struct PhraseHead {
  const Linear* layers;  // fp32, `depth` of them.
  const Norm* norms;     // One behind each.
  Linear output;
  int32_t depth, num_inputs, input_size;
  int32_t output_dtype;  // 0: fp32, 1: bf16.
  float norm_eps, input_eps;
  // A speculated vocabulary of phrases: a narrow ranking of all of them says which are scored. Then `output` has no
  // packed weights, and its rows lie here in the order of the trie.
  Linear narrowing;  // fp32
  Linear table;      // of `output_dtype`, bias included.
  const void* rows;  // [num_entries, width] of `output_dtype`.
  const float* row_bias;
  int32_t num_candidates;  // 0: all phrases are scored.
};

struct Chain {
  const Linear* layers;  // fp32, two of them.
  const Norm* norms;
  Linear output;  // Followers in the order of their trie, then one row for all other text.
  Trie followers;
  const int32_t* entry_starts;  // [num_entries + 1]: part of `entry_tokens` of each first phrase, in trie order.
  const int32_t* entry_tokens;
  const void* embeddings;    // [vocabulary, input_size]
  int32_t embeddings_dtype;  // 0: fp32, 1: bf16.
  int32_t num_first;         // First phrases to go on from; 0: the head has no step.
  int32_t min_nodes;         // Follower nodes behind each that are looked at, at least.
};

struct Drafts {
  int32_t num_rows, max_nodes, has_chains;
  const float* inputs;    // [rows, num_inputs * input_size]
  const int64_t* roots;   // [rows] newest tokens.
  int64_t* tokens;        // [rows, max_nodes + 1], roots first, parents before children.
  int64_t* parents;
  float* values;
  int64_t* counts;  // [rows] nodes of each tree, the root included.
};

class PhraseDrafter {
 public:
  PhraseDrafter(const PhraseHead& head, const Trie& trie, const Chain& chain, int num_threads)
      : head_(head), trie_(trie), chain_(chain), num_threads_(num_threads) {
    layers_.assign(head.layers, head.layers + head.depth);
    norms_.assign(head.norms, head.norms + head.depth);
    narrowing_.assign(1, head.narrowing);
    children_ = Children(trie);
    if (!chain.num_first) return;
    follower_children_ = Children(chain.followers);
    steps_.assign(chain.layers, chain.layers + 2);
    step_norms_.assign(chain.norms, chain.norms + 2);
  }

  void draft(const Drafts& call) {
    Pool& pool = shared_pool(num_threads_);
    const Work first = prepare(call.num_rows, head_.num_inputs * head_.input_size, layers_, head_.output, first_);
    const int num_first = call.has_chains ? chain_.num_first : 0;
    const int num_chained = call.num_rows * num_first;
    Work second{};
    if (num_chained) second = prepare(num_chained, steps_[0].in, steps_, chain_.output, second_);
    const bool is_ranked = head_.num_candidates != 0;
    Work ranked{};
    if (is_ranked) ranked = prepare(call.num_rows, head_.output.in, narrowing_, head_.table, ranked_);
    if (is_ranked && tops_.empty()) tops_.assign(pool.size(), TopScores(head_.num_candidates));
    guesses_.resize(std::max<size_t>(guesses_.size(), call.num_rows));
    follows_.resize(std::max<size_t>(follows_.size(), num_chained));
    pool.run([&](int thread) {
      auto each = [&](int count, auto&& work) {
        for (int row = thread; row < count; row += pool.size()) work(row);
        pool.barrier();
      };
      open_tiles();
      each(call.num_rows, [&](int row) { read_inputs(call, row, first.at(first.state, row)); });
      for (int layer = 0; layer < head_.depth; layer++) {
        product<float>(pool, thread, layers_[layer], first.state, first.widest, call.num_rows, first.update,
                       first.widest);
        each(call.num_rows, [&](int row) {
          float* state = first.at(first.state, row);
          const Linear& linear = layers_[layer];
          advance(norms_[layer], first.at(first.update, row), linear.out, linear.in == linear.out, state, state);
          if (layer + 1 == head_.depth) narrow(first, row);
        });
      }
      if (is_ranked) rank(pool, thread, each, first, ranked, call.num_rows);
      else score(pool, thread, head_.output, first, call.num_rows);
      each(call.num_rows, [&](int row) {
        guess(trie_, children_, trie_.num_entries + is_ranked, first.scores_of(row), call.max_nodes, num_first,
              guesses_[row]);
        if (!num_chained) write(call, row, guesses_[row]);
      });
      if (num_chained) chain(pool, thread, each, call, first, second, num_chained);
      close_tiles();
    });
  }

 private:
  // Buffers of a few rows on their way through layers to scores.
  struct Work {
    int widest, scores_stride, narrow_stride;
    float *state, *update, *scores;
    bf16* narrow;
    float* at(float* rows, int row) const { return rows + size_t(row) * widest; }
    float* scores_of(int row) const { return scores + size_t(row) * scores_stride; }
  };
  struct Buffers {
    Buffer<float> state, update, scores;
    Buffer<bf16> narrow;
  };

  Work prepare(int num_rows, int num_inputs, const std::vector<Linear>& layers, const Linear& output, Buffers& from) {
    const size_t rows = (num_rows + 15) / 16 * 16;
    Work work;
    work.widest = padded(num_inputs);
    for (const Linear& layer : layers) work.widest = std::max(work.widest, padded(layer.out));
    work.scores_stride = (output.out / PAIR + 1) * PAIR;  // One column more than there are scores, at least.
    work.narrow_stride = padded(output.in);
    work.state = from.state.get(rows * work.widest);
    work.update = from.update.get(rows * work.widest);
    work.scores = from.scores.get(rows * work.scores_stride);
    work.narrow = from.narrow.get(rows * work.narrow_stride);
    return work;
  }

  void narrow(const Work& work, int row) {
    for (int d = 0; d < head_.output.in; d += LANES)
      store(work.narrow + size_t(row) * work.narrow_stride + d, load(work.at(work.state, row) + d));
  }

  void score(Pool& pool, int thread, const Linear& output, const Work& work, int num_rows) {
    if (head_.output_dtype == 1)
      product<bf16>(pool, thread, output, work.narrow, work.narrow_stride, num_rows, work.scores,
                    work.scores_stride);
    else
      product<float>(pool, thread, output, work.state, work.widest, num_rows, work.scores, work.scores_stride);
  }

  // Scores of the phrases that the ranking puts first; what it says of the others goes into one column for all of them.
  template <class Each>
  void rank(Pool& pool, int thread, Each&& each, const Work& first, const Work& ranked, int num_rows) {
    product<float>(pool, thread, head_.narrowing, first.state, first.widest, num_rows, ranked.state, ranked.widest);
    each(num_rows, [&](int row) {
      for (int d = 0; d < head_.table.in; d += LANES)
        store(ranked.narrow + size_t(row) * ranked.narrow_stride + d, load(ranked.at(ranked.state, row) + d));
    });
    score(pool, thread, head_.table, ranked, num_rows);
    each(num_rows, [&](int row) {
      const float *ranking = ranked.scores_of(row), *state = first.at(first.state, row);
      if (head_.output_dtype == 1) choose<bf16>(thread, ranking, state, first.scores_of(row));
      else choose<float>(thread, ranking, state, first.scores_of(row));
    });
  }

  template <class T>
  void choose(int thread, const float* ranking, const float* state, float* scores) {
    const int size = trie_.num_entries, width = head_.output.in;
    const T* rows = static_cast<const T*>(head_.rows);
    Mass all;
    v16f last = splat(-INFINITY);
    const int whole = size / LANES * LANES;
    for (int i = 0; i < whole; i += LANES) all.add(load(ranking + i));
    for (int i = whole; i < size; i++) last[i - whole] = ranking[i];
    if (whole < size) all.add(last);
    TopScores& top = tops_[thread];
    top.clear();
    top.add(0, size, [&](int64_t i) { return load(ranking + i); }, [&](int64_t i) { return ranking[i]; });
    std::vector<int64_t> ids(head_.num_candidates);
    top.take(ids.data());
    for (int64_t id : ids) prefetch(rows + id * width, width * sizeof(T));
    std::fill(scores, scores + size, -INFINITY);
    float most = -INFINITY;
    double kept = 0.0, exact = 0.0;
    const float mass = all.log();
    for (int64_t id : ids) {
      scores[id] = dot(rows + id * width, state, width) + head_.row_bias[id];
      most = std::max(most, scores[id]);
      kept += std::exp(ranking[id] - mass);
    }
    for (int64_t id : ids) exact += std::exp(scores[id] - most);
    // The candidates hold `kept` of the ranking's mass, and by that as much of the exact one.
    scores[size] = kept < 1.0 ? float(most + std::log(exact * (1.0 / kept - 1.0))) : -INFINITY;
  }

  // Phrases behind the likeliest first ones, then the merged trees. Row r of `second` goes on from first phrase
  // r % num_first of row r / num_first.
  template <class Each>
  void chain(Pool& pool, int thread, Each&& each, const Drafts& call, const Work& first, const Work& second,
             int num_rows) {
    const int width = head_.output.in, num_first = chain_.num_first;
    auto before = [&](int row) { return first.at(first.state, row / num_first); };
    each(num_rows, [&](int row) {
      read_phrase(before(row), guesses_[row / num_first].entries[row % num_first], second.at(second.state, row));
    });
    for (int layer = 0; layer < 2; layer++) {
      product<float>(pool, thread, steps_[layer], second.state, second.widest, num_rows, second.update,
                     second.widest);
      each(num_rows, [&](int row) {
        float* state = second.at(second.state, row);
        advance(step_norms_[layer], second.at(second.update, row), width, true, layer ? state : before(row), state);
        if (layer == 1) narrow(second, row);
      });
    }
    score(pool, thread, chain_.output, second, num_rows);
    each(num_rows, [&](int row) {
      guess(chain_.followers, follower_children_, chain_.followers.num_entries + 1, second.scores_of(row),
            std::max(call.max_nodes, chain_.min_nodes), 0, follows_[row]);
    });
    each(call.num_rows, [&](int row) { merge(call, row); });
  }

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

  // What the step reads: the state, the phrase's last token and the mean of its tokens, each divided by its root
  // mean square.
  void read_phrase(const float* state, int entry, float* to) {
    const int width = head_.output.in, size = head_.input_size;
    const int begin = chain_.entry_starts[entry], end = chain_.entry_starts[entry + 1];
    float *last = to + width, *mean = last + size;
    std::memset(mean, 0, size * sizeof(float));
    for (int i = begin; i < end; i++)
      for (int d = 0; d < size; d += LANES) {
        const v16f x = embedding(chain_.entry_tokens[i], d);
        store(mean + d, load(mean + d) + x);
        if (i + 1 == end) store(last + d, x);
      }
    for (int d = 0; d < size; d += LANES) store(mean + d, load(mean + d) * (1.0f / (end - begin)));
    scale(state, width, to);
    scale(last, size, last);
    scale(mean, size, mean);
  }
  v16f embedding(int token, int d) const {
    const size_t at = size_t(token) * head_.input_size + d;
    return chain_.embeddings_dtype == 1 ? load(static_cast<const bf16*>(chain_.embeddings) + at)
                                        : load(static_cast<const float*>(chain_.embeddings) + at);
  }
  void scale(const float* from, int size, float* to) const {
    const float factor = inverse_rms(from, size, head_.input_eps);
    for (int d = 0; d < size; d += LANES) store(to + d, load(from + d) * factor);
  }

  // Norm and activation of an update, added to what `residual` holds where there is a residual connection.
  void advance(const Norm& norm, float* update, int size, bool is_residual, const float* residual, float* out) {
    normalise(norm, LAYER_NORM, head_.norm_eps, update, size, update);
    for (int d = 0; d < size; d += LANES) {
      const v16f y = activate(load(update + d), GELU_ERF);
      store(out + d, is_residual ? load(residual + d) + y : y);
    }
  }

  void merge(const Drafts& call, int row) {
    const Guess& guess = guesses_[row];
    Merger merger(trie_, children_, guess);
    for (int node : guess.nodes) merger.first(node);
    std::vector<int> place;
    for (int i = 0; i < chain_.num_first; i++) {
      const int entry = guess.entries[i];
      int end = -1;
      for (int at = chain_.entry_starts[entry]; at < chain_.entry_starts[entry + 1]; at++)
        end = merger.child(end, chain_.entry_tokens[at]);
      const Guess& follow = follows_[row * chain_.num_first + i];
      const Trie& trie = chain_.followers;
      place.assign(follow.nodes.size(), -1);
      for (size_t n = 0; n < follow.nodes.size(); n++) {
        const int node = follow.nodes[n], parent = trie.parents[node];
        const auto above = std::lower_bound(follow.nodes.begin(), follow.nodes.end(), parent);
        place[n] = merger.child(parent < 0 ? end : place[above - follow.nodes.begin()], trie.tokens[node]);
        merger.nodes[place[n]].worth += guess.chance(entry) * follow.mass(trie, node);
      }
    }
    write_merged(call, row, merger.nodes);
  }

  void write_merged(const Drafts& call, int row, std::vector<Merged>& nodes) {
    std::vector<int> order(nodes.size()), place(nodes.size(), 0);
    for (size_t i = 0; i < nodes.size(); i++) {
      nodes[i].worth = std::min(1.0, nodes[i].worth) * (1.0 - trie_.tie * nodes[i].depth);
      order[i] = int(i);
    }
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return nodes[a].worth > nodes[b].worth; });
    size_t kept = std::min<size_t>(call.max_nodes, order.size());
    while (kept && nodes[order[kept - 1]].worth <= 0.0) kept--;
    order.resize(kept);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return nodes[a].depth < nodes[b].depth; });
    const size_t at = write_root(call, row);
    int count = 0;
    for (int number : order) {
      const Merged& node = nodes[number];
      // Sums that are all but 0 can round so that a parent is worth less than its child, and is left out alone.
      if (node.parent >= 0 && !place[node.parent]) continue;
      place[number] = ++count;
      call.tokens[at + count] = node.token;
      call.parents[at + count] = node.parent < 0 ? 0 : place[node.parent];
      call.values[at + count] = float(node.worth);
    }
    call.counts[row] = count + 1;
  }

  static size_t write_root(const Drafts& call, int row) {
    const size_t at = size_t(row) * (call.max_nodes + 1);
    call.tokens[at] = call.roots[row];
    call.parents[at] = -1;
    call.values[at] = 1.0f;
    return at;
  }

  // Parents have lower numbers than their children, so sorted nodes are a tree in the right order.
  void write(const Drafts& call, int row, const Guess& guess) {
    const std::vector<int32_t>& nodes = guess.nodes;
    const size_t at = write_root(call, row);
    for (size_t i = 0; i < nodes.size(); i++) {
      const int node = nodes[i], parent = trie_.parents[node];
      call.tokens[at + 1 + i] = trie_.tokens[node];
      call.parents[at + 1 + i] =
          parent < 0 ? 0 : std::lower_bound(nodes.begin(), nodes.end(), parent) - nodes.begin() + 1;
      call.values[at + 1 + i] = float(std::min(1.0, guess.mass(trie_, node)));
    }
    call.counts[row] = int64_t(nodes.size()) + 1;
  }

  PhraseHead head_;
  Trie trie_;
  Chain chain_;
  const int num_threads_;
  Children children_, follower_children_;
  std::vector<Linear> layers_, steps_;
  std::vector<Norm> norms_, step_norms_;
  std::vector<Guess> guesses_, follows_;
  std::vector<Linear> narrowing_;
  std::vector<TopScores> tops_;
  Buffers first_, second_, ranked_;
};

}  // namespace paceline

extern "C" {

void* paceline_phrase_new(const paceline::PhraseHead* head, const paceline::Trie* trie,
                          const paceline::Chain* chain, int32_t num_threads) {
  return new paceline::PhraseDrafter(*head, *trie, *chain, num_threads);
}
void paceline_phrase_free(void* drafter) { delete static_cast<paceline::PhraseDrafter*>(drafter); }
void paceline_phrase_draft(void* drafter, const paceline::Drafts* call) {
  static_cast<paceline::PhraseDrafter*>(drafter)->draft(*call);
}

}  // extern "C"
