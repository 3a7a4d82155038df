#include "text/bpe.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <queue>

#include "base/check.h"
#include "base/json.h"
#include "text/pipeline.h"
#include "text/unicode.h"

namespace fourfold::text {
namespace {

constexpr size_t kMaxTokenBytes = 1 << 16;
constexpr size_t kShortWord = 48;  // up to here a scan for the best pair beats a heap

uint64_t mix(uint64_t x) {
  x ^= x >> 32;
  x *= 0x9E3779B97F4A7C15ull;
  return x ^ (x >> 29);
}

uint64_t pair_key(int32_t left, int32_t right) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
}

// Recently seen short words, one table per thread, direct mapped. A slot belongs to the vocabulary whose serial it has.
struct WordCache {
  static constexpr size_t kSlots = 1 << 14;
  static constexpr size_t kMaxWord = 31;
  static constexpr size_t kMaxTokens = 8;
  struct Slot {
    uint64_t serial = 0;
    uint8_t size = 0;
    uint8_t count = 0;
    char word[kMaxWord];
    uint8_t sizes[kMaxTokens];
    int32_t ids[kMaxTokens];
  };
  std::unique_ptr<std::array<Slot, kSlots>> slots = std::make_unique<std::array<Slot, kSlots>>();
};

}  // namespace

Bpe::Bpe(const Json& model, bool byte_level, std::string_view name) : byte_level_(byte_level) {
  static std::atomic<uint64_t> next_serial{1};
  serial_ = next_serial++;
  if (!model.is_object()) fail("{}: 'model' must be an object", name);
  if (const Json* type = find_field(model, "type"); type != nullptr && *type != "BPE") {
    fail("{}: the model's type is {}, only \"BPE\" is supported", name, printable(type->dump()));
  }
  if (const Json* dropout = find_field(model, "dropout"); dropout != nullptr && *dropout != 0) {
    fail("{}: dropout {} would make the tokens random, null is wanted", name, printable(dropout->dump()));
  }
  ignore_merges_ = bool_field(model, "ignore_merges", false, name);
  byte_fallback_ = bool_field(model, "byte_fallback", false, name);
  fuse_unknown_ = bool_field(model, "fuse_unk", false, name);
  if (find_field(model, "continuing_subword_prefix")) prefix_ = string_field(model, "continuing_subword_prefix", name);
  if (find_field(model, "end_of_word_suffix")) suffix_ = string_field(model, "end_of_word_suffix", name);
  if (byte_level_ && (!prefix_.empty() || !suffix_.empty())) {
    fail("{}: a subword prefix or word suffix together with ByteLevel is not supported", name);
  }
  const Json* vocabulary = find_field(model, "vocab");
  if (vocabulary == nullptr || !vocabulary->is_object()) fail("{}: 'vocab' must be an object of token: id", name);
  read_vocabulary(*vocabulary, name);
  if (find_field(model, "unk_token")) {
    const std::string token = string_field(model, "unk_token", name);
    unknown_ = find(token);
    if (unknown_ < 0) fail("{}: unk_token '{}' is not in the vocabulary", name, printable(token));
  }
  const Json* merges = find_field(model, "merges");
  if (merges == nullptr || !merges->is_array()) fail("{}: 'merges' must be an array", name);
  read_merges(*merges, name);

  std::fill(std::begin(byte_ids_), std::end(byte_ids_), -1);
  if (byte_level_) {
    for (unsigned byte = 0; byte < 256; ++byte) {
      std::string token;
      append_utf8(token, byte_to_char(static_cast<unsigned char>(byte)));
      byte_ids_[byte] = find(token);
    }
    if (ignore_merges_) {
      for (size_t id = 0; id < tokens_.size(); ++id) {
        std::string bytes;
        if (defined_[id] && byte_level_decode(tokens_[id], bytes)) words_.emplace(bytes, static_cast<int32_t>(id));
      }
    }
  }
}

void Bpe::read_vocabulary(const Json& vocabulary, std::string_view name) {
  int64_t highest = -1;
  for (const auto& [token, id] : vocabulary.items()) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() > kMaxTokenId ||
        (id.is_number_unsigned() && id.get<uint64_t>() > kMaxTokenId)) {
      fail("{}: the token '{}' has the id {}, an integer from 0 to {} is wanted", name, printable(token),
           printable(id.dump()), kMaxTokenId);
    }
    if (token.size() > kMaxTokenBytes) fail("{}: a token of {} bytes, at most {}", name, token.size(), kMaxTokenBytes);
    highest = std::max(highest, id.get<int64_t>());
  }
  tokens_.resize(static_cast<size_t>(highest + 1));
  defined_.resize(static_cast<size_t>(highest + 1));
  for (const auto& [token, id] : vocabulary.items()) {
    const auto index = id.get<size_t>();
    if (defined_[index]) {
      fail("{}: the tokens '{}' and '{}' share the id {}", name, printable(tokens_[index]), printable(token), index);
    }
    tokens_[index] = token;
    defined_[index] = true;
  }
  ids_.reserve(vocabulary.size());
  for (size_t id = 0; id < tokens_.size(); ++id) {
    if (defined_[id]) ids_.emplace(tokens_[id], static_cast<int32_t>(id));
  }
}

