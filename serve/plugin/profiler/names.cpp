// Distinguishes names by a few letters, then compares once: this runs for every collective of a
// job. The spellings are those of `src/collectives.cc`.
#include "profiler/names.h"

#include <cstring>

#include "profiler/record.h"
#include "vocabulary.h"

namespace dynamiccl {
namespace {

enum Datatype : std::uint8_t {  // `ncclDataType_t` in `src/nccl.h.in`
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
  kFloat8e4m3 = 10,
  kFloat8e5m2 = 11,
};

constexpr char kPrefix[] = "nccl";

std::uint8_t number_if(const char* name, const char* spelling, int number) noexcept {
  return std::strcmp(name, spelling) == 0 ? static_cast<std::uint8_t>(number) : kUnknown;
}

/// The letter at `index`, or '\0' when the name ends before it.
char letter(const char* name, std::size_t index) noexcept {
  return std::memchr(name, '\0', index) == nullptr ? name[index] : '\0';
}

}  // namespace

std::uint8_t collective_of(const char* name) noexcept {
  if (name == nullptr) return kUnknown;
  switch (name[0]) {
    case 'A':
      return letter(name, 3) == 'R' ? number_if(name, "AllReduce", kAllReduce)
                                    : number_if(name, "AllGather", kAllGather);
    case 'B':
      return number_if(name, "Broadcast", kBroadcast);
    case 'R':
      return letter(name, 6) == 'S' ? number_if(name, "ReduceScatter", kReduceScatter)
                                    : number_if(name, "Reduce", kReduce);
    default:
      return kUnknown;
  }
}

std::uint8_t algorithm_of(const char* name) noexcept {
  if (name == nullptr) return kUnknown;
  switch (name[0]) {
    case 'R':
      return number_if(name, "RING", kRing);
    case 'T':
      return number_if(name, "TREE", kTree);
    case 'N':
      return letter(name, 4) == '_' ? number_if(name, "NVLS_TREE", kNVLSTree)
                                    : number_if(name, "NVLS", kNVLS);
    case 'C':
      return letter(name, 8) == 'D' ? number_if(name, "COLLNET_DIRECT", kCollNetDirect)
                                    : number_if(name, "COLLNET_CHAIN", kCollNetChain);
    case 'P':
      return number_if(name, "PAT", kPAT);
    default:
      return kUnknown;
  }
}

std::uint8_t protocol_of(const char* name) noexcept {
  if (name == nullptr) return kUnknown;
  if (name[0] == 'S') return number_if(name, "SIMPLE", kSimple);
  return letter(name, 2) == '1' ? number_if(name, "LL128", kLL128) : number_if(name, "LL", kLL);
}

std::uint8_t datatype_of(const char* name) noexcept {
  if (name == nullptr) return kUnknown;
  if (std::strncmp(name, kPrefix, sizeof kPrefix - 1) != 0) {
    // The one type that NCCL's own list of names lacks, to 2.30.7.
    return number_if(name, "Unknown", kUint8);
  }
  name += sizeof kPrefix - 1;
  switch (name[0]) {
    case 'B':
      return number_if(name, "Bfloat16", kBfloat16);
    case 'F':
      switch (letter(name, 5)) {
        case '1':
          return number_if(name, "Float16", kFloat16);
        case '3':
          return number_if(name, "Float32", kFloat32);
        case '6':
          return number_if(name, "Float64", kFloat64);
        default:
          return letter(name, 7) == '4' ? number_if(name, "Float8e4m3", kFloat8e4m3)
                                        : number_if(name, "Float8e5m2", kFloat8e5m2);
      }
    case 'I':
      if (letter(name, 3) == '8') return number_if(name, "Int8", kInt8);
      return letter(name, 3) == '3' ? number_if(name, "Int32", kInt32)
                                    : number_if(name, "Int64", kInt64);
    case 'U':
      if (letter(name, 4) == '8') return number_if(name, "Uint8", kUint8);
      return letter(name, 4) == '3' ? number_if(name, "Uint32", kUint32)
                                    : number_if(name, "Uint64", kUint64);
    default:
      return kUnknown;
  }
}

std::size_t element_bytes(std::uint8_t datatype) noexcept {
  static constexpr std::uint8_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return datatype < sizeof kBytes ? kBytes[datatype] : 0;
}

}  // namespace dynamiccl
