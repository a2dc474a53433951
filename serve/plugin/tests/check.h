// The smallest test framework that does: CHECK counts failures, `main` returns their number.
#pragma once

#include <atomic>
#include <cstdio>

inline std::atomic<int> g_failures{0};

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      ++g_failures;                                                        \
    }                                                                      \
  } while (false)
