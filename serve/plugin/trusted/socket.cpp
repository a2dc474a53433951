// See socket.h.
#include "trusted/socket.h"

#include <fcntl.h>

#include <cstring>

#include "trusted/file.h"

namespace dynamiccl {

const char* check_trusted_socket(const char* path) noexcept {
  const char* slash = std::strrchr(path, '/');
  const char* name = slash != nullptr ? slash + 1 : path;
  const std::string_view directory =
      slash != nullptr ? std::string_view(path, static_cast<std::size_t>(name - path))
                       : std::string_view(".");
  File parent;
  if (open_trusted_directory(directory, &parent, true) != nullptr) {
    return "its directory is not there, or others may write to it";
  }
  // O_PATH: a socket cannot be opened. To connect to it takes the right to write.
  File socket;
  socket.reset(openat(parent.descriptor(), name, O_PATH | O_CLOEXEC | O_NOFOLLOW));
  return why_not_trusted(socket.descriptor(), S_IFSOCK, kOthersWrite);
}

}  // namespace dynamiccl
