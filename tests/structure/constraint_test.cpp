#include "structure/constraint.h"

#include <gtest/gtest.h>

#include "engine/constraints.h"
#include "matching.h"
#include "structure/json_schema.h"
#include "structure/tool_calls.h"

namespace fourfold::structure {
namespace {

using Reasoning = ConstraintOptions::Reasoning;

// Bytes, and tokens that join what a grammar tells apart.
Vocabulary joined_vocabulary() {
  Vocabulary out = byte_vocabulary();
  for (const char* text : {"<think>",      "</think>",  "</",          "think",      ">\n",  ">\n\n",  ">x",
                           "\n\n",         "{\"",       "\": ",        "\"}",        "12",   "\", \"", "a\"",
                           "</think>\n\n", "</think>{", "<tool_call>", "tool_call>", "true", "é"}) {
    out.tokens.emplace_back(text);
  }
  out.size = static_cast<int64_t>(out.tokens.size()) + 7;  // ids without a token
  return out;
}

int32_t token_of(const Vocabulary& vocabulary, std::string_view text) {
  const auto found = std::find(vocabulary.tokens.begin(), vocabulary.tokens.end(), text);
  FF_ASSERT(found != vocabulary.tokens.end());
  return static_cast<int32_t>(found - vocabulary.tokens.begin());
}

class GrammarConstraint : public testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_COMPILER();
    vocabulary = joined_vocabulary();
    compiler = make_compiler(vocabulary);
    end = std::make_shared<ReasoningEnd>(vocabulary);
  }

  std::shared_ptr<engine::Constraint> make(const std::string& grammar, ConstraintOptions options = {}) {
    options.stop_tokens = {kStop};
    return make_constraint(compiler->compile(grammar), end, std::move(options));
  }

  std::vector<uint32_t> mask(engine::Constraint& constraint) const {
    std::vector<uint32_t> bits(static_cast<size_t>((vocabulary.size + 31) / 32), 0);
    if (!constraint.mask(bits)) std::fill(bits.begin(), bits.end(), ~uint32_t{0});
    return bits;
  }
  static bool has(const std::vector<uint32_t>& bits, int32_t token) {
    return (bits[static_cast<size_t>(token) / 32] >> (token % 32) & 1) != 0;
  }
  bool allows(engine::Constraint& constraint, std::string_view text) const {
    return has(mask(constraint), token_of(vocabulary, text));
  }
  bool may_end(engine::Constraint& constraint) const { return has(mask(constraint), kStop); }
  void feed(engine::Constraint& constraint, std::initializer_list<const char*> texts) const {
    for (const char* text : texts) {
      ASSERT_TRUE(allows(constraint, text)) << text;
      ASSERT_TRUE(constraint.accept(token_of(vocabulary, text))) << text;
    }
  }

  const Json schema = Json::parse(
      R"({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 9}},
                                      "required": ["a"]})");
  Vocabulary vocabulary;
  std::unique_ptr<Compiler> compiler;
  std::shared_ptr<const ReasoningEnd> end;
};

// Whatever tokens a text is cut into, each is let through, and the end is at its end only.
TEST_F(GrammarConstraint, TakesEveryCutIntoTokens) {
  const std::string text = R"({"a": 12, "b": "é"})";
  const auto constraint = make(json_schema_grammar(schema, false));
  int64_t ways = 0;
  const auto walk = [&](auto&& self, size_t at) -> void {
    const std::vector<uint32_t> bits = mask(*constraint);
    EXPECT_EQ(has(bits, kStop), at == text.size());
    if (at == text.size()) {
      ++ways;
      return;
    }
    for (size_t token = 1; token < vocabulary.tokens.size(); ++token) {
      const std::string& piece = vocabulary.tokens[token];
      if (text.compare(at, piece.size(), piece) != 0) continue;
      const auto id = static_cast<int32_t>(token);
      EXPECT_TRUE(has(bits, id)) << text.substr(0, at) << "|" << piece;
      ASSERT_TRUE(constraint->accept(id));
      self(self, at + piece.size());
      constraint->roll_back(1);
      EXPECT_EQ(mask(*constraint), bits);
    }
  };
  walk(walk, 0);
  EXPECT_GT(ways, 8);
}

