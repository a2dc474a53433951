// The fingerprint from the kernel's files: GPUs and MIG from /proc, NICs from /sys.
#include "identity/fingerprint.h"

#include <dirent.h>
#include <strings.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <utility>

#include "file.h"
#include "platform/nccl_version.h"
#include "platform/threads.h"

namespace dynamiccl {
namespace {

constexpr std::size_t kPathBytes = 512;
constexpr std::size_t kNameBytes = 96;
constexpr std::size_t kFileBytes = 2048;
constexpr int kMaxModels = 8;
constexpr int kMaxRates = 32;

/// Something that is there several times.
struct Counted {
  char name[kNameBytes];
  std::uint64_t rate;  // thousandths of a Gbit/s, or Mbit/s; 0: unknown. 0 for GPUs
  int count;
};

using Path = char[kPathBytes];

/// "a/b" under the machine's root; false when it is too long.
bool join(Path& path, const char* folder, const char* name) noexcept {
  const int length = std::snprintf(path, sizeof path, "%s/%s", folder, name);
  return length > 0 && static_cast<std::size_t>(length) < sizeof path;
}

/// The files of a machine: those of a made-up one in tests.
bool of_machine(Path& path, const char* name) noexcept {
#ifdef DYNAMICCL_TESTS
  if (const char* root = std::getenv("DYNAMICCL_TEST_ROOT")) return join(path, root, name);
#endif
  return join(path, "", name);
}

/// The entries of a directory, without those that begin with a dot.
class Folder {
 public:
  explicit Folder(const char* path) noexcept : stream_(opendir(path)) {}
  ~Folder() {
    if (stream_ != nullptr) closedir(stream_);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  bool is_open() const noexcept { return stream_ != nullptr; }

  const char* next() noexcept {
    while (stream_ != nullptr) {
      const dirent* entry = readdir(stream_);
      if (entry == nullptr) return nullptr;
      if (entry->d_name[0] != '.') return entry->d_name;
    }
    return nullptr;
  }

 private:
  DIR* stream_;
};

bool exists(const char* path) noexcept { return access(path, F_OK) == 0; }

/// The file's beginning, without the white space around it; false when it cannot be read.
template <std::size_t capacity>
bool read_text(const char* path, char (&text)[capacity]) noexcept {
  text[0] = '\0';
  const File file(path);
  if (!file.is_open()) return false;
  const ssize_t size = file.read_all(reinterpret_cast<std::uint8_t*>(text), capacity - 1);
  if (size < 0) return false;
  std::size_t end = static_cast<std::size_t>(size);
  while (end > 0 && std::strchr(" \t\r\n", text[end - 1]) != nullptr) --end;
  text[end] = '\0';
  return true;
}

/// The text of "folder/name"; empty where there is none, as EFA has no link_layer.
template <std::size_t capacity>
void read_word(const char* folder, const char* name, char (&text)[capacity]) noexcept {
  text[0] = '\0';
  Path path;
  if (join(path, folder, name)) read_text(path, text);
}

/// Adds one of (name, rate) to the `count` entries, sorted by name; false when there is no room.
template <int capacity>
bool add(Counted (&found)[capacity], int* count, const char* name, std::uint64_t rate) noexcept {
  for (int i = 0; i < *count; ++i) {
    if (found[i].rate == rate && std::strcmp(found[i].name, name) == 0) {
      ++found[i].count;
      return true;
    }
  }
  if (*count == capacity || std::strlen(name) >= kNameBytes) return false;
  std::snprintf(found[*count].name, kNameBytes, "%s", name);
  found[*count].rate = rate;
  found[*count].count = 1;
  for (int i = (*count)++; i > 0 && std::strcmp(found[i].name, found[i - 1].name) < 0; --i) {
    std::swap(found[i], found[i - 1]);
  }
  return true;
}

/// The value of a line "Key: value" of the driver's information file; empty when there is none,
/// and when it is longer than any model's name.
void value_of(const char* text, const char* key, char (&value)[kNameBytes]) noexcept {
  value[0] = '\0';
  const std::size_t length = std::strlen(key);
  for (const char* line = text; line != nullptr && *line != '\0';) {
    const char* end = std::strchr(line, '\n');
    if (std::strncmp(line, key, length) == 0 && line[length] == ':') {
      const char* begin = line + length + 1;
      const char* stop = end != nullptr ? end : begin + std::strlen(begin);
      while (begin < stop && (*begin == ' ' || *begin == '\t')) ++begin;
      while (stop > begin && (stop[-1] == ' ' || stop[-1] == '\t')) --stop;
      const auto size = static_cast<std::size_t>(stop - begin);
      if (size >= kNameBytes) return;
      std::memcpy(value, begin, size);
      value[size] = '\0';
      return;
    }
    line = end != nullptr ? end + 1 : nullptr;
  }
}

/// What would be read as punctuation, the fingerprint's own or JSON's, becomes '_'.
void make_plain(char* name) noexcept {
  for (char* c = name; *c != '\0'; ++c) {
    if (*c < ' ' || *c > '~' || std::strchr(";*+=\"\\", *c) != nullptr) *c = '_';
  }
}

/// Counts the GPUs by model; false when one of them cannot be named.
bool find_gpus(Counted (&models)[kMaxModels], int* count) noexcept {
  Path root;
  if (!of_machine(root, "proc/driver/nvidia/gpus")) return false;
  Folder gpus(root);
  while (const char* entry = gpus.next()) {
    Path gpu, path;
    char text[kFileBytes], model[kNameBytes], excluded[kNameBytes];
    if (!join(gpu, root, entry) || !join(path, gpu, "information")) return false;
    if (!read_text(path, text)) return false;
    value_of(text, "Model", model);
    value_of(text, "GPU Excluded", excluded);
    if (std::strcmp(excluded, "Yes") == 0) continue;  // the driver keeps it from everybody
    if (model[0] == '\0') return false;
    make_plain(model);
    if (!add(models, count, model, 0)) return false;
  }
  return true;
}

/// Whether a GPU is divided: the driver lists gpu<N>/mig/gi<M> for each instance
/// (NVIDIA MIG User Guide, "Device Nodes and Capabilities").
bool has_mig_instances() noexcept {
  Path root;
  if (!of_machine(root, "proc/driver/nvidia/capabilities")) return false;
  Folder capabilities(root);
  while (const char* gpu = capabilities.next()) {
    Path path, mig;
    if (std::strncmp(gpu, "gpu", 3) != 0) continue;
    if (!join(path, root, gpu) || !join(mig, path, "mig")) continue;
    Folder instances(mig);
    while (const char* instance = instances.next()) {
      if (std::strncmp(instance, "gi", 2) == 0) return true;
    }
  }
  return false;
}

/// "400 Gb/sec (4X NDR)" -> 400000, "2.5 Gb/sec" -> 2500; 0 for anything else.
std::uint64_t thousandths_of(const char* text) noexcept {
  std::uint64_t value = 0;
  int decimals = -1;  // -1: before the point
  int digits = 0;
  for (; (*text >= '0' && *text <= '9') || (*text == '.' && decimals < 0); ++text) {
    if (*text == '.') {
      decimals = 0;
    } else if (decimals < 3) {
      if (++digits > 15) return 0;
      value = value * 10 + static_cast<std::uint64_t>(*text - '0');
      if (decimals >= 0) ++decimals;
    }
  }
  if (digits == 0 || (*text != ' ' && *text != '\0')) return 0;
  for (int i = std::max(decimals, 0); i < 3; ++i) value *= 10;
  return value;
}

/// Whether an RDMA device is driven by the kernel's `efa`.
bool is_efa(const char* device) noexcept {
  Path link, target;
  if (!join(link, device, "device/driver")) return false;
  const ssize_t size = readlink(link, target, sizeof target - 1);
  if (size <= 0) return false;
  target[size] = '\0';
  const char* slash = std::strrchr(target, '/');
  return std::strcmp(slash != nullptr ? slash + 1 : target, "efa") == 0;
}

/// Counts the active ports of an RDMA device by kind and rate.
bool add_ports(const char* device, Counted (&found)[kMaxRates], int* count) noexcept {
  Path root;
  if (!join(root, device, "ports")) return false;
  Folder ports(root);
  while (const char* number = ports.next()) {
    Path port;
    char layer[kNameBytes], state[kNameBytes], rate[kNameBytes];
    if (!join(port, root, number)) return false;
    read_word(port, "link_layer", layer);
    read_word(port, "state", state);
    read_word(port, "rate", rate);
    const char* colon = std::strrchr(state, ':');  // "4: ACTIVE"
    const char* word = colon != nullptr ? colon + 1 : state;
    if (std::strcmp(word + std::strspn(word, " "), "ACTIVE") != 0) continue;
    const char* plain = strcasecmp(layer, "ethernet") == 0 ? "roce" : "infiniband";
    if (!add(found, count, is_efa(device) ? "efa" : plain, thousandths_of(rate))) return false;
  }
  return true;
}

bool find_rdma(Counted (&found)[kMaxRates], int* count) noexcept {
  Path root;
  if (!of_machine(root, "sys/class/infiniband")) return false;
  Folder devices(root);
  while (const char* name = devices.next()) {
    Path device;
    if (!join(device, root, name) || !add_ports(device, found, count)) return false;
  }
  return true;
}

/// Counts network devices by speed: those with hardware, or, where none has, all but lo.
bool find_sockets(Counted (&found)[kMaxRates], int* count) noexcept {
  Path root;
  if (!of_machine(root, "sys/class/net")) return false;
  for (const bool with_hardware : {true, false}) {
    Folder devices(root);
    while (const char* name = devices.next()) {
      Path device, inside;
      char speed[kNameBytes];
      if (std::strcmp(name, "lo") == 0) continue;
      // Ends in "/.": bonding_masters is a file beside the devices.
      if (!join(device, root, name) || !join(inside, device, ".")) return false;
      if (!exists(inside) || !join(inside, device, "device")) continue;
      if (with_hardware && !exists(inside)) continue;
      read_word(device, "speed", speed);
      if (!add(found, count, "socket", thousandths_of(speed))) return false;
    }
    if (*count > 0) return true;
  }
  return true;
}

/// The fastest active RDMA ports, which NCCL would use; without one, the fastest socket.
bool find_nics(Counted* fastest) noexcept {
  Counted found[kMaxRates];
  int count = 0;
  if (!find_rdma(found, &count) || (count == 0 && !find_sockets(found, &count))) return false;
  *fastest = {"none", 0, 0};
  for (int i = 0; i < count; ++i) {
    const bool same_rate = found[i].rate == fastest->rate;
    const bool wins = found[i].rate > fastest->rate ||
                      (same_rate && std::strcmp(found[i].name, fastest->name) > 0);
    if (fastest->count == 0 || wins) *fastest = found[i];
  }
  return true;
}

/// Appends to a text of `*length` characters; false when it is full.
__attribute__((format(printf, 4, 5))) bool append(char* text, std::size_t capacity,
                                                  std::size_t* length, const char* format,
                                                  ...) noexcept {
  va_list arguments;
  va_start(arguments, format);
  const int written = std::vsnprintf(text + *length, capacity - *length, format, arguments);
  va_end(arguments);
  if (written < 0 || static_cast<std::size_t>(written) >= capacity - *length) return false;
  *length += static_cast<std::size_t>(written);
  return true;
}

}  // namespace

bool take_fingerprint(char* text, std::size_t capacity) noexcept {
  if (capacity == 0) return false;
  text[0] = '\0';
  capacity = std::min(capacity, kFingerprintBytes);
  Counted models[kMaxModels];
  Counted nic;
  int num_models = 0;
  if (!find_gpus(models, &num_models) || !find_nics(&nic)) return false;
  std::size_t length = 0;
  if (num_models == 0 && !append(text, capacity, &length, "gpu=none*0")) return false;
  for (int i = 0; i < num_models; ++i) {
    if (!append(text, capacity, &length, "%s%s*%d", i == 0 ? "gpu=" : "+", models[i].name,
                models[i].count)) {
      return false;
    }
  }
  return append(text, capacity, &length, ";mig=%d;nic=%s*%d;nccl=%d", has_mig_instances() ? 1 : 0,
                nic.name, nic.count, loaded_nccl_version());
}

const char* own_fingerprint() noexcept {
  static Mutex mutex;
  static char fingerprint[kFingerprintBytes];
  const Lock lock(&mutex);
  if (fingerprint[0] == '\0' && !take_fingerprint(fingerprint, sizeof fingerprint)) {
    std::snprintf(fingerprint, sizeof fingerprint, "unknown");
  }
  return fingerprint;
}

void own_fingerprint(int nccl_version, char (&text)[kFingerprintBytes]) noexcept {
  const char* own = own_fingerprint();
  const char* nccl = std::strstr(own, ";nccl=");
  const auto length = nccl != nullptr ? static_cast<int>(nccl - own) : 0;
  std::snprintf(text, sizeof text, "%.*s;nccl=%d", length, own, nccl_version);
  if (nccl == nullptr) std::snprintf(text, sizeof text, "%s", own);
}

}  // namespace dynamiccl
