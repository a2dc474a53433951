// One thread and one queue for all communicators of a process.
#include "tests/job/proxy.h"

#include <chrono>
#include <utility>

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

Proxy::Proxy(const ProxyHabits& habits, std::uint64_t seed)
    : habits_(habits), random_(seed), thread_([this] { loop(); }) {}

Proxy::~Proxy() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Proxy::add(const void* owner, std::uint64_t due_ns, std::function<void()> task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_.emplace(due_ns, Item{owner, std::move(task)});
  changed_.notify_all();
}

void Proxy::run(const void* owner, std::function<void()> task) {
  add(owner, now_ns(), std::move(task));
}

void Proxy::deliver(const void* owner, const Kernel& kernel) {
  for (int channel = 0; channel < kernel.num_channels; ++channel) {
    std::uint64_t delay_ns = 0;
    int chance = 0, copies = 1;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      delay_ns = random_() % static_cast<std::uint64_t>(1000 * habits_.delay_us + 1);
      chance = static_cast<int>(random_() % 100);
      if (static_cast<int>(random_() % 100) < habits_.duplicate_percent) copies = 2;
    }
    const bool dropped = chance < habits_.drop_percent;
    if (dropped && chance % 2 == 0) continue;
    // Channels begin and end at different times.
    const std::uint64_t start_ns = kernel.start_ns + static_cast<std::uint64_t>(10 * channel);
    const std::uint64_t stop_ns = kernel.stop_ns - static_cast<std::uint64_t>(10 * channel);
    for (int copy = 0; copy < copies; ++copy) {
      add(owner, kernel.stop_ns + delay_ns, [=] {
        void* event =
            kernel.profiler->start_kernel(kernel.context, kernel.collective, channel, start_ns);
        if (!dropped) kernel.profiler->stop_kernel(event, stop_ns);
      });
    }
  }
}

void Proxy::finish(const void* owner, bool deliver_rest) {
  std::unique_lock<std::mutex> lock(mutex_);
  std::multimap<std::uint64_t, Item> rest;
  for (auto item = queue_.begin(); item != queue_.end();) {
    if (item->second.owner != owner) {
      ++item;
      continue;
    }
    if (deliver_rest) rest.emplace(0, std::move(item->second));
    item = queue_.erase(item);
  }
  queue_.merge(rest);  // at once
  changed_.notify_all();
  const auto is_done = [&] {
    if (busy_with_ == owner) return false;
    for (const auto& [due_ns, item] : queue_) {
      if (item.owner == owner) return false;
    }
    return true;
  };
  changed_.wait(lock, is_done);
}

void Proxy::loop() {
  adopt_thread();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_) {
    if (queue_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const auto next = queue_.begin();
    const std::uint64_t now = now_ns();
    if (next->first > now) {
      changed_.wait_for(lock, std::chrono::nanoseconds(next->first - now));
      continue;
    }
    const Item item = std::move(next->second);
    queue_.erase(next);
    busy_with_ = item.owner;
    lock.unlock();
    item.task();
    lock.lock();
    busy_with_ = nullptr;
    changed_.notify_all();
  }
}
