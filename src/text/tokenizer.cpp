#include "text/tokenizer.h"

#include <algorithm>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/pipeline.h"

namespace fourfold::text {
namespace {

constexpr size_t kMaxAddedTokens = 1 << 17;
constexpr size_t kMaxAddedBytes = 1024;
constexpr size_t kMaxTemplate = 1024;

// One step of the post-processor: tokens around the text, or the trimming of offsets.
struct PostStep {
  bool trim = false;              // ByteLevel with trim_offsets
  bool add_prefix_space = false;  // ByteLevel
  bool is_template = false;
  std::vector<int32_t> before, after;
};

// A template for one text: special tokens, the text once, special tokens.
PostStep read_template(const Json& json, std::string_view name) {
  PostStep step;
  step.is_template = true;
  const Json* single = find_field(json, "single");
  if (single == nullptr || !single->is_array() || single->size() > kMaxTemplate) {
    fail("{}: 'single' must be an array of at most {} entries", name, kMaxTemplate);
  }
  const Json* special = find_field(json, "special_tokens");
  bool text_seen = false;
  for (const Json& entry : *single) {
    if (const Json* sequence = find_field(entry, "Sequence"); sequence != nullptr) {
      const std::string id = string_field(*sequence, "id", name);
      if (id != "A" || text_seen) fail("{}: 'single' must hold the sequence A exactly once", name);
      text_seen = true;
      continue;
    }
    const Json* token = find_field(entry, "SpecialToken");
    if (token == nullptr) fail("{}: an entry of 'single' is neither Sequence nor SpecialToken", name);
    const std::string id = string_field(*token, "id", name);
    const Json* definition = special == nullptr ? nullptr : find_field(*special, id.c_str());
    const Json* ids = definition == nullptr ? nullptr : find_field(*definition, "ids");
    if (ids == nullptr || !ids->is_array()) fail("{}: no ids for the special token '{}'", name, printable(id));
    for (const Json& value : *ids) {
      if (!value.is_number_unsigned() || value.get<uint64_t>() > kMaxTokenId) {
        fail("{}: the id {} of the special token '{}' is not a token id", name, printable(value.dump()), printable(id));
      }
      auto& side = text_seen ? step.after : step.before;
      side.push_back(value.get<int32_t>());
      if (side.size() > kMaxTemplate) fail("{}: more than {} special tokens", name, kMaxTemplate);
    }
  }
  if (!text_seen) fail("{}: 'single' does not hold the sequence A", name);
  return step;
}

void read_post_processor(const Json& json, std::string_view name, int depth, std::vector<PostStep>& steps) {
  if (json.is_null()) return;
  if (depth > 8 || steps.size() > 64) fail("{}: too many post-processors", name);
  const std::string type = string_field(json, "type", name);
  if (type == "TemplateProcessing") {
    steps.push_back(read_template(json, name));
  } else if (type == "ByteLevel") {
    PostStep step;
    step.trim = bool_field(json, "trim_offsets", true, name);
    step.add_prefix_space = bool_field(json, "add_prefix_space", true, name);
    steps.push_back(step);
  } else if (type == "Sequence") {
    const Json* processors = find_field(json, "processors");
    if (processors == nullptr || !processors->is_array()) fail("{}: 'processors' must be an array", name);
    for (const Json& processor : *processors) read_post_processor(processor, name, depth + 1, steps);
  } else {
    fail("{}: type '{}' is not supported; wanted TemplateProcessing, ByteLevel or Sequence", name, printable(type));
  }
}

std::vector<AddedToken> read_added_tokens(const Json& json, const Bpe& model, std::string_view name) {
  std::vector<AddedToken> tokens;
  const Json* list = find_field(json, "added_tokens");
  if (list == nullptr) return tokens;
  if (!list->is_array()) fail("{}: 'added_tokens' is {}, an array is wanted", name, json_kind(*list));
  if (list->size() > kMaxAddedTokens) {
    fail("{}: {} added tokens, at most {} are accepted", name, list->size(), kMaxAddedTokens);
  }
  for (const Json& entry : *list) {
    AddedToken token;
    token.content = string_field(entry, "content", name);
    if (token.content.size() > kMaxAddedBytes) {
      fail("{}: an added token of {} bytes, at most {} are accepted", name, token.content.size(), kMaxAddedBytes);
    }
    const Json* id = find_field(entry, "id");
    if (id == nullptr || !id->is_number_unsigned() || id->get<uint64_t>() > kMaxTokenId) {
      fail("{}: the added token '{}' has the id {}, an integer from 0 to {} is wanted", name, printable(token.content),
           id == nullptr ? "(none)" : printable(id->dump()), kMaxTokenId);
    }
    token.id = id->get<int32_t>();
    if (const int32_t known = model.find(token.content); known >= 0 && known != token.id) {
      fail("{}: the added token '{}' has the id {}, but the vocabulary gives it {}", name, printable(token.content),
           token.id, known);
    }
    token.special = bool_field(entry, "special", false, name);
    token.single_word = bool_field(entry, "single_word", false, name);
    token.lstrip = bool_field(entry, "lstrip", false, name);
    token.rstrip = bool_field(entry, "rstrip", false, name);
    token.normalized = bool_field(entry, "normalized", !token.special, name);
    if (!token.content.empty()) tokens.push_back(std::move(token));
  }
  return tokens;
}

// Characters before a position of valid UTF-8, from a count every few hundred bytes.
class CharCounter {
 public:
  explicit CharCounter(std::string_view text) : text_(text) {
    size_t count = 0;
    for (size_t i = 0; i < text.size(); ++i) {
      if (i % kStep == 0) counts_.push_back(count);
      count += !is_continuation(text[i]);
    }
    if (text.size() % kStep == 0) counts_.push_back(count);
  }
  size_t operator()(size_t position) const {
    const size_t block = position / kStep;
    return counts_[block] + count_code_points(text_.substr(block * kStep, position - block * kStep));
  }

