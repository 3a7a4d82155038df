#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "structure/compiler.h"
#include "structure/grammar_text.h"

namespace fourfold::structure {
namespace {

constexpr size_t kMaxBytes = 64 << 10, kMaxDepth = 64;
constexpr int64_t kMaxRepeat = 1000, kMaxWeight = 16'000;

bool is_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' || c == '.';
}

}  // namespace

// One pass over the characters, with a stack of groups: how much each holds, and how much the last element in it.
void check_grammar(const std::string& grammar) {
  if (grammar.size() > kMaxBytes) {
    throw Rejected("", fmt::format("has {} bytes, at most {} are taken", grammar.size(), kMaxBytes));
  }
  struct Group {
    int64_t sum = 0, last = 0;
  };
  std::vector<Group> groups(1);
  const auto element = [&](int64_t weight) {
    groups.back().last = weight;
    groups.back().sum += weight;
  };
  const auto heavier = [&](int64_t times) {
    Group& group = groups.back();
    group.sum += group.last * (times - 1);
    if (group.sum > kMaxWeight) throw Rejected("", "repeats too much");
  };
  const auto wrong = [](size_t at, const std::string& what) {
    throw Rejected("", fmt::format("has {} at byte {}", what, at));
  };
  for (size_t i = 0; i < grammar.size();) {
    const char c = grammar[i];
    if (c == '#') {
      i = std::min(grammar.find('\n', i), grammar.size());
    } else if (c == '"' || c == '[') {
      const size_t begin = i++;
      while (i < grammar.size() && grammar[i] != (c == '"' ? '"' : ']')) i += grammar[i] == '\\' ? 2 : 1;
      if (i >= grammar.size()) wrong(begin, c == '"' ? "an unclosed text" : "an unclosed class");
      ++i;
      element(c == '"' ? static_cast<int64_t>(i - begin) : 1);
    } else if (c == '(') {
      if (i + 1 < grammar.size() && grammar[i + 1] == '=') wrong(i, "a look ahead, which is not supported,");
      if (i > 0 && is_name(grammar[i - 1])) wrong(i, "a macro, which is not supported,");
      groups.emplace_back();
      if (groups.size() > kMaxDepth) wrong(i, fmt::format("more than {} nested groups", kMaxDepth));
      ++i;
    } else if (c == ')') {
      if (groups.size() == 1) wrong(i, "an unopened )");
      const int64_t weight = groups.back().sum;
      groups.pop_back();
      element(weight);
      ++i;
    } else if (c == '{') {
      const size_t end = grammar.find('}', i);
      int64_t most = 0, number = 0;
      for (size_t k = i + 1; k < std::min(end, grammar.size()); ++k) {
        const char d = grammar[k];
        if (d >= '0' && d <= '9') {
          number = std::min<int64_t>(number * 10 + (d - '0'), kMaxRepeat + 1);
          most = std::max(most, number);
        } else if (d == ',' || d == ' ') {
          number = 0;
        } else {
          wrong(k, "an unknown repetition");
        }
      }
      if (end == std::string::npos) wrong(i, "an unclosed {");
      if (most > kMaxRepeat) wrong(i, fmt::format("a repetition of more than {}", kMaxRepeat));
      heavier(std::max<int64_t>(1, std::min<int64_t>(most, 256)));
      i = end + 1;
    } else if (is_name(c)) {
      while (i < grammar.size() && is_name(grammar[i])) ++i;
      if (i < grammar.size() && grammar[i] == '[') wrong(i, "options of a rule, which are not supported,");
      element(1);
    } else {
      ++i;
    }
    if (groups.back().sum > kMaxWeight) throw Rejected("", "is too large");
  }
  if (groups.size() > 1) throw Rejected("", "has an unclosed (");
}

}  // namespace fourfold::structure
