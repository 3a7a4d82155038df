#include "text/pipeline.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "base/json.h"

namespace fourfold::text {

const Json* find_field(const Json& object, const char* field) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(field);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

std::string string_field(const Json& object, const char* field, std::string_view name) {
  const Json* value = find_field(object, field);
  if (value == nullptr) fail("{}: '{}' is missing, a string is wanted", name, field);
  if (!value->is_string()) fail("{}: '{}' is {}, a string is wanted", name, field, json_kind(*value));
  return value->get<std::string>();
}

bool bool_field(const Json& object, const char* field, bool fallback, std::string_view name) {
  const Json* value = find_field(object, field);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) fail("{}: '{}' is {}, true or false is wanted", name, field, json_kind(*value));
  return value->get<bool>();
}

namespace {

constexpr size_t kMaxSequence = 64;

const std::array<char32_t, 256>& byte_table() {
  static const std::array<char32_t, 256> table = [] {
    std::array<char32_t, 256> out{};
    char32_t next = 256;
    for (unsigned byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
      out[byte] = printable ? byte : next++;
    }
    return out;
  }();
  return table;
}

// {"String": "..."} or {"Regex": "..."}; a string matches itself.
Regex read_pattern(const Json& object, std::string_view name) {
  const Json* pattern = find_field(object, "pattern");
  if (pattern == nullptr || !pattern->is_object() || pattern->size() != 1) {
    fail("{}: 'pattern' must be {{\"Regex\": ...}} or {{\"String\": ...}}", name);
  }
  if (find_field(*pattern, "Regex") != nullptr) return Regex(string_field(*pattern, "Regex", name), name);
  const std::string literal = string_field(*pattern, "String", name);
  std::string escaped;
  for (char c : literal) {
    if (std::ispunct(static_cast<unsigned char>(c))) escaped += '\\';
    escaped += c;
  }
  return Regex(escaped, name);
}

const Json& read_list(const Json& object, const char* field, std::string_view name) {
  const Json* list = find_field(object, field);
  if (list == nullptr || !list->is_array()) fail("{}: '{}' must be an array", name, field);
  if (list->size() > kMaxSequence) fail("{}: '{}' has {} entries, at most {}", name, field, list->size(), kMaxSequence);
  return *list;
}

char32_t char_field(const Json& object, const char* field, std::string_view name) {
  const std::string value = string_field(object, field, name);
  size_t position = 0;
  const char32_t c = value.empty() ? 0 : next_code_point(value, position);
  if (value.empty() || position != value.size()) {
    fail("{}: '{}' is '{}', one character is wanted", name, field, printable(value));
  }
  return c;
}

size_t count_field(const Json& object, const char* field, std::string_view name) {
  const Json* value = find_field(object, field);
  if (value == nullptr) return 0;
  if (!value->is_number_unsigned() || value->get<uint64_t>() > 1'000'000) {
    fail("{}: '{}' must be a small non-negative integer", name, field);
  }
  return value->get<size_t>();
}

class FormNormalizer : public Normalizer {
 public:
  explicit FormNormalizer(NormalForm form) : form_(form) {}
  void apply(AlignedText& text) const override {
    std::vector<CharChange> changes;
    if (normalize(text.text(), form_, changes)) text.rewrite(changes);
  }

 private:
  NormalForm form_;
};

class LowercaseNormalizer : public Normalizer {
 public:
  void apply(AlignedText& text) const override {
    std::vector<CharChange> changes;
    const std::string_view view = text.text();
    bool changed = false;
    for (size_t i = 0; i < view.size();) {
      const char32_t c = next_code_point(view, i);
      if (c == 0x130) {  // the only character whose lower case has two
        changes.push_back({'i', 0});
        changes.push_back({0x307, 1});
      } else {
        changes.push_back({to_lower(c), 0});
      }
      changed |= changes.back().code_point != c;
    }
    if (changed) text.rewrite(changes);
  }
};

class PrependNormalizer : public Normalizer {
 public:
  explicit PrependNormalizer(std::string prefix) : prefix_(std::move(prefix)) {}
  void apply(AlignedText& text) const override { text.prepend(prefix_); }

