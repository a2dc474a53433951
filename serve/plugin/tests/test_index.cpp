// plugin.index: what a sound one says, and that nothing odd in one is used.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>

#include "identity/index.h"
#include "tests/check.h"
#include "vocabulary.h"

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
  std::uint8_t hash[kDigestBytes];
  const bool knows =
      index->file_hash("table", "h100-ib", 4, 32, hash) || index->find_system(kBox.c_str());
  if (problem != nullptr && std::strstr(problem, why) != nullptr && !knows) return true;
  std::fprintf(stderr, "said: %s\n", problem != nullptr ? problem : "nothing");
  return false;
}

void sound_index_answers() {
  const auto index = std::make_unique<PluginIndex>();
  const std::string text = kHead + "system\th100-ib\t" + kBox + "\nsystem\th100-ib\tgpu=none*0\n" +
                           "noise\th100-ib\t4\t31000\n" + kTable + "table\tbox\t1\t8\t" + kHash +
                           "\n";
  CHECK(decode(index.get(), text) == nullptr);
  CHECK(std::strcmp(index->find_system(kBox.c_str()), "h100-ib") == 0);
  CHECK(std::strcmp(index->find_system("gpu=none*0"), "h100-ib") == 0);
  CHECK(index->find_system("gpu=none*1") == nullptr && index->find_system("") == nullptr);
  std::uint8_t hash[kDigestBytes];
  CHECK(index->file_hash("table", "h100-ib", 4, 32, hash) && hash[0] == 0xbb && hash[31] == 0xbb);
  CHECK(!index->file_hash("table", "h100-ib", 32, 4, hash) &&
        !index->file_hash("table", "h100", 4, 32, hash));
  CHECK(!index->file_hash("table", "box", 4, 32, hash) &&
        index->file_hash("table", "box", 1, 8, hash));
  CHECK(index->noise_ppm("h100-ib", kAllReduce) == 31000);
  CHECK(index->noise_ppm("h100-ib", 3) == -1 && index->noise_ppm("box", 4) == -1);
  CHECK(index->manifest_hash()[0] == 0xaa);
  std::uint8_t wanted[kDigestBytes];
  Sha256 sha;
  sha.update(text.data(), text.size());
  sha.finish(wanted);
  CHECK(std::memcmp(index->artifact_hash(), wanted, sizeof wanted) == 0);
}

void every_cut_and_every_changed_byte_is_survived() {
  const std::string text = kHead + "system\th100-ib\t" + kBox + "\n" + kTable;
  const auto index = std::make_unique<PluginIndex>();
  for (std::size_t size = 0; size < text.size(); ++size) {
    CHECK(decode(index.get(), text.substr(0, size)) != nullptr);
  }
  for (std::size_t i = 0; i < text.size(); ++i) {
    for (const int byte : {0, 9, 10, 13, 32, 127, 255}) {
      std::string changed = text;
      changed[i] = static_cast<char>(byte);
      decode(index.get(), changed);
      index->find_system(kBox.c_str());
    }
  }
}

void odd_frames_are_refused() {
  CHECK(refused("", "cut off"));
  CHECK(refused("\n", "not a DynamICCL index"));
  CHECK(refused(kHead, "lists no table"));
  CHECK(refused(kHead + kTable.substr(0, kTable.size() - 1), "cut off"));
  CHECK(refused("dynamiccl-index\t2\n" + kTable, "format version"));
  CHECK(refused("dynamiccl-index\t1\t1\n" + kTable, "format version"));
  CHECK(refused("dynamiccl-index\t1\n" + kTable, "hash of a manifest"));
  CHECK(refused("dynamiccl-index\t1\nartifact\t" + kHash + "0\n" + kTable, "hash of a manifest"));
  CHECK(refused(kHead + kTable + "\n", "names no system"));
  CHECK(refused(kHead + std::string("table\0", 6) + kTable, "control character"));
  CHECK(refused(kHead + kTable + "system\tbox\tgpu=a\rb\n", "control character"));
  CHECK(refused(kHead + "a\tb\tc\td\te\tf\n" + kTable, "too many fields"));
  CHECK(refused(kHead + "system\tbox\tgpu=" + std::string(197, 'x') + "\n" + kTable, "too long"));
  std::string many = kHead + kTable;
  for (int i = 0; i < kMaxIndexLines; ++i) {
    many += "system\tx\tgpu=" + std::to_string(i) + "\n";
  }
  CHECK(refused(many, "too many lines"));
  CHECK(refused(std::string(kMaxIndexBytes + 1, 'x'), "too long"));
}

