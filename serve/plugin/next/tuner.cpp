// On the calls' path only where a next tuner is set; it then costs what that one costs.
#include "next/tuner.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "next/library.h"
#include "platform/dynamic.h"
#include "platform/threads.h"

namespace dynamiccl {
namespace {

constexpr int kMostCells = 16 * kNumProtocols;

NextLibrary g_vendor({"DYNAMICCL_NEXT_TUNER", "tuner", "ncclTunerPlugin_v", 2,
                      "it exports no tuner that this NCCL takes", "is asked first on every call",
                      nullptr});

bool has_cell(const CostTable& costs, int algorithm, int protocol) noexcept {
  const int cell = algorithm * costs.num_protocols + protocol;
  return algorithm < costs.num_algorithms && protocol < costs.num_protocols &&
         costs.cells[cell] != kCostIgnore;
}

/// NCCL's own way with a v2 plugin (`src/plugin/tuner/tuner_v2.cc`).
ncclResult_t ask_v2(const ncclTuner_v2_t* tuner, void* context, const Question& question) noexcept {
  const CostTable& costs = question.costs;
  const bool has_nvls = has_cell(costs, kNVLS, kSimple) || has_cell(costs, kNVLSTree, kSimple);
  int algorithm = -1, protocol = -1;
  const ncclResult_t result = tuner->getCollInfo(
      context, question.collective, question.size_bytes, has_cell(costs, kCollNetChain, kSimple),
      has_nvls, question.num_pipe_ops, &algorithm, &protocol, question.num_channels);
  if (result == ncclSuccess && algorithm >= 0 && protocol >= 0 &&
      has_cell(costs, algorithm, protocol)) {
    costs.cells[algorithm * costs.num_protocols + protocol] = 0.0F;
  }
  return result;
}

/// The next float below a positive one; by hand, since libm is not linked.
float just_below(float cost) noexcept {
  std::uint32_t bits;
  std::memcpy(&bits, &cost, sizeof bits);
  --bits;
  std::memcpy(&cost, &bits, sizeof cost);
  return cost;
}

/// The costs that ours is to decide by: NCCL's, but that a cell which the vendor made free is just
/// below the cheapest. Left free it would win a tie, and make every Ring look relegated.
void show(const float* before, const float* after, int num_cells, float* shown) noexcept {
  float cheapest = INFINITY;
  for (int i = 0; i < num_cells; ++i) {
    if (before[i] > 0.0F) cheapest = std::min(cheapest, before[i]);
  }
  for (int i = 0; i < num_cells; ++i) {
    const bool is_freed = after[i] == 0.0F && before[i] != 0.0F;
    shown[i] = is_freed ? just_below(cheapest) : after[i];
  }
}

}  // namespace

const NextPlugin* TunerLink::find(int abi_version, ncclDebugLogger_t logger) noexcept {
  return g_vendor.find(abi_version, logger);
}

ncclResult_t TunerLink::create(const NextPlugin* next, const Communicator& communicator,
                               ncclNvlDomainInfo_v5_t* domains, ncclTunerConstants_v5_t* constants,
                               void** context) noexcept {
  const std::size_t ranks = communicator.num_ranks, nodes = communicator.num_nodes;
  const ncclDebugLogger_t logger = communicator.logger;
  *context = nullptr;
  void* memory = std::malloc(sizeof(TunerLink));
  if (memory == nullptr) return ncclSystemError;  // theirs may have to act on all ranks alike
  auto* link = new (memory) TunerLink;
  link->next_ = next;
  void** theirs = &link->theirs_;
  ncclResult_t result = ncclSuccess;
  switch (next->version) {
    case 2:
      result = next->as<ncclTuner_v2_t>()->init(ranks, nodes, logger, theirs);
      break;
    case 3:
      result = next->as<ncclTuner_v3_t>()->init(ranks, nodes, logger, theirs);
      break;
    case 4:
      result = next->as<ncclTuner_v4_t>()->init(ranks, nodes, logger, theirs);
      break;
    default:  // v5 and v6 have these at one place
      result = next->as<ncclTuner_v5_t>()->init(theirs, communicator.comm_id, ranks, nodes, logger,
                                                domains, constants);
  }
  if (result == ncclSuccess) {
    result = Context::create(communicator, &link->ours_);
    if (result != ncclSuccess) link->finalize_next();
  }
  if (result != ncclSuccess) {
    std::free(link);
    return result;
  }
  *context = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(link) | kMark);
  return ncclSuccess;
}