 private:
  std::string prefix_;
};

class ReplaceNormalizer : public Normalizer {
 public:
  ReplaceNormalizer(Regex regex, std::string content) : regex_(std::move(regex)), content_(std::move(content)) {}
  void apply(AlignedText& text) const override {
    std::vector<MatchSpan> spans;
    regex_.find_spans(text.text(), spans);
    std::vector<Span> ranges;
    for (const MatchSpan& span : spans) {
      if (span.matched) ranges.push_back({span.begin, span.end});
    }
    if (ranges.size() * content_.size() > (1u << 30)) fail("the replaced text exceeds {} bytes", 1u << 30);
    text.replace(ranges, content_);
  }

 private:
  Regex regex_;
  std::string content_;
};

class StripNormalizer : public Normalizer {
 public:
  StripNormalizer(bool left, bool right) : left_(left), right_(right) {}
  void apply(AlignedText& text) const override {
    const std::string_view view = text.text();
    size_t begin = view.size(), end = 0;
    for (size_t i = 0; i < view.size();) {
      const size_t at = i;
      if (is_whitespace(next_code_point(view, i))) continue;
      begin = std::min(begin, at);
      end = i;
    }
    if (end == 0) {
      begin = left_ || right_ ? view.size() : 0;
      end = view.size();
    } else {
      if (!left_) begin = 0;
      if (!right_) end = view.size();
    }
    if (begin > 0 || end < view.size()) text = text.slice(begin, end);
  }

 private:
  bool left_, right_;
};

class NormalizerSequence : public Normalizer {
 public:
  void apply(AlignedText& text) const override {
    for (const auto& step : steps) step->apply(text);
  }
  std::vector<std::unique_ptr<Normalizer>> steps;
};

std::unique_ptr<Normalizer> read_normalizer_at(const Json& json, std::string_view name, int depth) {
  if (json.is_null()) return nullptr;
  if (depth > 8) fail("{}: normalizers nested too deeply", name);
  const std::string type = string_field(json, "type", name);
  if (type == "NFC") return std::make_unique<FormNormalizer>(NormalForm::kNfc);
  if (type == "NFD") return std::make_unique<FormNormalizer>(NormalForm::kNfd);
  if (type == "NFKC") return std::make_unique<FormNormalizer>(NormalForm::kNfkc);
  if (type == "NFKD") return std::make_unique<FormNormalizer>(NormalForm::kNfkd);
  if (type == "Lowercase") return std::make_unique<LowercaseNormalizer>();
  if (type == "Prepend") return std::make_unique<PrependNormalizer>(string_field(json, "prepend", name));
  if (type == "Strip") {
    return std::make_unique<StripNormalizer>(bool_field(json, "strip_left", true, name),
                                             bool_field(json, "strip_right", true, name));
  }
  if (type == "Replace") {
    return std::make_unique<ReplaceNormalizer>(read_pattern(json, name), string_field(json, "content", name));
  }
  if (type == "Sequence") {
    auto sequence = std::make_unique<NormalizerSequence>();
    for (const Json& step : read_list(json, "normalizers", name)) {
      if (auto read = read_normalizer_at(step, name, depth + 1)) sequence->steps.push_back(std::move(read));
    }
    return sequence;
  }
  fail("{}: type '{}' is not supported; wanted NFC, NFD, NFKC, NFKD, Lowercase, Prepend, Replace, Strip or Sequence",
       name, printable(type));
}

enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

Behavior read_behavior(const Json& json, std::string_view name) {
  const std::string behavior = string_field(json, "behavior", name);
  if (behavior == "Removed") return Behavior::kRemoved;
  if (behavior == "Isolated") return Behavior::kIsolated;
  if (behavior == "MergedWithPrevious") return Behavior::kMergedWithPrevious;
  if (behavior == "MergedWithNext") return Behavior::kMergedWithNext;
  if (behavior == "Contiguous") return Behavior::kContiguous;
  fail("{}: behavior '{}' is not supported", name, printable(behavior));
}

// Turns matches into pieces: those to keep, in place.
void apply_behavior(Behavior behavior, std::vector<MatchSpan>& spans) {
  std::vector<MatchSpan> out;
  bool previous = false;
  switch (behavior) {
    case Behavior::kIsolated:
      return;
    case Behavior::kRemoved:
      std::erase_if(spans, [](const MatchSpan& span) { return span.matched; });
      return;
    case Behavior::kContiguous:
      for (const MatchSpan& span : spans) {
        if (span.matched == previous && !out.empty()) {
          out.back().end = span.end;
        } else {
          out.push_back(span);
        }
        previous = span.matched;
      }
      break;
    case Behavior::kMergedWithPrevious:
      for (const MatchSpan& span : spans) {
        if (span.matched && !previous && !out.empty()) {
          out.back().end = span.end;
        } else {
          out.push_back(span);
        }
        previous = span.matched;
      }
      break;
    case Behavior::kMergedWithNext:
      for (auto span = spans.rbegin(); span != spans.rend(); ++span) {
        if (span->matched && !previous && !out.empty()) {
          out.back().begin = span->begin;
        } else {
          out.push_back(*span);
        }
        previous = span->matched;
      }
      std::reverse(out.begin(), out.end());
      break;
  }
  spans = std::move(out);
}

// Cuts every piece by `find`, which appends the spans of a text.
template <typename Find>
void split_pieces(Pieces& pieces, Behavior behavior, Find find) {
  std::vector<Piece> out;
  out.reserve(pieces.pieces.size() * 2);
  std::vector<MatchSpan> spans;
  for (const Piece& piece : pieces.pieces) {
    spans.clear();
    find(pieces.view(piece), spans);
    apply_behavior(behavior, spans);
    for (const MatchSpan& span : spans) {
      if (span.begin < span.end) out.push_back({piece.source, piece.begin + span.begin, piece.begin + span.end});
    }
  }
  pieces.pieces = std::move(out);
}

// Each character of which `test` holds is a match of its own.
template <typename Test>
void find_chars(std::string_view text, std::vector<MatchSpan>& out, Test test) {
  size_t last = 0;
  for (size_t i = 0; i < text.size();) {
    const size_t at = i;
    if (!test(next_code_point(text, i))) continue;
    if (last < at) out.push_back({last, at, false});
    out.push_back({at, i, true});
    last = i;
  }
  if (last < text.size()) out.push_back({last, text.size(), false});
}

class SplitPreTokenizer : public PreTokenizer {
 public:
  SplitPreTokenizer(Regex regex, Behavior behavior, bool invert)
      : regex_(std::move(regex)), behavior_(behavior), invert_(invert) {}
  void apply(Pieces& pieces) const override {
    split_pieces(pieces, behavior_, [&](std::string_view text, std::vector<MatchSpan>& spans) {
      regex_.find_spans(text, spans);
      if (invert_) {
        for (MatchSpan& span : spans) span.matched = !span.matched;
      }
    });
  }

