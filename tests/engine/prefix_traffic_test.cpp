// What the prefix cache finds in the traffic it is made for (docs/engine.md): at least nine tenths of what it could.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "prefix_server.h"

namespace fourfold::engine {
namespace {

constexpr int32_t kOpen = 1, kClose = 2, kLine = 3, kSystemRole = 4, kUser = 5, kAssistant = 6, kThink = 8,
                  kThought = 9;

// A conversation as a chat template renders it.
class Chat {
 public:
  enum class Thinking : uint8_t {
    kOff,       // an empty think block in the generation prompt, none in the history
    kKept,      // the history has it
    kStripped,  // the history has it only behind the user's last message
  };
  Chat(Random& random, Thinking thinking, int64_t system) : random_(random), thinking_(thinking) {
    if (system > 0) messages_.push_back({kSystemRole, {}, random_tokens(random, system)});
  }
  void user(int64_t tokens) { messages_.push_back({kUser, {}, random_tokens(random_, tokens)}); }
  void tool(int64_t tokens) { messages_.push_back({kUser, {}, random_tokens(random_, tokens), true}); }

  Tokens prompt(std::vector<int64_t>& hints) const {
    Tokens out;
    hints.clear();
    size_t last_user = 0;
    for (size_t i = 0; i < messages_.size(); ++i) {
      if (messages_[i].role == kUser && !messages_[i].is_tool) last_user = i;
    }
    for (size_t i = 0; i < messages_.size(); ++i) {
      const Message& message = messages_[i];
      append(out, {kOpen, message.role, kLine});
      const bool shown = thinking_ == Thinking::kKept || (thinking_ == Thinking::kStripped && i > last_user);
      if (message.role == kAssistant && shown) {
        append(out, {kThink, kLine});
        append(out, message.thinking);
        append(out, {kLine, kThought, kLine, kLine});
      }
      append(out, message.content);
      append(out, {kClose, kLine});
      if (i == 0 && message.role == kSystemRole) hints.push_back(static_cast<int64_t>(out.size()));
    }
    if (hints.empty() || hints.back() != static_cast<int64_t>(out.size())) {
      hints.push_back(static_cast<int64_t>(out.size()));
    }
    append(out, {kOpen, kAssistant, kLine, kThink, kLine});
    if (thinking_ == Thinking::kOff) append(out, {kLine, kThought, kLine, kLine});
    return out;
  }
  // The model says something; what it says is part of the history from then on.
  Tokens say(int64_t thinking, int64_t content) {
    Message message{kAssistant, {}, random_tokens(random_, content)};
    Tokens out;
    if (thinking_ != Thinking::kOff) {
      message.thinking = random_tokens(random_, thinking);
      out = message.thinking;
      append(out, {kLine, kThought, kLine, kLine});
    }
    append(out, message.content);
    append(out, {kClose});
    messages_.push_back(message);
    return out;
  }
  // A request with what was said so far.
  void turn(PrefixServer& server, int64_t thinking, int64_t content, const std::string& salt = "") {
    std::vector<int64_t> hints;
    const Tokens tokens = prompt(hints);
    server.request(salt, tokens, hints, say(thinking, content));
  }

