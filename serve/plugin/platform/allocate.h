// Objects on the heap where neither new nor delete can be had: see CMakeLists.txt.
#pragma once

#include <cstdlib>
#include <new>

namespace dynamiccl {

/// Null when memory is short.
template <typename T, typename... Arguments>
T* allocate(Arguments&&... arguments) noexcept {
  void* memory = std::malloc(sizeof(T));
  return memory != nullptr ? new (memory) T(arguments...) : nullptr;
}

template <typename T>
void deallocate(T* object) noexcept {
  if (object == nullptr) return;
  object->~T();
  std::free(object);
}

}  // namespace dynamiccl
