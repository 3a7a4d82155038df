#include "bench/prompts.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/file.h"
#include "base/random.h"

namespace fourfold::bench {
namespace {

namespace fs = std::filesystem;
constexpr uint64_t kMaxFile = 256u << 20;
constexpr int64_t kSums = 900 * 900;  // of two numbers of three digits

uint64_t mixed(uint64_t seed, int64_t number) {
  return Random(seed * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(number)).next();
}

template <size_t N>
const char* pick(Random& random, const char* const (&from)[N]) {
  return from[random.below(N)];
}

constexpr const char* kNames[] = {"Amara", "Bruno", "Chidi", "Dilek", "Elin", "Farid", "Greta", "Hana",
                                  "Ivo",   "Jun",   "Katya", "Luca",  "Mina", "Noor",  "Oskar", "Priya"};
constexpr const char* kPlaces[] = {"Bergen", "Cusco",  "Dakar", "Galway", "Hanoi", "Izmir", "Kyoto",   "Lviv",
                                   "Maputo", "Oaxaca", "Porto", "Quito",  "Riga",  "Split", "Tbilisi", "Utrecht"};
constexpr const char* kThings[] = {
    "a bicycle workshop", "a bakery",      "a climbing hall", "a choir",          "a small museum",
    "a tool library",     "a rowing club", "a seed bank",     "a night bus line", "a beekeepers' market",
    "a repair cafe",      "a planetarium"};
constexpr const char* kVerbs[] = {"sorts", "merges", "counts", "filters", "caches", "validates", "rounds", "splits"};
constexpr const char* kNouns[] = {"invoices",    "log lines", "sensor readings", "playlists",
                                  "train times", "recipes",   "chess moves",     "inventory rows"};
constexpr const char* kLanguages[] = {"C++", "Python", "Rust", "Go", "SQL", "TypeScript", "Java", "Bash"};
constexpr const char* kTones[] = {"friendly", "brief", "formal", "apologetic", "enthusiastic", "sober"};

// Work as people ask for it. The number makes each one different, whatever else was drawn.
std::string task(Random& random, int64_t number) {
  const auto amount = [&](uint64_t low, uint64_t high) { return low + random.below(high - low); };
  const char *who = pick(random, kNames), *other = pick(random, kNames), *where = pick(random, kPlaces);
  const char *thing = pick(random, kThings), *verb = pick(random, kVerbs), *noun = pick(random, kNouns);
  const char *language = pick(random, kLanguages), *tone = pick(random, kTones);
  switch (random.below(12)) {
    case 0:
      return fmt::format(
          "Write a {} e-mail from {} to {} about ticket {}: {} in {} stays closed for {} days because of a burst pipe.",
          tone, who, other, number, thing, where, amount(2, 30));
    case 1:
      return fmt::format(
          "Write a function in {} that {} {}. It is for job {}, the input has up to {} rows and may have duplicates. "
          "Explain its complexity.",
          language, verb, noun, number, amount(1000, 900000));
    case 2:
      return fmt::format(
          "Review this change ({}): it {} {} twice, once before and once behind the loop of {} rounds, in {}. What can "
          "go wrong, and how would you test it?",
          number, verb, noun, amount(3, 80), language);
    case 3:
      return fmt::format(
          "{} has {} euros a month for {} in {} (file {}). Rent takes {} and heating {}. Make a plan for a year and "
          "say what you would give up first.",
          who, amount(900, 9000), thing, where, number, amount(200, 500), amount(60, 190));
    case 4:
      return fmt::format(
          "Summarise for minute {}: {} reported that {} in {} had {} visitors, {} fewer than in spring; {} doubts the "
          "count, wants it repeated and asks who pays.",
          number, who, thing, where, amount(100, 5000), amount(5, 90), other);
    case 5:
      return fmt::format(
          "Plan {} days from {} to {} by train for {} people who like {} and dislike early mornings. Reference {}.",
          amount(2, 9), where, pick(random, kPlaces), amount(2, 7), thing, number);
    case 6:
      return fmt::format(
          "Compare {} and {} for a service that {} {} at {} requests a second. Give a table, then a recommendation. "
          "(Case {})",
          language, pick(random, kLanguages), verb, noun, amount(10, 40000), number);
    case 7:
      return fmt::format(
          "A story of about {} words, number {}: {} finds an unsent letter by {} in {}. It must not end with a dream.",
          amount(150, 600), number, who, other, thing);
    case 8:
      return fmt::format(
          "Explain to {}, who is {} years old, why {} in {} needs an insurance, with two examples. Keep sheet {} in "
          "mind: no foreign words.",
          who, amount(8, 80), thing, where, number);
    case 9:
      return fmt::format(
          "The test number {} fails once in {} runs: the program {} {} with {} threads. List the likely causes, the "
          "most likely first, and an experiment for each.",
          number, amount(20, 3000), verb, noun, amount(2, 64));
    case 10:
      return fmt::format(
          "Write a query that finds, in the table `{}_{}`, the {} of each city with more than {} entries in the last "
          "{} days, the newest first.",
          pick(random, kVerbs), number, noun, amount(3, 900), amount(2, 60));
    default:
      return fmt::format(
          "{} and {} argue about {}: one wants to open it to everybody in {}, the other fears {} more guests a day. "
          "Mediate in round {}.",
          who, other, thing, where, amount(10, 400), number);
  }
}

// About `tokens` tokens of sentences that do not repeat.
std::string notes(Random& random, int64_t tokens) {
  std::string text = "Notes, for reference:\n";
  // A sentence has some 17 words; words of everyday text are 1.3 tokens in vocabularies of the usual size.
  const int64_t sentences = std::max<int64_t>(1, tokens / 22);
  for (int64_t i = 0; i < sentences; ++i) {
    text += fmt::format("{}. On day {} {} of {} wrote that {} had {} visitors and {} left early with {} {}.\n", i + 1,
                        random.below(365), pick(random, kNames), pick(random, kPlaces), pick(random, kThings),
                        random.below(9000), pick(random, kNames), random.below(90), pick(random, kNouns));
  }
  return text + "\n";
}

std::vector<Json> read_items(const fs::path& path) {
  std::vector<fs::path> files;
  if (directory_exists(path)) {
    for (const auto& entry : fs::directory_iterator(path)) {
      if (entry.path().extension() == ".jsonl") files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    if (files.empty()) fail("{}: no .jsonl file in it", printable(path.string(), 200));
  } else if (file_exists(path)) {
    files.push_back(path);
  } else {
    fail("--prompts {}: wanted trivial, real, or a file or directory of conversations", printable(path.string(), 200));
  }
  std::vector<Json> items;
  for (const fs::path& file : files) {
    const std::string content = read_file(file, kMaxFile);
    int64_t number = 0;
    for (size_t begin = 0; begin < content.size();) {
      const size_t end = std::min(content.find('\n', begin), content.size());
      const std::string_view line = std::string_view(content).substr(begin, end - begin);
      begin = end + 1;
      ++number;
      if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
      const std::string where = fmt::format("{}:{}", file.string(), number);
      const Json json = parse_json(line, where);
      if (!json.is_object()) fail("{}: {}, wanted an object", where, json_kind(json));
      const auto messages = json.find("messages");
      if (messages == json.end() || !messages->is_array() || messages->empty() || !messages->back().is_object()) {
        fail("{}: no messages, wanted an array of them", where);
      }
      Json item = {{"messages", *messages}};
      if (json.contains("tools")) item["tools"] = json["tools"];
      items.push_back(std::move(item));
    }
  }
  if (items.empty()) fail("{}: no conversation in it", printable(path.string(), 200));
  // Each counts once, so that no prompt is sent twice.
  std::vector<std::pair<std::string, size_t>> texts;
  for (size_t i = 0; i < items.size(); ++i)
    texts.emplace_back(items[i].dump(-1, ' ', false, Json::error_handler_t::replace), i);
  std::sort(texts.begin(), texts.end());
  texts.erase(std::unique(texts.begin(), texts.end(), [](const auto& a, const auto& b) { return a.first == b.first; }),
              texts.end());
  std::sort(texts.begin(), texts.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  std::vector<Json> distinct;
  for (const auto& [text, i] : texts) distinct.push_back(std::move(items[i]));
  return distinct;
}

}  // namespace

PromptSet PromptSet::open(const std::string& name) {
  PromptSet set;
  set.name_ = name;
  if (name == "trivial") {
    set.kind_ = Kind::kTrivial;
  } else if (name == "real") {
    set.kind_ = Kind::kReal;
  } else {
    set.items_ = read_items(name);
  }
  return set;
}

Json PromptSet::prompt(uint64_t seed, int64_t number, int64_t context) const {
  Random random(mixed(seed, number));
  Json item;
  if (kind_ == Kind::kFile) {
    FF_ASSERT(number < size());
    std::vector<size_t> order(items_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    Random shuffle(seed);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[shuffle.below(i)]);
    item = items_[order[static_cast<size_t>(number)]];
  } else {
    // A step that has no factor in common with the number of sums meets each of them once.
    const int64_t sum = static_cast<int64_t>((seed * 7919 + static_cast<uint64_t>(number) * 524287) % kSums);
    const std::string text = kind_ == Kind::kTrivial ? fmt::format("What is {} + {}?", 100 + sum / 900, 100 + sum % 900)
                                                     : task(random, number);
    item = {{"messages", Json::array({{{"role", "user"}, {"content", text}}})}};
  }
  if (context > 0) {
    Json& content = item["messages"].back()["content"];
    if (!content.is_string()) fail("{}: the last message is no text, which --context needs", name_);
    content = notes(random, context) + content.get<std::string>();
  }
  return item;
}

}  // namespace fourfold::bench
