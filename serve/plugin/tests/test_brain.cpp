// A brain library that is missing or faulty gives an error with a reason, and never a crash.
#include <string>

#include "brain/brain.h"
#include "table.h"
#include "tests/check.h"

using namespace dynamiccl;

namespace {

struct Asked {
  bool done = false;
  std::size_t table_bytes = 0;
  std::string reason;
  std::uint8_t table[DYNAMICCL_TABLE_BYTES] = {};
};

dynamiccl_brain_config config_of(const char* artifact) { return {artifact, "box", nullptr, 1, 8}; }

std::string refusal(const std::string& library, const char* artifact) {
  BrainHandle brain;
  char reason[DYNAMICCL_REASON_BYTES] = "";
  CHECK(!brain.open_from(library.c_str(), config_of(artifact), reason, sizeof reason));
  CHECK(!brain.is_open() && brain.name()[0] == '\0');
  return reason;
}

Asked ask(const std::string& library, const char* artifact) {
  BrainHandle brain;
  Asked asked;
  char reason[DYNAMICCL_REASON_BYTES] = "";
  CHECK(brain.open_from(library.c_str(), config_of(artifact), reason, sizeof reason));
  CHECK(brain.is_open() && std::string(brain.name()) == "fake");
  asked.done =
      brain.decide({}, asked.table, sizeof asked.table, &asked.table_bytes, reason, sizeof reason);
  asked.reason = reason;
  return asked;
}

void libraries_that_are_not_brains(const std::string& directory) {
  CHECK(refusal(directory + "/no-such-library.so", "good").find("no-such-library") !=
        std::string::npos);
  CHECK(refusal(directory + "/libfake_other_symbol.so", "good").find("has no dynamiccl_brain_v1") !=
        std::string::npos);
  CHECK(refusal(directory + "/libfake_other_version.so", "good").find("another release") !=
        std::string::npos);
}

void brains_that_refuse(const std::string& library) {
  CHECK(refusal(library, "refuses") == std::string(DYNAMICCL_REASON_BYTES - 1, '?'));
  CHECK(refusal(library, "refuses silently") == "it gives no reason");
}

void brains_that_misbehave(const std::string& library) {
  const Asked kept = ask(library, "keeps");
  CHECK(kept.done && kept.table_bytes == 0);
  const Asked failed = ask(library, "fails");
  CHECK(!failed.done && failed.table_bytes == 0 && failed.reason == "not today");
  const Asked lied = ask(library, "lies");
  CHECK(!lied.done && lied.table_bytes == 0 && !lied.reason.empty());
  const Asked nonsense = ask(library, "nonsense");
  DecisionTable table;
  CHECK(nonsense.done && decode_table(nonsense.table, nonsense.table_bytes, &table) != nullptr);
}

void handle_without_a_brain() {
  BrainHandle brain;
  char reason[DYNAMICCL_REASON_BYTES] = "";
  std::uint8_t table[1];
  std::size_t table_bytes = 5;
  CHECK(!brain.decide({}, table, sizeof table, &table_bytes, reason, sizeof reason));
  CHECK(table_bytes == 0 && std::string(reason) == "no brain is open");
  brain.close();
  // There is no such artifact, and mostly no runtime beside this program.
  CHECK(!brain.open(config_of("/nowhere"), reason, sizeof reason));
  CHECK(reason[0] != '\0');
}

void handle_opens_again(const std::string& library) {
  BrainHandle brain;
  char reason[DYNAMICCL_REASON_BYTES] = "";
  for (int i = 0; i < 3; ++i) {
    CHECK(brain.open_from(library.c_str(), config_of("keeps"), reason, sizeof reason));
  }
  CHECK(!brain.open_from(library.c_str(), config_of("refuses"), reason, sizeof reason));
  CHECK(!brain.is_open());
}

}  // namespace

int main(int, char** arguments) {
  const std::string directory = arguments[2];
  const std::string library = directory + "/libfake_brain.so";
  libraries_that_are_not_brains(directory);
  brains_that_refuse(library);
  brains_that_misbehave(library);
  handle_without_a_brain();
  handle_opens_again(library);
  return g_failures;
}
