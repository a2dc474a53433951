// What TorchScript needs of the process it runs in: the right torch, and a thread of its own.
#pragma once

#include <functional>
#include <string>

namespace dynamiccl {

/// Why the torch that this process has loaded must not be called; empty when it is the one that the
/// runtime was built with. The dynamic linker takes whichever libtorch_cpu.so the job has already
/// loaded, and C++ classes of another release differ in layout: calling it would corrupt the job.
std::string torch_mismatch();

/// Run `work` on a thread with a deep stack, on one processor, with gradients and the profiling
/// executor off, and wait for it. The job's own torch keeps its settings: only this thread's are
/// set. Throws what `work` throws.
void run_beside_job(const std::function<void()>& work);

}  // namespace dynamiccl