 private:
  static constexpr size_t kStep = 256;
  std::string_view text_;
  std::vector<size_t> counts_;
};

// Byte ranges of a text whose invalid sequences were replaced, as ranges of the text as it came.
class InputRanges {
 public:
  explicit InputRanges(std::string_view input) : replaced_(replaced_utf8(input)) {
    size_t input_position = 0, repaired_position = 0;
    for (const Replaced& one : replaced_) {
      input_position += one.position - repaired_position;
      inputs_.push_back(input_position);
      input_position += one.size;
      repaired_position = one.position + kReplacementBytes;
    }
  }
  // What reaches into a replaced sequence holds all of it.
  Span operator()(Span span) const { return {place(span.begin, false), place(span.end, true)}; }

 private:
  size_t place(size_t position, bool end) const {
    const auto behind = std::upper_bound(replaced_.begin(), replaced_.end(), position,
                                         [](size_t at, const Replaced& one) { return at < one.position; });
    if (behind == replaced_.begin()) return position;
    const auto index = static_cast<size_t>(behind - replaced_.begin()) - 1;
    const Replaced& last = replaced_[index];
    const size_t within = position - last.position;
    if (within >= kReplacementBytes) return inputs_[index] + last.size + within - kReplacementBytes;
    return inputs_[index] + (end && within > 0 ? last.size : 0);
  }

  std::vector<Replaced> replaced_;
  std::vector<size_t> inputs_;  // where each of them begins in the input
};

}  // namespace

// The texts that added tokens matched, with the whitespace that lstrip and rstrip took, by place in the encoding.
using Matched = std::unordered_map<size_t, std::string>;

struct Tokenizer::Impl {
  std::unique_ptr<Normalizer> normalizer;
  PreTokenizerStage pre_tokenizer;
  std::optional<Bpe> model;
  DecoderStage decoder;
  std::vector<PostStep> post;
  std::vector<AddedToken> added;
  std::vector<std::string> added_text;  // the content, normalized where it is matched so
  std::unordered_map<int32_t, size_t> added_by_id;
  AddedTokenMatcher raw_matcher, normalized_matcher;
  std::vector<std::string> bytes;  // token_bytes by id
  size_t size = 0;

