// A list searched from its end: look-ups are mostly for recent entries.
#include "adaptive/service/directory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace dynamiccl {

Directory::~Directory() { std::free(entries_); }

Directory::Entry* Directory::find(std::uint64_t comm_id) noexcept {
  for (int i = size_ - 1; i >= 0; --i) {
    if (entries_[i].comm_id == comm_id) return &entries_[i];
  }
  return nullptr;
}

bool Directory::receive(const Message& message, Message* answer) noexcept {
  Entry* entry = find(message.comm_id);
  if (message.kind == MessageKind::kRegister) {
    Address address;
    const auto* text = reinterpret_cast<const char*>(message.body);
    if (message.body_bytes >= kAddressTextBytes ||
        !parse_address(text, message.body_bytes, &address)) {
      return false;
    }
    if (entry == nullptr) {
      if (size_ == kMostEntries) return false;
      if (size_ == capacity_) {
        const int wanted = std::max(64, 2 * capacity_);
        auto* entries = static_cast<Entry*>(
            std::realloc(entries_, static_cast<std::size_t>(wanted) * sizeof *entries_));
        if (entries == nullptr) return false;
        entries_ = entries;
        capacity_ = wanted;
      }
      entry = &entries_[size_++];
      entry->comm_id = message.comm_id;
    }
    std::memcpy(entry->address, text, message.body_bytes);
    entry->address[message.body_bytes] = '\0';
    return false;
  }
  if (message.kind != MessageKind::kLookup || entry == nullptr) return false;
  *answer = Message{};
  answer->kind = MessageKind::kFound;
  answer->comm_id = message.comm_id;
  answer->body = reinterpret_cast<const std::uint8_t*>(entry->address);
  answer->body_bytes = static_cast<std::uint32_t>(std::strlen(entry->address));
  return true;
}

}  // namespace dynamiccl
