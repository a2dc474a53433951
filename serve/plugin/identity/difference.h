// Values that must be equal on all ranks of a communicator, as lines `name=value`.
#pragma once

#include <cstddef>

namespace dynamiccl {

/// Compares a rank's lines with the leader's; true when they differ, and then `words` says in what
/// ("artifact is 12ab, not 34cd"). `other` need not end with a zero.
bool find_difference(const char* own, const char* other, std::size_t other_bytes,
                     char (&words)[200]) noexcept;

}  // namespace dynamiccl