 private:
  Regex regex_;
  Behavior behavior_;
  bool invert_;
};

class DigitsPreTokenizer : public PreTokenizer {
 public:
  explicit DigitsPreTokenizer(bool individual) : behavior_(individual ? Behavior::kIsolated : Behavior::kContiguous) {}
  void apply(Pieces& pieces) const override {
    split_pieces(pieces, behavior_,
                 [](std::string_view text, std::vector<MatchSpan>& spans) { find_chars(text, spans, is_numeric); });
  }

 private:
  Behavior behavior_;
};

class WhitespaceSplitPreTokenizer : public PreTokenizer {
 public:
  void apply(Pieces& pieces) const override {
    split_pieces(pieces, Behavior::kRemoved,
                 [](std::string_view text, std::vector<MatchSpan>& spans) { find_chars(text, spans, is_whitespace); });
  }
};

// Gives every piece that asks for it a prefix; such a piece becomes a text of its own.
template <typename Wants>
void prefix_pieces(Pieces& pieces, std::string_view prefix, Wants wants) {
  for (Piece& piece : pieces.pieces) {
    const std::string_view view = pieces.view(piece);
    if (view.empty() || view.starts_with(prefix) || !wants(piece)) continue;
    AlignedText text = pieces.texts[piece.source].slice(piece.begin, piece.end);
    text.prepend(prefix);
    pieces.texts.push_back(std::move(text));
    piece = {static_cast<uint32_t>(pieces.texts.size() - 1), 0, pieces.texts.back().text().size()};
  }
}

class ByteLevelPreTokenizer : public PreTokenizer {
 public:
  ByteLevelPreTokenizer(bool add_prefix_space, bool use_regex, std::string_view name)
      : add_prefix_space_(add_prefix_space) {
    if (use_regex) {
      regex_.emplace_back(R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)", name);
    }
  }
  void apply(Pieces& pieces) const override {
    if (add_prefix_space_) prefix_pieces(pieces, " ", [](const Piece&) { return true; });
    for (const Regex& regex : regex_) {
      split_pieces(pieces, Behavior::kIsolated,
                   [&](std::string_view text, std::vector<MatchSpan>& spans) { regex.find_spans(text, spans); });
    }
  }