void Bpe::read_merges(const Json& merges, std::string_view name) {
  if (merges.size() >= kNoRank / 2) fail("{}: {} merges are too many", name, merges.size());
  size_t slots = 16;
  while (slots < merges.size() * 2) slots *= 2;
  merges_.resize(slots);
  uint32_t rank = 0;
  for (const Json& merge : merges) {
    std::string_view left, right;
    if (merge.is_string()) {
      const std::string_view text = merge.get_ref<const std::string&>();
      if (text.starts_with("#version")) continue;
      const size_t space = text.find(' ');
      if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos) {
        fail("{}: merge {} is '{}', two tokens with one space between are wanted", name, rank, printable(text));
      }
      left = text.substr(0, space);
      right = text.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0].get_ref<const std::string&>();
      right = merge[1].get_ref<const std::string&>();
    } else {
      fail("{}: merge {} is {}, a string or a pair of strings is wanted", name, rank, json_kind(merge));
    }
    const int32_t left_id = find(left), right_id = find(right);
    if (left_id < 0 || right_id < 0) {
      fail("{}: merge {} names '{}', which is not in the vocabulary", name, rank,
           printable(left_id < 0 ? left : right));
    }
    std::string joined(left);
    joined += right.substr(right.starts_with(prefix_) ? prefix_.size() : 0);
    const int32_t id = find(joined);
    if (id < 0) fail("{}: merge {} makes '{}', which is not in the vocabulary", name, rank, printable(joined));
    const uint64_t key = pair_key(left_id, right_id);
    size_t slot = mix(key) & (slots - 1);
    while (merges_[slot].pair != kNoPair && merges_[slot].pair != key) slot = (slot + 1) & (slots - 1);
    merges_[slot] = {key, rank, id};
    ++rank;
  }
  merge_count_ = rank;
}

int32_t Bpe::find(std::string_view token) const {
  const auto found = ids_.find(token);
  return found == ids_.end() ? -1 : found->second;
}

const Bpe::Merge* Bpe::find_merge(int32_t left, int32_t right) const {
  const uint64_t key = pair_key(left, right);
  for (size_t slot = mix(key) & (merges_.size() - 1);; slot = (slot + 1) & (merges_.size() - 1)) {
    if (merges_[slot].pair == key) return &merges_[slot];
    if (merges_[slot].pair == kNoPair) return nullptr;
  }
}

void Bpe::split_symbols(std::string_view word, std::vector<Symbol>& symbols) const {
  if (word.size() > 0x7FFFFFFF) fail("a word of {} bytes is too long to tokenize", word.size());
  const auto add = [&](int32_t id, size_t size) { symbols.push_back({id, static_cast<uint32_t>(size), 0, 0}); };
  int32_t pending = -1;  // an unknown token that may still grow
  size_t pending_size = 0;
  for (size_t i = 0; i < word.size();) {
    const size_t size = byte_level_ ? 1 : utf8_length(static_cast<unsigned char>(word[i]));
    int32_t id = -1;
    std::string spelled;
    if (byte_level_) {
      id = byte_ids_[static_cast<unsigned char>(word[i])];
      if (id < 0) append_utf8(spelled, byte_to_char(static_cast<unsigned char>(word[i])));
    } else {
      if (i > 0) spelled += prefix_;
      spelled += word.substr(i, size);
      if (i + size >= word.size()) spelled += suffix_;
      id = find(spelled);
    }
    i += size;
    if (id >= 0) {
      if (pending >= 0) add(pending, pending_size);
      pending = -1;
      add(id, size);
      continue;
    }
    if (byte_fallback_) {
      int32_t bytes[64];
      size_t count = 0;
      for (; count < spelled.size() && count < 64; ++count) {
        bytes[count] = find(fmt::format("<0x{:02X}>", static_cast<unsigned char>(spelled[count])));
        if (bytes[count] < 0) break;
      }
      if (count == spelled.size()) {
        for (size_t k = 0; k < count; ++k) add(bytes[k], 1);
        continue;
      }
    }
    if (unknown_ >= 0) {
      if (pending >= 0 && fuse_unknown_) {
        pending_size += size;
      } else {
        if (pending >= 0) add(pending, pending_size);
        pending = unknown_;
        pending_size = size;
      }
    }
    // Without an unknown token the character is lost, as in `tokenizers`.
  }
  if (pending >= 0) add(pending, pending_size);
}

