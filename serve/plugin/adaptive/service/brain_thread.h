// The thread that runs leaders' brains, and the hand-over of questions and answers.
#pragma once

#include <cstdint>

#include "adaptive/agreement/agreement.h"

namespace dynamiccl {

/// Give a leader's brain the current history if a decision is due. Returns at once.
void ask_brain(Agreement* agreement, std::uint64_t now_ns) noexcept;

/// Propose the tables that brains have returned.
void take_proposals(std::uint64_t now_ns) noexcept;

}  // namespace dynamiccl
