// The stages of tokenizer.json around the model: normalizer, pre_tokenizer, decoder. Each is read from its JSON object;
// a type that is not supported is an Error that names it.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_forward.h"
#include "text/aligned_text.h"
#include "text/regex.h"

namespace fourfold::text {

// NFC, NFD, NFKC, NFKD, Lowercase, Prepend, Replace, Strip, Sequence; null does nothing.
class Normalizer {
 public:
  virtual ~Normalizer() = default;
  virtual void apply(AlignedText& text) const = 0;
};
std::unique_ptr<Normalizer> read_normalizer(const Json& json, std::string_view name);

// A piece of text that the model sees as one word: bytes [begin, end) of texts[source].
struct Piece {
  uint32_t source;
  size_t begin;
  size_t end;
};

struct Pieces {
  std::vector<AlignedText> texts;
  std::vector<Piece> pieces;

  std::string_view view(const Piece& piece) const {
    return texts[piece.source].text().substr(piece.begin, piece.end - piece.begin);
  }
};

// Split, Digits, ByteLevel (last in a Sequence), Metaspace, Sequence, Whitespace, WhitespaceSplit; null does nothing.
class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  virtual void apply(Pieces& pieces) const = 0;
};

struct PreTokenizerStage {
  std::unique_ptr<PreTokenizer> splitter;  // may be null
  bool byte_level = false;                 // the model sees bytes, written as in GPT-2's byte-to-character table
};
PreTokenizerStage read_pre_tokenizer(const Json& json, std::string_view name);

// What turns tokens back into text. Two views of one thing:
//   - chain(): the whole sequence at once, as `tokenizers` decodes;
//   - token_bytes() plus strip_left: one token at a time, for streaming. Equal to chain() on valid UTF-8.
class Decoder {
 public:
  virtual ~Decoder() = default;
  virtual void chain(std::vector<std::string>& tokens) const = 0;
};
struct DecoderStage {
  std::unique_ptr<Decoder> decoder;  // may be null: tokens joined by single spaces
  bool byte_level = false;
  bool only_byte_level = false;  // nothing else: decoding is joining token_bytes
  bool byte_fallback = false;
  std::vector<std::pair<std::string, std::string>> replacements;
  char32_t strip_content = 0;  // stripped at the start of the whole text, up to strip_left times
  size_t strip_left = 0;
};
DecoderStage read_decoder(const Json& json, std::string_view name);

// GPT-2's table: each byte has a printable character.
char32_t byte_to_char(unsigned char byte);
// The byte that a character stands for, or -1.
int char_to_byte(char32_t c);
// Maps a token's text back to bytes; false when a character is not in the table.
bool byte_level_decode(std::string_view token, std::string& bytes);

// Reading the parts of an object: errors name `name`, the field, what was found and what was wanted.
const Json* find_field(const Json& object, const char* field);
std::string string_field(const Json& object, const char* field, std::string_view name);
bool bool_field(const Json& object, const char* field, bool fallback, std::string_view name);

}  // namespace fourfold::text