// Repeatedly joins the pair of lowest rank, the leftmost of equal ones.
void Bpe::merge_short(std::vector<Symbol>& symbols) const {
  const Merge* merges[kShortWord];  // of symbol i with symbol i + 1
  size_t count = symbols.size();
  for (size_t i = 0; i + 1 < count; ++i) merges[i] = find_merge(symbols[i].id, symbols[i + 1].id);
  while (count > 1) {
    size_t best = count;
    uint32_t best_rank = kNoRank;
    for (size_t i = 0; i + 1 < count; ++i) {
      if (merges[i] != nullptr && merges[i]->rank < best_rank) {
        best = i;
        best_rank = merges[i]->rank;
      }
    }
    if (best == count) break;
    symbols[best].id = merges[best]->id;
    symbols[best].size += symbols[best + 1].size;
    for (size_t i = best + 1; i + 1 < count; ++i) {
      symbols[i] = symbols[i + 1];
      if (i + 2 < count) merges[i] = merges[i + 1];
    }
    --count;
    if (best > 0) merges[best - 1] = find_merge(symbols[best - 1].id, symbols[best].id);
    if (best + 1 < count) merges[best] = find_merge(symbols[best].id, symbols[best + 1].id);
  }
  symbols.resize(count);
}

void Bpe::merge_long(std::vector<Symbol>& symbols) const {
  struct Entry {
    uint32_t rank;
    int32_t position;
    uint64_t pair;
    int32_t id;
    bool operator<(const Entry& other) const {
      return rank != other.rank ? rank > other.rank : position > other.position;
    }
  };
  const auto last = static_cast<int32_t>(symbols.size()) - 1;
  std::vector<Entry> entries;
  entries.reserve(symbols.size());
  const auto entry = [&](int32_t position, std::vector<Entry>* start, std::priority_queue<Entry>* queue) {
    const Symbol& symbol = symbols[static_cast<size_t>(position)];
    const Symbol& right = symbols[static_cast<size_t>(symbol.next)];
    const Merge* merge = find_merge(symbol.id, right.id);
    if (merge == nullptr) return;
    const Entry made{merge->rank, position, merge->pair, merge->id};
    if (start != nullptr) start->push_back(made);
    if (queue != nullptr) queue->push(made);
  };
  for (int32_t i = 0; i <= last; ++i) {
    symbols[static_cast<size_t>(i)].previous = i - 1;
    symbols[static_cast<size_t>(i)].next = i < last ? i + 1 : -1;
  }
  for (int32_t i = 0; i < last; ++i) entry(i, &entries, nullptr);
  std::priority_queue<Entry> queue(std::less<Entry>(), std::move(entries));
  while (!queue.empty()) {
    const Entry top = queue.top();
    queue.pop();
    Symbol& symbol = symbols[static_cast<size_t>(top.position)];
    if (symbol.size == 0 || symbol.next < 0) continue;
    Symbol& right = symbols[static_cast<size_t>(symbol.next)];
    if (pair_key(symbol.id, right.id) != top.pair) continue;  // an entry of before an earlier merge
    symbol.id = top.id;
    symbol.size += right.size;
    symbol.next = right.next;
    right.size = 0;
    if (symbol.next >= 0) symbols[static_cast<size_t>(symbol.next)].previous = top.position;
    if (symbol.previous >= 0) entry(symbol.previous, nullptr, &queue);
    if (symbol.next >= 0) entry(top.position, nullptr, &queue);
  }
  std::erase_if(symbols, [](const Symbol& symbol) { return symbol.size == 0; });
}

void Bpe::merge_word(std::string_view word, std::vector<WordToken>& out) const {
  thread_local std::vector<Symbol> symbols;
  symbols.clear();
  split_symbols(word, symbols);
  if (symbols.size() <= kShortWord) {
    merge_short(symbols);
  } else {
    merge_long(symbols);
  }
  for (const Symbol& symbol : symbols) out.push_back({symbol.id, symbol.size});
  if (symbols.capacity() > 1 << 20) symbols = {};
}

void Bpe::encode_word(std::string_view word, std::vector<WordToken>& out) const {
  if (word.empty()) return;
  if (ignore_merges_) {
    int32_t id = -1;
    if (byte_level_) {
      const auto found = words_.find(std::string(word));
      if (found != words_.end()) id = found->second;
    } else {
      id = find(word);
    }
    if (id >= 0) {
      out.push_back({id, static_cast<uint32_t>(word.size())});
      return;
    }
  }
  if (word.size() > WordCache::kMaxWord) return merge_word(word, out);
  thread_local WordCache cache;
  const uint64_t hash = std::hash<std::string_view>()(word) ^ mix(serial_);
  WordCache::Slot& slot = (*cache.slots)[hash & (WordCache::kSlots - 1)];
  if (slot.serial == serial_ && slot.size == word.size() && std::memcmp(slot.word, word.data(), word.size()) == 0) {
    for (size_t i = 0; i < slot.count; ++i) out.push_back({slot.ids[i], slot.sizes[i]});
    return;
  }
  const size_t before = out.size();
  merge_word(word, out);
  const size_t count = out.size() - before;
  if (count > WordCache::kMaxTokens) return;
  slot.serial = serial_;
  slot.size = static_cast<uint8_t>(word.size());
  slot.count = static_cast<uint8_t>(count);
  std::memcpy(slot.word, word.data(), word.size());
  for (size_t i = 0; i < count; ++i) {
    slot.ids[i] = out[before + i].id;
    slot.sizes[i] = static_cast<uint8_t>(out[before + i].size);
  }
}

}  // namespace fourfold::text