 private:
  struct Message {
    int32_t role = kUser;
    Tokens thinking, content;
    bool is_tool = false;
  };
  Random& random_;
  Thinking thinking_;
  std::vector<Message> messages_;
};

constexpr Chat::Thinking kAllThinking[] = {Chat::Thinking::kOff, Chat::Thinking::kKept, Chat::Thinking::kStripped};

class Traffic : public ::testing::TestWithParam<Chat::Thinking> {};
std::string name_of(const ::testing::TestParamInfo<Chat::Thinking>& which) {
  if (which.param == Chat::Thinking::kOff) return "Off";
  return which.param == Chat::Thinking::kKept ? "Kept" : "Stripped";
}
INSTANTIATE_TEST_SUITE_P(Thinking, Traffic, ::testing::ValuesIn(kAllThinking), name_of);

// What is left of a cache when one thing was asked for.
struct Counter {
  explicit Counter(const PrefixServer& s) : server(s), hits(s.hits), possible(s.possible) {}
  double share() const {
    return static_cast<double>(server.hits - hits) /
           static_cast<double>(std::max<int64_t>(server.possible - possible, 1));
  }
  const PrefixServer& server;
  int64_t hits, possible;
};

// Between two turns a program asks for a title, under another system prompt, and for follow-ups, under the same.
TEST_P(Traffic, SideRequestsBetweenTurns) {
  Random random(1);
  PrefixServer server({.pages = 8192, .cached_states = 8});
  Chat chat(random, GetParam(), 700);
  for (int turn = 0; turn < 20; ++turn) {
    chat.user(60);
    chat.turn(server, 150, 200);
    Chat title(random, GetParam(), 90);
    title.user(300);
    title.turn(server, 20, 10);
    Chat follow_up = chat;
    follow_up.user(30);
    follow_up.turn(server, 20, 40);
  }
  server.check();
  EXPECT_GE(server.share(), 0.9);
}

// A long loop of tool calls, while another conversation waits: neither costs the other its cache.
TEST_P(Traffic, FiftyToolCalls) {
  Random random(2);
  PrefixServer server({.pages = 8192, .cached_states = 8});
  Chat idle(random, GetParam(), 500);
  for (int turn = 0; turn < 3; ++turn) {
    idle.user(40);
    idle.turn(server, 100, 300);
  }
  Chat agent(random, GetParam(), 3000);
  agent.user(200);
  const Counter loop(server);
  for (int call = 0; call < 50; ++call) {
    agent.turn(server, 60, 80);
    agent.tool(call % 7 == 0 ? 1300 : 250);
  }
  EXPECT_GE(loop.share(), 0.9);
  const Counter after(server);
  idle.user(40);
  idle.turn(server, 100, 300);
  EXPECT_GE(after.share(), 0.9);
  // The agent's user asks on; a new conversation of the same agent begins; and one more tool call.
  const Counter next(server);
  agent.turn(server, 60, 300);
  agent.user(100);
  agent.turn(server, 60, 80);
  agent.tool(250);
  agent.turn(server, 60, 80);
  EXPECT_GE(next.share(), 0.9);
  server.check();
}

// What changes from request to request is the end only, and nobody says where it begins.
TEST(PrefixTraffic, SuffixesWithoutHints) {
  for (const int64_t suffix : {40, 400, 1300}) {
    Random random(3);
    PrefixServer server({.pages = 8192, .cached_states = 8});
    const Tokens document = random_tokens(random, 8000);
    for (int i = 0; i < 12; ++i) {
      Tokens prompt = document;
      append(prompt, random_tokens(random, suffix));
      server.request("", prompt, {}, random_tokens(random, 100));
    }
    server.check();
    EXPECT_GE(server.share(), 0.9) << suffix;
  }
}

TEST_P(Traffic, SuffixesWithHints) {
  for (const int64_t suffix : {40, 400, 1300}) {
    Random random(3);
    PrefixServer server({.pages = 8192, .cached_states = 8});
    Chat chat(random, GetParam(), 8000);
    for (int i = 0; i < 12; ++i) {
      Chat question = chat;
      question.user(suffix);
      question.turn(server, 100, 100);
    }
    EXPECT_GE(server.share(), 0.95) << suffix;
  }
}

// Short prompts: no grid that begins at hundreds of tokens.
TEST_P(Traffic, ShortPrompts) {
  Random random(3);
  PrefixServer server({.pages = 8192, .cached_states = 8});
  Chat chat(random, GetParam(), 40);
  for (int turn = 0; turn < 8; ++turn) {
    chat.user(10);
    chat.turn(server, 20, 15);
  }
  EXPECT_GE(server.share(), 0.85);
}

// As many conversations as there are states, in turns: each needs one, once it is known which.
TEST_P(Traffic, ConversationsInTurns) {
  Random random(4);
  PrefixServer server({.pages = 8192, .cached_states = 16});
  std::vector<Chat> chats;
  for (int i = 0; i < 12; ++i) {
    chats.emplace_back(random, GetParam(), 0);
    chats.back().user(300);
  }
  for (int round = 0; round < 12; ++round) {
    const Counter counter(server);
    for (Chat& chat : chats) {
      chat.turn(server, 200, 200);
      chat.user(100);
    }
    if (round < 4) continue;
    EXPECT_GE(counter.share(), 0.9) << round;
  }
  server.check();
}

TEST_P(Traffic, Preemption) {
  Random random(5);
  PrefixServer server({.pages = 400, .cached_states = 8});
  Chat chat(random, GetParam(), 700);
  Chat other(random, GetParam(), 700);
  int64_t again = 0, resumed = 0;
  for (int turn = 0; turn < 10; ++turn) {
    chat.user(60);
    std::vector<int64_t> hints;
    const Tokens prompt = chat.prompt(hints);
    auto run = server.start("", prompt, hints);
    const Tokens answer = chat.say(150, 200);
    const auto middle = answer.begin() + 100;
    server.answer(run, Tokens(answer.begin(), middle));
    server.preempt(run);
    // Meanwhile somebody else's turn.
    other.user(500);
    other.turn(server, 100, 100);
    again += static_cast<int64_t>(run.tokens.size()) - 1;
    resumed += server.resume(run);
    server.answer(run, Tokens(middle, answer.end()));
    server.finish(run);
    server.check();
  }
  EXPECT_GE(static_cast<double>(resumed), 0.99 * static_cast<double>(again));
  EXPECT_GE(server.share(), 0.9);
  // A preempted request is not counted twice.
  EXPECT_EQ(server.cache().stats().hit_tokens, server.hits);
}

TEST_P(Traffic, SaltsShareNothing) {
  PrefixServer server({.pages = 8192, .cached_states = 16});
  // The same words from three tenants.
  std::vector<Random> randoms(3, Random(6));
  std::vector<Chat> chats;
  for (Random& random : randoms) chats.emplace_back(random, GetParam(), 700);
  const std::vector<std::string> salts = {"", "a", "b"};
  for (int turn = 0; turn < 6; ++turn) {
    for (size_t i = 0; i < chats.size(); ++i) {
      chats[i].user(60);
      std::vector<int64_t> hints;
      if (turn == 0) {
        EXPECT_EQ(server.cache().match(salts[i], chats[i].prompt(hints)).known, 0);
      }
      chats[i].turn(server, 100, 200, salts[i]);
    }
  }
  server.check();
  EXPECT_GE(server.share(), 0.9);
}

// Four answers of one prompt: three begin from the first one's.
TEST_P(Traffic, SeveralAnswers) {
  Random random(7);
  PrefixServer server({.pages = 8192, .cached_states = 8});
  Chat chat(random, GetParam(), 300);
  chat.user(50);
  std::vector<int64_t> hints;
  const Tokens prompt = chat.prompt(hints);
  std::vector<PrefixServer::Run> runs;
  for (int i = 0; i < 4; ++i) {
    runs.push_back(server.start("", prompt, hints, 4));
    if (i == 0) continue;
    EXPECT_EQ(runs.back().hit, static_cast<int64_t>(prompt.size()) - 1);
  }
  for (auto& run : runs) {
    server.answer(run, random_tokens(random, 30));
    server.finish(run);
  }
  server.check();
}

}  // namespace
}  // namespace fourfold::engine
