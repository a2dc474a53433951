// The fingerprint of this machine: one line of text that must be equal on all ranks.
#pragma once

#include <cstddef>

namespace dynamiccl {

/// Room for the longest fingerprint (200 characters) and its end.
constexpr std::size_t kFingerprintBytes = 201;

/// Writes `gpu=<model>*<count>;mig=<0|1>;nic=<kind>*<count>;nccl=<version>`, for example
/// `gpu=NVIDIA H100 80GB HBM3*8;mig=0;nic=infiniband*8;nccl=22809`. Several models are sorted and
/// joined by '+'; without a GPU it is `none*0`; `nccl` is 0 where no NCCL shows itself.
///
/// Reads the driver's files in /proc and /sys and makes no CUDA call; a driver can take
/// milliseconds over it, so ask once a process. Returns false when something that is there could
/// not be read or named, so that a guess never passes for a fact. What NICs are called and how they
/// are counted is also in collect/nodes.py: the two must agree.
bool take_fingerprint(int nccl_version, char (&text)[kFingerprintBytes]) noexcept;

}  // namespace dynamiccl
