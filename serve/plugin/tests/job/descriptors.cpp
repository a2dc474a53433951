// What a plugin calls here instead of the C library's: the system call, and then whether a program
// that another thread of the job starts at this very moment would inherit the descriptor. Setting
// FD_CLOEXEC afterwards is too late for that. Such a rank dies, which every test sees.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace {

int checked(long descriptor, const char* call) {
  if (descriptor >= 0 && (fcntl(static_cast<int>(descriptor), F_GETFD) & FD_CLOEXEC) == 0) {
    std::fprintf(stderr, "%s made descriptor %ld without CLOEXEC\n", call, descriptor);
    std::abort();
  }
  return static_cast<int>(descriptor);
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int socket(int domain, int type, int protocol);
int socket(int domain, int type, int protocol) {
  return checked(syscall(SYS_socket, domain, type, protocol), "socket");
}

__attribute__((visibility("default"))) int accept4(int listener, void* peer, void* size, int flags);
int accept4(int listener, void* peer, void* size, int flags) {
  return checked(syscall(SYS_accept4, listener, peer, size, flags), "accept4");
}

__attribute__((visibility("default"))) int eventfd(unsigned count, int flags);
int eventfd(unsigned count, int flags) {
  return checked(syscall(SYS_eventfd2, count, flags), "eventfd");
}

__attribute__((visibility("default"))) int pipe2(int* ends, int flags);
int pipe2(int* ends, int flags) {
  const long result = syscall(SYS_pipe2, ends, flags);
  if (result == 0) checked(ends[0], "pipe2");
  return static_cast<int>(result);
}

}  // extern "C"
