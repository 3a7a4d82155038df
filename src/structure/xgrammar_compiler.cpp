#include <time.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

#include "base/check.h"
#include "structure/compiler.h"
#include "structure/grammar_text.h"

namespace fourfold::structure {
void ask_whether_to_stop();
}

// What xgrammar has to say. Its errors are exceptions, its warnings are about what we do not use.
namespace xgrammar {

[[noreturn]] void LogFatalImpl(const std::string&, int, const std::string& message) {
  throw std::runtime_error(message);
}

void LogMessageImpl(const std::string&, int, int, const std::string&) {}

// cmake/xgrammar_changes.cmake: called before each state of a grammar that is compiled, on the thread that compiles.
void AskWhetherToStop() { fourfold::structure::ask_whether_to_stop(); }

}  // namespace xgrammar

namespace fourfold::structure {
namespace {

struct Stopped : std::runtime_error {
  using std::runtime_error::runtime_error;
};

double processor_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// What this thread compiles by.
struct Compiling {
  const CompilerOptions& options;
  const double begin = processor_seconds();
};
thread_local const Compiling* compiling = nullptr;

class XgrammarMatcher final : public Matcher {
 public:
  XgrammarMatcher(const xgrammar::CompiledGrammar& grammar, const std::vector<int32_t>& stop_tokens)
      : stop_tokens_(stop_tokens), matcher_(grammar, std::vector<int>(stop_tokens.begin(), stop_tokens.end())) {}

  bool mask(std::span<uint32_t> bits) override {
    int64_t shape = static_cast<int64_t>(bits.size());
    DLTensor tensor{};
    tensor.data = bits.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = 1;
    tensor.dtype = xgrammar::GetBitmaskDLType();
    tensor.shape = &shape;
    return matcher_.FillNextTokenBitmask(&tensor);
  }

  bool accept(int32_t token) override {
    const bool stop = std::find(stop_tokens_.begin(), stop_tokens_.end(), token) != stop_tokens_.end();
    return !stop && matcher_.AcceptToken(token);
  }

  bool accept_text(const std::string& text) override { return matcher_.AcceptString(text); }
  void roll_back(int64_t count) override { matcher_.Rollback(static_cast<int>(count)); }
  bool complete() const override { return matcher_.IsCompleted(); }

 private:
  const std::vector<int32_t> stop_tokens_;
  xgrammar::GrammarMatcher matcher_;
};

class XgrammarGrammar final : public Grammar {
 public:
  explicit XgrammarGrammar(xgrammar::CompiledGrammar compiled) : compiled_(std::move(compiled)) {}

  std::unique_ptr<Matcher> matcher(const std::vector<int32_t>& stop_tokens) const override {
    return std::make_unique<XgrammarMatcher>(compiled_, stop_tokens);
  }
  size_t bytes() const override { return compiled_.MemorySizeBytes(); }

 private:
  const xgrammar::CompiledGrammar compiled_;
};

class XgrammarCompiler final : public Compiler {
 public:
  XgrammarCompiler(const Vocabulary& vocabulary, const CompilerOptions& options)
      : options_(options),
        compiler_(xgrammar::TokenizerInfo(vocabulary.tokens, xgrammar::VocabType::RAW,
                                          static_cast<int>(vocabulary.size), std::vector<int32_t>{}),
                  1, true, options.cache_bytes) {}

  std::shared_ptr<const Grammar> compile(const std::string& grammar) override {
    const Compiling now{options_};
    compiling = &now;
    try {
      auto out = std::make_shared<XgrammarGrammar>(compiler_.CompileGrammar(grammar));
      compiling = nullptr;
      return out;
    } catch (const Stopped& stopped) {
      refused(grammar);
      throw Rejected("", stopped.what());
    } catch (const std::exception& error) {
      refused(grammar);
      throw Rejected("", fmt::format("is no grammar: {}", printable(error.what(), 300)));
    }
  }

  int64_t cached_bytes() const override { return compiler_.GetCacheSizeBytes(); }

 private:
  // What was refused is kept as well, and not counted there.
  void refused(const std::string& grammar) {
    compiling = nullptr;
    constexpr size_t kMaxRefused = 16 << 20;
    const size_t bytes = grammar.size() + 1024;
    if (refused_bytes_.fetch_add(bytes) + bytes <= kMaxRefused) return;
    refused_bytes_ = 0;
    compiler_.ClearCache();
  }

  const CompilerOptions options_;
  xgrammar::GrammarCompiler compiler_;
  std::atomic<size_t> refused_bytes_{0};
};

}  // namespace

bool has_compiler() { return true; }

void ask_whether_to_stop() {
  if (compiling == nullptr) return;
  const CompilerOptions& options = compiling->options;
  if (options.stop && options.stop()) throw Stopped("was not made ready: the compiler was stopped");
  if (processor_seconds() - compiling->begin > options.max_seconds) {
    throw Stopped(
        fmt::format("is too large: it takes more than {:g} s of processor time to make ready", options.max_seconds));
  }
}

std::unique_ptr<Compiler> make_compiler(const Vocabulary& vocabulary, const CompilerOptions& options) {
  FF_ASSERT(static_cast<int64_t>(vocabulary.tokens.size()) <= vocabulary.size);
  return std::make_unique<XgrammarCompiler>(vocabulary, options);
}

}  // namespace fourfold::structure
