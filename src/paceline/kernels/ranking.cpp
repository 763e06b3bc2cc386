// The ranking of a speculated vocabulary, from narrow states to chosen entries, in one call.
//
// Scores of all entries are the product of a few states and a table of some tens of megabytes; the mass of each state is
// added up while its scores are made, and then the best entries are picked out: of every state, or of a group of states
// together, an entry counting with the best that any of them gives it, relative to that state's own mass.
#include <algorithm>
#include <cmath>
#include <vector>

#include "linear.hpp"
#include "mass.hpp"
#include "simd.hpp"
#include "threads.hpp"
#include "top_scores.hpp"

namespace paceline {
namespace {

struct RankingCall {
  Linear table;     // packed [V, width]
  int32_t dtype;    // 0: fp32, 1: bf16
  int32_t num_threads, num_rows, num_groups, is_shared;
  int64_t wanted;
  const void* states;  // [num_rows and 15 more, stride], of `dtype`
  int64_t stride;      // width, for bf16 rounded up to 32 with zeros behind
  float* scores;       // [num_rows, padded V], scratch
  int64_t* ids;        // [num_groups, wanted] if shared, else [num_rows, wanted]
  float* log_share;    // [num_rows], log of the part of a state's mass that its chosen entries hold
};

template <class T>
class Ranking {
 public:
  explicit Ranking(const RankingCall& call)
      : call_(call), pool_(shared_pool(call.num_threads)), row_size_(int64_t(num_pairs(call.table)) * PAIR),
        chunk_(chunk_of(call.table, pool_)), num_chunks_((num_pairs(call.table) + chunk_ - 1) / chunk_),
        masses_(size_t(num_chunks_) * call.num_rows), log_mass_(call.num_rows) {
    const int64_t lists = call.is_shared ? call.num_groups : call.num_rows;
    for (int64_t i = 0; i < lists * pool_.size(); i++) tops_.emplace_back(call.wanted);
  }

  void run() {
    pool_.run([&](int thread) {
      if (sizeof(T) == 2) open_tiles();
      score(thread);
      if (sizeof(T) == 2) close_tiles();
      pool_.barrier();
      if (thread == 0) join_masses();
      pool_.barrier();
      select(thread);
      pool_.barrier();
      finish(thread);
    });
  }

 private:
  // Scores of this thread's share of the table.
  void score(int thread) {
    const int num_real = call_.table.out;
    multiply_share<T>(
        pool_, thread, call_.table, static_cast<const T*>(call_.states), int(call_.stride), call_.num_rows, nullptr,
        [&](int row, int pair, v16f left, v16f right) {
          float* out = call_.scores + row * row_size_ + int64_t(pair) * PAIR;
          for (int past = num_real - pair * PAIR; past < PAIR; past++) (past < LANES ? left : right)[past % LANES] = -INFINITY;
          store(out, left);
          store(out + LANES, right);
          // Which thread takes a chunk is chance; what a chunk adds up to is not.
          Mass& mass = masses_[size_t(pair / chunk_) * call_.num_rows + row];
          mass.add(left);
          mass.add(right);
        });
  }

  void join_masses() {
    for (int row = 0; row < call_.num_rows; row++) {
      float joined = -INFINITY;
      for (int chunk = 0; chunk < num_chunks_; chunk++)
        joined = Mass::joined(joined, masses_[size_t(chunk) * call_.num_rows + row].log());
      log_mass_[row] = joined;
    }
  }

  // The best of this thread's part of the entries, for every list.
  void select(int thread) {
    // Parts begin at multiples of sixteen: all but the last one are read in whole vectors.
    const int64_t blocks = row_size_ / LANES, threads = pool_.size();
    const int64_t first = blocks * thread / threads * LANES;
    const int64_t last = std::min<int64_t>(blocks * (thread + 1) / threads * LANES, call_.table.out);
    const int64_t lists = call_.is_shared ? call_.num_groups : call_.num_rows;
    const int64_t rows_each = call_.num_rows / lists;
    for (int64_t list = 0; list < lists; list++) {
      const float* own = call_.scores + list * rows_each * row_size_;
      const float* mass = log_mass_.data() + list * rows_each;
      auto sixteen = [&](int64_t id) {
        v16f best = load(own + id) - mass[0];
        for (int64_t row = 1; row < rows_each; row++) best = maximum(best, load(own + row * row_size_ + id) - mass[row]);
        return best;
      };
      auto one = [&](int64_t id) {
        float best = own[id] - mass[0];
        for (int64_t row = 1; row < rows_each; row++) best = std::max(best, own[row * row_size_ + id] - mass[row]);
        return best;
      };
      tops_[list * threads + thread].add(first, last, sixteen, one);
    }
  }

  // The parts of each list put together, and what they hold.
  void finish(int thread) {
    const int64_t lists = call_.is_shared ? call_.num_groups : call_.num_rows, threads = pool_.size();
    for (int64_t list = thread; list < lists; list += threads) {
      TopScores& top = tops_[list * threads];
      for (int64_t part = 1; part < threads; part++) top.add(tops_[list * threads + part]);
      int64_t* ids = call_.ids + list * call_.wanted;
      top.take(ids);
      const int64_t rows_each = call_.num_rows / lists;
      for (int64_t row = list * rows_each; row < (list + 1) * rows_each; row++) {
        const float* own = call_.scores + row * row_size_;
        float best = -INFINITY, held = 0.0f;
        for (int64_t i = 0; i < call_.wanted; i++) best = std::max(best, own[ids[i]]);
        for (int64_t i = 0; i < call_.wanted; i++) held += std::exp(own[ids[i]] - best);
        call_.log_share[row] = std::min(best - log_mass_[row] + std::log(held), 0.0f);
      }
    }
  }

  const RankingCall& call_;
  Pool& pool_;
  int64_t row_size_;
  int chunk_, num_chunks_;
  std::vector<Mass> masses_;
  std::vector<float> log_mass_;
  std::vector<TopScores> tops_;
};

}  // namespace
}  // namespace paceline

extern "C" void paceline_rank(const paceline::RankingCall* call) {
  if (call->dtype == 1) paceline::Ranking<paceline::bf16>(*call).run();
  else paceline::Ranking<float>(*call).run();
}
