// plugin.index is checked whole when it is read: what is odd anywhere is used nowhere.
#include "identity/index.h"

#include <cstdio>
#include <cstring>

#include "trusted/file.h"
#include "vocabulary.h"

namespace dynamiccl {
namespace {

constexpr char kSlugCharacters[] = "abcdefghijklmnopqrstuvwxyz0123456789._-";
constexpr std::size_t kMaxSlugBytes = 120;  // as in serve/table.py
constexpr std::int64_t kMaxPartsPerMillion = 1'000'000'000;

bool same(const char* left, const char* right) noexcept { return std::strcmp(left, right) == 0; }

bool is_slug(const char* text) noexcept {
  const std::size_t length = std::strlen(text);
  return length >= 1 && length <= kMaxSlugBytes && std::strchr("._-", text[0]) == nullptr &&
         std::strspn(text, kSlugCharacters) == length;
}

/// A decimal number without sign or leading zeros; -1 for anything else, and above `most`.
std::int64_t whole_number(const char* text, std::int64_t most) noexcept {
  if (text[0] == '\0' || (text[0] == '0' && text[1] != '\0')) return -1;
  std::int64_t value = 0;
  for (; *text != '\0'; ++text) {
    if (*text < '0' || *text > '9') return -1;
    value = value * 10 + (*text - '0');
    if (value > most) return -1;
  }
  return value;
}

/// Whether lines of this kind name a file of one communicator shape.
bool is_file(const char* kind) noexcept { return same(kind, "table") || same(kind, "constants"); }

bool is_hash(const char* text) noexcept {
  std::uint8_t hash[kDigestBytes];
  return from_hex(text, std::strlen(text), hash, sizeof hash);
}

bool is_shape(const char* nodes, const char* ranks) noexcept {
  const std::int64_t num_nodes = whole_number(nodes, INT32_MAX);
  const std::int64_t num_ranks = whole_number(ranks, INT32_MAX);
  return num_nodes >= 1 && num_ranks >= num_nodes && num_ranks % num_nodes == 0;
}

}  // namespace

const char* PluginIndex::load(const char* path) noexcept {
  num_lines_ = 0;
  auto* bytes = reinterpret_cast<std::uint8_t*>(text_);  // it is decoded where it lies
  std::size_t size = 0;
  if (const char* problem = read_trusted(path, bytes, kMaxIndexBytes, &size)) return problem;
  return decode(bytes, size);
}

const char* PluginIndex::decode(const std::uint8_t* bytes, std::size_t size) noexcept {
  num_lines_ = 0;
  if (size > kMaxIndexBytes) return "it is too long";
  Sha256 sha;
  sha.update(bytes, size);
  sha.finish(artifact_hash_);
  std::memmove(text_, bytes, size);
  text_[size] = '\0';
  const char* problem = split(size);
  if (problem == nullptr) problem = check();
  if (problem != nullptr) num_lines_ = 0;
  return problem;
}

/// Makes fields of the text; null on success, else why not.
const char* PluginIndex::split(std::size_t size) noexcept {
  if (size == 0 || text_[size - 1] != '\n') return "it is cut off";
  std::size_t line = 0, field = 0;
  int num_fields = 1;
  for (std::size_t i = 0; i < size; ++i) {
    const auto byte = static_cast<unsigned char>(text_[i]);
    if (byte != '\t' && byte != '\n') {
      if (byte < ' ' || byte == 0x7f) return "it has a control character";
      continue;
    }
    if (i - field > kMaxIndexFieldBytes) return "a field is too long";
    text_[i] = '\0';
    field = i + 1;
    if (byte == '\t') {
      if (++num_fields > kMaxFields) return "a line has too many fields";
      continue;
    }
    if (num_lines_ == kMaxIndexLines) return "it has too many lines";
    lines_[num_lines_++] = {static_cast<std::uint16_t>(line),
                            static_cast<std::uint8_t>(num_fields)};
    line = field;
    num_fields = 1;
  }
  return nullptr;
}

const char* PluginIndex::check() noexcept {
  if (!same(field(0, 0), "dynamiccl-index")) return "it is not a DynamICCL index";
  if (!same(field(0, 1), "1") || lines_[0].num_fields != 2) {
    return "its format version is another";
  }
  const char* hash = field(1, 1);
  const bool names_manifest = same(field(1, 0), "artifact") && lines_[1].num_fields == 2 &&
                              from_hex(hash, std::strlen(hash), manifest_hash_, kDigestBytes);
  if (!names_manifest) return "its second line is not the hash of a manifest";
  bool has_file = false;
  for (int i = 2; i < num_lines_; ++i) {
    if (const char* problem = check_line(i)) return problem;
    if (repeats_an_earlier_one(i)) return "a line contradicts an earlier one";
    has_file |= is_file(field(i, 0));
  }
  return has_file ? nullptr : "it lists no table";
}

const char* PluginIndex::check_line(int line) const noexcept {
  const char* kind = field(line, 0);
  const int num_fields = lines_[line].num_fields;
  if (!is_slug(field(line, 1))) return "a line names no system";
  if (same(kind, "system")) {
    const bool sound = num_fields == 3 && std::strncmp(field(line, 2), "gpu=", 4) == 0;
    return sound ? nullptr : "a fingerprint is none";
  }
  if (same(kind, "noise")) {
    const bool sound = num_fields == 4 && whole_number(field(line, 2), kNumCollectives - 1) >= 0 &&
                       whole_number(field(line, 3), kMaxPartsPerMillion) >= 0;
    return sound ? nullptr : "a noise band is none";
  }
  if (is_file(kind)) {
    const bool sound =
        num_fields == 5 && is_shape(field(line, 2), field(line, 3)) && is_hash(field(line, 4));
    return sound ? nullptr : "a table's line is damaged";
  }
  return "a line is of no known kind";
}

const char* PluginIndex::field(int line, int index) const noexcept {
  if (line >= num_lines_ || index >= lines_[line].num_fields) return "";
  const char* text = text_ + lines_[line].offset;
  for (int i = 0; i < index; ++i) text += std::strlen(text) + 1;
  return text;
}

int PluginIndex::find(const char* const* keys, int num_keys) const noexcept {
  for (int line = 0; line < num_lines_; ++line) {
    int equal = 0;
    while (equal < num_keys && same(field(line, equal), keys[equal])) ++equal;
    if (equal == num_keys) return line;
  }
  return num_lines_;
}

bool PluginIndex::repeats_an_earlier_one(int line) const noexcept {
  const char* kind = field(line, 0);
  if (same(kind, "system")) {
    // One machine, two systems: then it is known as neither.
    for (int i = 0; i < line; ++i) {
      if (same(field(i, 0), kind) && same(field(i, 2), field(line, 2))) return true;
    }
    return false;
  }
  const char* keys[] = {kind, field(line, 1), field(line, 2), field(line, 3)};
  return find(keys, is_file(kind) ? 4 : 3) < line;
}

const char* PluginIndex::find_system(const char* fingerprint) const noexcept {
  for (int line = 0; line < num_lines_; ++line) {
    if (same(field(line, 0), "system") && same(field(line, 2), fingerprint)) return field(line, 1);
  }
  return nullptr;
}

bool PluginIndex::file_hash(const char* kind, const char* system, std::size_t num_nodes,
                            std::size_t num_ranks, std::uint8_t hash[kDigestBytes]) const noexcept {
  char nodes[24], ranks[24];
  std::snprintf(nodes, sizeof nodes, "%zu", num_nodes);
  std::snprintf(ranks, sizeof ranks, "%zu", num_ranks);
  const char* keys[] = {kind, system, nodes, ranks};
  const int line = find(keys, 4);
  const char* text = field(line, 4);
  return line < num_lines_ && from_hex(text, std::strlen(text), hash, kDigestBytes);
}

std::int64_t PluginIndex::noise_ppm(const char* system, int collective) const noexcept {
  char number[16];
  std::snprintf(number, sizeof number, "%d", collective);
  const char* keys[] = {"noise", system, number};
  const int line = find(keys, 3);
  return line < num_lines_ ? whole_number(field(line, 3), kMaxPartsPerMillion) : -1;
}

}  // namespace dynamiccl
