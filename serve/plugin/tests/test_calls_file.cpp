// Calls files: what is in them, their bound, and what happens when the disk does not play along.
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>

#include "tests/calls_files.h"
#include "tests/check.h"

using namespace dynamiccl;

namespace {

constexpr std::uint64_t kMib = 1 << 20;

CallsFacts facts_of(int world_rank) {
  CallsFacts facts = {};
  facts.world_rank = world_rank;
  facts.world_size = 16;
  facts.nccl_version = 22907;
  std::strcpy(facts.host, "node-1");
  std::strcpy(facts.mode, "observe");
  return facts;
}

CallRecord record_of(std::uint64_t sequence) {
  CallRecord record = {};
  record.sequence = sequence;
  return record;
}

void contents(CallsFiles* files, const std::filesystem::path& parent) {
  const CallsDirectory directory(parent, "contents");
  CHECK(files->open(directory.path().c_str(), kMib) == nullptr && files->is_open());
  CHECK(directory.files().empty());  // only with the first record
  files->append(record_of(7), 0, facts_of(3));
  files->append(record_of(8), 5, facts_of(3));
  files->close();
  const auto found = directory.files();
  CHECK(found.size() == 1);
  const std::string name = found[0].filename().string();
  CHECK(name == "calls-node-1-" + std::to_string(getpid()) + "-r3-0000.dcc");
  const std::string bytes = CallsDirectory::content(found[0]);
  CHECK(bytes.size() == kCallsHeaderBytes + 2 * kCallsEntryBytes);
  CHECK(bytes.compare(0, 8, std::string("DCCALLS\0", 8)) == 0);
  const auto* start = reinterpret_cast<const std::uint8_t*>(bytes.data());
  CHECK(read_unsigned(start + kCallsHeaderBytes - 8, 8) == fnv1a(start, kCallsHeaderBytes - 8));
  const auto entries = directory.entries();
  CHECK(entries.size() == 2 && entries[0].record.sequence == 7 && entries[1].dropped == 5);
  CHECK(files->written() == 2 && files->lost() == 0);
}

void unknown_rank(CallsFiles* files, const std::filesystem::path& parent) {
  const CallsDirectory directory(parent, "rank");
  CHECK(files->open(directory.path().c_str(), kMib) == nullptr);
  files->append(record_of(1), 0, facts_of(-1));
  files->close();
  CHECK(directory.files()[0].string().find("-rx-0001.dcc") !=
        std::string::npos);  // goes on counting
}

void bound(CallsFiles* files, const std::filesystem::path& parent) {
  const CallsDirectory directory(parent, "bound");
  CHECK(files->open(directory.path().c_str(), kMib) == nullptr);
  const std::uint64_t records = 3 * kMib / kCallsEntryBytes;
  for (std::uint64_t i = 0; i < records; ++i) {
    files->append(record_of(i), 0, facts_of(0));
    if (i % 1000 != 0) continue;
    files->flush();
    std::uint64_t total = 0;
    for (const auto& file : directory.files()) total += std::filesystem::file_size(file);
    CHECK(total <= kMib);
  }
  files->close();
  CHECK(directory.files().size() == 8);
  const auto entries = directory.entries();
  CHECK(entries.back().record.sequence == records - 1);
  CHECK(entries.size() * kCallsEntryBytes > kMib * 3 / 4);
  for (std::size_t i = 1; i < entries.size(); ++i) {
    CHECK(entries[i].record.sequence == entries[i - 1].record.sequence + 1);
  }
}

bool refused(CallsFiles* files, const std::filesystem::path& path, const char* why) {
  const char* said = files->open(path.c_str(), kMib);
  files->append(record_of(1), 0, facts_of(0));
  return said != nullptr && std::string(said).find(why) != std::string::npos && !files->is_open();
}

void strange_directories(CallsFiles* files, const std::filesystem::path& parent) {
  const CallsDirectory directory(parent, "strange");
  const auto inside = directory.path() / "made";
  CHECK(files->open(inside.c_str(), kMib) == nullptr);  // the last part is made
  files->close();
  chmod(inside.c_str(), 0770);
  CHECK(refused(files, inside, "others may write to it"));
  chmod(inside.c_str(), 0702);
  CHECK(refused(files, inside, "others may write to it"));
  chmod(inside.c_str(), 0755);
  const auto link = directory.path() / "link";
  std::filesystem::create_symlink(inside, link);
  CHECK(refused(files, link, "symbolic link"));
  CHECK(refused(files, directory.path() / "none" / "deeper", "there is no such file"));
  std::ofstream(directory.path() / "file") << "x";
  CHECK(refused(files, directory.path() / "file", "not a directory"));
  if (geteuid() == 0) {
    CHECK(chown(inside.c_str(), 12345, 0) == 0);
    CHECK(refused(files, inside, "another user"));
  }
}

/// As on a full disk: a write comes back short, and the next one fails.
void full_disk(CallsFiles* files, const std::filesystem::path& parent) {
  const CallsDirectory directory(parent, "full");
  std::signal(SIGXFSZ, SIG_IGN);  // on the writer's thread all signals are blocked
  rlimit before, limit;
  getrlimit(RLIMIT_FSIZE, &before);
  limit = before;
  limit.rlim_cur = kCallsHeaderBytes + 2 * kCallsEntryBytes + 11;
  CHECK(files->open(directory.path().c_str(), kMib) == nullptr);
  const std::uint64_t written = files->written(), lost = files->lost();
  setrlimit(RLIMIT_FSIZE, &limit);
  for (std::uint64_t i = 0; i < 5; ++i) files->append(record_of(i), 0, facts_of(0));
  files->flush();
  setrlimit(RLIMIT_FSIZE, &before);
  for (std::uint64_t i = 5; i < 9; ++i) files->append(record_of(i), 0, facts_of(0));
  files->close();
  CHECK(files->written() - written == 2 && files->lost() - lost == 7);
  CHECK(directory.files().size() == 1);
  CHECK(std::filesystem::file_size(directory.files()[0]) ==
        kCallsHeaderBytes + 2 * kCallsEntryBytes);
  // The next communicator tries again.
  CHECK(files->open(directory.path().c_str(), kMib) == nullptr);
  files->append(record_of(9), 0, facts_of(0));
  files->close();
  CHECK(directory.entries().size() == 3);
}

void directory_that_went_away(CallsFiles* files, const std::filesystem::path& parent) {
  const CallsDirectory directory(parent, "gone");
  CHECK(files->open(directory.path().c_str(), kMib) == nullptr);
  std::filesystem::remove_all(directory.path());
  const std::uint64_t lost = files->lost();
  files->append(record_of(1), 0, facts_of(0));
  files->append(record_of(2), 0, facts_of(0));
  files->close();
  CHECK(files->lost() - lost == 2);
}

}  // namespace

int main(int, char** arguments) {
  auto* files = new CallsFiles;
  contents(files, arguments[2]);
  unknown_rank(files, arguments[2]);
  bound(files, arguments[2]);
  strange_directories(files, arguments[2]);
  full_disk(files, arguments[2]);
  directory_that_went_away(files, arguments[2]);
  delete files;
  return g_failures;
}
