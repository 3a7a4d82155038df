#include "cmd/bench_load.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <latch>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "base/interrupt.h"
#include "base/json.h"
#include "base/threads.h"
#include "cmd/model_options.h"
#include "cuda/backend/backend.h"
#include "cuda/device/device.h"
#include "measure/ceilings.h"
#include "model/checkpoint.h"
#include "model/model.h"
#include "model/ranked.h"
#include "ranks/group.h"

namespace fourfold::cmd {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

struct Options {
  std::string directory;
  BackendArgs backend;
  int repeats = 3;
  bool json = false;
};

// Seconds in which all threads read the files, in pieces of a megabyte.
double read_files(const std::vector<std::filesystem::path>& files, ThreadPool& pool) {
  constexpr uint64_t kPiece = uint64_t{1} << 20;
  struct Piece {
    const OpenFile* file;
    uint64_t offset, bytes;
  };
  std::vector<std::unique_ptr<OpenFile>> open;
  std::vector<Piece> pieces;
  for (const std::filesystem::path& path : files) {
    open.push_back(std::make_unique<OpenFile>(path));
    for (uint64_t at = 0; at < open.back()->bytes(); at += kPiece) {
      pieces.push_back({open.back().get(), at, std::min(kPiece, open.back()->bytes() - at)});
    }
  }
  std::atomic<size_t> next{0};
  const Clock::time_point begin = Clock::now();
  pool.run([&](int) {
    std::vector<std::byte> to(kPiece);
    for (size_t i = next++; i < pieces.size(); i = next++) {
      throw_if_interrupted();
      pieces[i].file->read(pieces[i].offset, to.data(), pieces[i].bytes);
    }
  });
  return seconds_since(begin);
}

struct Load {
  double open_s = 0, weights_s = 0;  // headers; everything from there to the model being where it runs
  // Parts of weights_s. What the one thread does that goes through the model: look tensors up, check that all were
  // taken. What it waits for, and what others do meanwhile, on a card: cuda::LoadTimes.
  double lookups_s = 0, finish_s = 0;
  int64_t lookups = 0;
  std::string backend;
  std::vector<std::vector<std::pair<const char*, double>>> cards;  // by rank
};

// A source that takes the time.
class TimedSource final : public model::WeightSource {
 public:
  TimedSource(model::WeightSource& source, Load& load) : source_(source), load_(load) {}
  const model::ModelConfig& config() const override { return source_.config(); }
  ops::MatrixSource matrix(std::string_view module, int64_t rows, int64_t columns) override {
    const Time time(load_.lookups_s);
    ++load_.lookups;
    return source_.matrix(module, rows, columns);
  }
  std::vector<float> vector(std::string_view name, int64_t count) override {
    const Time time(load_.lookups_s);
    ++load_.lookups;
    return source_.vector(name, count);
  }
  void release(const ops::MatrixSource& matrix) override {
    const Time time(load_.lookups_s);
    source_.release(matrix);
  }
  void read_in_place(bool in_place) override { source_.read_in_place(in_place); }
  void finish() override {
    const Time time(load_.finish_s);
    source_.finish();
  }

 private:
  struct Time {
    explicit Time(double& seconds) : sum(seconds) {}
    ~Time() { sum += seconds_since(begin); }
    double& sum;
    Clock::time_point begin = Clock::now();
  };
  model::WeightSource& source_;
  Load& load_;
};

// What is counted by a rank's device.
std::vector<std::pair<const char*, double>> of_card(const Load& load, const cuda::LoadTimes& times) {
  const auto seconds = [](const cuda::LoadTimes::Sum& sum) { return static_cast<double>(sum.load()) * 1e-9; };
  std::vector<std::pair<const char*, double>> card = {
      {"allocating", seconds(times.allocating)},     {"small_copies", seconds(times.small_copies)},
      {"caller_waits", seconds(times.caller_waits)}, {"ending", seconds(times.ending)},
      {"page_locking", seconds(times.page_locking)}, {"feed_idle", seconds(times.feed_idle)},
      {"feed_memory", seconds(times.feed_memory)},   {"feed_reads", seconds(times.feed_reads)},
      {"feed_copies", seconds(times.feed_copies)},   {"blocks", static_cast<double>(times.blocks.load())}};
  // Of the one thread: its own work beside look-ups, and waiting for the drafts' copy of the head.
  card.emplace_back("other", load.weights_s - load.lookups_s - load.finish_s - seconds(times.allocating) -
                                 seconds(times.small_copies) - seconds(times.caller_waits) - seconds(times.ending));
  return card;
}

// Backends for a load: made where `make` says, and known here.
class Backends {
 public:
  Backends(model::BackendFactory make, int64_t ranks) : make_(std::move(make)), all_(static_cast<size_t>(ranks)) {}

