// The word of a communicator in /dev/shm, named by user, job and communicator.
#pragma once

#include <cstddef>
#include <cstdint>

#include "agree/vote.h"

namespace dynamiccl {

/// Agrees with the other ranks of `vote.round`, all of which are on this host; at most `limit_ms`.
/// Whether they all use the table. If not, `reason` says why, zero-terminated. `waited_in_vain`:
/// whether somebody did not come at all.
///
/// A rank that cannot open the file never votes, so nobody has the table. Whoever comes last
/// removes the name, since all have opened it. Where one does not come it stays, should that one
/// come late, and the next dynamiccl-run of the user sweeps it.
bool agree_by_word(const Vote& vote, std::uint64_t limit_ms, bool* waited_in_vain, char* reason,
                   std::size_t reason_size) noexcept;

}  // namespace dynamiccl