  const AddedToken* added_token(int32_t id) const {
    const auto found = added_by_id.find(id);
    return found == added_by_id.end() ? nullptr : &added[found->second];
  }
  std::string_view token(int32_t id) const {
    if (const auto found = added_by_id.find(id); found != added_by_id.end()) return added_text[found->second];
    return model->is_defined(id) ? std::string_view(model->tokens()[static_cast<size_t>(id)]) : std::string_view();
  }
  bool defined(int32_t id) const { return model->is_defined(id) || added_by_id.contains(id); }

  std::string bytes_of(std::string_view token_text) const;
  void encode_text(AlignedText text, AddedTokens which, bool offsets, Encoding& out, Matched& matched) const;
  void trim(const PostStep& step, const std::vector<int32_t>& ids, const Matched& matched,
            std::vector<Span>& offsets) const;
};

std::string Tokenizer::Impl::bytes_of(std::string_view token_text) const {
  std::string text(token_text);
  if (!decoder.decoder) return text;
  for (const auto& [from, to] : decoder.replacements) {
    std::string out;
    size_t done = 0;
    for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, done)) {
      out.append(text, done, at - done);
      out += to;
      done = at + from.size();
    }
    out.append(text, done);
    text = std::move(out);
  }
  if (decoder.byte_fallback && text.size() == 6 && text.starts_with("<0x") && text[5] == '>' &&
      std::isxdigit(static_cast<unsigned char>(text[3])) && std::isxdigit(static_cast<unsigned char>(text[4]))) {
    return std::string(1, static_cast<char>(std::stoi(text.substr(3, 2), nullptr, 16)));
  }
  if (decoder.byte_level) {
    std::string out;
    if (byte_level_decode(text, out)) return out;
  }
  return text;
}

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::from_json(std::string_view text, std::string_view name) {
  JsonLimits limits;
  limits.reject_duplicate_keys = false;
  const Json json = parse_json(text, name, limits);
  if (!json.is_object()) fail("{}: {} at the top, an object is wanted", name, json_kind(json));
  auto impl = std::make_unique<Impl>();
  const auto part = [&](const char* field) {
    const Json* found = find_field(json, field);
    return found == nullptr ? Json() : *found;
  };
  impl->normalizer = read_normalizer(part("normalizer"), fmt::format("{}: normalizer", name));
  impl->pre_tokenizer = read_pre_tokenizer(part("pre_tokenizer"), fmt::format("{}: pre_tokenizer", name));
  const Json* model = find_field(json, "model");
  if (model == nullptr) fail("{}: 'model' is missing", name);
  impl->model.emplace(*model, impl->pre_tokenizer.byte_level, fmt::format("{}: model", name));
  impl->decoder = read_decoder(part("decoder"), fmt::format("{}: decoder", name));
  read_post_processor(part("post_processor"), fmt::format("{}: post_processor", name), 0, impl->post);
  impl->added = read_added_tokens(json, *impl->model, name);

  impl->size = impl->model->tokens().size();
  for (size_t i = 0; i < impl->added.size(); ++i) {
    const AddedToken& token = impl->added[i];
    if (const auto [found, added] = impl->added_by_id.emplace(token.id, i); !added) {
      fail("{}: the added tokens '{}' and '{}' share the id {}", name, printable(impl->added[found->second].content),
           printable(token.content), token.id);
    }
    impl->size = std::max(impl->size, static_cast<size_t>(token.id) + 1);
    if (token.normalized) {
      AlignedText content(token.content, 0);
      if (impl->normalizer) impl->normalizer->apply(content);
      impl->normalized_matcher.add(content.text(), static_cast<int32_t>(i));
      impl->added_text.emplace_back(content.text());
    } else {
      impl->added_text.push_back(token.content);
      impl->raw_matcher.add(token.content, static_cast<int32_t>(i));
    }
  }
  impl->bytes.resize(impl->size);
  for (size_t id = 0; id < impl->size; ++id) impl->bytes[id] = impl->bytes_of(impl->token(static_cast<int32_t>(id)));
  for (const PostStep& step : impl->post) {
    for (const auto* side : {&step.before, &step.after}) {
      for (int32_t id : *side) {
        if (!impl->defined(id)) fail("{}: post_processor: the id {} has no token", name, id);
      }
    }
  }
  return Tokenizer(std::move(impl));
}

