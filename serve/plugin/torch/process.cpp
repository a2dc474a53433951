// Version check and threads; what can go wrong here would go wrong inside the training job.
#include "torch/process.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ParallelGuard.h>
#include <dlfcn.h>
#include <pthread.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <exception>
#include <fstream>
#include <stdexcept>

#include "torch/built_with.h"

namespace dynamiccl {
namespace {

constexpr std::size_t kStackBytes = std::size_t{8} << 20;  // what torch is tested with

std::string after(const std::string& text, const std::string& mark, char end) {
  const std::size_t found = text.find(mark);
  if (found == std::string::npos) return "";
  const std::size_t first = found + mark.size();
  return text.substr(first, text.find(end, first) - first);
}

/// The libtorch_cpu.so that the linker gave us.
std::string loaded_library() {
  Dl_info info;
  const bool known = dladdr(reinterpret_cast<void*>(&at::show_config), &info) != 0;
  return known && info.dli_fname != nullptr ? info.dli_fname : "";
}

/// `git_version` in the version.py of the package that `library` lies in; empty without one.
std::string revision_beside(const std::string& library) {
  const std::string lib = library.substr(0, library.rfind('/'));
  std::ifstream file(lib + "/../version.py");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("git_version", 0) == 0) return after(line, "'", '\'');
  }
  return "";
}

std::string described(const std::string& version, const std::string& revision) {
  return revision.empty() ? version : version + " (" + revision.substr(0, 10) + ")";
}

struct Job {
  const std::function<void()>* work;
  std::exception_ptr failure;
};

/// One processor for this thread. at::set_num_threads would change it for the whole job: torch
/// keeps the number in a global that every later thread of the job takes over.
void take_one_processor() {
  at::get_num_threads();  // torch's own lazy setting of this thread comes first, or it comes last
  void* torch = dlopen(loaded_library().c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (torch == nullptr) throw std::runtime_error("libtorch_cpu.so cannot be found again");
  // Looked up through torch, so that it is the OpenMP and the MKL which torch calls.
  using SetThreads = void (*)(int);
  if (auto set = reinterpret_cast<SetThreads>(dlsym(torch, "omp_set_num_threads"))) set(1);
  if (auto set = reinterpret_cast<SetThreads>(dlsym(torch, "MKL_Set_Num_Threads_Local"))) set(1);
  dlclose(torch);
}

void* run(void* argument) {
  auto* job = static_cast<Job*>(argument);
  try {
    take_one_processor();
    const c10::ParallelGuard serial(true);
    const c10::InferenceMode no_gradients;
    // Without it the first calls are profiled and compiled anew, which takes 100 times as long.
    const torch::jit::GraphOptimizerEnabledGuard plain(false);
    (*job->work)();
  } catch (...) {
    job->failure = std::current_exception();
  }
  return nullptr;
}

}  // namespace

std::string torch_mismatch() {
  const std::string library = loaded_library();
  const std::string version = after(at::show_config(), "TORCH_VERSION=", ',');
  const std::string revision = revision_beside(library);
  if (version == torch_version_at_build() && revision == torch_revision_at_build()) return "";
  return "it was built with torch " +
         described(torch_version_at_build(), torch_revision_at_build()) +
         " and this process has torch " + described(version, revision) + " from " + library;
}

void run_beside_job(const std::function<void()>& work) {
  Job job = {&work, nullptr};
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  pthread_t thread;
  const int result = pthread_create(&thread, &attributes, run, &job);
  pthread_attr_destroy(&attributes);
  if (result != 0) throw std::runtime_error("the system refuses a thread");
  pthread_join(thread, nullptr);
  if (job.failure) std::rethrow_exception(job.failure);
}

}  // namespace dynamiccl
