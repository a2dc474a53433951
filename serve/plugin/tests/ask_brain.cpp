// Command line client for Python tests: asks a brain for decisions, as a leader does.
//
//   ask_brain socket|torch|LIBRARY ARTIFACT SYSTEM NODES RANKS [SOCKET]
//
// Histories come on stdin as text, one a line: the number of tasks; for each its collective, bin,
// number of timed calls and number of calls shown; for each of these the seven fields of
// dynamiccl_call. Each line is answered with the table in hex, `keep` or `error: REASON`.
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "brain/brain.h"
#include "platform/threads.h"

namespace {

std::vector<dynamiccl_task> read_tasks(const std::string& line) {
  std::istringstream text(line);
  std::size_t count = 0;
  text >> count;
  std::vector<dynamiccl_task> tasks(count);
  for (dynamiccl_task& task : tasks) {
    text >> task.collective >> task.bin >> task.num_timed >> task.num_calls;
    for (int i = 0; i < task.num_calls && i < DYNAMICCL_WINDOW; ++i) {
      dynamiccl_call& call = task.calls[i];
      int algorithm = 0, protocol = 0, num_channels = 0;
      text >> call.size_bytes >> call.time_us >> call.skew_us >> call.interference >> algorithm >>
          protocol >> num_channels;
      call.algorithm = static_cast<std::int8_t>(algorithm);
      call.protocol = static_cast<std::int8_t>(protocol);
      call.num_channels = static_cast<std::int8_t>(num_channels);
    }
  }
  return tasks;
}

void answer(dynamiccl::BrainHandle* brain, const std::string& line) {
  const std::vector<dynamiccl_task> tasks = read_tasks(line);
  const dynamiccl_history history = {tasks.data(), static_cast<int>(tasks.size()), nullptr, 0};
  std::uint8_t table[DYNAMICCL_TABLE_BYTES];
  std::size_t table_bytes = 0;
  char reason[DYNAMICCL_REASON_BYTES] = "";
  if (!brain->decide(history, table, sizeof table, &table_bytes, reason, sizeof reason)) {
    std::printf("error: %s\n", reason);
  } else if (table_bytes == 0) {
    std::printf("keep\n");
  } else {
    for (std::size_t i = 0; i < table_bytes; ++i) std::printf("%02x", table[i]);
    std::printf("\n");
  }
  std::fflush(stdout);
}

char** g_arguments;
bool g_has_socket;

void* run(void*) {
  const std::string kind = g_arguments[1];
  const dynamiccl_brain_config config = {g_arguments[2], g_arguments[3],
                                         g_has_socket ? g_arguments[6] : nullptr,
                                         std::atoi(g_arguments[4]), std::atoi(g_arguments[5])};
  dynamiccl::BrainHandle brain;
  char reason[DYNAMICCL_REASON_BYTES] = "";
  const bool opened = kind == "socket" || kind == "torch"
                          ? brain.open(config, reason, sizeof reason)
                          : brain.open_from(kind.c_str(), config, reason, sizeof reason);
  if (!opened) {
    std::printf("error: %s\n", reason);
    return nullptr;
  }
  for (std::string line; std::getline(std::cin, line);) answer(&brain, line);
  return nullptr;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 6) return 2;
  g_arguments = arguments;
  g_has_socket = count > 6;
  pthread_t thread;  // with the small stack that the plugin's threads have
  if (!dynamiccl::start_thread(run, nullptr, "brain", &thread)) return 3;
  dynamiccl::join_thread(thread);
  return 0;
}
