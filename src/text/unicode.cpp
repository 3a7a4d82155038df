#include "text/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <unordered_map>

namespace fourfold::text {

Utf8Step utf8_step(std::string_view text, size_t position) {
  using Kind = Utf8Step::Kind;
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(position);
  if (lead < 0x80) return {Kind::kValid, lead, 1};
  if (lead < 0xC2 || lead > 0xF4) return {Kind::kInvalid, kReplacement, 1};
  const size_t length = utf8_length(lead);
  // The second byte's range excludes overlong forms, surrogates and values above U+10FFFF.
  unsigned char low = 0x80, high = 0xBF;
  if (lead == 0xE0) low = 0xA0;
  if (lead == 0xED) high = 0x9F;
  if (lead == 0xF0) low = 0x90;
  if (lead == 0xF4) high = 0x8F;
  char32_t code_point = lead & (0xFF >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if (position + i >= text.size()) return {Kind::kTruncated, kReplacement, i};
    const unsigned char next = byte(position + i);
    if (next < low || next > high) return {Kind::kInvalid, kReplacement, i};
    low = 0x80;
    high = 0xBF;
    code_point = (code_point << 6) | (next & 0x3F);
  }
  return {Kind::kValid, code_point, length};
}

char32_t next_code_point(std::string_view valid, size_t& position) {
  const auto lead = static_cast<unsigned char>(valid[position]);
  if (lead < 0x80) {
    ++position;
    return lead;
  }
  const size_t length = utf8_length(lead);
  char32_t code_point = lead & (0xFF >> (length + 1));
  for (size_t i = 1; i < length && position + i < valid.size(); ++i) {
    code_point = (code_point << 6) | (static_cast<unsigned char>(valid[position + i]) & 0x3F);
  }
  position = std::min(position + length, valid.size());
  return code_point;
}

void append_utf8(std::string& out, char32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += static_cast<char>(0xC0 | (c >> 6));
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xE0 | (c >> 12));
    out += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | (c >> 18));
    out += static_cast<char>(0x80 | ((c >> 12) & 0x3F));
    out += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  }
}

std::u32string to_utf32(std::string_view valid) {
  std::u32string out;
  out.reserve(valid.size());
  for (size_t i = 0; i < valid.size();) out += next_code_point(valid, i);
  return out;
}

size_t count_code_points(std::string_view valid) {
  return static_cast<size_t>(std::count_if(valid.begin(), valid.end(), [](char c) { return !is_continuation(c); }));
}

bool is_valid_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    if (static_cast<unsigned char>(text[i]) < 0x80) {
      ++i;
      continue;
    }
    const Utf8Step step = utf8_step(text, i);
    if (step.kind != Utf8Step::Kind::kValid) return false;
    i += step.size;
  }
  return true;
}

std::string to_valid_utf8(std::string_view text) {
  if (is_valid_utf8(text)) return std::string(text);
  Utf8Stream stream;
  std::string out = stream.append(text);
  out += stream.flush();
  return out;
}

std::vector<Replaced> replaced_utf8(std::string_view text) {
  std::vector<Replaced> replaced;
  size_t position = 0;  // in the repaired text
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = utf8_step(text, i);
    if (step.kind == Utf8Step::Kind::kValid) {
      position += step.size;
      i += step.size;
      continue;
    }
    const size_t size = step.kind == Utf8Step::Kind::kTruncated ? text.size() - i : step.size;
    replaced.push_back({position, size});
    position += kReplacementBytes;
    i += size;
  }
  return replaced;
}

std::string Utf8Stream::append(std::string_view bytes) {
  std::string joined;
  if (!tail_.empty()) {
    joined = std::move(tail_);
    joined += bytes;
    bytes = joined;
    tail_.clear();
  }
  std::string out;
  out.reserve(bytes.size());
  for (size_t i = 0; i < bytes.size();) {
    const Utf8Step step = utf8_step(bytes, i);
    if (step.kind == Utf8Step::Kind::kTruncated) {
      tail_ = bytes.substr(i);
      break;
    }
    if (step.kind == Utf8Step::Kind::kValid) {
      out.append(bytes.substr(i, step.size));
    } else {
      append_utf8(out, kReplacement);
    }
    i += step.size;
  }
  return out;
}

std::string Utf8Stream::flush() {
  std::string out;
  if (!tail_.empty()) append_utf8(out, kReplacement);
  tail_.clear();
  return out;
}

bool is_whitespace(char32_t c) {
  return c == ' ' || (c >= 0x09 && c <= 0x0D) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

namespace {

utf8proc_category_t category(char32_t c) { return utf8proc_category(static_cast<utf8proc_int32_t>(c)); }

}  // namespace

bool is_numeric(char32_t c) {
  if (c < 0x80) return c >= '0' && c <= '9';
  const auto kind = category(c);
  return kind == UTF8PROC_CATEGORY_ND || kind == UTF8PROC_CATEGORY_NL || kind == UTF8PROC_CATEGORY_NO;
}

bool is_word(char32_t c) {
  if (c < 0x80) return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_';
  switch (category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      break;
  }
  // Other_Alphabetic outside L, M and N (circled and squared letters), and Join_Control.
  return (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
         (c >= 0x1F170 && c <= 0x1F189) || c == 0x200C || c == 0x200D;
}

char32_t to_lower(char32_t c) { return static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))); }
char32_t to_upper(char32_t c) { return static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c))); }

