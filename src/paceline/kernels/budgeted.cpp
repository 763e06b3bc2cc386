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

struct Limits {
  double horizon, scale, gate, remaining, cap, price;
};

struct BudgetedCall {
  int32_t num_trees, dtype;
  int64_t size;             // of the vocabulary
  const void* logits;       // [R, size]
  const int64_t* starts;    // [num_trees + 1] rows
  const int64_t* parents;   // [R] within the tree, -1 for roots
  const int64_t* tokens;    // [R]
  const int64_t* choices;   // [R] argmax of each row
  const Limits* limits;     // [num_trees]
  const int64_t* eos_starts;  // [num_trees + 1]
  const int64_t* eos;       // ids that end the text of each tree's sequence
  double* regrets;          // [R] out
  int64_t* ends;            // [num_trees] out: row at which the path ends
  int64_t* stops;           // [num_trees] out: row that the path did not go on to, -1 behind a leaf
  int32_t* reasons;         // [num_trees] out: why not
  double* values;           // [num_trees] out: suffix value of that row
};

enum Reason { NONE, END_OF_TEXT, BANNED, GATE, BUDGET, CAP };

struct Node {
  double depth = 0, regret = 0, num_relaxed = 0, value = 0;
  bool is_reached = true;
  Reason reason = NONE;
};

inline double logit(const BudgetedCall& call, int64_t row, int64_t id) {
  const int64_t at = row * call.size + id;
  return call.dtype == 1 ? widen(static_cast<const bf16*>(call.logits)[at]) : static_cast<const float*>(call.logits)[at];
}

inline bool ends_text(const BudgetedCall& call, int tree, int64_t id) {
  for (int64_t i = call.eos_starts[tree]; i < call.eos_starts[tree + 1]; i++)
    if (call.eos[i] == id) return true;
  return false;
}

// What refuses a node that is not the target's choice, in the order in which the rule asks.
inline Reason refusal(const BudgetedCall& call, int tree, const Node& node, double regret, int64_t id, int64_t choice) {
  const Limits& limits = call.limits[tree];
  if (ends_text(call, tree, id) || ends_text(call, tree, choice)) return END_OF_TEXT;
  if (!std::isfinite(regret)) return BANNED;
  if (!(node.value > 0 && regret / node.value <= limits.gate)) return GATE;
  if (node.regret > limits.remaining) return BUDGET;
  return node.num_relaxed > limits.cap ? CAP : NONE;
}

void verify_tree(const BudgetedCall& call, int tree, std::vector<Node>& nodes) {
  const int64_t start = call.starts[tree], num_nodes = call.starts[tree + 1] - start;
  const Limits& limits = call.limits[tree];
  double* regrets = call.regrets + start;
  nodes.assign(num_nodes, Node());
  regrets[0] = 0;
  int64_t end = 0;
  double most = 0;
  for (int64_t i = 1; i < num_nodes; i++) {
    const int64_t above = call.parents[start + i], id = call.tokens[start + i];
    const int64_t choice = call.choices[start + above];
    Node& node = nodes[i];
    node = nodes[above];
    node.reason = NONE;
    node.depth += 1;
    node.value = std::max(limits.horizon - node.depth + 1, 0.0) / limits.scale;
    regrets[i] = 0;
    if (id != choice) {
      const double regret = logit(call, start + above, choice) - logit(call, start + above, id);
      regrets[i] = regret;
      if (std::isfinite(regret)) node.regret += regret;
      node.num_relaxed += 1;
      node.reason = refusal(call, tree, node, regret, id, choice);
      node.is_reached &= node.reason == NONE;
    }
    if (!node.is_reached) continue;
    const double worth = node.depth - limits.price * node.regret;
    const Node& best = nodes[end];
    const bool is_better = worth != most                 ? worth > most
                           : node.regret != best.regret ? node.regret < best.regret
                                                        : node.num_relaxed < best.num_relaxed;
    if (is_better) end = i, most = worth;
  }
  int64_t stop = -1;
  for (int64_t i = end + 1; i < num_nodes; i++)
    if (call.parents[start + i] == end && (stop < 0 || regrets[i] < regrets[stop])) stop = i;
  call.ends[tree] = start + end;
  call.stops[tree] = stop < 0 ? -1 : start + stop;
  call.reasons[tree] = stop < 0 ? NONE : nodes[stop].reason;
  call.values[tree] = stop < 0 ? NAN : nodes[stop].value;
}

}  // namespace
}  // namespace paceline

extern "C" void paceline_verify_budgeted(const paceline::BudgetedCall* call) {
  std::vector<paceline::Node> nodes;
  for (int tree = 0; tree < call->num_trees; tree++) paceline::verify_tree(*call, tree, nodes);
}
