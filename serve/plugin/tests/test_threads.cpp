// Several communicators that one process makes at once, and several threads each on its own and all
// on one: equal questions get equal answers, whoever asks.
#include <cstring>
#include <thread>

#include "tests/check.h"
#include "tests/library.h"
#include "tests/table_file.h"

using namespace dynamiccl;

namespace {

constexpr int kThreads = 8;
constexpr int kCallsPerThread = 4000;

Call question(int i) {
  Call call;
  call.collective = i % 7;
  call.size_bytes = static_cast<std::size_t>(i) * 7919;
  for (std::size_t cell = 0; cell < call.costs.size(); ++cell) {
    call.costs[cell] = (cell + static_cast<std::size_t>(i)) % 5 == 0 ? -1.0F : 5.0F + 3.0F * cell;
  }
  return call;
}

std::vector<Call> answers(const Library& library, int version, void* context) {
  std::vector<Call> all;
  for (int i = 0; i < kCallsPerThread; ++i) {
    all.push_back(library.ask(version, context, question(i)));
  }
  return all;
}

bool equal(const std::vector<Call>& left, const std::vector<Call>& right) {
  bool same = left.size() == right.size();
  for (std::size_t i = 0; same && i < left.size(); ++i) {
    same = left[i].costs == right[i].costs && left[i].num_channels == right[i].num_channels;
  }
  return same;
}

/// `shared`: all threads ask one context; else each makes, asks and frees its own, twice.
void ranks_agree(const Library& library, bool shared) {
  std::vector<std::vector<Call>> seen(kThreads);
  std::vector<std::thread> threads;
  void* one = shared ? library.init(5, 8, 1) : nullptr;
  for (int rank = 0; rank < kThreads; ++rank) {
    threads.emplace_back([&, rank] {
      const int version = 3 + rank % 4;
      for (int round = 0; round < 2; ++round) {
        void* mine = shared ? one : library.init(version, 8, 1);
        CHECK(mine != nullptr);
        seen[static_cast<std::size_t>(rank)] = answers(library, shared ? 5 : version, mine);
        if (!shared) library.finalize(version, mine);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<Call>& other : seen) CHECK(equal(seen[0], other));
  library.finalize(5, one);
}

void contexts_are_independent(const Library& library, const ArtifactDirectory& artifact) {
  artifact.write(1, 16, table_of(1, 16, {kTree, kSimple, 4, 1, 0}));
  void* contexts[8];
  for (int i = 0; i < 8; ++i) {
    contexts[i] = i % 2 == 0 ? library.init(5, 8, 1) : library.init(5, 16, 1);
  }
  for (int i = 0; i < 8; i += 3) {  // free some; the others must not notice
    library.finalize(5, contexts[i]);
    contexts[i] = nullptr;
  }
  for (int i = 0; i < 8; ++i) {
    if (contexts[i] == nullptr) continue;
    const Call after = library.ask(5, contexts[i], Call());
    CHECK(after.num_channels == (i % 2 == 0 ? 8 : 4));
    CHECK(after.costs[i % 2 == 0 ? 4 : 2] == 0.0F);
    library.finalize(5, contexts[i]);
  }
}

}  // namespace

int main(int, char** arguments) {
  const Library library(arguments[1]);
  const ArtifactDirectory artifact(arguments[2], "threads");
  artifact.write(1, 8, table_of(1, 8, {kRing, kLL128, 8, 1, 0}));
  ranks_agree(library, false);
  ranks_agree(library, true);
  contexts_are_independent(library, artifact);
  return g_failures;
}
