// Grammars made ready for one vocabulary: what may come next, as a set of tokens. xgrammar does that, where it is built
// in (the CMake option FOURFOLD_XGRAMMAR).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace fourfold::structure {

// The tokens of a model. Those without bytes are never part of a text: special tokens, and ids without a token.
struct Vocabulary {
  std::vector<std::string> tokens;  // bytes, by id
  int64_t size = 0;                 // ids that the model knows, at least tokens.size()
};

struct CompilerOptions {
  // Of compiled grammars that are kept, the least recently used go first. What one grammar takes is bounded by its
  // text.
  int64_t cache_bytes = int64_t{128} << 20;
  // Of processor time, for one grammar: some 50 ms go by before a grammar that takes longer is noticed.
  double max_seconds = 10;
  // Asked as often while a grammar is compiled; true ends that. From the threads that call compile().
  std::function<bool()> stop;
};

// Where a text stands in a grammar, by the tokens it was made of.
class Matcher {
 public:
  virtual ~Matcher() = default;
  // The tokens that may come next: bit t % 32 of bits[t / 32]. Stop tokens where the text may end, and only there.
  // False: any token may.
  virtual bool mask(std::span<uint32_t> bits) = 0;
  // False: it does not fit, and nothing has changed. Stop tokens are not accepted.
  virtual bool accept(int32_t token) = 0;
  // Text that is no token of its own; counts as one for roll_back().
  virtual bool accept_text(const std::string& text) = 0;
  virtual void roll_back(int64_t count) = 0;
  // Whether the text may end here.
  virtual bool complete() const = 0;
};

// A compiled grammar; does not change.
class Grammar {
 public:
  virtual ~Grammar() = default;
  virtual std::unique_ptr<Matcher> matcher(const std::vector<int32_t>& stop_tokens) const = 0;
  virtual size_t bytes() const = 0;
};

// All functions may be called from many threads.
class Compiler {
 public:
  virtual ~Compiler() = default;
  // From EBNF, its first rule being `root`. Rejected when it is none, and when it takes longer than it may or is
  // stopped; it is then rejected again without being compiled, while it is remembered. The limits of GrammarText and
  // check_grammar() bound what comes before the first question.
  virtual std::shared_ptr<const Grammar> compile(const std::string& grammar) = 0;
  virtual int64_t cached_bytes() const = 0;
};

// Whether there is a compiler in this build. make_compiler() is an Error where there is none.
bool has_compiler();
std::unique_ptr<Compiler> make_compiler(const Vocabulary& vocabulary, const CompilerOptions& options = {});

// Rejected when somebody else's grammar is too large, or uses more of the notation than rules, texts, classes, groups
// and repetitions.
void check_grammar(const std::string& grammar);

}  // namespace fourfold::structure
