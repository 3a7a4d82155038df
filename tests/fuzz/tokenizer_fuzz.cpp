// A tokenizer.json and a text, cut at the first zero byte: load, encode, decode, stream. What must hold: nothing but
// Error is thrown, offsets lie within the text and in order of their ends, and the detokeniser's pieces are valid UTF-8
// and join to decode().
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "base/check.h"
#include "text/tokenizer.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void run(std::string_view json, std::string_view input) {
  using namespace fourfold::text;
  const Tokenizer tokenizer = Tokenizer::from_json(json, "fuzz");
  for (const AddedTokens which : {AddedTokens::kAll, AddedTokens::kNotSpecial, AddedTokens::kNone}) {
    EncodeOptions options;
    options.added_tokens = which;
    options.offsets = true;
    const Encoding encoding = tokenizer.encode(input, options);
    const size_t size = to_valid_utf8(input).size();
    require(encoding.ids.size() == encoding.byte_offsets.size() && encoding.ids.size() == encoding.char_offsets.size());
    for (const Span& span : encoding.byte_offsets) require(span.begin <= span.end && span.end <= size);
    Detokenizer stream(tokenizer);
    std::string streamed;
    for (const int32_t id : encoding.ids) {
      require(tokenizer.is_defined(id));
      const std::string piece = stream.push(id);
      require(is_valid_utf8(piece));
      streamed += piece;
    }
    streamed += stream.flush();
    const std::string decoded = tokenizer.decode(encoding.ids);
    require(is_valid_utf8(decoded));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view all(reinterpret_cast<const char*>(data), size);
  const size_t cut = all.find('\0');
  try {
    run(all.substr(0, cut), cut == std::string_view::npos ? "" : all.substr(cut + 1));
  } catch (const fourfold::Error&) {
  }
  return 0;
}