namespace {

// Unicode Standard, chapter 3.12: Hangul syllables are composed by arithmetic.
constexpr char32_t kSBase = 0xAC00, kLBase = 0x1100, kVBase = 0x1161, kTBase = 0x11A7;
constexpr char32_t kLCount = 19, kVCount = 21, kTCount = 28, kSCount = kLCount * kVCount * kTCount;

int combining_class(char32_t c) {
  if (c < 0x300) return 0;
  return utf8proc_get_property(static_cast<utf8proc_int32_t>(c))->combining_class;
}

// The full decomposition of one character; returns the number of code points written.
size_t decompose(char32_t c, bool compatibility, utf8proc_int32_t* out, size_t capacity) {
  int boundary = 0;
  const int options = UTF8PROC_DECOMPOSE | (compatibility ? UTF8PROC_COMPAT : 0);
  const auto written =
      utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), out, static_cast<utf8proc_ssize_t>(capacity),
                              static_cast<utf8proc_option_t>(options), &boundary);
  if (written < 1 || static_cast<size_t>(written) > capacity) {
    out[0] = static_cast<utf8proc_int32_t>(c);
    return 1;
  }
  return static_cast<size_t>(written);
}

constexpr size_t kMaxDecomposition = 32;  // the longest (U+FDFA, compatibility) has 18

// Primary composites: the pairs that NFC joins, and the characters that can be the second of a pair. Built once from
// utf8proc's decompositions, by asking it to compose each of them again (which knows the exclusions).
struct Compositions {
  std::unordered_map<uint64_t, char32_t> pairs;
  std::vector<bool> second;  // by code point
  std::vector<bool> changes_in_nfc;
  static constexpr char32_t kEnd = 0x30000;  // no canonical decompositions beyond the CJK supplement

  Compositions() : second(kEnd), changes_in_nfc(kEnd) {
    for (char32_t c = 0xC0; c < kEnd; ++c) {
      if (c >= kSBase && c < kSBase + kSCount) continue;
      const auto* property = utf8proc_get_property(static_cast<utf8proc_int32_t>(c));
      if (property->decomp_seqindex == UINT16_MAX || property->decomp_type != 0) continue;
      utf8proc_int32_t buffer[kMaxDecomposition];
      const size_t length = decompose(c, false, buffer, kMaxDecomposition);
      if (length == 1) {
        changes_in_nfc[c] = true;  // a singleton never comes back
        continue;
      }
      const auto last = static_cast<char32_t>(buffer[length - 1]);
      // In place, on a copy: everything but the last code point, composed.
      utf8proc_int32_t head[kMaxDecomposition + 1];
      std::copy(buffer, buffer + length - 1, head);
      const auto compose = static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE);
      const auto head_length = utf8proc_normalize_utf32(head, static_cast<utf8proc_ssize_t>(length - 1), compose);
      utf8proc_int32_t whole[kMaxDecomposition + 1];
      std::copy(buffer, buffer + length, whole);
      const auto whole_length = utf8proc_normalize_utf32(whole, static_cast<utf8proc_ssize_t>(length), compose);
      if (head_length == 1 && whole_length == 1 && static_cast<char32_t>(whole[0]) == c) {
        pairs.emplace(key(static_cast<char32_t>(head[0]), last), c);
        second[last] = true;
      } else {
        changes_in_nfc[c] = true;
      }
    }
    for (char32_t v = kVBase; v < kVBase + kVCount; ++v) second[v] = true;
    for (char32_t t = kTBase + 1; t < kTBase + kTCount; ++t) second[t] = true;
  }

  static uint64_t key(char32_t a, char32_t b) { return (static_cast<uint64_t>(a) << 32) | b; }

  // Zero when the two do not compose.
  char32_t compose(char32_t a, char32_t b) const {
    if (a >= kLBase && a < kLBase + kLCount && b >= kVBase && b < kVBase + kVCount) {
      return kSBase + ((a - kLBase) * kVCount + (b - kVBase)) * kTCount;
    }
    if (a >= kSBase && a < kSBase + kSCount && (a - kSBase) % kTCount == 0 && b > kTBase && b < kTBase + kTCount) {
      return a + (b - kTBase);
    }
    const auto found = pairs.find(key(a, b));
    return found == pairs.end() ? 0 : found->second;
  }
};

const Compositions& compositions() {
  static const Compositions instance;
  return instance;
}

