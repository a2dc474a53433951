// What a plugin calls here instead of the C library's: the system call, and then whether a program
// that another thread of the job starts at this very moment would inherit the descriptor. Setting
// FD_CLOEXEC afterwards is too late for that. Such a rank dies, which every test sees.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

extern "C" __attribute__((visibility("default"))) int socket(int domain, int type, int protocol) {
  const long descriptor = syscall(SYS_socket, domain, type, protocol);
  if (descriptor >= 0 && (fcntl(static_cast<int>(descriptor), F_GETFD) & FD_CLOEXEC) == 0) {
    std::fprintf(stderr, "socket made descriptor %ld without CLOEXEC\n", descriptor);
    std::abort();
  }
  return static_cast<int>(descriptor);
}