Tokenizer Tokenizer::from_file(const std::filesystem::path& path) { return from_json(read_file(path), path.string()); }

Tokenizer Tokenizer::from_directory(const std::filesystem::path& directory) {
  return from_file(directory / "tokenizer.json");
}

// Encodes a text that holds no added tokens of the raw kind.
void Tokenizer::Impl::encode_text(AlignedText text, AddedTokens which, bool offsets, Encoding& out,
                                  Matched& matched) const {
  if (normalizer) normalizer->apply(text);
  const std::vector<AddedPart> parts = split_added(text.text(), normalized_matcher, added, which);
  Pieces pieces;
  std::vector<WordToken> words;
  for (const AddedPart& part : parts) {
    if (part.index >= 0) {
      if (offsets) {
        out.byte_offsets.push_back(text.source(part.begin, part.end));
        matched.emplace(out.ids.size(), text.text().substr(part.begin, part.end - part.begin));
      }
      out.ids.push_back(added[static_cast<size_t>(part.index)].id);
      continue;
    }
    pieces.texts.clear();
    pieces.texts.push_back(parts.size() == 1 ? std::move(text) : text.slice(part.begin, part.end));
    pieces.pieces.assign(1, {0, 0, pieces.texts[0].text().size()});
    if (pre_tokenizer.splitter) pre_tokenizer.splitter->apply(pieces);
    for (const Piece& piece : pieces.pieces) {
      words.clear();
      model->encode_word(pieces.view(piece), words);
      size_t at = piece.begin;
      for (const WordToken& word : words) {
        out.ids.push_back(word.id);
        if (offsets) {
          // A model that drops unknown characters can only shorten a word, never leave it.
          const size_t end = std::min(at + word.size, piece.end);
          out.byte_offsets.push_back(at < end ? pieces.texts[piece.source].source(at, end) : Span{});
        }
        at += word.size;
      }
    }
  }
}

// Leaves spaces at either end of a token out of its range (ByteLevel's trim_offsets).
void Tokenizer::Impl::trim(const PostStep& step, const std::vector<int32_t>& ids, const Matched& matched,
                           std::vector<Span>& offsets) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto found = matched.find(i);
    const std::string_view text = found == matched.end() ? token(ids[i]) : std::string_view(found->second);
    size_t leading = 0, trailing = 0, total = 0;
    for (size_t at = 0; at < text.size(); ++total) {
      const char32_t c = next_code_point(text, at);
      if (c == byte_to_char(' ') || is_whitespace(c)) {
        if (leading == total) ++leading;
        ++trailing;
      } else {
        trailing = 0;
      }
    }
    Span& span = offsets[i];
    if (leading > 0) {
      // One space at the start is the prefix space, which is not in the input.
      if ((i == 0 || span.begin == 0) && step.add_prefix_space && leading == 1) leading = 0;
      span.begin = std::min(span.begin + leading, span.end);
    }
    if (trailing > 0 && span.end >= trailing) span.end = std::max(span.end - trailing, span.begin);
  }
}

