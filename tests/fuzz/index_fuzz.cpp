// The index of a checkpoint: any bytes are an index or one Error, and the quick way of reading it finds what the whole
// parser finds, or leaves it alone.
#include <cstdlib>
#include <set>
#include <string>

#include "base/check.h"
#include "model/shard_index.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fourfold;
  model::IndexText text(std::string(reinterpret_cast<const char*>(data), size), "fuzz");
  for (size_t i = 0; i < text.pieces(); ++i) text.parse(i);
  const std::optional<model::ShardIndex> plain = text.plain();
  if (plain) {
    std::set<std::string_view> tensors;
    for (const auto& part : plain->entries) {
      for (const auto& entry : part) {
        if (!tensors.insert(entry.tensor).second) return 0;  // whoever uses it finds that (Checkpoint::agrees())
      }
    }
  }
  try {
    const model::ShardIndex all = text.by_json();
    if (!plain) return 0;
    if (plain->files != all.files || plain->total_size != all.total_size) std::abort();
    size_t at = 0;
    for (const auto& part : plain->entries) {
      for (const auto& entry : part) {
        if (at == all.entries[0].size()) std::abort();
        const auto& other = all.entries[0][at++];
        if (entry.tensor != other.tensor || entry.file != other.file) std::abort();
      }
    }
    if (at != all.entries[0].size()) std::abort();
  } catch (const Error&) {
    if (plain) std::abort();
  }
  return 0;
}
