// The fingerprint from the kernel's files: GPUs and MIG from /proc, NICs from /sys.
#include "prepare/fingerprint.h"

#include <glob.h>
#include <strings.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <utility>

#include "file.h"
#include "platform/threads.h"

namespace dynamiccl {
namespace {

constexpr std::size_t kNameBytes = 96;
constexpr int kMaxKinds = 32;

using Path = char[512];

/// A sorted list of names (and rates) with counts.
struct Kinds {
  struct Kind {
    char name[kNameBytes];
    std::uint64_t rate;  // thousandths of a Gbit/s, or Mbit/s; 0: unknown. 0 for GPUs
    int count;
  };

  /// Inserts in sorted order; false when there is no room.
  bool add(const char* name, std::uint64_t rate) noexcept {
    for (int i = 0; i < size; ++i) {
      if (kinds[i].rate != rate || std::strcmp(kinds[i].name, name) != 0) continue;
      ++kinds[i].count;
      return true;
    }
    if (size == kMaxKinds || std::strlen(name) >= kNameBytes) return false;
    std::snprintf(kinds[size].name, kNameBytes, "%s", name);
    kinds[size].rate = rate;
    kinds[size].count = 1;
    for (int i = size++; i > 0 && std::strcmp(kinds[i].name, kinds[i - 1].name) < 0; --i) {
      std::swap(kinds[i], kinds[i - 1]);
    }
    return true;
  }

