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
  Merger(const Trie& trie, const Children& children, const Guess& guess)
      : trie_(trie), children_(children), guess_(guess) {}
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
  int find(int parent, int token) const {
    const int32_t *begin = trie_.tokens + children_.begin(parent), *end = trie_.tokens + children_.end(parent);
    const int32_t* found = std::lower_bound(begin, end, token);
    return found != end && *found == token ? int(found - trie_.tokens) : -1;
  }

  const Trie& trie_;
  const Children& children_;
  const Guess& guess_;
  std::unordered_map<int64_t, int> numbers_;
};

}  // namespace paceline
