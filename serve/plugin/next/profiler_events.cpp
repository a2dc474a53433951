// What runs for each event where a next profiler is set. It takes no lock and allocates nothing.
#include <cstring>

#include "heard.h"
#include "next/event_rules.h"
#include "next/library.h"
#include "next/profiler.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kCalls = ncclProfileGroupApi | ncclProfileCollApi | ncclProfileP2pApi;

/// Where the handle of the Group is, which v5 and v6 name beside the event above.
void** group_of(ncclProfilerEventDescr_v5_t* event) noexcept {
  if (event->type == ncclProfileColl) return &event->collOfGroup.parentGroup;
  return event->type == ncclProfileP2p ? &event->p2pOfGroup.parentGroup : nullptr;
}

}  // namespace

void* ProfilerLink::start(void* context, const ncclProfilerEventDescr_v4_t& event) noexcept {
  ncclProfilerEventDescr_v5_t wide = {};
  wide.type = event.type;
  wide.parentObj = event.parentObj;
  wide.rank = event.rank;
  static_assert(sizeof wide - offsetof(ncclProfilerEventDescr_v5_t, coll) >=
                    sizeof event - offsetof(ncclProfilerEventDescr_v4_t, coll),
                "it fits");
  std::memcpy(&wide.coll, &event.coll, sizeof event.coll);
  return start(4, context, wide);
}

void* ProfilerLink::start(int abi_version, void* context,
                          const ncclProfilerEventDescr_v5_t& event) noexcept {
  std::uint64_t bits = reinterpret_cast<std::uintptr_t>(context);
  if (event.type == ncclProfileProxyOp && !is_of_this_process(event.proxyOp.pid)) {
    const ProfilerLink* link = elsewhere(abi_version);
    if (link == nullptr) return nullptr;
    bits = link->bits();
  } else if (event.type == ncclProfileProxyStep || event.type == ncclProfileNetPlugin) {
    // The context may be another process's; the event above is of this one.
    Pair parent;
    if (Pairs::find(event.parentObj, &parent)) bits = parent.link;
  }
  const Visit visit(bits);
  if (visit.link() == nullptr) return nullptr;
  const bool is_call = (event.type & kCalls) != 0;
  void* handle = visit.link()->start_both(event);
  visit.link()->mask_->follow(!is_call);
  return handle;
}

/// What they wanted when NCCL read the mask for this event: it does so when a call is made, and all
/// that belongs to the call goes by that. Of a plan nothing says which calls it is of, and 2.27
/// does not even report calls; there the mask of the moment has to do.
int ProfilerLink::mask_for(std::uint64_t type, const Pair* parent, const Pair* group,
                           bool is_under_nothing) noexcept {
  if (!has_theirs_) return 0;
  if (type == ncclProfileGroup && next_->abi_version > 4) {
    is_launched_.store(true, std::memory_order_relaxed);
    return call_mask_.load(std::memory_order_relaxed);
  }
  if (goes_by_moment(type) || (is_elsewhere_ && type == ncclProfileProxyOp)) {
    const int mask = mask_->wanted_by_them();
    if ((type & kCalls) != 0) keep_call_mask(type, mask);
    return mask;
  }
  if (parent != nullptr) return parent->mask;
  if (group != nullptr) return group->mask;
  // 2.27 starts no P2p for NetPlugin alone, but what is below it.
  return next_->abi_version == 4 && is_under_nothing ? mask_->wanted_by_them() : 0;
}

/// NCCL starts a plan's event by its first call whose mask is not empty. A group may have calls of
/// which there is no event, and of the group itself only one communicator hears.
void ProfilerLink::keep_call_mask(std::uint64_t type, int mask) noexcept {
  const bool is_group = type == ncclProfileGroupApi;
  const bool is_first = is_launched_.exchange(is_group, std::memory_order_relaxed);
  if (is_group || is_first || call_mask_.load(std::memory_order_relaxed) == 0) {
    call_mask_.store(mask, std::memory_order_relaxed);
  }
}

