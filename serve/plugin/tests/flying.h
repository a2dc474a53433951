// A message of the agreement on its way from one rank to another.
#pragma once

#include <cstdint>

#include "adaptive/wire/message.h"
#include "tests/inspect.h"
#include "tests/table_file.h"

namespace dynamiccl {

struct Flying {
  int from, to;
  Message message;
  Bytes body;
  bool same(const Flying& o) const {
    const Message &a = message, &b = o.message;
    return from == o.from && to == o.to && a.kind == b.kind && a.verdict == b.verdict &&
           a.reason == b.reason && a.proposal == b.proposal && a.index == b.index &&
           a.hash == b.hash && a.span == b.span && a.fixed == b.fixed;
  }
  std::uint64_t digest() const {
    std::uint64_t d = 1;
    Inspect::mix(&d, static_cast<std::uint64_t>(from * 64 + to));
    Inspect::mix(&d, static_cast<std::uint64_t>(message.kind) * 256 + message.verdict);
    Inspect::mix(&d, message.proposal);
    Inspect::mix(&d, message.index);
    Inspect::mix(&d, message.hash);
    Inspect::mix(&d, message.fixed);
    Inspect::mix(&d, message.reason);
    return d;
  }
};

}  // namespace dynamiccl