Encoding Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  if (text.size() > kMaxInput) fail("a text of {} bytes, at most {} are accepted", text.size(), kMaxInput);
  std::string repaired;
  std::optional<InputRanges> input;
  if (!is_valid_utf8(text)) {
    if (options.offsets) input.emplace(text);
    repaired = to_valid_utf8(text);
    text = repaired;
  }
  Encoding out;
  out.ids.reserve(text.size() / 3 + 8);
  Matched matched;
  for (const AddedPart& part : split_added(text, impl_->raw_matcher, impl_->added, options.added_tokens)) {
    if (part.index >= 0) {
      if (options.offsets) {
        out.byte_offsets.push_back({part.begin, part.end});
        matched.emplace(out.ids.size(), text.substr(part.begin, part.end - part.begin));
      }
      out.ids.push_back(impl_->added[static_cast<size_t>(part.index)].id);
    } else {
      impl_->encode_text(AlignedText(text.substr(part.begin, part.end - part.begin), part.begin), options.added_tokens,
                         options.offsets, out, matched);
    }
  }
  if (options.offsets) {
    const CharCounter chars(text);
    out.char_offsets.reserve(out.byte_offsets.size());
    for (const Span& span : out.byte_offsets) out.char_offsets.push_back({chars(span.begin), chars(span.end)});
  }
  for (const PostStep& step : impl_->post) {
    if (step.trim && options.offsets) {
      impl_->trim(step, out.ids, matched, out.byte_offsets);
      impl_->trim(step, out.ids, matched, out.char_offsets);
    }
    if (!step.is_template || !options.add_special_tokens) continue;
    if (!step.before.empty()) {
      Matched shifted;
      for (auto& [place, match] : matched) shifted.emplace(place + step.before.size(), std::move(match));
      matched = std::move(shifted);
    }
    out.ids.insert(out.ids.begin(), step.before.begin(), step.before.end());
    out.ids.insert(out.ids.end(), step.after.begin(), step.after.end());
    if (options.offsets) {
      for (auto* offsets : {&out.byte_offsets, &out.char_offsets}) {
        offsets->insert(offsets->begin(), step.before.size(), Span{});
        offsets->insert(offsets->end(), step.after.size(), Span{});
      }
    }
  }
  if (input) {
    for (Span& span : out.byte_offsets) span = (*input)(span);
  }
  return out;
}

std::vector<int32_t> Tokenizer::encode_ids(std::string_view text, const EncodeOptions& options) const {
  return std::move(encode(text, options).ids);
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  if (impl_->decoder.only_byte_level) {
    std::string bytes;
    for (int32_t id : ids) {
      if (!skip_special_tokens || !is_special(id)) bytes += token_bytes(id);
    }
    return to_valid_utf8(bytes);
  }
  std::vector<std::string> tokens;
  tokens.reserve(ids.size());
  for (int32_t id : ids) {
    if (!impl_->defined(id) || (skip_special_tokens && is_special(id))) continue;
    tokens.emplace_back(impl_->token(id));
  }
  if (impl_->decoder.decoder) impl_->decoder.decoder->chain(tokens);
  std::string out;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0 && !impl_->decoder.decoder) out += ' ';
    out += tokens[i];
  }
  return out;
}

size_t Tokenizer::size() const { return impl_->size; }
bool Tokenizer::is_defined(int32_t id) const { return impl_->defined(id); }
bool Tokenizer::is_special(int32_t id) const {
  const AddedToken* token = impl_->added_token(id);
  return token != nullptr && token->special;
}
std::string_view Tokenizer::token(int32_t id) const { return impl_->token(id); }

std::optional<int32_t> Tokenizer::find(std::string_view token) const {
  for (const AddedToken& added : impl_->added) {
    if (added.content == token) return added.id;
  }
  const int32_t id = impl_->model->find(token);
  return id < 0 ? std::nullopt : std::optional(id);
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  if (id < 0 || static_cast<size_t>(id) >= impl_->bytes.size()) return {};
  return impl_->bytes[static_cast<size_t>(id)];
}

std::span<const AddedToken> Tokenizer::added_tokens() const { return impl_->added; }

Detokenizer::Detokenizer(const Tokenizer& tokenizer, bool skip_special_tokens)
    : tokenizer_(&tokenizer), skip_special_tokens_(skip_special_tokens) {}

std::string Detokenizer::push(int32_t id) {
  if (!tokenizer_->is_defined(id) || (skip_special_tokens_ && tokenizer_->is_special(id))) return "";
  std::string_view bytes = tokenizer_->token_bytes(id);
  const DecoderStage& decoder = tokenizer_->impl_->decoder;
  std::string spaced;
  if (first_) {
    std::string strip;
    append_utf8(strip, decoder.strip_content);
    for (size_t i = 0; i < decoder.strip_left && bytes.starts_with(strip); ++i) bytes.remove_prefix(strip.size());
  } else if (!decoder.decoder) {
    spaced = " ";
    spaced += bytes;
    bytes = spaced;
  }
  first_ = false;
  return stream_.append(bytes);
}

std::string Detokenizer::flush() { return stream_.flush(); }

}  // namespace fourfold::text
