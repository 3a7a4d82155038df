#include "structure/grammar_text.h"

#include <algorithm>
#include <limits>

#include "text/unicode.h"

namespace fourfold::structure {
namespace {

constexpr uint32_t kLast = 0x10FFFF, kSurrogates = 0xD800, kAfterSurrogates = 0xE000;
constexpr int64_t kMuch = std::numeric_limits<int64_t>::max() / 4;

int64_t plus(int64_t a, int64_t b) { return a > kMuch - b ? kMuch : a + b; }
int64_t times(int64_t a, int64_t b) { return b != 0 && a > kMuch / b ? kMuch : a * b; }

bool is_plain(uint32_t c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == ' ';
}

std::string escaped(uint32_t c) {
  if (is_plain(c)) return std::string(1, static_cast<char>(c));
  return fmt::format("\\U{:08X}", c);
}

}  // namespace

CharSet::CharSet(std::initializer_list<std::pair<uint32_t, uint32_t>> ranges) {
  for (const auto& [first, last] : ranges) add(first, last);
}

void CharSet::add(uint32_t first, uint32_t last) {
  last = std::min(last, kLast);
  if (first > last) return;
  if (first < kAfterSurrogates && last >= kSurrogates) {
    if (first < kSurrogates) add(first, kSurrogates - 1);
    add(kAfterSurrogates, last);
    return;
  }
  ranges_.emplace_back(first, last);
  std::sort(ranges_.begin(), ranges_.end());
  size_t kept = 0;
  for (size_t i = 1; i < ranges_.size(); ++i) {
    if (ranges_[i].first <= ranges_[kept].second + 1) {
      ranges_[kept].second = std::max(ranges_[kept].second, ranges_[i].second);
    } else {
      ranges_[++kept] = ranges_[i];
    }
  }
  ranges_.resize(kept + 1);
}

void CharSet::add(const CharSet& other) {
  for (const auto& [first, last] : other.ranges_) add(first, last);
}

CharSet CharSet::complement() const {
  CharSet out;
  uint32_t next = 0;
  for (const auto& [first, last] : ranges_) {
    if (first > next) out.add(next, first - 1);
    next = last + 1;
  }
  out.add(next, kLast);
  return out;
}

CharSet CharSet::minus(const CharSet& other) const {
  CharSet out = complement();
  out.add(other);
  return out.complement();
}

bool CharSet::contains(uint32_t c) const {
  return std::any_of(ranges_.begin(), ranges_.end(),
                     [&](const auto& range) { return c >= range.first && c <= range.second; });
}

std::string CharSet::text() const {
  std::string out = "[";
  for (const auto& [first, last] : ranges_) {
    out += escaped(first);
    if (last > first) out += "-" + escaped(last);
  }
  return out + "]";
}

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (size_t at = 0; at < text.size();) out += escaped(text::next_code_point(text, at));
  return out + "\"";
}

Part literal(std::string_view text) {
  const auto characters = std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
  return {quoted(text), std::max<int64_t>(1, characters), characters, characters};
}

Part one_of(const CharSet& set) {
  FF_ASSERT(!set.empty());
  return {set.text(), 1, 1, 1};
}

Part sequence(const std::vector<Part>& parts) {
  if (parts.size() == 1) return parts.front();
  Part out{"(", 0, 0, 0};
  for (const Part& part : parts) {
    if (out.text.size() > 1) out.text += " ";
    out.text += part.text;
    out.weight = plus(out.weight, part.weight);
    out.shortest = plus(out.shortest, part.shortest);
    out.longest = out.longest < 0 || part.longest < 0 ? -1 : plus(out.longest, part.longest);
  }
  if (parts.empty()) out.text += "\"\"";
  out.text += ")";
  return out;
}

Part choice(const std::vector<Part>& parts) {
  FF_ASSERT(!parts.empty());
  if (parts.size() == 1) return parts.front();
  Part out{"(", 0, kMuch, 0};
  for (const Part& part : parts) {
    if (out.text.size() > 1) out.text += " | ";
    out.text += part.text;
    out.weight = plus(out.weight, part.weight);
    out.shortest = std::min(out.shortest, part.shortest);
    out.longest = out.longest < 0 || part.longest < 0 ? -1 : std::max(out.longest, part.longest);
  }
  out.text += ")";
  return out;
}

Part repeated(const Part& part, int64_t least, int64_t most) {
  FF_ASSERT(least >= 0 && (most < 0 || most >= least));
  if (least == 1 && most == 1) return part;
  Part out;
  out.text = "(" + part.text;
  if (most < 0 && least <= 1) {
    out.text += least == 0 ? "*)" : "+)";
  } else if (least == 0 && most == 1) {
    out.text += "?)";
  } else {
    out.text += most < 0 ? fmt::format("{{{},}})", least) : fmt::format("{{{},{}}})", least, most);
  }
  // The compiler writes up to this many of them one behind the other, and counts the rest.
  constexpr int64_t kUnrolled = 256;
  out.weight = plus(times(part.weight, std::min(kUnrolled, std::max<int64_t>(1, std::max(least, most)))), 1);
  out.shortest = times(part.shortest, least);
  out.longest = most < 0 || part.longest < 0 ? -1 : times(part.longest, most);
  if (part.longest == 0) out.longest = 0;
  return out;
}

Part optional(const Part& part) { return repeated(part, 0, 1); }

std::string GrammarText::declare() {
  if (++rules_ > limits_.max_rules) {
    throw Rejected("", fmt::format("needs more than {} rules of grammar", limits_.max_rules));
  }
  return fmt::format("r{}", rules_);
}

void GrammarText::define(const std::string& name, const Part& body) {
  weight_ = plus(weight_, body.weight);
  text_ += name + " ::= " + body.text + "\n";
  if (weight_ > limits_.max_weight || text_.size() > limits_.max_bytes) {
    throw Rejected("", fmt::format("is too large: at most {} states and {} bytes of grammar are taken",
                                   limits_.max_weight, limits_.max_bytes));
  }
}

Part GrammarText::rule(const Part& body) {
  const std::string name = declare();
  define(name, body);
  return {name, 1, body.shortest, body.longest};
}

Part GrammarText::cut(const Part& body, int64_t most) {
  const std::string name = declare();
  define(fmt::format("{}[max_chars={}]", name, most), body);
  return {name, 1, body.shortest, most};
}

std::string GrammarText::finish(const Part& root) {
  define("root", root);
  return std::move(text_);
}

}  // namespace fourfold::structure
