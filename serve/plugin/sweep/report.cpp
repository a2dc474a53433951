// Creating and giving back the report's file; its stores are in the header, on the hot path.
#include "sweep/report.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <cstring>

#include "file.h"
#include "platform/threads.h"

namespace dynamiccl {
namespace {

/// Reserve the whole file: a store into a hole of it on a full disk would be a SIGBUS.
const char* reserve(int descriptor, std::size_t size_bytes) noexcept {
  rlimit limit;
  // Beyond this limit the reservation would not fail but end the process (SIGXFSZ).
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < size_bytes) {
    return "files may not grow that long here";
  }
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(descriptor, 0, static_cast<off_t>(size_bytes));
  return error == 0 ? nullptr : "its space cannot be reserved";
}

}  // namespace

const char* Report::create(const char* path, std::int32_t num_blocks,
                           std::uint64_t checksum) noexcept {
  const auto count = static_cast<std::size_t>(num_blocks);
  const std::size_t size_bytes = sizeof(Header) + count * (sizeof *chunks_ + sizeof *states_);
  const File file(path, O_RDWR | O_CREAT | O_EXCL);
  if (!file.is_open()) return errno == EEXIST ? nullptr : "it cannot be created";
  const char* problem = reserve(file.descriptor(), size_bytes);
  void* memory = MAP_FAILED;
  if (problem == nullptr) {
    memory = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.descriptor(), 0);
    if (memory == MAP_FAILED) problem = "it cannot be mapped";
  }
  if (problem != nullptr) {
    unlink(path);  // ours, and of no use to anyone
    return problem;
  }
  size_bytes_ = size_bytes;
  header_ = static_cast<Header*>(memory);
  chunks_ = reinterpret_cast<std::uint32_t*>(header_ + 1);
  states_ = reinterpret_cast<std::uint8_t*>(chunks_ + count);
  header_->version = kReportVersion;
  header_->num_blocks = num_blocks;
  header_->checksum = checksum;
  std::memcpy(header_->magic, kReportMagic, sizeof kReportMagic);  // last: now it is one
  return nullptr;
}

Report::~Report() {
  if (header_ == nullptr) return;
  sync(0);
  munmap(header_, size_bytes_);
}

void Report::sync(std::uint64_t every_ns) noexcept {
  if (header_ == nullptr) return;
  const std::uint64_t now_ns = monotonic_ns();
  if (now_ns - synced_ns_ < every_ns) return;
  synced_ns_ = now_ns;
  msync(header_, size_bytes_, MS_SYNC);  // where it fails, the kernel writes later
}

void Report::set_chunk(std::int32_t block, std::uint32_t chunk_bytes) noexcept {
  if (header_ == nullptr) return;
  std::uint32_t& smallest = chunks_[block];
  if (smallest == 0 || chunk_bytes < smallest) smallest = chunk_bytes;
}

void Report::set_stop(std::uint64_t call, std::uint64_t expected_bytes, std::uint64_t found_bytes,
                      int found_collective) noexcept {
  if (header_ == nullptr) return;
  header_->calls = call;
  header_->expected_bytes = expected_bytes;
  header_->found_bytes = found_bytes;
  header_->found_collective = found_collective;
  header_->stopped_at_call = call;
}

}  // namespace dynamiccl