// Whether the character stays as it is whatever surrounds it, and nothing composes with it from the left.
bool is_stable(char32_t c, NormalForm form) {
  if (c < 0x80) return true;
  if (c < 0x300 && form == NormalForm::kNfc) return true;
  const auto* property = utf8proc_get_property(static_cast<utf8proc_int32_t>(c));
  if (property->combining_class != 0) return false;
  const bool hangul = c >= kSBase && c < kSBase + kSCount;
  const bool decomposes = hangul || property->decomp_seqindex != UINT16_MAX;
  switch (form) {
    case NormalForm::kNfd:
      return !hangul && (!decomposes || property->decomp_type != 0);
    case NormalForm::kNfkd:
      return !decomposes;
    case NormalForm::kNfc:
    case NormalForm::kNfkc: {
      if (form == NormalForm::kNfkc && decomposes && !hangul) {
        // Its own decomposition or that of a part (U+1E9B) is a compatibility one.
        utf8proc_int32_t canonical[kMaxDecomposition], full[kMaxDecomposition];
        const size_t length = decompose(c, false, canonical, kMaxDecomposition);
        if (decompose(c, true, full, kMaxDecomposition) != length) return false;
        if (!std::equal(canonical, canonical + length, full)) return false;
      }
      if (c >= Compositions::kEnd) return true;
      const Compositions& table = compositions();
      if (table.second[c]) return false;
      return hangul || !decomposes || !table.changes_in_nfc[c];
    }
  }
  return false;
}

struct Item {
  char32_t c;
  int32_t change;
  int ccc;
};

// The canonical composition algorithm over one segment that starts with a starter where there is one.
void compose_segment(const std::vector<Item>& items, std::vector<CharChange>& out) {
  const Compositions& table = compositions();
  bool have = false;
  CharChange composee{};
  int last_class = -1;  // -1: nothing stands between the composee and here
  std::vector<CharChange> waiting;
  for (const Item& item : items) {
    if (!have) {
      if (item.ccc != 0) {
        out.push_back({item.c, item.change});
        continue;
      }
      composee = {item.c, item.change};
      have = true;
      continue;
    }
    const bool blocked = last_class >= 0 && last_class >= item.ccc;
    if (const char32_t joined = blocked ? 0 : table.compose(composee.code_point, item.c); joined != 0) {
      composee = {joined, composee.change + item.change - 1};
      continue;
    }
    if (item.ccc == 0) {
      out.push_back(composee);
      out.insert(out.end(), waiting.begin(), waiting.end());
      waiting.clear();
      composee = {item.c, item.change};
      last_class = -1;
      continue;
    }
    waiting.push_back({item.c, item.change});
    last_class = item.ccc;
  }
  if (have) out.push_back(composee);
  out.insert(out.end(), waiting.begin(), waiting.end());
}

}  // namespace

bool normalize(std::string_view valid, NormalForm form, std::vector<CharChange>& out) {
  const bool compatibility = form == NormalForm::kNfkc || form == NormalForm::kNfkd;
  const bool compose = form == NormalForm::kNfc || form == NormalForm::kNfkc;
  size_t first_unstable = valid.size();
  for (size_t i = 0; i < valid.size();) {
    if (static_cast<unsigned char>(valid[i]) < 0x80) {
      ++i;
      continue;
    }
    const size_t at = i;
    if (!is_stable(next_code_point(valid, i), form)) {
      first_unstable = at;
      break;
    }
  }
  if (first_unstable == valid.size()) return false;

  const size_t before = out.size();
  bool changed = false;
  std::vector<Item> items;
  std::vector<char32_t> source;
  size_t i = 0;
  while (i < valid.size()) {
    // A segment: one stable character and the unstable ones after it.
    source.clear();
    source.push_back(next_code_point(valid, i));
    bool stable = is_stable(source[0], form);
    while (i < valid.size()) {
      size_t next = i;
      const char32_t c = next_code_point(valid, next);
      if (is_stable(c, form)) break;
      stable = false;
      source.push_back(c);
      i = next;
    }
    if (stable) {
      out.push_back({source[0], 0});
      continue;
    }
    items.clear();
    for (char32_t c : source) {
      utf8proc_int32_t buffer[kMaxDecomposition];
      const size_t length = decompose(c, compatibility, buffer, kMaxDecomposition);
      for (size_t k = 0; k < length; ++k) {
        const auto part = static_cast<char32_t>(buffer[k]);
        items.push_back({part, k == 0 ? 0 : 1, combining_class(part)});
      }
    }
    // Canonical ordering: each run of non-starters, stably by combining class.
    for (auto begin = items.begin(); begin != items.end();) {
      if (begin->ccc == 0) {
        ++begin;
        continue;
      }
      const auto end = std::find_if(begin, items.end(), [](const Item& item) { return item.ccc == 0; });
      std::stable_sort(begin, end, [](const Item& a, const Item& b) { return a.ccc < b.ccc; });
      begin = end;
    }
    const size_t segment = out.size();
    if (compose) {
      compose_segment(items, out);
    } else {
      for (const Item& item : items) out.push_back({item.c, item.change});
    }
    changed |= out.size() - segment != source.size();
    for (size_t k = 0; !changed && k < source.size(); ++k) changed |= out[segment + k].code_point != source[k];
  }
  if (!changed) out.resize(before);
  return changed;
}

}  // namespace fourfold::text
