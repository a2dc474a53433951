// All writing is done with write(): a store into a mapped file on a full disk would be a signal.
#include "profiler/calls_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "platform/threads.h"
#include "trusted/file.h"

namespace dynamiccl {
namespace {

struct Header {
  std::uint8_t magic[8];
  std::uint32_t version;
  std::uint32_t header_bytes;
  std::uint32_t entry_bytes;
  std::uint32_t number;
  std::int32_t pid;
  std::uint32_t zero;
  std::uint64_t created_ns;
  CallsFacts facts;
  std::uint8_t padding[64];
  std::uint64_t checksum;  // fnv1a over the bytes before it
};
static_assert(sizeof(Header) == kCallsHeaderBytes, "the file's header, byte for byte");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the file's numbers are little-endian");

template <typename Struct>
const std::uint8_t* bytes_of(const Struct& value) noexcept {
  return reinterpret_cast<const std::uint8_t*>(&value);
}

}  // namespace

const char* CallsFiles::open(const char* directory, std::uint64_t max_bytes) noexcept {
  close();
  mkdir(directory, 0700);
  max_file_bytes_ = max_bytes / kFilesKept;
  broken_ = false;
  return open_trusted_directory(directory, &directory_);
}

void CallsFiles::close() noexcept {
  flush();
  end_file();
  directory_.reset(-1);
}

void CallsFiles::append(const CallRecord& record, std::uint32_t dropped,
                        const CallsFacts& facts) noexcept {
  if (broken_ || !directory_.is_open()) {
    lose(1);
    return;
  }
  if (file_ >= 0 && file_bytes_ + buffered_ + kCallsEntryBytes > max_file_bytes_) {
    flush();
    end_file();
    file_bytes_ = 0;
  }
  if (file_ < 0 && !resume_file() && !begin_file(facts)) {
    lose(1);
    return;
  }
  CallsEntry entry = {record, dropped, 0};
  entry.checksum =
      static_cast<std::uint32_t>(fnv1a(bytes_of(entry), sizeof entry - sizeof entry.checksum));
  std::memcpy(buffer_ + buffered_, &entry, sizeof entry);
  buffered_ += sizeof entry;
  if (buffered_ + kCallsEntryBytes > kBufferBytes) flush();
}

void CallsFiles::flush() noexcept {
  if (buffered_ == 0) return;
  const std::size_t wanted = buffered_ / kCallsEntryBytes;
  const std::size_t whole = write_all(buffer_, buffered_) / kCallsEntryBytes;
  buffered_ = 0;
  file_bytes_ += whole * kCallsEntryBytes;
  written_.fetch_add(whole, std::memory_order_relaxed);
  if (whole == wanted) return;
  lose(wanted - whole);
  broken_ = true;
  // Every reader would report the torn entry; when even this fails, they will.
  if (ftruncate(file_, static_cast<off_t>(file_bytes_)) != 0) errno = 0;
  end_file();
}

bool CallsFiles::resume_file() noexcept {
  if (file_bytes_ == 0 || file_bytes_ + kCallsEntryBytes > max_file_bytes_) return false;
  char name[kMaxNameBytes];
  name_of(next_number_ - 1, name);
  file_ = openat(directory_.descriptor(), name, O_WRONLY | O_APPEND | O_NOFOLLOW | O_CLOEXEC);
  struct statx status;
  const bool is_ours = file_ >= 0 && statx(file_, "", AT_EMPTY_PATH, STATX_SIZE, &status) == 0 &&
                       status.stx_size == file_bytes_;
  if (!is_ours) end_file();
  return is_ours;
}

bool CallsFiles::begin_file(const CallsFacts& facts) noexcept {
  std::memcpy(host_, facts.host, sizeof host_);
  world_rank_ = facts.world_rank;
  char name[kMaxNameBytes];
  for (; next_number_ - oldest_number_ >= kFilesKept; ++oldest_number_) {
    name_of(oldest_number_, name);
    unlinkat(directory_.descriptor(), name, 0);
  }
  name_of(next_number_, name);
  file_ = openat(directory_.descriptor(), name,
                 O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
  Header header = {};
  header.version = kCallsVersion;
  header.header_bytes = kCallsHeaderBytes;
  header.entry_bytes = kCallsEntryBytes;
  header.number = next_number_++;
  header.pid = getpid();
  header.created_ns = realtime_ns();
  header.facts = facts;
  std::memcpy(header.magic, kCallsMagic, sizeof kCallsMagic);
  header.checksum = fnv1a(bytes_of(header), sizeof header - sizeof header.checksum);
  file_bytes_ = sizeof header;
  if (file_ >= 0 && write_all(&header, sizeof header) == sizeof header) return true;
  if (file_ >= 0) unlinkat(directory_.descriptor(), name, 0);
  end_file();
  broken_ = true;
  return false;
}

void CallsFiles::end_file() noexcept {
  if (file_ >= 0) ::close(file_);
  file_ = -1;
}

void CallsFiles::name_of(std::uint32_t number, char (&name)[kMaxNameBytes]) const noexcept {
  char rank[16] = "x";
  if (world_rank_ >= 0) std::snprintf(rank, sizeof rank, "%d", world_rank_);
  std::snprintf(name, sizeof name, "calls-%.63s-%d-r%s-%04u.dcc", host_, static_cast<int>(getpid()),
                rank, number);
}

std::size_t CallsFiles::write_all(const void* bytes, std::size_t size) noexcept {
  const auto* from = static_cast<const std::uint8_t*>(bytes);
  std::size_t done = 0;
  while (done < size) {
    const ssize_t put = write(file_, from + done, size - done);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) break;
    done += static_cast<std::size_t>(put);
  }
  return done;
}

}  // namespace dynamiccl
