// plugin.index: what a sound one says, and that nothing odd in one is used.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>

#include "identity/index.h"
#include "tests/check.h"

using namespace dynamiccl;

namespace {

const std::string kHash(64, 'a');
const std::string kOther(64, 'b');
const std::string kHead = "dynamiccl-index\t1\nartifact\t" + kHash + "\n";
const std::string kTable = "table\th100-ib\t4\t32\t" + kOther + "\n";
const std::string kBox = "gpu=NVIDIA H100 80GB HBM3*8;mig=0;nic=infiniband*8;nccl=22809";

const char* decode(PluginIndex* index, const std::string& text) {
  return index->decode(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
}

/// Whether an index is refused because of `why`, and then knows nothing.
bool refused(const std::string& text, const char* why) {
  const auto index = std::make_unique<PluginIndex>();
  const char* problem = decode(index.get(), text);
  char hash[kHexBytes], system[kSystemBytes];
  const bool knows =
      index->table_hash("h100-ib", 4, 32, hash) || index->find_system(kBox.c_str(), system);
  if (problem != nullptr && std::strstr(problem, why) != nullptr && !knows) return true;
  std::fprintf(stderr, "said: %s\n", problem != nullptr ? problem : "nothing");
  return false;
}

/// The system of a machine; empty when the index is refused, or does not know it.
std::string system_of(const std::string& text, const std::string& machine) {
  const auto index = std::make_unique<PluginIndex>();
  char system[kSystemBytes];
  if (decode(index.get(), text) != nullptr) return "";
  return index->find_system(machine.c_str(), system) ? system : "";
}

/// What it says the hash of a table is; empty where it names none.
std::string hash_of(const std::string& text, const char* system, std::size_t num_nodes,
                    std::size_t num_ranks) {
  const auto index = std::make_unique<PluginIndex>();
  char hash[kHexBytes];
  if (decode(index.get(), text) != nullptr) return "";
  return index->table_hash(system, num_nodes, num_ranks, hash) ? hash : "";
}

void sound_index_answers() {
  const auto index = std::make_unique<PluginIndex>();
  const std::string text = kHead + "system\th100-ib\t" + kBox + "\nsystem\th100-ib\tgpu=none*0\n" +
                           "noise\th100-ib\t4\t31000\n" + kTable + "table\tbox\t1\t8\t" + kHash +
                           "\n";
  CHECK(system_of(text, kBox) == "h100-ib" && system_of(text, "gpu=none*0") == "h100-ib");
  CHECK(system_of(text, "gpu=none*1") == "" && system_of(text, "") == "");
  CHECK(system_of(text, kBox.substr(0, kBox.size() - 1)) == "" &&
        system_of(text, kBox + "0") == "");
  CHECK(hash_of(text, "h100-ib", 4, 32) == kOther && hash_of(text, "box", 1, 8) == kHash);
  CHECK(hash_of(text, "h100-ib", 32, 4) == "" && hash_of(text, "h100", 4, 32) == "");
  CHECK(hash_of(text, "box", 4, 32) == "" && hash_of(text, "h100-ib", 4, 3) == "");
  CHECK(decode(index.get(), text) == nullptr);
  char noise[8], wanted[kHexBytes];
  CHECK(index->find("noise\th100-ib\t4\t", noise, sizeof noise) && std::string(noise) == "31000");
  CHECK(!index->find("noise\th100-ib\t3\t", noise, sizeof noise));
  CHECK(!index->find("noise\th100-ib\t4\t", noise, 5));  // it does not fit
  sha256_hex(text.data(), text.size(), wanted);
  CHECK(std::strcmp(index->artifact_hash(), wanted) == 0);
}

void every_cut_and_every_changed_byte_is_survived() {
  const std::string text = kHead + "system\th100-ib\t" + kBox + "\n" + kTable;
  const auto index = std::make_unique<PluginIndex>();
  char hash[kHexBytes], system[kSystemBytes];
  for (std::size_t size = 0; size < text.size(); ++size) {
    decode(index.get(), text.substr(0, size));
    CHECK(!index->table_hash("h100-ib", 4, 32, hash));
  }
  for (std::size_t i = 0; i < text.size(); ++i) {
    for (const int byte : {0, 9, 10, 13, 32, 127, 255}) {
      std::string changed = text;
      changed[i] = static_cast<char>(byte);
      if (decode(index.get(), changed) != nullptr) continue;
      if (index->find_system(kBox.c_str(), system)) CHECK(std::strcmp(system, "h100-ib") == 0);
      if (index->table_hash("h100-ib", 4, 32, hash)) CHECK(std::strlen(hash) <= 64);
    }
  }
}

void odd_files_are_refused() {
  CHECK(refused("", "cut off"));
  CHECK(refused("\n", "not a DynamICCL index"));
  CHECK(refused("dynamiccl-index\t1", "cut off"));
  CHECK(refused(kHead + kTable.substr(0, kTable.size() - 1), "cut off"));
  CHECK(refused("dynamiccl-index\t2\n" + kTable, "format version"));
  CHECK(refused("dynamiccl-index\t1\t1\n" + kTable, "format version"));
  CHECK(refused(kHead + std::string("table\0", 6) + kTable, "no text"));
  CHECK(refused(std::string(kMaxIndexBytes + 1, 'x'), "too long"));
}

/// What an odd line says is not believed, and the others are not the worse for it.
void odd_lines_are_of_no_use() {
  for (const char* name : {"", "-x", "Box", "a/b", "..", "../x", "a b"}) {
    CHECK(system_of(kHead + kTable + "system\t" + name + "\t" + kBox + "\n", kBox) == "");
  }
  const std::string longest(120, 'x');
  CHECK(system_of(kHead + "system\t" + longest + "\t" + kBox + "\n", kBox) == longest);
  CHECK(system_of(kHead + "system\tx" + longest + "\t" + kBox + "\n", kBox) == "");
  CHECK(system_of(kHead + "system\tbox\n" + kBox + "\n", kBox) == "");
  CHECK(system_of(kHead + "system\tbox\t" + kBox + "\tx\n", kBox) == "");
  CHECK(hash_of(kHead + "\n?\n" + kTable, "h100-ib", 4, 32) == kOther);
  CHECK(hash_of(kHead + "table\tbox\t1\t8\t" + kHash + "0\n", "box", 1, 8) == "");
  CHECK(hash_of(kHead + " table\tbox\t1\t8\t" + kHash + "\n", "box", 1, 8) == "");
}

void contradictions_are_not_believed() {
  const std::string first = "system\tbox\t" + kBox + "\n";
  CHECK(system_of(kHead + first, kBox) == "box");
  CHECK(system_of(kHead + first + "system\tother\t" + kBox + "\n", kBox) == "");
  CHECK(hash_of(kHead + kTable, "h100-ib", 4, 32) == kOther);
  const std::string another = "table\th100-ib\t4\t32\t" + kHash + "\n";
  CHECK(hash_of(kHead + kTable + another, "h100-ib", 4, 32) == "");
}

void files_are_read_whole(const std::string& directory) {
  const auto index = std::make_unique<PluginIndex>();
  CHECK(std::strstr(index->load((directory + "/no.index").c_str()), "no such file") != nullptr);
  const std::string path = directory + "/plugin.index";
  std::ofstream(path, std::ios::binary) << kHead << kTable;
  CHECK(index->load(path.c_str()) == nullptr);
  char hash[kHexBytes];
  CHECK(index->table_hash("h100-ib", 4, 32, hash));
  std::ofstream(path, std::ios::binary) << kHead << kTable << std::string(1 << 20, 'x');
  CHECK(std::strstr(index->load(path.c_str()), "too long") != nullptr);
  CHECK(!index->table_hash("h100-ib", 4, 32, hash));
}

}  // namespace

int main(int, char** arguments) {
  sound_index_answers();
  every_cut_and_every_changed_byte_is_survived();
  odd_files_are_refused();
  odd_lines_are_of_no_use();
  contradictions_are_not_believed();
  files_are_read_whole(arguments[2]);
  return g_failures;
}