 private:
  bool add_prefix_space_;
  std::vector<Regex> regex_;  // none or one
};

class MetaspacePreTokenizer : public PreTokenizer {
 public:
  enum class Prepend { kAlways, kFirst, kNever };
  MetaspacePreTokenizer(char32_t replacement, Prepend prepend, bool split) : prepend_(prepend), split_(split) {
    append_utf8(replacement_, replacement);
  }
  void apply(Pieces& pieces) const override {
    for (Piece& piece : pieces.pieces) {
      const std::string_view view = pieces.view(piece);
      std::vector<Span> spaces;
      for (size_t i = view.find(' '); i != std::string_view::npos; i = view.find(' ', i + 1))
        spaces.push_back({i, i + 1});
      if (spaces.empty()) continue;
      AlignedText text = pieces.texts[piece.source].slice(piece.begin, piece.end);
      text.replace(spaces, replacement_);
      pieces.texts.push_back(std::move(text));
      piece = {static_cast<uint32_t>(pieces.texts.size() - 1), 0, pieces.texts.back().text().size()};
    }
    if (prepend_ != Prepend::kNever) {
      prefix_pieces(pieces, replacement_, [&](const Piece& piece) {
        return prepend_ == Prepend::kAlways ||
               pieces.texts[piece.source].source(piece.begin, piece.begin + 1).begin == 0;
      });
    }
    if (!split_) return;
    split_pieces(pieces, Behavior::kMergedWithNext, [&](std::string_view text, std::vector<MatchSpan>& spans) {
      size_t position = 0;
      const char32_t wanted = next_code_point(replacement_, position);
      find_chars(text, spans, [&](char32_t c) { return c == wanted; });
    });
  }

 private:
  std::string replacement_;
  Prepend prepend_;
  bool split_;
};

class PreTokenizerSequence : public PreTokenizer {
 public:
  void apply(Pieces& pieces) const override {
    for (const auto& step : steps) step->apply(pieces);
  }
  std::vector<std::unique_ptr<PreTokenizer>> steps;
};

MetaspacePreTokenizer::Prepend read_prepend_scheme(const Json& json, std::string_view name) {
  using Prepend = MetaspacePreTokenizer::Prepend;
  if (find_field(json, "prepend_scheme") == nullptr) {
    return bool_field(json, "add_prefix_space", true, name) ? Prepend::kAlways : Prepend::kNever;
  }
  const std::string scheme = string_field(json, "prepend_scheme", name);
  if (scheme == "always") return Prepend::kAlways;
  if (scheme == "first") return Prepend::kFirst;
  if (scheme == "never") return Prepend::kNever;
  fail("{}: prepend_scheme '{}' is not supported", name, printable(scheme));
}

PreTokenizerStage read_pre_tokenizer_at(const Json& json, std::string_view name, int depth) {
  PreTokenizerStage stage;
  if (json.is_null()) return stage;
  if (depth > 8) fail("{}: pre-tokenizers nested too deeply", name);
  const std::string type = string_field(json, "type", name);
  if (type == "Split") {
    stage.splitter = std::make_unique<SplitPreTokenizer>(read_pattern(json, name), read_behavior(json, name),
                                                         bool_field(json, "invert", false, name));
  } else if (type == "Digits") {
    stage.splitter = std::make_unique<DigitsPreTokenizer>(bool_field(json, "individual_digits", false, name));
  } else if (type == "WhitespaceSplit") {
    stage.splitter = std::make_unique<WhitespaceSplitPreTokenizer>();
  } else if (type == "Whitespace") {
    stage.splitter = std::make_unique<SplitPreTokenizer>(Regex("\\w+|[^\\w\\s]+", name), Behavior::kRemoved, true);
  } else if (type == "ByteLevel") {
    stage.byte_level = true;
    stage.splitter = std::make_unique<ByteLevelPreTokenizer>(bool_field(json, "add_prefix_space", true, name),
                                                             bool_field(json, "use_regex", true, name), name);
  } else if (type == "Metaspace") {
    stage.splitter = std::make_unique<MetaspacePreTokenizer>(
        char_field(json, "replacement", name), read_prepend_scheme(json, name), bool_field(json, "split", true, name));
  } else if (type == "Sequence") {
    auto sequence = std::make_unique<PreTokenizerSequence>();
    for (const Json& step : read_list(json, "pretokenizers", name)) {
      if (stage.byte_level) fail("{}: ByteLevel must be the last pre-tokenizer of a Sequence", name);
      PreTokenizerStage read = read_pre_tokenizer_at(step, name, depth + 1);
      if (read.splitter) sequence->steps.push_back(std::move(read.splitter));
      stage.byte_level = read.byte_level;
    }
    stage.splitter = std::move(sequence);
  } else {
    fail(
        "{}: type '{}' is not supported; wanted Split, Digits, ByteLevel, Metaspace, Whitespace, WhitespaceSplit or "
        "Sequence",
        name, printable(type));
  }
  return stage;
}

class ByteLevelDecoder : public Decoder {
 public:
  void chain(std::vector<std::string>& tokens) const override {
    std::string bytes;
    for (const std::string& token : tokens) {
      if (!byte_level_decode(token, bytes)) bytes += token;
    }
    tokens.assign(1, to_valid_utf8(bytes));
  }
};

// "<0x0A>" is a byte, else -1.
int fallback_byte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int value = 0;
  for (char c : token.substr(3, 2)) {
    if (!std::isxdigit(static_cast<unsigned char>(c))) return -1;
    value = value * 16 + (std::isdigit(static_cast<unsigned char>(c)) ? c - '0' : (c | 0x20) - 'a' + 10);
  }
  return value;
}

