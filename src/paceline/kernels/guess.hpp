// A distribution over phrases, and what it says of every node of their trie.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.hpp"

namespace paceline {

struct Trie {
  const int32_t* tokens;
  const int32_t* parents;  // -1 below the root.
  const int32_t* depths;
  const int32_t* starts;  // First phrase beneath each node, and the one behind the last.
  const int32_t* ends;
  int32_t num_nodes, num_entries;
  double tie;  // Of nodes of equal worth the upper one comes first: worth times (1 - tie * depth).
};

// Nodes are numbered by level, then by parent, then by token, so the children of a node lie side by side.
class Children {
 public:
  Children() = default;
  explicit Children(const Trie& trie) : starts_(trie.num_nodes + 2) {
    int node = 0;
    for (int parent = -1; parent < trie.num_nodes; parent++) {
      starts_[parent + 1] = node;
      while (node < trie.num_nodes && trie.parents[node] == parent) node++;
    }
    starts_.back() = node;
  }
  int begin(int parent) const { return starts_[parent + 1]; }
  int end(int parent) const { return starts_[parent + 2]; }

 private:
  std::vector<int32_t> starts_;
};

// What one distribution over phrases amounts to.
struct Guess {
  std::vector<double> running;  // Sums of exponentials over the phrases in trie order.
  double whole;                 // Over everything, other text included.
  std::vector<int32_t> nodes;   // The most valuable trie nodes, ascending.
  std::vector<int32_t> entries;  // The likeliest phrases.
  double mass(const Trie& trie, int node) const {
    return (running[trie.ends[node]] - running[trie.starts[node]]) / whole;
  }
  double chance(int entry) const { return (running[entry + 1] - running[entry]) / whole; }
};

// The `count` largest scores, the largest first; of equal ones the first.
inline void likeliest(const float* scores, int size, int count, std::vector<int32_t>& out) {
  out.clear();
  float least = -1.0f;
  for (int i = 0; i < size && count; i++) {
    const bool is_full = int(out.size()) == count;
    // Nearly all scores are too small, sixteen at a time.
    while (is_full && i + LANES <= size && !any_above(load(scores + i), least)) i += LANES;
    if (i == size) break;
    if (is_full && scores[i] <= least) continue;
    if (int(out.size()) == count) out.pop_back();
    auto place = std::find_if(out.begin(), out.end(), [&](int entry) { return scores[i] > scores[entry]; });
    out.insert(place, i);
    least = scores[out.back()];
  }
}

struct Node {
  double worth;
  int32_t number;
  bool operator<(const Node& other) const {
    return worth > other.worth || (worth == other.worth && number < other.number);
  }
};

// The most valuable nodes of those that it is shown: a heap, the least of them on top.
class BestNodes {
 public:
  BestNodes(const Trie& trie, const std::vector<double>& running, size_t count)
      : trie_(trie), running_(running), count_(count) {}

  // Nodes from `begin` to `end`.
  void scan(int begin, int end) {
    for (int node = begin; node < end; node++) {
      const double mass = running_[trie_.ends[node]] - running_[trie_.starts[node]];
      if (mass <= least_) continue;
      const Node found{mass * (1.0 - trie_.tie * trie_.depths[node]), node};
      if (heap_.size() == count_) {
        if (!(found < heap_.front())) continue;
        std::pop_heap(heap_.begin(), heap_.end());
        heap_.pop_back();
      }
      heap_.push_back(found);
      std::push_heap(heap_.begin(), heap_.end());
      if (heap_.size() == count_) least_ = heap_.front().worth;
      open_.push_back(node);
    }
  }

  // All nodes: one that is not among the best has no child that is.
  void search(const Children& children) {
    scan(children.begin(-1), children.end(-1));
    for (size_t next = 0; next < open_.size(); next++) {
      const int node = open_[next];
      if (running_[trie_.ends[node]] - running_[trie_.starts[node]] > least_)
        scan(children.begin(node), children.end(node));
    }
  }

  const std::vector<Node>& nodes() const { return heap_; }

 private:
  const Trie& trie_;
  const std::vector<double>& running_;
  const size_t count_;
  std::vector<Node> heap_;
  std::vector<int32_t> open_;
  double least_ = 0.0;
};

// Softmax, running sums, the most valuable nodes and the likeliest phrases. Scores behind those of the phrases
// count into the whole only.
inline void guess(const Trie& trie, const Children& children, int num_scores, float* scores, int max_nodes,
                  int num_entries, Guess& out) {
  // Columns behind the last score are padding.
  for (int i = num_scores; i % LANES; i++) scores[i] = -INFINITY;
  v16f highest = splat(-INFINITY);
  for (int i = 0; i < num_scores; i += LANES) highest = maximum(load(scores + i), highest);
  const float most = maximum(highest);
  for (int i = 0; i < num_scores; i += LANES) {
    const v16f own = load(scores + i);
    // Phrases that were not scored have no chance at all.
    store(scores + i, own == -INFINITY ? v16f{} : exponential(own - most));
  }
  out.running.resize(num_scores + 1);
  out.running[0] = 0.0;
  for (int i = 0; i < num_scores; i++) out.running[i + 1] = out.running[i] + scores[i];
  out.whole = out.running[num_scores];
  likeliest(scores, trie.num_entries, num_entries, out.entries);
  BestNodes best(trie, out.running, max_nodes);
  best.search(children);
  out.nodes.clear();
  for (const Node& node : best.nodes()) out.nodes.push_back(node.number);
  std::sort(out.nodes.begin(), out.nodes.end());
}

}  // namespace paceline
