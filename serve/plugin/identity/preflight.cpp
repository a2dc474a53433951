// The probe prints it, and `dynamiccl-deploy doctor --compare` hands it on (serve/preflight.py).
#include "identity/preflight.h"

#include <cstring>

#include "vocabulary.h"

namespace dynamiccl {

void preflight_word(const std::uint8_t artifact_hash[kDigestBytes], const char* fingerprint,
                    char (&word)[kPreflightBytes]) noexcept {
  char hash[2 * kDigestBytes + 1];
  to_hex(artifact_hash, kDigestBytes, hash);
  Sha256 sha;
  const char* const pieces[] = {kPluginVersion, "\n", hash, "\n", fingerprint};
  for (const char* text : pieces) sha.update(text, std::strlen(text));
  std::uint8_t digest[kDigestBytes];
  sha.finish(digest);
  to_hex(digest, (kPreflightBytes - 1) / 2, word);
}

}  // namespace dynamiccl