class ByteFallbackDecoder : public Decoder {
 public:
  void chain(std::vector<std::string>& tokens) const override {
    std::vector<std::string> out;
    std::string bytes;
    const auto flush = [&] {
      if (bytes.empty()) return;
      if (is_valid_utf8(bytes)) {
        out.push_back(bytes);
      } else {
        out.insert(out.end(), bytes.size(), "\xEF\xBF\xBD");
      }
      bytes.clear();
    };
    for (std::string& token : tokens) {
      const int byte = fallback_byte(token);
      if (byte >= 0) {
        bytes += static_cast<char>(byte);
      } else {
        flush();
        out.push_back(std::move(token));
      }
    }
    flush();
    tokens = std::move(out);
  }
};

class FuseDecoder : public Decoder {
 public:
  void chain(std::vector<std::string>& tokens) const override {
    std::string joined;
    for (const std::string& token : tokens) joined += token;
    tokens.assign(1, std::move(joined));
  }
};

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  size_t done = 0;
  for (size_t at = text.find(from); at != std::string_view::npos; at = text.find(from, done)) {
    out.append(text.substr(done, at - done));
    out.append(to);
    done = at + from.size();
  }
  out.append(text.substr(done));
  return out;
}

class ReplaceDecoder : public Decoder {
 public:
  ReplaceDecoder(std::string from, std::string to) : from_(std::move(from)), to_(std::move(to)) {}
  void chain(std::vector<std::string>& tokens) const override {
    for (std::string& token : tokens) token = replace_all(token, from_, to_);
  }

 private:
  std::string from_, to_;
};

class StripDecoder : public Decoder {
 public:
  StripDecoder(char32_t content, size_t start, size_t stop) : start_(start), stop_(stop) {
    append_utf8(content_, content);
  }
  void chain(std::vector<std::string>& tokens) const override {
    for (std::string& token : tokens) {
      size_t begin = 0, end = token.size();
      for (size_t i = 0; i < start_ && token.compare(begin, content_.size(), content_) == 0; ++i) {
        begin += content_.size();
      }
      for (size_t i = 0; i < stop_ && end >= begin + content_.size() &&
                         token.compare(end - content_.size(), content_.size(), content_) == 0;
           ++i) {
        end -= content_.size();
      }
      token = token.substr(begin, end - begin);
    }
  }

 private:
  std::string content_;
  size_t start_, stop_;
};

class MetaspaceDecoder : public Decoder {
 public:
  MetaspaceDecoder(char32_t replacement, bool strip_first) : strip_first_(strip_first) {
    append_utf8(replacement_, replacement);
  }
  void chain(std::vector<std::string>& tokens) const override {
    for (size_t i = 0; i < tokens.size(); ++i) {
      // The first token loses its markers, where the pre-tokenizer put one in front; all others become spaces.
      tokens[i] = replace_all(tokens[i], replacement_, i == 0 && strip_first_ ? "" : " ");
    }
  }

