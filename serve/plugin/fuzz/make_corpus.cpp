// Writes the seeds of the fuzz targets: make_corpus serve/plugin/fuzz/corpus
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/conversation.h"
#include "tests/schedule_file.h"

using namespace dynamiccl;

namespace {

class Corpus {
 public:
  Corpus(const std::string& root, const std::string& target) : root_(root + "/" + target) {
    std::filesystem::create_directories(root_);
  }

  void write(const std::string& name, const Bytes& bytes) const {
    std::ofstream(root_ + "/" + name, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }

 private:
  std::string root_;
};

Bytes operator+(Bytes left, const Bytes& right) {
  append(&left, right);
  return left;
}

void tables(const Corpus& corpus) {
  corpus.write("one-bin", table_of(1, 8, {kRing, kLL128, 8, 1, 0}, kAllReduce, 80, 1));
  corpus.write("many-bins", table_of(4, 32, {kTree, kAuto, 0, 1, 0}, kAllReduce, 40, 60));
  corpus.write("last-bin", table_of(2, 16, {kPAT, kSimple, 64, 1, 512}, kAllGather, 248, 1));
  corpus.write("abstains", table_of(1, 2, {kAuto, kAuto, 0, 0, 0}, kReduce, 0, 3));
  corpus.write("unsound", table_of(1, 2, {kNVLS, kLL, 8, 1, 0}, kBroadcast, 0, 2));
}

void schedules(const Corpus& corpus) {
  Plan plan;
  corpus.write("two-cycles", schedule_of(plan));
  plan.warmup.clear();
  plan.configs[1].chunk_bytes = 1 << 16;
  plan.configs[1].act = 1;
  corpus.write("chunks", schedule_of(plan));
  plan.sizes = {1ULL << 61};
  plan.configs.resize(1);
  plan.blocks.assign(20, 0);
  plan.halves = 1;
  corpus.write("one-size", schedule_of(plan));
  plan.blocks[7] = 1;
  corpus.write("no-config", schedule_of(plan));
}

void indexes(const Corpus& corpus) {
  const std::string hash(64, 'a');
  const std::string head = "dynamiccl-index\t1\nartifact\t" + hash + "\n";
  const std::string table = "table\tbox\t1\t8\t" + hash + "\n";
  const std::string machine = "system\tbox\tgpu=a*8;mig=0;nic=socket*1;nccl=22809\n";
  const auto write = [&](const char* name, const std::string& text) {
    corpus.write(name, Bytes(text.begin(), text.end()));
  };
  write("unbound", head + table);
  write("bound", head + machine + "noise\tbox\t4\t31000\n" + table);
  write("contradicts", head + machine + machine + table);
  write("no-table", head + machine);
}

void messages(const Corpus& corpus) {
  corpus.write("empty", encoded(numbered(1)));
  const Bytes body(100, 0xab);
  corpus.write("body", encoded(numbered(2, body)));
  Message found;
  found.kind = MessageKind::kFound;
  found.rank = 0x7fffffff;
  found.comm_id = found.index = found.hash = found.span = found.fixed = UINT64_MAX;
  corpus.write("extremes", encoded(found));
}

/// The first two bytes are the choice and the cut of fuzz_session.cpp.
void sessions(const Corpus& corpus) {
  const Bytes whole[3] = {encoded(numbered(0)), encoded(numbered(1)), encoded(numbered(2))};
  Peer peer;
  Bytes to_server = peer.client_hello();
  Bytes to_client = peer.server_hello();
  corpus.write("hello", Bytes{0, 0} + to_server);
  append(&to_server, peer.frame(0, 0, {}));
  for (std::uint64_t i = 0; i < 3; ++i) {
    append(&to_server, peer.frame(0, i + 1, whole[i]));
    append(&to_client, peer.frame(1, i + 1, whole[i]));
  }
  corpus.write("to-server", Bytes{0, 0} + to_server);
  corpus.write("to-server-cut", Bytes{0, 7} + to_server);
  corpus.write("to-client", Bytes{3, 0} + to_client);
  corpus.write("reflected", Bytes{3, 0} + to_server);
  Bytes sealed;
  for (const Bytes& message : whole) sealed = sealed + Bytes{0, 56, 0} + message;
  corpus.write("sealed-to-server", Bytes{1, 0} + sealed);
  corpus.write("sealed-to-client", Bytes{4, 100} + sealed);
  corpus.write("sealed-nonsense", Bytes{1, 0} + sealed + Bytes{0, 1, 0, 9});
  corpus.write("sealed-again", Bytes{1, 0} + sealed + Bytes{0xff, 56, 0} + whole[0]);
  // On the wire: hello, answer, proof; four messages; then what somebody does to them.
  const Bytes handshake = {1, 4, 0x81, 0x84, 1, 4};
  const Bytes talk = {0, 5, 0, 0, 0x80, 1, 0x80, 253, 1, 0x81};
  corpus.write("wire-honest", Bytes{2, 33} + handshake + talk + Bytes{3, 99, 4, 0x84});
  corpus.write("wire-altered", Bytes{2, 0} + handshake + talk + Bytes{5, 99, 0, 1, 4});
  corpus.write("wire-lost", Bytes{2, 0} + handshake + talk + Bytes{3, 89, 7, 0, 1, 0, 1, 4});
  corpus.write("wire-reflected", Bytes{2, 0} + handshake + talk + Bytes{6, 4, 0x84});
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: make_corpus DIR\n");
    return 2;
  }
  const std::string root = arguments[1];
  tables(Corpus(root, "table"));
  schedules(Corpus(root, "schedule"));
  indexes(Corpus(root, "index"));
  messages(Corpus(root, "message"));
  sessions(Corpus(root, "session"));
  return 0;
}