void odd_lines_are_refused() {
  for (const char* name : {"", "-x", "Box", "a/b", "..", "a b"}) {
    CHECK(refused(kHead + kTable + "system\t" + name + "\tgpu=x\n", "names no system"));
  }
  CHECK(refused(kHead + kTable + "system\t" + std::string(121, 'x') + "\tgpu=x\n", "names no"));
  CHECK(refused(kHead + kTable + "system\tbox\tcpu=x\n", "fingerprint is none"));
  CHECK(refused(kHead + kTable + "system\tbox\n", "fingerprint is none"));
  for (const char* noise : {"5\t1", "-1\t1", "04\t1", "4\t", "4\t-1", "4\t1.5", "4\t1000000001",
                            "4\t99999999999999999999", "4", "4\t1\t1"}) {
    CHECK(refused(kHead + kTable + "noise\tbox\t" + noise + "\n", "noise band is none"));
  }
  for (const char* shape : {"0\t0", "2\t1", "2\t3", "x\t8", "1\t", "-1\t8", "1\t2147483648"}) {
    CHECK(refused(kHead + "table\tbox\t" + shape + "\t" + kHash + "\n", "line is damaged"));
  }
  CHECK(refused(kHead + "table\tbox\t1\t8\t" + kHash.substr(1) + "\n", "line is damaged"));
  CHECK(refused(kHead + "table\tbox\t1\t8\t" + kHash.substr(1) + "g\n", "line is damaged"));
  CHECK(refused(kHead + kTable + "tables\tbox\n", "no known kind"));
}

void contradictions_are_refused() {
  const std::string first = "system\tbox\tgpu=x\n";
  CHECK(refused(kHead + kTable + first + "system\tother\tgpu=x\n", "contradicts"));
  CHECK(refused(kHead + kTable + first + first, "contradicts"));
  CHECK(refused(kHead + kTable + "table\th100-ib\t4\t32\t" + kHash + "\n", "contradicts"));
  CHECK(refused(kHead + kTable + "noise\tbox\t4\t1\nnoise\tbox\t4\t2\n", "contradicts"));
}

void files_are_read_whole(const std::string& directory) {
  const auto index = std::make_unique<PluginIndex>();
  CHECK(std::strstr(index->load((directory + "/no.index").c_str()), "no such file") != nullptr);
  const std::string path = directory + "/plugin.index";
  std::ofstream(path, std::ios::binary) << kHead << kTable;
  CHECK(index->load(path.c_str()) == nullptr);
  std::uint8_t hash[kDigestBytes];
  CHECK(index->file_hash("table", "h100-ib", 4, 32, hash));
  std::ofstream(path, std::ios::binary) << kHead << kTable << std::string(1 << 20, 'x');
  CHECK(std::strstr(index->load(path.c_str()), "too long") != nullptr);
  CHECK(!index->file_hash("table", "h100-ib", 4, 32, hash));
}

}  // namespace

int main(int, char** arguments) {
  sound_index_answers();
  every_cut_and_every_changed_byte_is_survived();
  odd_frames_are_refused();
  odd_lines_are_refused();
  contradictions_are_refused();
  files_are_read_whole(arguments[2]);
  return g_failures;
}
