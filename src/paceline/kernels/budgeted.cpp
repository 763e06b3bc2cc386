// Budgeted verification of draft trees in one pass over their nodes (verifiers/budgeted.py states the rule).
//
// The array code in Python is a hundred small operations; after a forward has swept the caches they take longer
// than reading the logits.
#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.hpp"

namespace paceline {
// Names of this file alone: another one has nodes of its own.
namespace {

struct TreeCall {
  const int64_t* parents;  // [num_nodes], -1 for the root
  const int64_t* tokens;
  const int64_t* eos;  // [num_eos] ids that end the sequence's text
  int64_t num_nodes, num_eos;
  double horizon, scale, gate, remaining, cap, price;
  // Results: the token behind the path, how long that is, how many of it are relaxed, and what it did not go on to.
  int64_t next_token, path_len, num_relaxed;
  double stop_regret, stop_value;
  int32_t reason, has_stop;
};

struct BudgetedCall {
  int32_t num_trees, dtype, num_threads;
  int64_t size;         // of the vocabulary
  const void* logits;   // [R, size], trees in order
  TreeCall* trees;      // [num_trees]
  int64_t* choices;     // [R] scratch: argmax of each row
  int64_t* path;        // [R] out: nodes of each tree's path, from its first row on
  int64_t* path_tokens; // [R] out: their tokens
  int64_t* places;      // [R] out: which places of the path are relaxed
  double* regrets;      // [R] out: by how much
};

enum Reason { NONE, END_OF_TEXT, BANNED, GATE, BUDGET, CAP };

struct Node {
  double depth = 0, path_regret = 0, num_relaxed = 0, value = 0, regret = 0;
  bool is_reached = true, is_choice = true;
  Reason reason = NONE;
};

inline double logit(const BudgetedCall& call, int64_t row, int64_t id) {
  const int64_t at = row * call.size + id;
  return call.dtype == 1 ? widen(static_cast<const bf16*>(call.logits)[at]) : static_cast<const float*>(call.logits)[at];
}

inline bool ends_text(const TreeCall& tree, int64_t id) {
  return std::find(tree.eos, tree.eos + tree.num_eos, id) != tree.eos + tree.num_eos;
}

// What refuses a node that is not the target's choice, in the order in which the rule asks.
inline Reason refusal(const TreeCall& tree, const Node& node, int64_t id, int64_t choice) {
  if (ends_text(tree, id) || ends_text(tree, choice)) return END_OF_TEXT;
  if (!std::isfinite(node.regret)) return BANNED;
  if (!(node.value > 0 && node.regret / node.value <= tree.gate)) return GATE;
  if (node.path_regret > tree.remaining) return BUDGET;
  return node.num_relaxed > tree.cap ? CAP : NONE;
}

// Judge all nodes, parents first; returns the last node of the best path.
int64_t judge(const BudgetedCall& call, const TreeCall& tree, int64_t start, std::vector<Node>& nodes) {
  nodes.assign(tree.num_nodes, Node());
  int64_t end = 0;
  double most = 0;
  for (int64_t i = 1; i < tree.num_nodes; i++) {
    const int64_t above = tree.parents[i], id = tree.tokens[i], choice = call.choices[start + above];
    Node& node = nodes[i];
    node = nodes[above];
    node.reason = NONE;
    node.regret = 0;
    node.depth += 1;
    node.value = std::max(tree.horizon - node.depth + 1, 0.0) / tree.scale;
    node.is_choice = id == choice;
    if (!node.is_choice) {
      const bool is_known = id >= 0 && id < call.size;
      node.regret = is_known ? logit(call, start + above, choice) - logit(call, start + above, id) : NAN;
      if (std::isfinite(node.regret)) node.path_regret += node.regret;
      node.num_relaxed += 1;
      node.reason = refusal(tree, node, id, choice);
      node.is_reached &= node.reason == NONE;
    }
    if (!node.is_reached) continue;
    const double worth = node.depth - tree.price * node.path_regret;
    const Node& best = nodes[end];
    const bool is_better = worth != most                           ? worth > most
                           : node.path_regret != best.path_regret ? node.path_regret < best.path_regret
                                                                  : node.num_relaxed < best.num_relaxed;
    if (is_better) end = i, most = worth;
  }
  return end;
}

void verify_tree(const BudgetedCall& call, TreeCall& tree, int64_t start, std::vector<Node>& nodes) {
  const int64_t end = judge(call, tree, start, nodes);
  tree.next_token = call.choices[start + end];
  tree.path_len = int64_t(nodes[end].depth);
  tree.num_relaxed = int64_t(nodes[end].num_relaxed);
  int64_t relaxed = tree.num_relaxed;
  for (int64_t node = end, place = tree.path_len - 1; place >= 0; node = tree.parents[node], place--) {
    call.path[start + place] = node;
    call.path_tokens[start + place] = tree.tokens[node];
    if (nodes[node].is_choice) continue;
    relaxed--;
    call.places[start + relaxed] = place;
    call.regrets[start + relaxed] = nodes[node].regret;
  }
  int64_t stop = -1;
  for (int64_t i = end + 1; i < tree.num_nodes; i++)
    if (tree.parents[i] == end && (stop < 0 || nodes[i].regret < nodes[stop].regret)) stop = i;
  tree.has_stop = stop >= 0;
  tree.reason = stop < 0 ? NONE : nodes[stop].reason;
  tree.stop_regret = stop < 0 ? NAN : nodes[stop].regret;
  tree.stop_value = stop < 0 ? NAN : nodes[stop].value;
}

}  // namespace
}  // namespace paceline

extern "C" {

void paceline_argmax(const void*, int32_t, int64_t, int64_t, int64_t*, int32_t);

void paceline_verify_budgeted(const paceline::BudgetedCall* call) {
  int64_t num_rows = 0;
  for (int tree = 0; tree < call->num_trees; tree++) num_rows += call->trees[tree].num_nodes;
  paceline_argmax(call->logits, call->dtype, num_rows, call->size, call->choices, call->num_threads);
  std::vector<paceline::Node> nodes;
  int64_t start = 0;
  for (int tree = 0; tree < call->num_trees; tree++) {
    paceline::verify_tree(*call, call->trees[tree], start, nodes);
    start += call->trees[tree].num_nodes;
  }
}

}  // extern "C"
