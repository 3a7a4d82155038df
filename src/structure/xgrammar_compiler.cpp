#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/check.h"
#include "structure/compiler.h"
#include "structure/grammar_text.h"

// What xgrammar has to say. Its errors are exceptions, its warnings are about what we do not use.
namespace xgrammar {

[[noreturn]] void LogFatalImpl(const std::string&, int, const std::string& message) {
  throw std::runtime_error(message);
}

void LogMessageImpl(const std::string&, int, int, const std::string&) {}

}  // namespace xgrammar

namespace fourfold::structure {
namespace {

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
      : compiler_(xgrammar::TokenizerInfo(vocabulary.tokens, xgrammar::VocabType::RAW,
                                          static_cast<int>(vocabulary.size), std::vector<int32_t>{}),
                  1, true, options.cache_bytes) {}

  std::shared_ptr<const Grammar> compile(const std::string& grammar) override {
    try {
      return std::make_shared<XgrammarGrammar>(compiler_.CompileGrammar(grammar));
    } catch (const std::exception& error) {
      throw Rejected("", fmt::format("is no grammar: {}", printable(error.what(), 300)));
    }
  }

  int64_t cached_bytes() const override { return compiler_.GetCacheSizeBytes(); }

 private:
  xgrammar::GrammarCompiler compiler_;
};

}  // namespace

bool has_compiler() { return true; }

std::unique_ptr<Compiler> make_compiler(const Vocabulary& vocabulary, const CompilerOptions& options) {
  FF_ASSERT(static_cast<int64_t>(vocabulary.tokens.size()) <= vocabulary.size);
  return std::make_unique<XgrammarCompiler>(vocabulary, options);
}

}  // namespace fourfold::structure
