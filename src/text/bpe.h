// The BPE model of tokenizer.json: vocabulary and merges, and the merging of one word.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/json_forward.h"

namespace fourfold::text {

constexpr int32_t kMaxTokenId = (1 << 21) - 1;

// One token of a word and how many bytes of the word it covers.
struct WordToken {
  int32_t id;
  uint32_t size;
};

class Bpe {
 public:
  // `byte_level`: words are bytes and the vocabulary is written in GPT-2's byte-to-character table.
  Bpe(const Json& model, bool byte_level, std::string_view name);

  // Appends the tokens of one word. O(n log n) in its length. Safe from many threads: each keeps its own cache of
  // short words.
  void encode_word(std::string_view word, std::vector<WordToken>& out) const;

  // By the token's text as it stands in the file; -1 when there is none.
  int32_t find(std::string_view token) const;
  // The texts by id; ids that no token has are empty and is_defined is false.
  const std::vector<std::string>& tokens() const { return tokens_; }
  bool is_defined(int32_t id) const {
    return id >= 0 && static_cast<size_t>(id) < defined_.size() && defined_[static_cast<size_t>(id)];
  }
  size_t merge_count() const { return merge_count_; }

 private:
  struct Merge {
    uint64_t pair = kNoPair;
    uint32_t rank = 0;
    int32_t id = 0;
  };
  struct Symbol {
    int32_t id;
    uint32_t size;
    int32_t previous;
    int32_t next;
  };
  static constexpr uint64_t kNoPair = ~0ull;
  static constexpr uint32_t kNoRank = ~0u;

  void read_vocabulary(const Json& vocabulary, std::string_view name);
  void read_merges(const Json& merges, std::string_view name);
  const Merge* find_merge(int32_t left, int32_t right) const;
  void merge_word(std::string_view word, std::vector<WordToken>& out) const;
  void split_symbols(std::string_view word, std::vector<Symbol>& symbols) const;
  void merge_short(std::vector<Symbol>& symbols) const;
  void merge_long(std::vector<Symbol>& symbols) const;

  std::vector<std::string> tokens_;
  std::vector<bool> defined_;
  std::unordered_map<std::string_view, int32_t> ids_;  // keys point into tokens_
  std::unordered_map<std::string, int32_t> words_;     // byte level with ignore_merges: by bytes
  std::vector<Merge> merges_;                          // open addressing, a power of two of slots
  size_t merge_count_ = 0;
  int32_t byte_ids_[256];  // byte level: the token of each byte, or -1
  bool byte_level_;
  bool ignore_merges_ = false;
  bool byte_fallback_ = false;
  bool fuse_unknown_ = false;
  int32_t unknown_ = -1;
  std::string prefix_, suffix_;  // continuing_subword_prefix, end_of_word_suffix
  uint64_t serial_;              // names this vocabulary in the threads' caches
};

}  // namespace fourfold::text