ncclResult_t TunerLink::ask_next(const Question& question) noexcept {
  float** table = reinterpret_cast<float**>(question.costs.cells);
  const int algorithms = question.costs.num_algorithms, protocols = question.costs.num_protocols;
  switch (next_->version) {
    case 2:
      return ask_v2(next_->as<ncclTuner_v2_t>(), theirs_, question);
    case 3:
      return next_->as<ncclTuner_v3_t>()->getCollInfo(
          theirs_, question.collective, question.size_bytes, question.num_pipe_ops, table,
          algorithms, protocols, question.num_channels);
    default:  // v4 to v6 have this one at one place
      return next_->as<ncclTuner_v4_t>()->getCollInfo(
          theirs_, question.collective, question.size_bytes, question.num_pipe_ops, table,
          algorithms, protocols, question.reg_buff, question.num_channels);
  }
}

/// Counts a call in; retire() frees nothing under it.
class TunerVisit {
 public:
  explicit TunerVisit(std::atomic<int>* inside) noexcept : inside_(inside) { ++*inside_; }
  ~TunerVisit() { --*inside_; }
  TunerVisit(const TunerVisit&) = delete;
  TunerVisit& operator=(const TunerVisit&) = delete;

 private:
  std::atomic<int>* inside_;
};

ncclResult_t TunerLink::answer(const Question& question) noexcept {
  const TunerVisit visit(&inside_);
  if (is_closing_.load()) return ncclSuccess;
  const Context::Stay stay(ours_);  // so that ours is still there when theirs has answered
  const CostTable& costs = question.costs;
  const bool is_table = is_sound(costs);
  const int num_cells = is_table ? costs.num_algorithms * costs.num_protocols : 0;
  float before[kMostCells], shown[kMostCells], decided[kMostCells];
  std::copy_n(costs.cells, num_cells, before);
  const int own_channels = *question.num_channels;
  const ncclResult_t result = ask_next(question);
  if (ours_ == nullptr) return result;
  int channels = own_channels;
  show(before, costs.cells, num_cells, shown);
  std::copy_n(shown, num_cells, decided);
  const CostTable ours = {is_table ? decided : costs.cells, costs.num_algorithms,
                          costs.num_protocols};
  // Also after an error of theirs: the call counts.
  const ncclResult_t our_result =
      stay.entered() ? ours_->answer(question.collective, question.size_bytes, ours, &channels)
                     : ncclSuccess;
  if (result != ncclSuccess) return result;
  int cell = -1;
  for (int i = 0; i < num_cells; ++i) {
    if (decided[i] == 0.0F && shown[i] != 0.0F) cell = i;
  }
  if (cell >= 0) {
    for (int i = 0; i < num_cells; ++i) {
      if (costs.cells[i] == 0.0F) costs.cells[i] = before[i];
    }
    costs.cells[cell] = 0.0F;
    *question.num_channels = channels;
  }
  return our_result;
}

ncclResult_t TunerLink::answer_v2(const Question& question) noexcept {
  const TunerVisit visit(&inside_);
  if (is_closing_.load()) return ncclSuccess;
  const Context::Stay stay(ours_);
  int algorithm = -1, protocol = -1, channels = *question.num_channels;
  const ncclResult_t result = next_->as<ncclTuner_v2_t>()->getCollInfo(
      theirs_, question.collective, question.size_bytes, question.collnet_support,
      question.nvls_support, question.num_pipe_ops, question.algorithm, question.protocol,
      question.num_channels);
  if (ours_ == nullptr || !stay.entered()) return result;
  const ncclResult_t our_result =
      ours_->answer_v2(question.collective, question.size_bytes, question.nvls_support, &algorithm,
                       &protocol, &channels);
  if (result != ncclSuccess) return result;
  if (algorithm >= 0) {
    *question.algorithm = algorithm;
    *question.protocol = protocol;
    *question.num_channels = channels;
  }
  return our_result;
}

ncclResult_t TunerLink::answer_chunk(int collective, std::size_t size_bytes, int algorithm,
                                     int protocol, int num_channels,
                                     std::size_t* chunk_bytes) noexcept {
  const TunerVisit visit(&inside_);
  if (is_closing_.load()) return ncclSuccess;
  if (next_->version < 6 || next_->as<ncclTuner_v6_t>()->getChunkSize == nullptr) {
    return ncclSuccess;
  }
  return next_->as<ncclTuner_v6_t>()->getChunkSize(theirs_, collective, size_bytes, algorithm,
                                                   protocol, num_channels, chunk_bytes);
}

ncclResult_t TunerLink::finalize_next() noexcept {
  // At one place in v2 to v6.
  return next_->as<ncclTuner_v2_t>()->destroy(theirs_);
}

ncclResult_t TunerLink::retire(TunerLink* link) noexcept {
  link->is_closing_.store(true);
  Context::retire(link->ours_);
  const ncclResult_t result = link->finalize_next();
  if (wait_until([link] { return link->inside_.load() == 0; })) std::free(link);
  return result;
}

}  // namespace dynamiccl
