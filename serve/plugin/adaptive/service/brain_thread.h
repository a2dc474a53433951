// Adaptive mode: the thread on which leaders' brains think, and the way there and back.
#pragma once

#include <cstdint>

#include "adaptive/agreement/agreement.h"

namespace dynamiccl {

/// A leader in adaptive mode: give its brain what is known now, if that is due. Returns at once.
void ask_brain(Agreement* agreement, std::uint64_t now_ns) noexcept;

/// Propose what brains have answered.
void take_proposals(std::uint64_t now_ns) noexcept;

}  // namespace dynamiccl
