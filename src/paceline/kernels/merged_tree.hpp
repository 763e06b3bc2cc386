// One draft tree of first phrases and of those that follow them (vocabularies/chains.py).
#pragma once
#include <unordered_map>
#include <vector>

#include "guess.hpp"

namespace paceline {

// A node of a merged tree. The root is number -1.
struct Merged {
  int32_t token, parent, depth, node;  // `node` is that of the first trie, or -1.
  double worth;
};

class Merger {
 public:
  Merger(const Trie& trie, const Guess& guess) : trie_(trie), guess_(guess) {}
  std::vector<Merged> nodes;

  // The child of a node by a token; one that is new is worth its mass in the first trie.
  int child(int parent, int token) {
    const auto [found, is_new] = numbers_.try_emplace((int64_t(parent) + 1) << 32 | token, int(nodes.size()));
    if (!is_new) return found->second;
    const int above = parent < 0 ? -1 : nodes[parent].node;
    const int node = parent < 0 || above >= 0 ? find(above, token) : -1;
    nodes.push_back({token, parent, parent < 0 ? 1 : nodes[parent].depth + 1, node,
                     node < 0 ? 0.0 : guess_.mass(trie_, node)});
    return found->second;
  }
  // A node of the first trie, with all above it.
  int first(int node) {
    const int parent = trie_.parents[node] < 0 ? -1 : first(trie_.parents[node]);
    return child(parent, trie_.tokens[node]);
  }

 private:
  // Nodes are numbered by level, then by parent, then by token.
  int find(int parent, int token) const {
    int low = 0, high = trie_.num_nodes;
    while (low < high) {
      const int middle = (low + high) / 2;
      const bool is_before = trie_.parents[middle] < parent ||
                             (trie_.parents[middle] == parent && trie_.tokens[middle] < token);
      if (is_before) low = middle + 1;
      else high = middle;
    }
    return low < trie_.num_nodes && trie_.parents[low] == parent && trie_.tokens[low] == token ? low : -1;
  }

  const Trie& trie_;
  const Guess& guess_;
  std::unordered_map<int64_t, int> numbers_;
};

}  // namespace paceline