 private:
  std::string replacement_;
  bool strip_first_;
};

class DecoderSequence : public Decoder {
 public:
  void chain(std::vector<std::string>& tokens) const override {
    for (const auto& step : steps) step->chain(tokens);
  }
  std::vector<std::unique_ptr<Decoder>> steps;
};

void read_decoder_step(const Json& json, std::string_view name, int depth, DecoderStage& stage,
                       std::vector<std::unique_ptr<Decoder>>& steps) {
  if (depth > 8) fail("{}: decoders nested too deeply", name);
  const std::string type = string_field(json, "type", name);
  if (type == "ByteLevel") {
    stage.byte_level = true;
    steps.push_back(std::make_unique<ByteLevelDecoder>());
  } else if (type == "ByteFallback") {
    stage.byte_fallback = true;
    steps.push_back(std::make_unique<ByteFallbackDecoder>());
  } else if (type == "Fuse") {
    steps.push_back(std::make_unique<FuseDecoder>());
  } else if (type == "Strip") {
    const char32_t content = char_field(json, "content", name);
    const size_t start = count_field(json, "start", name), stop = count_field(json, "stop", name);
    stage.strip_content = content;
    stage.strip_left = start;
    steps.push_back(std::make_unique<StripDecoder>(content, start, stop));
  } else if (type == "Replace") {
    const Json* pattern = find_field(json, "pattern");
    if (pattern == nullptr || find_field(*pattern, "String") == nullptr) {
      fail("{}: the decoder Replace is supported with a pattern {{\"String\": ...}} only", name);
    }
    std::string from = string_field(*pattern, "String", name), to = string_field(json, "content", name);
    if (from.empty()) fail("{}: the decoder Replace has an empty pattern", name);
    stage.replacements.emplace_back(from, to);
    steps.push_back(std::make_unique<ReplaceDecoder>(std::move(from), std::move(to)));
  } else if (type == "Metaspace") {
    const char32_t replacement = char_field(json, "replacement", name);
    const bool strip = read_prepend_scheme(json, name) != MetaspacePreTokenizer::Prepend::kNever;
    std::string from;
    append_utf8(from, replacement);
    stage.replacements.emplace_back(from, " ");
    if (strip) {
      stage.strip_content = ' ';
      stage.strip_left = 1;
    }
    steps.push_back(std::make_unique<MetaspaceDecoder>(replacement, strip));
  } else if (type == "Sequence") {
    for (const Json& step : read_list(json, "decoders", name)) read_decoder_step(step, name, depth + 1, stage, steps);
  } else {
    fail("{}: type '{}' is not supported; wanted ByteLevel, ByteFallback, Fuse, Strip, Replace, Metaspace or Sequence",
         name, printable(type));
  }
}

}  // namespace

char32_t byte_to_char(unsigned char byte) { return byte_table()[byte]; }

int char_to_byte(char32_t c) {
  static const std::array<int16_t, 324> inverse = [] {
    std::array<int16_t, 324> out{};
    out.fill(-1);
    for (int byte = 0; byte < 256; ++byte) out[byte_table()[static_cast<size_t>(byte)]] = static_cast<int16_t>(byte);
    return out;
  }();
  return c < inverse.size() ? inverse[c] : -1;
}

bool byte_level_decode(std::string_view token, std::string& bytes) {
  const size_t before = bytes.size();
  for (size_t i = 0; i < token.size();) {
    const int byte = char_to_byte(next_code_point(token, i));
    if (byte < 0) {
      bytes.resize(before);
      return false;
    }
    bytes += static_cast<char>(byte);
  }
  return true;
}

std::unique_ptr<Normalizer> read_normalizer(const Json& json, std::string_view name) {
  return read_normalizer_at(json, name, 0);
}

PreTokenizerStage read_pre_tokenizer(const Json& json, std::string_view name) {
  return read_pre_tokenizer_at(json, name, 0);
}

DecoderStage read_decoder(const Json& json, std::string_view name) {
  DecoderStage stage;
  if (json.is_null()) return stage;
  auto sequence = std::make_unique<DecoderSequence>();
  read_decoder_step(json, name, 0, stage, sequence->steps);
  stage.only_byte_level = stage.byte_level && sequence->steps.size() == 1;
  stage.decoder = std::move(sequence);
  return stage;
}

}  // namespace fourfold::text