  Kind kinds[kMaxKinds];
  int size = 0;
};

/// "folder/name"; false when it is too long.
bool join(Path& path, const char* folder, const char* name) noexcept {
  const int length = std::snprintf(path, sizeof path, "%s/%s", folder, name);
  return length > 0 && static_cast<std::size_t>(length) < sizeof path;
}

bool ends_with(const char* text, const char* end) noexcept {
  const std::size_t length = std::strlen(text), end_length = std::strlen(end);
  return length >= end_length && std::strcmp(text + length - end_length, end) == 0;
}

/// Calls `take(path)` for each path that matches a shell pattern; stops with false when a call
/// returns false, or when out of memory.
template <typename Take>
bool each(const char* pattern, const Take& take) noexcept {
  const char* root = "";
#ifdef DYNAMICCL_TESTS
  if (const char* made_up = std::getenv("DYNAMICCL_TEST_ROOT")) root = made_up;
#endif
  Path whole;
  glob_t found = {};
  if (!join(whole, root, pattern)) return false;
  const int problem = glob(whole, GLOB_NOSORT, nullptr, &found);
  bool goes_on = problem == 0 || problem == GLOB_NOMATCH;
  for (std::size_t i = 0; i < found.gl_pathc && goes_on; ++i) goes_on = take(found.gl_pathv[i]);
  globfree(&found);
  return goes_on;
}

/// Removes trailing white space.
void trim(char* text) noexcept {
  std::size_t end = std::strlen(text);
  while (end > 0 && std::strchr(" \t\r\n", text[end - 1]) != nullptr) text[--end] = '\0';
}

/// Reads the beginning of "folder/name"; false, and empty, when it cannot be read.
template <std::size_t capacity>
bool read_text(const char* folder, const char* name, char (&text)[capacity]) noexcept {
  Path path;
  text[0] = '\0';
  if (!join(path, folder, name)) return false;
  const File file(path);
  if (!file.is_open()) return false;
  const ssize_t size = file.read_all(reinterpret_cast<std::uint8_t*>(text), capacity - 1);
  text[size > 0 ? size : 0] = '\0';
  trim(text);
  return size >= 0;
}

/// The value of `key` in the driver's information file; empty if missing or longer than any model
/// name.
void read_field(const char* text, const char* key, char (&value)[kNameBytes]) noexcept {
  value[0] = '\0';
  for (const char* line = text; line != nullptr; line = std::strchr(line, '\n')) {
    line += *line == '\n';
    if (std::strncmp(line, key, std::strlen(key)) != 0) continue;
    line += std::strlen(key);
    line += std::strspn(line, " \t");
    const std::size_t size = std::strcspn(line, "\n");
    if (size >= sizeof value) return;
    std::memcpy(value, line, size);
    value[size] = '\0';
    return trim(value);
  }
}

/// Counts the GPUs by model; false when one has no readable model.
bool find_gpus(Kinds* models) noexcept {
  return each("proc/driver/nvidia/gpus/*", [models](const char* gpu) {
    char text[2048], model[kNameBytes], excluded[kNameBytes];
    if (!read_text(gpu, "information", text)) return false;
    read_field(text, "Model:", model);
    read_field(text, "GPU Excluded:", excluded);
    if (std::strcmp(excluded, "Yes") == 0) return true;  // the driver keeps it from everybody
    // Punctuation of the fingerprint or of JSON becomes '_'.
    for (char* c = model; *c != '\0'; ++c) {
      if (*c < ' ' || *c > '~' || std::strchr(";*+=\"\\", *c) != nullptr) *c = '_';
    }
    return model[0] != '\0' && models->add(model, 0);
  });
}

/// "400 Gb/sec (4X NDR)" -> 400000, "2.5 Gb/sec" -> 2500; 0 for anything else.
std::uint64_t thousandths_of(const char* text) noexcept {
  std::uint64_t value = 0;
  int decimals = -1;  // to come; -1: before the point
  const char* at = text;
  for (; (*at >= '0' && *at <= '9') || (*at == '.' && decimals < 0); ++at) {
    if (*at == '.') {
      decimals = 3;
    } else if (decimals != 0) {
      value = value * 10 + static_cast<std::uint64_t>(*at - '0');
      if (decimals > 0) --decimals;
    }
  }
  if (at - text > 16 || (*at != ' ' && *at != '\0')) return 0;
  for (int i = decimals < 0 ? 3 : decimals; i > 0; --i) value *= 10;
  return value;
}

/// Counts the active ports of RDMA devices by kind and rate.
bool find_rdma(Kinds* found) noexcept {
  return each("sys/class/infiniband/*/ports/*", [found](const char* port) {
    char layer[kNameBytes], state[kNameBytes], rate[kNameBytes];
    Path link, driver = "";
    if (!join(link, port, "../../device/driver")) return false;
    [[maybe_unused]] const ssize_t size = readlink(link, driver, sizeof driver - 1);
    read_text(port, "link_layer", layer);  // EFA has none
    read_text(port, "state", state);
    read_text(port, "rate", rate);
    if (!ends_with(state, ": ACTIVE")) return true;
    const char* plain = strcasecmp(layer, "ethernet") == 0 ? "roce" : "infiniband";
    return found->add(ends_with(driver, "/efa") ? "efa" : plain, thousandths_of(rate));
  });
}

/// Counts network devices by speed: those with hardware, or, where none has, all but lo.
bool find_sockets(Kinds* found) noexcept {
  for (const bool with_hardware : {true, false}) {
    // Ends in "/.": bonding_masters is a file beside the devices.
    const bool all = each("sys/class/net/*/.", [found, with_hardware](const char* device) {
      Path hardware;
      char speed[kNameBytes];
      if (!join(hardware, device, "device")) return false;
      if (ends_with(device, "/lo/.")) return true;
      if (with_hardware && access(hardware, F_OK) != 0) return true;
      read_text(device, "speed", speed);
      return found->add("socket", thousandths_of(speed));
    });
    if (!all || found->size > 0) return all;
  }
  return true;
}

}  // namespace

bool take_fingerprint(int nccl_version, char (&text)[kFingerprintBytes]) noexcept {
  Kinds models, nics;
  if (!find_gpus(&models) || !find_rdma(&nics)) return false;
  if (nics.size == 0 && !find_sockets(&nics)) return false;
  char gpus[kFingerprintBytes] = "none*0";
  std::size_t length = 0;
  for (int i = 0; i < models.size && length < sizeof gpus; ++i) {
    length += static_cast<std::size_t>(std::snprintf(gpus + length, sizeof gpus - length, "%s%s*%d",
                                                     i == 0 ? "" : "+", models.kinds[i].name,
                                                     models.kinds[i].count));
  }
  // The fastest active RDMA ports, which NCCL would use; without one, the fastest socket.
  Kinds::Kind nic = {"none", 0, 0};
  for (int i = 0; i < nics.size; ++i) {
    if (nic.count == 0 || nics.kinds[i].rate >= nic.rate) nic = nics.kinds[i];
  }
  // The driver lists gpu<N>/mig/gi<M> for each instance of a GPU that is divided (NVIDIA MIG User
  // Guide, "Device Nodes and Capabilities").
  bool has_mig = false;
  each("proc/driver/nvidia/capabilities/gpu*/mig/gi*", [&has_mig](const char*) {
    has_mig = true;
    return false;
  });
  const int size = std::snprintf(text, sizeof text, "gpu=%s;mig=%d;nic=%s*%d;nccl=%d", gpus,
                                 has_mig ? 1 : 0, nic.name, nic.count, nccl_version);
  return length < sizeof gpus && static_cast<std::size_t>(size) < sizeof text;
}

}  // namespace dynamiccl
