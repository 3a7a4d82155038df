// fourfold bench serve: a server under load, by the clock of its clients.
#include "cmd/bench_serve.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/checksum.h"
#include "base/console.h"
#include "base/file.h"
#include "base/interrupt.h"
#include "base/progress.h"
#include "bench/figures.h"
#include "bench/load.h"
#include "bench/prompts.h"
#include "bench/report.h"
#include "bench/server.h"
#include "bench/server_process.h"
#include "cmd/arguments.h"
#include "cmd/engine_load.h"

namespace fourfold::cmd {
namespace {

struct Options {
  std::string target, twin, model, api_key, endpoint = "chat", html, out;
  std::vector<std::string> compare, goodput;
  std::string prompts = "real", thinking = "default", concurrency = "1,4,16", rates, lengths = "128", contexts = "0",
              drafts = "0";
  std::vector<std::string> server_flags;
  int64_t requests = 0, repeat = 3, warm_up = -1, silence = 600;
  double temperature = 0;
  uint64_t seed = 1;
  bool json = false, ignore_eos = false;
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

template <typename T>
std::vector<T> numbers(const std::string& text, const char* flag, T low, T high) {
  std::vector<T> values;
  for (const std::string& part : split(text)) {
    T value{};
    const auto [stop, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    if (error != std::errc() || stop != part.data() + part.size() || !(value >= low && value <= high)) {
      fail("{} {}: wanted numbers from {} to {} with commas between them", flag, printable(text, 100), low, high);
    }
    values.push_back(value);
  }
  return values;
}

// The loads in their order; those of one server.
std::vector<bench::CellSettings> loads(const Options& options) {
  std::vector<bench::CellSettings> cells;
  const auto concurrencies = numbers<int64_t>(options.concurrency, "--concurrency", 1, 4096);
  const auto lengths = numbers<int64_t>(options.lengths, "--max-tokens", 1, 1 << 20);
  const auto contexts = numbers<int64_t>(options.contexts, "--context", 0, 1 << 22);
  std::vector<double> rates;
  if (!options.rates.empty()) rates = numbers<double>(options.rates, "--rate", 0.001, 1e5);
  for (const std::string& prompts : split(options.prompts)) {
    for (const std::string& thinking : split(options.thinking)) {
      if (thinking != "default" && thinking != "on" && thinking != "off") {
        fail("--thinking {}: wanted on, off or default, or several with commas between them", printable(thinking, 40));
      }
      for (const int64_t context : contexts) {
        for (const int64_t length : lengths) {
          bench::CellSettings cell;
          cell.endpoint = options.endpoint;
          cell.prompts = prompts;
          cell.thinking = thinking;
          cell.context = context;
          cell.max_tokens = length;
          cell.temperature = options.temperature;
          cell.ignore_eos = options.ignore_eos;
          for (const double rate : rates) {
            cell.rate = rate;
            cell.requests = options.requests > 0 ? options.requests : std::max<int64_t>(16, std::lround(10 * rate));
            cells.push_back(cell);
          }
          if (!rates.empty()) continue;
          for (const int64_t concurrency : concurrencies) {
            cell.concurrency = concurrency;
            cell.requests = options.requests > 0 ? options.requests : std::max<int64_t>(16, 4 * concurrency);
            cells.push_back(cell);
          }
        }
      }
    }
  }
  return cells;
}

std::string body(const Json& prompt, const bench::CellSettings& cell, const std::string& model, uint64_t seed) {
  Json out = {{"model", model}};
  if (cell.endpoint == "chat") {
    out["messages"] = prompt["messages"];
    if (prompt.contains("tools")) out["tools"] = prompt["tools"];
    if (cell.thinking != "default") out["chat_template_kwargs"] = {{"enable_thinking", cell.thinking == "on"}};
  } else {
    const Json& content = prompt["messages"].back()["content"];
    if (!content.is_string()) fail("{}: the last message is no text, which --endpoint completions needs", cell.prompts);
    out["prompt"] = content;
  }
  out["max_tokens"] = cell.max_tokens;
  out["temperature"] = cell.temperature;
  if (cell.temperature > 0) out["seed"] = seed & 0x7fffffff;
  if (cell.ignore_eos) out["ignore_eos"] = true;
  out["stream"] = true;
  out["stream_options"] = {{"include_usage", true}};
  return out.dump(-1, ' ', false, Json::error_handler_t::replace);
}

uint64_t text_checksum(const std::string& text) { return checksum(std::as_bytes(std::span(text))); }

class Bench {
 public:
  Bench(const Options& options, std::vector<bench::CellSettings> cells)
      : options_(options), cells_(std::move(cells)), goodput_(bench::Goodput::parse(options.goodput)) {
    for (const std::string& name : split(options.prompts)) sets_.push_back(bench::PromptSet::open(name));
    for (size_t i = 0; i < cells_.size(); ++i) {
      const bench::PromptSet& set = set_of(cells_[i]);
      const int64_t needed = prompts_of(cells_[i]);
      if (set.size() > 0 && set.size() < needed) {
        fail("--prompts {}: {} different prompts in it, {} are wanted (--requests times --repeat, and {} to warm up)",
             printable(set.name(), 200), set.size(), needed, warm_up(cells_[i]));
      }
    }
  }

  // All loads against one server.
  void measure(const bench::Url& url, const std::string& drafts, Json& cells) {
    const std::string model = options_.model.empty() ? bench::first_model(url, options_.api_key) : options_.model;
    if (model_.empty()) model_ = model;
    const std::string label = fmt::format("{}{}", url.text(), drafts.empty() ? "" : ", drafts " + drafts);
    Progress progress(label, total(), "requests");
    for (const bench::CellSettings& cell : cells_) cells.push_back(measure(url, model, drafts, cell, progress));
    progress.finish();
  }

  const std::string& model() const { return model_; }

 private:
  const bench::PromptSet& set_of(const bench::CellSettings& cell) const {
    return *std::find_if(sets_.begin(), sets_.end(), [&](const auto& set) { return set.name() == cell.prompts; });
  }
  int64_t warm_up(const bench::CellSettings& cell) const {
    return options_.warm_up >= 0 ? options_.warm_up : std::min<int64_t>(8, cell.requests);
  }
  int64_t prompts_of(const bench::CellSettings& cell) const { return warm_up(cell) + options_.repeat * cell.requests; }
  uint64_t total() const {
    int64_t sum = 0;
    for (const bench::CellSettings& cell : cells_) sum += prompts_of(cell);
    return static_cast<uint64_t>(sum);
  }

  Json measure(const bench::Url& url, const std::string& model, const std::string& drafts, bench::CellSettings cell,
               Progress& progress) {
    const bench::PromptSet& set = set_of(cell);
    // Other loads have other prompts, so that none finds its own in the server's cache; other servers have the same.
    const Json place = {cell.prompts, cell.thinking, cell.concurrency, cell.rate, cell.max_tokens, cell.context};
    const std::string name = place.dump();
    const uint64_t seed = options_.seed * 0x9e3779b9u + text_checksum(name);
    int64_t number = 0;
    std::string all;
    const auto make_load = [&](int64_t count) {
      bench::Load load;
      load.url = url;
      load.path = cell.endpoint == "chat" ? "/v1/chat/completions" : "/v1/completions";
      load.api_key = options_.api_key;
      load.concurrency = cell.concurrency;
      load.rate = cell.rate;
      load.seed = seed + static_cast<uint64_t>(number);
      load.silence = std::chrono::seconds(options_.silence);
      for (int64_t i = 0; i < count; ++i, ++number) {
        const Json prompt = set.prompt(seed, number, cell.context);
        all += prompt.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
        load.bodies.push_back(body(prompt, cell, model, seed + static_cast<uint64_t>(number)));
      }
      return load;
    };
    uint64_t before_progress = done_;
    const auto tell = [&](int64_t done) { progress.set(before_progress + static_cast<uint64_t>(done)); };
    const auto run = [&](int64_t count) {
      before_progress = done_;
      bench::LoadResult result = bench::run_load(make_load(count), tell);
      done_ += static_cast<uint64_t>(count);
      return result;
    };
    if (warm_up(cell) > 0) run(warm_up(cell));
    const auto before = bench::draft_counters(url, options_.api_key);
    std::vector<bench::LoadResult> repetitions;
    for (int64_t i = 0; i < options_.repeat; ++i) repetitions.push_back(run(cell.requests));
    const auto after = bench::draft_counters(url, options_.api_key);
    cell.prompts_checksum = text_checksum(all);
    cell.drafts = drafts;
    const bool drafted = before && after && after->rounds > before->rounds;
    if (drafted && (drafts == "0" || drafts == "off")) {
      fail("{}: the twin must not draft, but {:.0f} drafts were verified", url.text(),
           after->drafted - before->drafted);
    }
    if (drafts.empty() && before && after) cell.drafts = drafted ? "on" : "off";
    return bench::cell_json(cell, bench::figures(repetitions, goodput_), goodput_, before, after,
                            bench::server_memory(url));
  }

  const Options& options_;
  std::vector<bench::CellSettings> cells_;
  const bench::Goodput goodput_;
  std::vector<bench::PromptSet> sets_;
  std::string model_;
  uint64_t done_ = 0;
};

std::string now() {
  const std::time_t time = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&time, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y%m%d-%H%M%S", &parts);
  return text;
}

void compare(const Options& options) {
  const Json found =
      bench::compare_reports(bench::read_report(options.compare[0]), bench::read_report(options.compare[1]));
  fmt::print("{}", options.json ? found.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"
                                : bench::comparison_table(found));
}

void run(const Options& options) {
  if (!options.compare.empty()) {
    if (options.compare.size() != 2 || !options.target.empty()) {
      fail("bench serve: --compare takes two reports and nothing else");
    }
    return compare(options);
  }
  if (options.target.empty()) fail("bench serve: wanted a URL, a checkpoint directory, or --compare A B");
  install_interrupt_handler();
  const bool remote = options.target.find("://") != std::string::npos;
  Json report = {{"fourfold", FOURFOLD_VERSION}, {"date", now()}};
  Json cells = Json::array();
  Bench bench(options, loads(options));
  if (remote) {
    if (options.drafts != "0" || !options.server_flags.empty()) {
      fail("bench serve: --drafts and --server-flag are for a server that is started, and {} runs already",
           printable(options.target, 200));
    }
    const bench::Url url = bench::Url::parse(options.target);
    if (!options.twin.empty()) bench.measure(bench::Url::parse(options.twin), "off", cells);
    bench.measure(url, options.twin.empty() ? "" : "on", cells);
    report["url"] = url.text();
  } else {
    if (!options.twin.empty()) fail("bench serve: --twin is for a URL; a directory's twin is --drafts 0");
    if (!directory_exists(options.target)) {
      fail("bench serve: {} is no URL and no directory", printable(options.target, 200));
    }
    std::vector<std::string> depths = split(options.drafts);
    for (const std::string& depth : depths) parse_drafts(depth);
    // The twin without drafts comes first, asked for or not.
    depths.erase(std::remove(depths.begin(), depths.end(), "0"), depths.end());
    depths.insert(depths.begin(), "0");
    for (const std::string& depth : depths) {
      std::vector<std::string> flags = {options.target};
      if (depth != "0") {
        flags.emplace_back("--speculative-config");
        flags.push_back(depth == "auto" ? R"({"method": "mtp"})"
                                        : fmt::format(R"({{"method": "mtp", "num_speculative_tokens": {}}})", depth));
      }
      flags.insert(flags.end(), options.server_flags.begin(), options.server_flags.end());
      const bench::ServerProcess server(std::filesystem::read_symlink("/proc/self/exe").string(), flags);
      bench.measure(server.url(), depth, cells);
    }
    report["url"] = "own server";
  }
  report["model"] = bench.model();
  report["command"] =
      fmt::format("--prompts {} --thinking {} --seed {}", options.prompts, options.thinking, options.seed);
  report["cells"] = std::move(cells);
  bench::add_speed_ups(report);
  if (!options.html.empty()) write_file_atomically(options.html, bench::html_report(report));
  const std::string text = report.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  if (!options.out.empty()) write_file_atomically(options.out, text);
  if (options.json) {
    fmt::print("{}", text);
  } else {
    fmt::print("{}, {}\n\n{}", bench.model(), report["url"].get<std::string>(), bench::text_table(report));
  }
  for (const Json& cell : report["cells"]) {
    if (cell["failed"].get<int64_t>() > 0) {
      warn("requests failed: their tokens are not counted, and nothing is compared with them");
      throw ExitStatus{2};
    }
  }
}

}  // namespace

void add_bench_serve(Command& bench_app) {
  const auto options = std::make_shared<Options>();
  Command command = bench_app.add_command(
      "serve",
      "A server of OpenAI's API under load: latencies and delivered tokens as its clients see them\n\n"
      "  fourfold bench serve http://127.0.0.1:8000 --concurrency 1,8,32\n"
      "  fourfold bench serve models/demo --drafts 1,2,auto --prompts trivial,real --thinking on,off\n"
      "  fourfold bench serve --compare before.json after.json\n\n"
      "Lists with commas are swept, each with each. A directory is served by this program itself, first without "
      "drafts.");
  command.add_option("target", options->target, "[URL | DIR]").untyped();
  command.add_option("--twin", options->twin, "URL of the same server without speculation, measured first");
  command.add_option("--model", options->model, "Name of the model (default: the server's first)");
  command.add_option("--api-key", options->api_key, "Sent as the bearer token");
  command.add_option("--endpoint", options->endpoint, "What is asked").one_of({"chat", "completions"}).show_default();
  command
      .add_option("--prompts", options->prompts,
                  "trivial, real, or files or directories of conversations as eval reads them")
      .show_default();
  command.add_option("--thinking", options->thinking, "on, off, default").show_default();
  command.add_option("--concurrency", options->concurrency, "Requests at a time").show_default();
  command.add_option("--rate", options->rates, "Requests a second at random times (Poisson), instead of --concurrency");
  command.add_option("--max-tokens", options->lengths, "Tokens of an answer at most").show_default();
  command.add_option("--context", options->contexts, "Tokens of notes in front of each question, about").show_default();
  command.add_option("--drafts", options->drafts, "With DIR: drafts a step, 0 to 5 or auto; 0 is always the first");
  command.add_option("--server-flag", options->server_flags, "With DIR: one more argument for serve").one_each();
  command
      .add_option("--requests", options->requests,
                  "For each load and repetition; 0: four times the concurrency, at least 16")
      .range(0, 1 << 20);
  command.add_option("--repeat", options->repeat, "Repetitions of each load").range(1, 100).show_default();
  command.add_option("--warm-up", options->warm_up, "Requests before each load that do not count (default: up to 8)")
      .range(0, 1 << 20);
  command.add_option("--goodput", options->goodput, "Limits in ms of a good answer: ttft:500 tpot:50 e2el:5000");
  command.add_option("--temperature", options->temperature, "0: greedy").real_range(0, 10).show_default();
  command.add_flag("--ignore-eos", options->ignore_eos,
                   "Every answer has --max-tokens tokens, where the server does that");
  command.add_option("--silence", options->silence, "Seconds without a byte after which a request has failed")
      .range(1, 86400)
      .show_default();
  command.add_option("--seed", options->seed, "Of prompts and arrivals");
  command.add_option("--compare", options->compare, "Two reports of --out: how B does beside A");
  command.add_option("--out", options->out, "Also write the JSON to this file");
  command.add_option("--html", options->html, "Also write a page with tables and plots");
  command.add_flag("--json", options->json, "Print one JSON object, under the names of vllm bench serve");
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
