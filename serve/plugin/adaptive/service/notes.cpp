// Implementation of notes.h.
#include "adaptive/service/notes.h"

#include <cstdlib>
#include <cstring>

namespace dynamiccl {

struct Notes::Note {
  Note* next;
  Agreement* to;
  Message message;
  // The body follows.
};

void Notes::add(Agreement* to, const Message& message) noexcept {
  auto* note = static_cast<Note*>(std::malloc(sizeof(Note) + message.body_bytes));
  if (note == nullptr) return;
  *note = {nullptr, to, message};
  note->message.body = reinterpret_cast<std::uint8_t*>(note + 1);
  if (message.body_bytes > 0) std::memcpy(note + 1, message.body, message.body_bytes);
  *end_ = note;
  end_ = &note->next;
}

void Notes::deliver(std::uint64_t now_ns) noexcept {
  while (notes_ != nullptr) {
    Note* note = notes_;
    notes_ = note->next;
    if (notes_ == nullptr) end_ = &notes_;
    note->to->receive(note->to->place().rank, note->message, now_ns);
    std::free(note);
  }
}

}  // namespace dynamiccl