void* ProfilerLink::start_both(ncclProfilerEventDescr_v5_t event) noexcept {
  const std::uint64_t type = event.type;
  const int abi = next_->abi_version;
  Pair parent = {}, group = {};
  void* const above = event.parentObj;
  void** const named_group = abi > 4 ? group_of(&event) : nullptr;
  const bool is_foreign = is_elsewhere_ && type == ncclProfileProxyOp;
  const bool has_parent = !is_foreign && Pairs::find(above, &parent);
  const bool has_group = named_group != nullptr && Pairs::find(*named_group, &group);
  const int mask = mask_for(type, has_parent ? &parent : nullptr, has_group ? &group : nullptr,
                            above == nullptr);

  void* handle = nullptr;
  if ((mask & bits_that_start(type, abi)) != 0) {
    handle = Pairs::reserve(life_of_event(event), is_gone);
    // Without a place theirs is not called at all: a start must not lack its stop.
    if (handle == nullptr) count_lost();
  }
  void* theirs = nullptr;
  const bool is_asked = handle != nullptr && knows_event(next_->version, type) &&
                        (!needs_parent(type, abi) || parent.theirs != nullptr);
  if (is_asked) theirs = start_theirs(event, is_foreign ? above : parent.theirs, group.theirs);

  void* ours = nullptr;
  if (ours_ != nullptr) {
    event.parentObj = Pairs::is_handle(above) ? parent.ours : above;
    ours = hear_start(ours_, event);
  }
  if (handle == nullptr) return ours;
  if (theirs == nullptr && is_leaf(type)) {
    Pairs::cancel(handle);
    return ours;
  }
  // Also where they gave no handle: what belongs to the event goes by its mask.
  Pairs::fill(handle, {ours, theirs, bits(), mask, parent.theirs == nullptr});
  return handle;
}

void* ProfilerLink::start_theirs(ncclProfilerEventDescr_v5_t event, void* parent,
                                 void* group) noexcept {
  void* handle = nullptr;
  event.parentObj = parent;
  if (void** named_group = group_of(&event)) *named_group = group;
  if (next_->version > 4) {
    next_->as<ncclProfiler_v5_t>()->startEvent(theirs_, &handle, &event);
    return handle;
  }
  ncclProfilerEventDescr_v4_t narrow = {};
  narrow.type = static_cast<std::uint8_t>(event.type);
  narrow.rank = event.rank;
  std::memcpy(&narrow.coll, &event.coll, sizeof narrow.coll);
  // As NCCL does over a v4 plugin.
  const bool is_task = event.type == ncclProfileColl || event.type == ncclProfileP2p;
  narrow.parentObj = is_task && next_->abi_version > 4 ? group : parent;
  next_->as<ncclProfiler_v4_t>()->startEvent(theirs_, &handle, &narrow);
  return handle;
}

void ProfilerLink::stop(void* handle) noexcept {
  Pair pair;
  if (!Pairs::find(handle, &pair)) return;
  {
    const Visit visit(pair.link);
    ProfilerLink* link = visit.link();
    if (link != nullptr && pair.theirs != nullptr) {
      link->next_->as<ncclProfiler_v4_t>()->stopEvent(pair.theirs);
    }
    if (link != nullptr) link->mask_->follow(true);
  }
  Pairs::close(handle);
  Profiler::stop(pair.ours);
}

void ProfilerLink::record(void* handle, ncclProfilerEventState_t state,
                          ncclProfilerEventStateArgs_v4_t* arguments) noexcept {
  Pair pair;
  if (!Pairs::find(handle, &pair)) return;
  {
    const Visit visit(pair.link);
    ProfilerLink* link = visit.link();
    const bool is_older = link != nullptr && link->next_->version < link->next_->abi_version;
    // NCCL's own conditions for a state.
    const bool is_heard =
        link != nullptr && pair.theirs != nullptr &&
        (!is_older || knows_state(link->next_->version, state)) &&
        (!is_of_step(state) || !pair.is_orphan) &&
        (!is_of_control(state) || (link->mask_->wanted_by_them() & ncclProfileProxyCtrl) != 0);
    if (is_heard) {
      link->next_->as<ncclProfiler_v4_t>()->recordEventState(pair.theirs, state, arguments);
    }
  }
  hear_state(pair.ours, state, arguments);
}

void ProfilerLink::count_lost() noexcept {
  static std::atomic<bool> is_said{false};
  lost_.fetch_add(1, std::memory_order_relaxed);
  if (is_said.exchange(true)) return;
  say_of_next(kNextProfiler, logger_,
              "more events at a time than can be kept apart: ", "some do not reach it");
}

}  // namespace dynamiccl