  // Time begins when the last rank has its backend: contexts are not weights.
  model::BackendFactory factory(std::latch& made, Clock::time_point& begin) {
    return [this, &made, &begin](const std::shared_ptr<ranks::Member>& member) {
      std::shared_ptr<ops::Backend> backend;
      try {
        backend = make_(member);
      } catch (...) {
        made.count_down();
        throw;
      }
      const std::optional<int> gpu = backend->gpu();
      {
        const std::lock_guard lock(mutex_);
        all_[static_cast<size_t>(member == nullptr ? 0 : member->rank())] = backend.get();
        if (gpu) cards_.insert(*gpu);
        begin = Clock::now();
      }
      if (gpu) cuda::device_of(*backend).load_times().reset();
      made.arrive_and_wait();
      return backend;
    };
  }
  // By rank, while the model that they were made for is there.
  const std::vector<const ops::Backend*>& all() const { return all_; }
  const std::set<int>& cards() const { return cards_; }

 private:
  model::BackendFactory make_;
  std::mutex mutex_;
  std::vector<const ops::Backend*> all_;
  std::set<int> cards_;
};

// GB/s from page-locked memory to all of them at the same time.
double copy_rate(const std::set<int>& cards) {
  std::vector<std::future<double>> rates;
  rates.reserve(cards.size());
  for (const int card : cards) {
    rates.push_back(std::async(std::launch::async, [card] { return measure::upload_gbs(cuda::Device(card)); }));
  }
  double sum = 0;
  for (std::future<double>& rate : rates) sum += rate.get();
  return sum;
}

Load load_once(const Options& options, Backends& backends, const model::RankOptions& ranks) {
  Load load;
  Clock::time_point begin = Clock::now();
  model::Checkpoint checkpoint(options.directory);
  load.open_s = seconds_since(begin);
  model::ModelOptions small;
  small.max_step_tokens = small.max_logit_rows = 16;
  small.mtp = true;
  small.progress = [](int64_t, int64_t) { throw_if_interrupted(); };
  TimedSource source(checkpoint, load);
  std::latch made(ranks.ranks);
  const auto model = model::load_model(source, backends.factory(made, begin), ranks, small);
  load.weights_s = seconds_since(begin);
  load.backend = model->backend().description();
  for (const ops::Backend* backend : backends.all()) {
    if (backend->gpu()) load.cards.push_back(of_card(load, cuda::device_of(*backend).load_times()));
  }
  return load;
}

void run(const Options& options) {
  install_interrupt_handler();
  std::vector<std::filesystem::path> files;
  uint64_t bytes = 0;
  {
    const model::Checkpoint checkpoint(options.directory);
    for (const model::SafetensorsFile& shard : checkpoint.shards()) {
      files.push_back(shard.path());
      bytes += shard.bytes();
    }
  }
  const double gb = static_cast<double>(bytes) * 1e-9;
  const model::RankOptions ranks = rank_options(options.backend);
  // One rank's is kept from load to load, those of several are made and freed on their threads.
  std::shared_ptr<ops::Backend> kept;
  if (ranks.ranks == 1) {
    chat::BackendRequest request;
    request.weight_bytes = bytes;
    kept = backend_factory(options.backend)(request);
  }
  Backends backends(kept != nullptr
                        ? model::BackendFactory([&kept](const std::shared_ptr<ranks::Member>&) { return kept; })
                        : rank_backends(options.backend, bytes),
                    ranks.ranks);
  ThreadPool pool(options.backend.threads);
  const double first = read_files(files, pool), again = read_files(files, pool);
  std::vector<Load> loads;
  for (int i = 0; i < options.repeats; ++i) loads.push_back(load_once(options, backends, ranks));
  std::optional<double> copies;  // GB/s
  if (!backends.cards().empty()) copies = std::max(copy_rate(backends.cards()), copy_rate(backends.cards()));
  const Load& best = *std::min_element(loads.begin(), loads.end(), [](const Load& a, const Load& b) {
    return a.open_s + a.weights_s < b.open_s + b.weights_s;
  });
  const double rate = gb / best.weights_s, whole = gb / (best.weights_s + best.open_s);
  const double ceiling = copies.value_or(gb / again);
  if (options.json) {
    Json out = {{"backend", best.backend},
                {"ranks", ranks.ranks},
                {"threads", pool.size()},
                {"bytes", bytes},
                {"first_read_gb_per_s", gb / first},
                {"read_gb_per_s", gb / again},
                {"gb_per_s", rate},
                {"gb_per_s_with_headers", whole},
                {"fraction", rate / ceiling},
                {"fraction_with_headers", whole / ceiling},
                {"loads", Json::array()}};
    if (copies) out["copy_gb_per_s"] = *copies;
    for (const Load& load : loads) {
      Json one = {{"headers_s", load.open_s},
                  {"weights_s", load.weights_s},
                  {"lookups", load.lookups},
                  {"lookups_s", load.lookups_s},
                  {"finish_s", load.finish_s}};
      for (size_t rank = 0; rank < load.cards.size(); ++rank) {
        Json card = Json::object();
        for (const auto& [name, value] : load.cards[rank]) {
          card[name == std::string_view("blocks") ? name : fmt::format("{}_s", name)] = value;
        }
        if (ranks.ranks > 1) one["by_rank"].push_back(card);
        if (ranks.ranks == 1) one.update(card);
      }
      out["loads"].push_back(std::move(one));
    }
    fmt::print("{}\n", out.dump(2));
    return;
  }
  fmt::print("{}, {:.2f} GB in {} files\n", best.backend, gb, files.size());
  fmt::print("files read by {} threads: {:.1f} GB/s, then {:.1f} from memory\n", pool.size(), gb / first, gb / again);
  if (copies) {
    fmt::print("copies from page-locked memory{}: {:.1f} GB/s\n",
               backends.cards().size() > 1 ? fmt::format(" to {} GPUs", backends.cards().size()) : "", *copies);
  }
  for (const Load& load : loads) {
    fmt::print("loaded in {:.3f} s, and {:.3f} s for headers: {:.1f} GB/s, {:.1f} with them\n", load.weights_s,
               load.open_s, gb / load.weights_s, gb / (load.weights_s + load.open_s));
    fmt::print("  {} look-ups {:.3f}, none left over {:.3f} s\n", load.lookups, load.lookups_s, load.finish_s);
    for (size_t rank = 0; rank < load.cards.size(); ++rank) {
      if (ranks.ranks > 1) fmt::print("  rank {}:", rank);
      const char* comma = "  ";
      for (const auto& [name, value] : load.cards[rank]) {
        std::string words = name;
        std::replace(words.begin(), words.end(), '_', ' ');
        fmt::print("{}{} {:.{}f}", std::exchange(comma, ", "), words, value, words == "blocks" ? 0 : 3);
      }
      fmt::print("\n");
    }
  }
  fmt::print("best: {:.0f} % of the {} rate, {:.0f} % with headers\n", 100 * rate / ceiling, copies ? "copy" : "read",
             100 * whole / ceiling);
}

}  // namespace

void add_bench_load(Command& bench_app) {
  auto options = std::make_shared<Options>();
  Command command = bench_app.add_command(
      "load",
      "How fast a checkpoint comes from its files into the memory that the model runs from, beside the rates of "
      "reading and copying in the same run; with --tensor-parallel-size N, onto N GPUs\n\n"
      "  fourfold generate /tmp/m --shape 35B-A3B --format modelopt-nvfp4\n"
      "  fourfold bench load /tmp/m --device cuda");
  command.add_option("dir", options->directory, "Checkpoint directory").required();
  command.add_option("--repeats", options->repeats, "Loads; the best one counts").range(1, 100).show_default();
  command.add_flag("--json", options->json, "Print JSON");
  add_backend_options(command, options->backend);
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
