// Local sockets that may steer a job: see trusted/file.h.
#pragma once

namespace dynamiccl {

/// Whether a socket at `path` may be connected to: null, or why not. Its directory is checked too:
/// only that keeps another from taking its place until then.
const char* check_trusted_socket(const char* path) noexcept;

}  // namespace dynamiccl
