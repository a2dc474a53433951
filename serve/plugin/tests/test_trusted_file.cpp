// Files that may steer a job: every way in which one can be another's, or not a file at all.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/check.h"
#include "trusted/file.h"

using namespace dynamiccl;

namespace {

bool says(const char* problem, const std::string& expected) {
  const std::string said = problem != nullptr ? problem : "";
  if (said != expected) std::fprintf(stderr, "said '%s'\n", said.c_str());
  return said == expected;
}

class Folder {
 public:
  explicit Folder(const std::string& parent) : root_(parent + "/trusted") {
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
    chmod(root_.c_str(), 0755);
  }
  ~Folder() { std::filesystem::remove_all(root_); }

  std::string path(const std::string& name) const { return root_ + "/" + name; }

  std::string write(const std::string& name, const std::string& content, unsigned mode) const {
    std::filesystem::remove_all(path(name));
    std::ofstream(path(name), std::ios::binary) << content;
    chmod(path(name).c_str(), mode);
    return path(name);
  }

  std::string make(const std::string& name, unsigned mode) const {
    std::filesystem::remove_all(path(name));
    mkdir(path(name).c_str(), 0700);
    chmod(path(name).c_str(), mode);
    return path(name);
  }

  std::string bind(const std::string& name, unsigned mode) const {
    std::filesystem::remove_all(path(name));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    // Bound by its last part: a build folder's path is often longer than an address may be.
    const std::string here = std::filesystem::current_path();
    CHECK(chdir(std::filesystem::path(path(name)).parent_path().c_str()) == 0);
    std::strncpy(address.sun_path, std::filesystem::path(name).filename().c_str(),
                 sizeof address.sun_path - 1);
    const int descriptor = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(::bind(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    CHECK(chdir(here.c_str()) == 0);
    close(descriptor);
    chmod(path(name).c_str(), mode);
    return path(name);
  }

 private:
  std::string root_;
};

const char* opened(const std::string& path, Readers readers = Readers::kAnyone) {
  std::uint8_t bytes[64];
  std::size_t size = 0;
  return read_trusted(path.c_str(), bytes, sizeof bytes, &size, readers);
}

void modes(const Folder& folder) {
  for (const unsigned mode : {0644U, 0600U, 0400U, 0444U, 0755U}) {
    CHECK(says(opened(folder.write("file", "x", mode)), ""));
  }
  for (const unsigned mode : {0664U, 0646U, 0666U, 0620U, 0602U, 0777U}) {
    CHECK(says(opened(folder.write("file", "x", mode)), "others may write to it"));
  }
  for (const unsigned mode : {0600U, 0400U}) {
    CHECK(says(opened(folder.write("key", "x", mode), Readers::kOwnerAlone), ""));
  }
  for (const unsigned mode : {0640U, 0604U, 0444U}) {
    CHECK(says(opened(folder.write("key", "x", mode), Readers::kOwnerAlone), "others may read it"));
  }
  for (const unsigned mode : {0700U, 0610U, 04600U, 01600U}) {
    CHECK(says(opened(folder.write("key", "x", mode), Readers::kOwnerAlone),
               "its mode is not 0600 or 0400"));
  }
  CHECK(
      says(opened(folder.write("key", "x", 0660), Readers::kOwnerAlone), "others may write to it"));
}

void kinds(const Folder& folder) {
  CHECK(says(opened(folder.path("nothing")), "there is no such file"));
  CHECK(says(opened(""), "there is no such file"));
  CHECK(says(opened(folder.make("directory", 0755)), "it is not a regular file"));
  CHECK(says(opened("/dev/null"), "it is not a regular file"));
  CHECK(mkfifo(folder.path("fifo").c_str(), 0600) == 0);
  CHECK(says(opened(folder.path("fifo")), "it is not a regular file"));  // and does not block
  folder.write("file", "x", 0600);
  CHECK(symlink("file", folder.path("link").c_str()) == 0);
  CHECK(says(opened(folder.path("link")), "it is a symbolic link"));
  CHECK(says(opened(folder.path("file/below")),
             "it is not a directory, or is a symbolic link, or lies in what is none"));
  CHECK(says(opened(std::string(5000, 'a')), "it cannot be opened"));
}

void directories(const Folder& folder) {
  File file;
  const std::string mine = folder.make("mine", 0755);
  CHECK(says(open_trusted_directory(mine, &file), "") && file.is_open());
  CHECK(symlink("mine", folder.path("to-mine").c_str()) == 0);
  for (const char* name : {"to-mine", "to-mine/", "to-mine//", "file", "fifo"}) {
    CHECK(says(open_trusted_directory(folder.path(name), &file),
               "it is not a directory, or is a symbolic link, or lies in what is none"));
    CHECK(!file.is_open());
  }
  CHECK(says(open_trusted_directory(mine + "//", &file), ""));
  CHECK(says(open_trusted_directory("/", &file), "") &&
        says(open_trusted_directory("//", &file), ""));
  CHECK(says(open_trusted_directory(std::string(5000, 'a'), &file), "its path is too long"));
  const std::string shared = folder.make("shared", 0775);
  for (const bool sticky_will_do : {false, true}) {
    CHECK(says(open_trusted_directory(shared, &file, sticky_will_do), "others may write to it"));
  }
  const std::string sticky = folder.make("sticky", 01777);
  CHECK(says(open_trusted_directory(sticky, &file), "others may write to it"));
  CHECK(says(open_trusted_directory(sticky, &file, true),
             geteuid() == 0 ? "" : "others may write to it"));
  CHECK(says(open_trusted_directory("/tmp", &file), "others may write to it"));
  CHECK(says(open_trusted_directory("/tmp", &file, true), ""));
}

void sockets(const Folder& folder) {
  for (const unsigned mode : {0600U, 0700U, 0644U}) {
    CHECK(says(check_trusted_socket(folder.bind("socket", mode).c_str()), ""));
  }
  CHECK(says(check_trusted_socket(folder.bind("socket", 0666).c_str()), "others may write to it"));
  CHECK(says(opened(folder.bind("socket", 0600)), "it cannot be opened"));
  CHECK(says(check_trusted_socket(folder.path("file").c_str()), "it is not a socket"));
  CHECK(symlink("socket", folder.path("to-socket").c_str()) == 0);
  CHECK(says(check_trusted_socket(folder.path("to-socket").c_str()), "it is a symbolic link"));
  CHECK(says(check_trusted_socket(folder.path("nothing").c_str()), "there is no such file"));
  CHECK(says(check_trusted_socket("nothing"), "there is no such file"));  // in this directory
  CHECK(says(check_trusted_socket("/nothing"), "there is no such file"));
  CHECK(says(check_trusted_socket(folder.path("mine/").c_str()), "there is no such file"));
  const char* elsewhere = "its directory is not there, or others may write to it";
  folder.make("shared", 0777);
  CHECK(says(check_trusted_socket(folder.bind("shared/socket", 0600).c_str()), elsewhere));
  CHECK(says(check_trusted_socket(folder.path("to-mine/socket").c_str()), elsewhere));
  CHECK(says(check_trusted_socket((std::string(5000, 'a') + "/x").c_str()), elsewhere));
}

void reading(const Folder& folder) {
  std::uint8_t buffer[8];
  std::size_t size = 9;
  const std::string path = folder.write("file", "12345678", 0600);
  CHECK(says(read_trusted(path.c_str(), buffer, sizeof buffer, &size), "") && size == 8);
  CHECK(std::memcmp(buffer, "12345678", 8) == 0);
  CHECK(says(read_trusted(path.c_str(), buffer, 7, &size), "it is too long"));
  CHECK(says(read_trusted(folder.write("file", "", 0600).c_str(), buffer, 0, &size), ""));
  CHECK(size == 0);
  CHECK(says(read_trusted(folder.path("link").c_str(), buffer, 8, &size), "it is a symbolic link"));
}

void keys(const Folder& folder) {
  std::uint8_t key[kDigestBytes] = {};
  char hex[2 * kDigestBytes + 1];
  CHECK(says(load_key(folder.write("key", "0123456789abcdef", 0600).c_str(), key), ""));
  to_hex(key, sizeof key, hex);
  // printf %s dynamiccl-key0123456789abcdef | sha256sum
  CHECK(std::strcmp(hex, "6b71b6aaf585919477682e016d8d1b1f83955f3e0f7b1ef8fcfbd2b434ab842f") == 0);
  CHECK(says(load_key(folder.write("key", std::string(4096, 'k'), 0400).c_str(), key), ""));
  CHECK(says(load_key(folder.write("key", std::string(4097, 'k'), 0400).c_str(), key),
             "it is too long"));
  CHECK(says(load_key(folder.write("key", "0123456789abcde", 0600).c_str(), key),
             "it is shorter than 16 bytes"));
  CHECK(says(load_key(folder.write("key", "0123456789abcdef", 0644).c_str(), key),
             "others may read it"));
}

/// What root can arrange: files of others, and a job that is not root's.
void owners(const Folder& folder) {
  constexpr uid_t kSomebody = 65534;
  const std::string roots = folder.write("roots", "x", 0644);
  const std::string secret = folder.write("kill", "", 0600);
  const std::string theirs = folder.write("theirs", "0123456789abcdef", 0600);
  const std::string directory = folder.make("their-directory", 01777);
  const std::string socket = folder.bind("socket", 0600);
  for (const std::string& path : {theirs, directory, socket}) {
    CHECK(chown(path.c_str(), kSomebody, kSomebody) == 0);
  }
  const char* another = "it belongs to another user";
  std::uint8_t key[kDigestBytes];
  File file;
  CHECK(says(opened(theirs), another));
  CHECK(says(load_key(theirs.c_str(), key), another));
  CHECK(says(open_trusted_directory(directory, &file), another));
  CHECK(says(open_trusted_directory(directory, &file, true), another));
  CHECK(says(check_trusted_socket(socket.c_str()), another));
  if (seteuid(kSomebody) != 0) return;
  // The folder of the build may be closed to others; then there is nothing to see here.
  if (faccessat(AT_FDCWD, roots.c_str(), R_OK, AT_EACCESS) == 0) {
    CHECK(says(opened(roots), ""));
    CHECK(says(opened(theirs, Readers::kOwnerAlone), ""));
    CHECK(says(opened(secret), "it may not be opened"));
    CHECK(says(check_trusted_socket(socket.c_str()), ""));
    CHECK(says(open_trusted_directory(directory, &file, true),
               "others may write to it"));  // sticky, but not root's
  }
  CHECK(seteuid(0) == 0);
}

}  // namespace

int main(int, char** arguments) {
  const Folder folder(arguments[2]);
  modes(folder);
  kinds(folder);
  directories(folder);
  sockets(folder);
  reading(folder);
  keys(folder);
  if (geteuid() == 0) owners(folder);
  return g_failures;
}
