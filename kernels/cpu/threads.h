// Threads that share the tiles of one job after another. Any thread that is awake takes the next tile, so nothing waits
// for a sleeping or suspended thread unless that thread has already taken a tile.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

class Threads {
  public:
    // Sets the number of threads besides the caller's.
    void resize(int count) {
        std::lock_guard<std::mutex> guard(busy_);
        forget_after_fork();
        if (!helpers_.empty()) {
            ending_.store(true);
            wake();
            for (auto& helper : helpers_) helper.join();
            helpers_.clear();
            ending_.store(false);
        }
        for (int i = 0; i < count; i++) helpers_.emplace_back([this] { help(); });
        process_ = getpid();
    }

    int count() const { return 1 + (int)helpers_.size(); }

    // Calls run(tile) for each of num_tiles, at most 65535, in any order and on any thread.
    template <class Run>
    void share(int64_t num_tiles, const Run& run) {
        if (num_tiles <= 1 || !shared_) {
            for (int64_t tile = 0; tile < num_tiles; tile++) run(tile);
            return;
        }
        work_ = [](const void* context, int64_t tile) { (*(const Run*)context)(tile); };
        context_ = &run;
        done_.store(0, std::memory_order_relaxed);
        uint64_t job = ((next_.load(std::memory_order_relaxed) >> 32) + 1) << 32;
        next_.store(job | (uint64_t)num_tiles << 16, std::memory_order_seq_cst);
        if (asleep_.load(std::memory_order_seq_cst) > 0) wake();
        take_tiles();
        for (int spins = 0; done_.load(std::memory_order_acquire) < num_tiles; spins++) {
            if (spins < MOST_SPINS) pause();
            else sched_yield();
        }
    }

    // Only the thread that holds a Turn may share tiles with the others. A thread that takes a Turn while another one
    // holds it works alone.
    class Turn {
      public:
        explicit Turn(Threads& threads) : threads_(threads), held_(threads.busy_.try_lock()) {
            if (!held_) return;
            threads_.forget_after_fork();
            previous_ = shared_;
            shared_ = !threads_.helpers_.empty();
        }
        ~Turn() {
            if (!held_) return;
            shared_ = previous_;
            threads_.busy_.unlock();
        }

      private:
        Threads& threads_;
        bool held_, previous_ = false;
    };

  private:
    // A thread spins for tens of microseconds before it sleeps: longer than the time between two jobs of a layer,
    // shorter than the time between two rounds.
    static constexpr int MOST_SPINS = 1000;

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    // A forked child has none of its parent's threads.
    void forget_after_fork() {
        if (helpers_.empty() || process_ == getpid()) return;
        // Threads of another process can be neither joined nor detached, so their handles are leaked on purpose.
        new std::vector<std::thread>(std::move(helpers_));
        helpers_.clear();
        asleep_.store(0);
    }

    bool take_tiles() {
        bool any = false;
        uint64_t seen = next_.load(std::memory_order_acquire);
        while ((seen & 0xffff) < (seen >> 16 & 0xffff)) {
            if (!next_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
            // The job cannot end before this tile is done, so `work_` and `context_` stay valid.
            work_(context_, (int64_t)(seen & 0xffff));
            done_.fetch_add(1, std::memory_order_release);
            any = true;
            seen = next_.load(std::memory_order_acquire);
        }
        return any;
    }

    void help() {
        int spins = 0;
        while (!ending_.load(std::memory_order_relaxed)) {
            if (take_tiles()) spins = 0;
            else if (++spins < MOST_SPINS) pause();
            else {
                uint32_t before = wakes_.load();
                asleep_.fetch_add(1, std::memory_order_seq_cst);
                uint64_t seen = next_.load(std::memory_order_seq_cst);
                if ((seen & 0xffff) >= (seen >> 16 & 0xffff) && !ending_.load())
                    syscall(SYS_futex, &wakes_, FUTEX_WAIT_PRIVATE, before, nullptr, nullptr, 0);
                asleep_.fetch_sub(1);
                spins = 0;
            }
        }
    }

    void wake() {
        wakes_.fetch_add(1);
        syscall(SYS_futex, &wakes_, FUTEX_WAKE_PRIVATE, 1 << 20, nullptr, nullptr, 0);
    }

    static inline thread_local bool shared_ = false;
    std::vector<std::thread> helpers_;
    std::mutex busy_;
    pid_t process_ = 0;
    void (*work_)(const void*, int64_t) = nullptr;
    const void* context_ = nullptr;
    // Job number, number of tiles and next tile, in 32, 16 and 16 bits.
    alignas(64) std::atomic<uint64_t> next_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<uint32_t> wakes_{0};
    std::atomic<int> asleep_{0};
    std::atomic<bool> ending_{false};
};

// Never destroyed, because its threads may outlive the main thread.
static Threads& threads = *new Threads;