// Random walks: what the mask has is accepted and what it has not is refused, and trying and taking back changes
// nothing.
TEST_F(GrammarConstraint, MaskAcceptAndRollBackAgree) {
  Random random(3);
  for (int round = 0; round < 40; ++round) {
    ConstraintOptions options;
    options.reasoning = round % 2 == 0 ? Reasoning::kNone : Reasoning::kInside;
    const auto constraint = make(json_schema_grammar(schema, round % 2 != 0), options);
    for (int step = 0; step < 60; ++step) {
      const std::vector<uint32_t> bits = mask(*constraint);
      std::vector<int32_t> allowed;
      for (int32_t token = 0; token < vocabulary.size; ++token) {
        if (token == kStop) continue;
        const bool taken = constraint->accept(token);
        EXPECT_EQ(taken, has(bits, token)) << token;
        if (!taken) continue;
        allowed.push_back(token);
        constraint->roll_back(1);
      }
      EXPECT_EQ(mask(*constraint), bits);
      if (allowed.empty()) {
        EXPECT_TRUE(has(bits, kStop));
        break;
      }
      if (random.below(3) == 0) {  // some way ahead, and back
        int64_t ahead = 0;
        for (; ahead < 5; ++ahead) {
          const std::vector<uint32_t> there = mask(*constraint);
          int32_t token = 1;
          while (token < vocabulary.size && !has(there, token)) ++token;
          if (token >= vocabulary.size || !constraint->accept(token)) break;
        }
        constraint->roll_back(ahead);
        EXPECT_EQ(mask(*constraint), bits);
      }
      // The end of the reasoning is drawn more often than by chance.
      const int32_t close = token_of(vocabulary, "</think>");
      const bool closes = options.reasoning == Reasoning::kInside && random.below(8) == 0 && has(bits, close);
      ASSERT_TRUE(constraint->accept(closes ? close : allowed[random.below(allowed.size())]));
    }
  }
}

TEST_F(GrammarConstraint, BeginsBehindReasoning) {
  ConstraintOptions options;
  options.reasoning = Reasoning::kInside;
  const std::string grammar = json_schema_grammar(schema, true);
  // The tag as one token, in pieces, and with what comes behind it in its last piece.
  for (const auto& close : {std::vector<const char*>{"</think>", "\n\n"},
                            {"</", "think", ">\n", "\n"},
                            {"</", "think", ">\n\n"},
                            {"</think>\n\n"},
                            {"</think>"}}) {
    const auto constraint = make(grammar, options);
    feed(*constraint, {"true", "}", "<", "</", "think"});
    EXPECT_FALSE(allows(*constraint, ">x"));
    feed(*constraint, {"x"});
    EXPECT_FALSE(may_end(*constraint));
    EXPECT_FALSE(allows(*constraint, "</think>{"));
    for (const char* piece : close) feed(*constraint, {piece});
    EXPECT_FALSE(allows(*constraint, "true"));
    EXPECT_FALSE(may_end(*constraint));
    feed(*constraint, {"{\"", "a\"", ":", "12", "}"});
    EXPECT_TRUE(may_end(*constraint));
    EXPECT_FALSE(allows(*constraint, "}"));
    // All the way back.
    constraint->roll_back(static_cast<int64_t>(close.size()) + 5);
    EXPECT_TRUE(allows(*constraint, "true"));
  }
}

TEST_F(GrammarConstraint, ReasoningMayBegin) {
  ConstraintOptions options;
  options.reasoning = Reasoning::kMaybe;
  options.think_open = token_of(vocabulary, "<think>");
  const auto constraint = make(json_schema_grammar(schema, true), options);
  EXPECT_TRUE(allows(*constraint, "{\""));
  feed(*constraint, {"<think>", "true", "</think>", "{\""});
  EXPECT_FALSE(allows(*constraint, "<think>"));
  constraint->roll_back(4);
  feed(*constraint, {"{\"", "a\""});
}

TEST_F(GrammarConstraint, CallsAreNotWrittenInReasoning) {
  ConstraintOptions options;
  options.reasoning = Reasoning::kInside;
  options.no_calls = true;
  const Json tools = Json::parse(R"([{"function": {"name": "f"}}])");
  const auto constraint = make(call_grammar(tools, {}), options);
  EXPECT_FALSE(allows(*constraint, "<tool_call>"));
  feed(*constraint, {"<"});
  EXPECT_FALSE(allows(*constraint, "tool_call>"));
  feed(*constraint, {"x", "</think>", "<tool_call>"});
}

// As the engine asks: a row for the next token and one behind each draft, and nothing has changed.
TEST_F(GrammarConstraint, GivesRowsForDrafts) {
  const auto constraint = make(json_schema_grammar(schema, false));
  const std::vector<uint32_t> before = mask(*constraint);
  const std::vector<int32_t> drafts = {token_of(vocabulary, "{\""), token_of(vocabulary, "a\""),
                                       token_of(vocabulary, "true")};
  std::vector<uint32_t> rows;
  engine::append_masks(*constraint, drafts, vocabulary.size, rows);
  EXPECT_EQ(rows.size(), 3 * before.size());  // the third draft does not fit
  EXPECT_TRUE(std::equal(before.begin(), before.end(), rows.begin()));
  EXPECT_EQ(mask(*constraint), before);
  engine::accept_token(*constraint, drafts[0]);
  const std::vector<uint32_t> next = mask(*constraint);
  EXPECT_TRUE(std::equal(next.begin(), next.end(), rows.begin() + static_cast<int64_t>(before.size())));
}

}  // namespace
}  // namespace fourfold::structure
