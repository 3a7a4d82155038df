// A tokenizer.json, read and run: added tokens, normalizer, pre-tokenizer, byte-level BPE, post-processor, decoder.
// Token ids, offsets and decoded text are those of Hugging Face's `tokenizers`.
//
// A Tokenizer does not change after loading; all of its functions may be called from many threads.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/aligned_text.h"
#include "text/unicode.h"

namespace fourfold::text {

// Which added tokens (control tokens such as <|im_start|>, <think>) are recognised where their text occurs in the
// input. Text from users that must not be able to forge control tokens is encoded with kNone.
enum class AddedTokens {
  kAll,         // the usual
  kNotSpecial,  // those not flagged "special" only (`encode_special_tokens` of `tokenizers`)
  kNone,
};

struct EncodeOptions {
  AddedTokens added_tokens = AddedTokens::kAll;
  bool add_special_tokens = true;  // what the post-processor puts around the text, such as <s>
  bool offsets = false;            // fill byte_offsets and char_offsets
};

struct Encoding {
  std::vector<int32_t> ids;
  // Where in the input each token comes from; empty ranges at 0 for tokens of the post-processor. A token that holds
  // part of a character has the range of the whole character.
  std::vector<Span> byte_offsets;
  std::vector<Span> char_offsets;
};

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool special = false;
  bool single_word = false;
  bool lstrip = false;
  bool rstrip = false;
  bool normalized = false;
};

class Tokenizer {
 public:
  static constexpr size_t kMaxInput = 1u << 30;

  // `name` is what an Error calls the file. Throws Error for anything malformed or unsupported.
  static Tokenizer from_json(std::string_view json, std::string_view name);
  static Tokenizer from_file(const std::filesystem::path& path);
  // DIR/tokenizer.json
  static Tokenizer from_directory(const std::filesystem::path& directory);

  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Invalid UTF-8 in the text counts as U+FFFD, one character (to_valid_utf8); byte offsets are those of the text as it
  // came.
  Encoding encode(std::string_view text, const EncodeOptions& options = {}) const;
  std::vector<int32_t> encode_ids(std::string_view text, const EncodeOptions& options = {}) const;

  // Ids without a token are left out, as `tokenizers` does; see is_defined().
  std::string decode(std::span<const int32_t> ids, bool skip_special_tokens = false) const;

  // One more than the highest id; ids below may be undefined.
  size_t size() const;
  bool is_defined(int32_t id) const;
  bool is_special(int32_t id) const;
  // The token as the file writes it (byte-level tokens in the alphabet of GPT-2, added tokens that are matched on
  // normalized text in that form); empty for an undefined id.
  std::string_view token(int32_t id) const;
  std::optional<int32_t> find(std::string_view token) const;
  // The bytes that the token adds to decoded text, before invalid UTF-8 is replaced; empty for an undefined id.
  std::string_view token_bytes(int32_t id) const;
  std::span<const AddedToken> added_tokens() const;

 private:
  friend class Detokenizer;
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Decodes a stream of tokens. push() returns the text that is certain after one more token, never a part of a
// character; flush() the rest (an incomplete character becomes U+FFFD). All pieces joined are Tokenizer::decode of all
// ids. The tokenizer must outlive it.
class Detokenizer {
 public:
  explicit Detokenizer(const Tokenizer& tokenizer, bool skip_special_tokens = false);
  std::string push(int32_t id);
  std::string flush();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_tokens_;
  bool first_ = true;
  Utf8Stream stream_;
};

}  // namespace fourfold::text
