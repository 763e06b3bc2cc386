// A distribution over phrases, and what it says of every node of their trie.
#pragma once
#include <algorithm>
#include <cmath>
#include <queue>
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
    if (int(out.size()) == count && scores[i] <= least) continue;
    if (int(out.size()) == count) out.pop_back();
    auto place = std::find_if(out.begin(), out.end(), [&](int entry) { return scores[i] > scores[entry]; });
    out.insert(place, i);
    least = scores[out.back()];
  }
}

// Softmax, running sums, the most valuable nodes and the likeliest phrases. Scores behind those of the phrases
// count into the whole only.
inline void guess(const Trie& trie, int num_scores, float* scores, int max_nodes, int num_entries, Guess& out) {
  // Columns behind the last score are padding.
  for (int i = num_scores; i % LANES; i++) scores[i] = -INFINITY;
  v16f highest = splat(-INFINITY);
  for (int i = 0; i < num_scores; i += LANES) highest = maximum(load(scores + i), highest);
  const float most = maximum(highest);
  for (int i = 0; i < num_scores; i += LANES) store(scores + i, exponential(load(scores + i) - most));
  out.running.resize(num_scores + 1);
  out.running[0] = 0.0;
  for (int i = 0; i < num_scores; i++) out.running[i + 1] = out.running[i] + scores[i];
  out.whole = out.running[num_scores];
  likeliest(scores, trie.num_entries, num_entries, out.entries);
  struct Node {
    double worth;
    int32_t number;
    bool operator<(const Node& other) const {
      return worth > other.worth || (worth == other.worth && number < other.number);
    }
  };
  // A heap of the best so far, the least of them on top.
  std::priority_queue<Node> best;
  double least = 0.0;
  for (int node = 0; node < trie.num_nodes; node++) {
    const double mass = out.running[trie.ends[node]] - out.running[trie.starts[node]];
    if (mass <= least) continue;
    const double worth = mass * (1.0 - trie.tie * trie.depths[node]);
    if (int(best.size()) == max_nodes) {
      if (!(Node{worth, node} < best.top())) continue;
      best.pop();
    }
    best.push({worth, node});
    if (int(best.size()) == max_nodes) least = best.top().worth;
  }
  out.nodes.clear();
  for (; !best.empty(); best.pop()) out.nodes.push_back(best.top().number);
  std::sort(out.nodes.begin(), out.nodes.end());
}

}  // namespace paceline
