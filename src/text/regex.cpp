#include "text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <chrono>

#include "base/check.h"
#include "text/unicode.h"

namespace fourfold::text {
namespace {

constexpr size_t kMaxPattern = 64 << 10;

// Class contents, usable inside [...]; \h and \v of PCRE2 are not the same sets.
constexpr std::string_view kSpace =
    "\\x09-\\x0d\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";
constexpr std::string_view kNotSpace =
    "\\x00-\\x08\\x0e-\\x1f\\x21-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}\\x{1681}-\\x{1fff}\\x{200b}-\\x{2027}"
    "\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}\\x{3001}-\\x{10ffff}";
constexpr std::string_view kWord =
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{24b6}-\\x{24e9}\\x{1f130}-\\x{1f149}\\x{1f150}-\\x{1f169}"
    "\\x{1f170}-\\x{1f189}";

// Copies a pattern, replacing what PCRE2 reads differently from Oniguruma.
class Translator {
 public:
  Translator(std::string_view in, std::string_view name) : in_(in), name_(name) {}

  std::string run() {
    while (at_ < in_.size()) {
      const char c = in_[at_];
      switch (c) {
        case '\\':
          atom_ = out_.size();
          escape(false);
          break;
        case '[':
          atom_ = out_.size();
          char_class();
          break;
        case '(':
          open_group();
          break;
        case ')':
          if (groups_.empty()) fail("{}: unmatched ')' in the pattern '{}'", name_, printable(in_, 120));
          atom_ = groups_.back();
          groups_.pop_back();
          copy(1);
          break;
        case '{':
          braces();
          break;
        case '*':
        case '+':
        case '?':
        case '|':
          copy(1);
          break;
        default:
          atom_ = out_.size();
          copy(utf8_length(static_cast<unsigned char>(c)));
      }
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void unsupported(std::string_view what) const {
    fail("{}: {} in the pattern '{}' at byte {} is not supported", name_, what, printable(in_, 120), at_);
  }

  void copy(size_t n) {
    out_.append(in_.substr(at_, n));
    at_ += n;
  }

  void open_group() {
    groups_.push_back(out_.size());
    const std::string_view rest = in_.substr(at_);
    if (rest.starts_with("(*")) unsupported("a verb '(*'");
    if (rest.starts_with("(?")) {
      // Option letters: Ruby's m means "dot matches newline", which is s in PCRE2.
      size_t i = 2;
      while (i < rest.size() && (std::isalpha(static_cast<unsigned char>(rest[i])) || rest[i] == '-')) ++i;
      const bool options = i > 2 && i < rest.size() && (rest[i] == ':' || rest[i] == ')');
      if (options) {
        for (size_t k = 2; k < i; ++k) {
          if (rest[k] != 'i' && rest[k] != '-') unsupported("a group option other than (?i)");
        }
        if (rest[i] == ')') {
          groups_.pop_back();
          copy(i + 1);
        } else {
          copy(i + 1);
        }
        return;
      }
      for (std::string_view known : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>"}) {
        if (rest.starts_with(known)) {
          copy(known.size());
          return;
        }
      }
      unsupported("this kind of group");
    }
    copy(1);
  }

  // "{n,m}", perhaps followed by '+', which Ruby reads as a second greedy quantifier.
  void braces() {
    size_t i = at_ + 1;
    while (i < in_.size() && (std::isdigit(static_cast<unsigned char>(in_[i])) || in_[i] == ',')) ++i;
    if (i == at_ + 1 || i >= in_.size() || in_[i] != '}') {
      atom_ = out_.size();
      out_ += "\\{";
      ++at_;
      return;
    }
    // Ruby reads {,m} as {0,m}.
    out_ += in_[at_ + 1] == ',' ? "{0" : "{";
    out_ += in_.substr(at_ + 1, i - at_);
    at_ = i + 1;
    if (at_ < in_.size() && in_[at_] == '+') {
      out_.insert(atom_, "(?:");
      out_ += ")+";
      ++at_;
    }
  }

  void escape(bool in_class) {
    if (at_ + 1 >= in_.size()) fail("{}: the pattern '{}' ends with a backslash", name_, printable(in_, 120));
    const char c = in_[at_ + 1];
    const auto put = [&](std::string_view set, bool negated) {
      if (!in_class) out_ += negated ? "[^" : "[";
      out_ += set;
      if (!in_class) out_ += ']';
      at_ += 2;
    };
    switch (c) {
      case 's':
        return put(kSpace, false);
      case 'S':
        return put(kNotSpace, false);
      case 'w':
        return put(kWord, false);
      case 'W':
        if (in_class) unsupported("'\\W' inside a class");
        return put(kWord, true);
      case 'h':
        return put("0-9a-fA-F", false);
      case 'H':
        if (in_class) unsupported("'\\H' inside a class");
        return put("0-9a-fA-F", true);
      case 'd':
        return put("\\p{Nd}", false);
      case 'D':
        return put("\\P{Nd}", false);
      case 'p':
      case 'P': {
        // The whole of \p{...} or \p{^...}.
        const size_t end = in_.find('}', at_);
        if (in_.substr(at_ + 2, 1) != "{" || end == std::string_view::npos) unsupported("'\\p' without braces");
        return copy(end + 1 - at_);
      }
      case 'x':
      case 'u': {
        // \xHH, \x{H...}, \uHHHH
        size_t digits_at = at_ + 2;
        size_t digits = c == 'u' ? 4 : 2;
        if (c == 'x' && in_.substr(digits_at, 1) == "{") {
          const size_t end = in_.find('}', digits_at);
          if (end == std::string_view::npos) unsupported("'\\x{' without '}'");
          return copy(end + 1 - at_);
        }
        if (c == 'x' &&
            (digits_at + 1 >= in_.size() || !std::isxdigit(static_cast<unsigned char>(in_[digits_at + 1])))) {
          digits = 1;
        }
        const std::string_view hex = in_.substr(digits_at, digits);
        if (hex.size() != digits || hex.find_first_not_of("0123456789abcdefABCDEF") != std::string_view::npos) {
          unsupported("a hexadecimal escape without digits");
        }
        out_ += "\\x{";
        out_ += hex;
        out_ += '}';
        at_ = digits_at + digits;
        return;
      }
      case 'b':
      case 'B':
        if (in_class && c == 'b') return copy(2);
        unsupported("a word boundary");
      case 'n':
      case 'r':
      case 't':
      case 'f':
      case 'a':
      case 'e':
        return copy(2);
      case 'v':
        at_ += 2;
        out_ += "\\x0b";
        return;
      case 'A':
      case 'z':
      case 'Z':
        if (in_class) unsupported("an anchor inside a class");
        return copy(2);
      default:
        break;
    }
    if (std::isalnum(static_cast<unsigned char>(c))) unsupported(fmt::format("the escape '\\{}'", c));
    copy(1);
    copy(utf8_length(static_cast<unsigned char>(c)));
  }

  void char_class() {
    copy(1);
    if (at_ < in_.size() && in_[at_] == '^') copy(1);
    bool first = true;
    while (true) {
      if (at_ >= in_.size()) fail("{}: unterminated '[' in the pattern '{}'", name_, printable(in_, 120));
      const char c = in_[at_];
      if (c == ']' && !first) {
        copy(1);
        return;
      }
      first = false;
      if (c == '[') {
        if (in_.substr(at_).starts_with("[:")) unsupported("a POSIX class");
        unsupported("a class inside a class");
      }
      if (in_.substr(at_).starts_with("&&")) unsupported("a class intersection");
      if (c == '\\') {
        escape(true);
      } else {
        copy(utf8_length(static_cast<unsigned char>(c)));
      }
    }
  }

  std::string_view in_;
  std::string_view name_;
  std::string out_;
  size_t at_ = 0;
  size_t atom_ = 0;             // where in out_ the last atom begins
  std::vector<size_t> groups_;  // where in out_ the open groups begin
};

// Matching needs scratch memory; one per thread.
struct Scratch {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(32 << 10, 4 << 20, nullptr);

  Scratch() {
    if (data == nullptr || context == nullptr) fail("out of memory for regular expressions");
    if (stack != nullptr) pcre2_jit_stack_assign(context, nullptr, stack);
    pcre2_set_heap_limit(context, 64 << 10);  // KiB
  }
  ~Scratch() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

}  // namespace

std::string translate_pattern(std::string_view pattern, std::string_view name) {
  return Translator(pattern, name).run();
}

struct Regex::Impl {
  std::string name;
  pcre2_code* code = nullptr;
  bool jit = false;
  ~Impl() { pcre2_code_free(code); }
};

Regex::Regex(std::string_view pattern, std::string_view name) : impl_(std::make_unique<Impl>()) {
  impl_->name = name;
  if (pattern.size() > kMaxPattern) {
    fail("{}: a pattern of {} bytes, at most {} are accepted", name, pattern.size(), kMaxPattern);
  }
  if (!is_valid_utf8(pattern)) fail("{}: the pattern is not valid UTF-8", name);
  const std::string translated = translate_pattern(pattern, name);
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  if (context == nullptr) fail("out of memory for regular expressions");
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  pcre2_set_parens_nest_limit(context, 100);
  int code = 0;
  PCRE2_SIZE offset = 0;
  const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
  impl_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(), options, &code,
                              &offset, context);
  pcre2_compile_context_free(context);
  if (impl_->code == nullptr) {
    PCRE2_UCHAR message[160] = "";
    pcre2_get_error_message(code, message, sizeof message);
    fail("{}: the pattern '{}' does not compile: {} (byte {} of '{}')", name, printable(pattern, 120),
         reinterpret_cast<const char*>(message), offset, printable(translated, 200));
  }
  impl_->jit = pcre2_jit_compile(impl_->code, PCRE2_JIT_COMPLETE) == 0;
}

Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;

void Regex::find_spans(std::string_view valid, std::vector<MatchSpan>& out) const {
  if (valid.empty()) {
    out.push_back({0, 0, false});
    return;
  }
  thread_local Scratch scratch;
  // One match may walk the whole text a few times (a run of spaces), never more.
  const size_t limit = 1'000'000 + 8 * valid.size();
  pcre2_set_match_limit(scratch.context, static_cast<uint32_t>(std::min<size_t>(limit, 0xFFFFFFFF)));
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::seconds(10) + std::chrono::microseconds(10) * valid.size();

  const auto* subject = reinterpret_cast<PCRE2_SPTR>(valid.data());
  size_t previous = 0;  // end of the last span
  size_t search_from = 0;
  size_t last_match_end = std::string_view::npos;
  size_t searches = 0;
  while (search_from <= valid.size()) {
    if ((++searches & 0xFF) == 0 && Clock::now() > deadline) {
      fail("{}: the pattern needs too long on a text of {} bytes", impl_->name, valid.size());
    }
    const int found = impl_->jit ? pcre2_jit_match(impl_->code, subject, valid.size(), search_from, PCRE2_NO_UTF_CHECK,
                                                   scratch.data, scratch.context)
                                 : pcre2_match(impl_->code, subject, valid.size(), search_from, PCRE2_NO_UTF_CHECK,
                                               scratch.data, scratch.context);
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0) {
      PCRE2_UCHAR message[160] = "";
      pcre2_get_error_message(found, message, sizeof message);
      fail("{}: the pattern fails on a text of {} bytes: {}", impl_->name, valid.size(),
           reinterpret_cast<const char*>(message));
    }
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(scratch.data);
    const size_t begin = range[0], end = range[1];
    if (begin > end || end > valid.size()) fail("{}: the pattern gives an impossible match", impl_->name);
    if (begin == end && last_match_end == end) {
      // An empty match right behind the last one does not count; go on one character later.
      if (search_from >= valid.size()) break;
      search_from += utf8_length(static_cast<unsigned char>(valid[search_from]));
      continue;
    }
    search_from = end;
    last_match_end = end;
    if (previous < begin) out.push_back({previous, begin, false});
    out.push_back({begin, end, true});
    previous = end;
  }
  if (previous < valid.size()) out.push_back({previous, valid.size(), false});
}

}  // namespace fourfold::text
