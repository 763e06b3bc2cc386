// A pool of threads of our own, asleep between forwards.
//
// Not OpenMP: a library that brings a second OpenMP runtime beside torch's makes both pools spin on the same
// cores, and a forward takes a hundred times longer. Within a forward the threads meet at spinning barriers
// (several per layer), and give the core away when another process holds a peer up.
#pragma once
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {

class Pool {
 public:
  explicit Pool(int num_threads) : num_threads_(num_threads) {
    for (int id = 1; id < num_threads; id++) workers_.emplace_back([this, id] { serve(id); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      generation_++;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }
  int size() const { return num_threads_; }

  // Run job(thread) on every thread and wait for all. Callers of several threads wait for each other.
  void run(const std::function<void(int)>& job) {
    std::lock_guard<std::mutex> turn(turns_);
    next_.store(num_threads_);
    if (num_threads_ > 1) {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      generation_++;
    }
    if (num_threads_ > 1) wake_.notify_all();
    job(0);
    barrier();
  }

  // All threads wait here for each other; the chunks are counted anew.
  void barrier() {
    if (num_threads_ == 1) {
      next_.store(num_threads_, std::memory_order_relaxed);
      return;
    }
    int phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(num_threads_, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
      if (spins > 20000) std::this_thread::yield();
      else relax();
    }
  }

  // Number of a chunk of this phase's work that no thread has yet. Every thread begins with the chunk of its own
  // number, so that it knows what it will need before the phase begins.
  int next_chunk() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  static void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
  void serve(int id) {
    unsigned long seen = 0;
    for (;;) {
      const std::function<void(int)>* job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_ != seen; });
        seen = generation_;
        if (stopping_) return;
        job = job_;
      }
      (*job)(id);
      barrier();
    }
  }

  int num_threads_;
  std::vector<std::thread> workers_;
  std::mutex turns_, mutex_;
  std::condition_variable wake_;
  const std::function<void(int)>* job_ = nullptr;
  unsigned long generation_ = 0;
  bool stopping_ = false;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
  alignas(64) std::atomic<int> next_{0};
};

// The pool of this process with so many threads: one for all who ask, since two pools would share the cores. A
// forked child has no threads but the one that forked, so there the old pool is left where it is.
inline Pool& shared_pool(int num_threads) {
  static std::mutex guard;
  static std::map<std::pair<pid_t, int>, Pool*> pools;  // Never deleted: threads may outlive static objects.
  std::lock_guard<std::mutex> lock(guard);
  Pool*& pool = pools[{getpid(), num_threads}];
  if (!pool) pool = new Pool(num_threads);
  return *pool;
}

}  // namespace paceline
