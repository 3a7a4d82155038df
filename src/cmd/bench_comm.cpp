#include "cmd/bench_comm.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/console.h"
#include "base/interrupt.h"
#include "base/json.h"
#include "cmd/arguments.h"
#include "cmd/bench_kernels.h"
#include "cmd/model_options.h"
#include "cuda/backend/backend.h"
#include "measure/links.h"
#include "measure/nccl.h"
#include "ranks/threads.h"

namespace fourfold::cmd {
namespace {

struct Options {
  BackendArgs backend;
  std::string tokens = "1,8,64,512";
  int64_t hidden = 4096;
  double seconds = 0.3;
  bool json = false;
};

struct Result {
  int64_t tokens = 0;
  double us = 0;                      // a sum with residual and norm behind it
  double alone_us = 0;                // residual and norm of one rank's delta
  std::optional<double> sum_us;       // on cards: of the sum alone, where there is such an operation
  double bytes = 0;                   // of deltas that a rank reads from others
  std::array<double, 5> by_way = {};  // on cards: us as that of kWays goes; 0: it does not
  std::optional<double> nccl_us;      // of NCCL's sum alone
};

// One rank: its backend, and rows to sum.
class Rank {
 public:
  Rank(std::shared_ptr<ops::Backend> backend, int64_t tokens, int64_t hidden)
      : backend_(std::move(backend)), tokens_(tokens), hidden_(hidden) {
    residual_ = backend_->allocate(tokens * hidden * 4);
    delta_ = allocate();
    out_ = allocate();
    weight_ = backend_->load_vector(std::vector<float>(static_cast<size_t>(hidden), 1.0f));
  }

  void sum() {
    backend_->reduce_add_rms_norm(ops::Backend::floats(*residual_, tokens_, hidden_),
                                  backend_->tensor(*delta_, tokens_, hidden_), weight_, 1e-6f,
                                  backend_->tensor(*out_, tokens_, hidden_), ops::Residual::kForSums);
  }
  // The sum alone; whether there is such an operation.
  bool sums_alone() {
    return backend_->all_reduce(backend_->tensor(*delta_, tokens_, hidden_), backend_->tensor(*out_, tokens_, hidden_));
  }
  void sum_alone() { sums_alone(); }
  void alone() {
    backend_->add_rms_norm(ops::Backend::floats(*residual_, tokens_, hidden_),
                           backend_->tensor(*delta_, tokens_, hidden_), weight_, 1e-6f,
                           backend_->tensor(*out_, tokens_, hidden_));
  }

  ops::Backend& backend() { return *backend_; }

 private:
  std::unique_ptr<ops::Buffer> allocate() {
    const ops::Tensor probe{nullptr, backend_->activation_type(), 0, 0, 0};
    return backend_->allocate(tokens_ * hidden_ * probe.element_bytes());
  }

  std::shared_ptr<ops::Backend> backend_;
  int64_t tokens_, hidden_;
  std::unique_ptr<ops::Buffer> residual_, delta_, out_;
  ops::Vector weight_;
};

// The same on cards: each of a graph of many, replayed, on all ranks at once. What a rank has to itself is timed beside
// the others' doing the same.
// Nothing where the host takes part in sums.
std::optional<double> measure_on_cards(ranks::Threads& threads, const std::vector<std::unique_ptr<Rank>>& ranks,
                                       int64_t tokens, void (Rank::*call)()) {
  constexpr int kCalls = 40;
  throw_if_interrupted();
  const std::vector<int32_t> rows(static_cast<size_t>(tokens), 0), pages = {0};
  std::optional<double> us;
  threads.run([&](int64_t rank) {
    Rank& r = *ranks[static_cast<size_t>(rank)];
    ops::Sequence sequence;
    sequence.count = static_cast<int32_t>(tokens);
    sequence.pages = pages;
    (r.*call)();  // ranks have found out how they reach each other
    const auto times = r.backend().time_operations([&] {
      r.backend().begin_step({rows, std::span(&sequence, 1), {}});
      for (int i = 0; i < kCalls; ++i) (r.*call)();
    });
    if (rank == 0 && times) us = times->microseconds / kCalls;
  });
  return us;
}

// Microseconds of a call on all ranks at once, as rank 0 sees it: as many as fill the time, all ranks equally many.
double measure(ranks::Threads& threads, const std::vector<std::unique_ptr<Rank>>& ranks, double seconds,
               void (Rank::*call)()) {
  using Clock = std::chrono::steady_clock;
  double us = 0;
  for (int64_t count = 4;; count *= 4) {
    throw_if_interrupted();
    double taken = 0;
    threads.run([&](int64_t rank) {
      const auto begin = Clock::now();
      for (int64_t i = 0; i < count; ++i) (*ranks[static_cast<size_t>(rank)].*call)();
      if (rank == 0) taken = std::chrono::duration<double>(Clock::now() - begin).count();
    });
    us = taken * 1e6 / static_cast<double>(count);
    if (taken >= seconds / 4) return us;
  }
}

// On cards: ways besides the one that a model's sums go, and what stands beside them.
// NCCL last: a rank that cannot join ends the group.
constexpr std::array<cuda::SumWay, 5> kWays = {cuda::SumWay::kFlags, cuda::SumWay::kWords, cuda::SumWay::kTwoShot,
                                               cuda::SumWay::kHost, cuda::SumWay::kNccl};

std::string key_of(cuda::SumWay way) {
  return way == cuda::SumWay::kTwoShot ? "two_shot" : std::string(cuda::name_of(way));
}

class Bench {
 public:
  explicit Bench(const Options& o)
      : o_(o), group_(std::make_shared<ranks::Group>(o.backend.ranks)), threads_(group_), backends_(count()) {}
  ~Bench() { release(); }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  void run() {
    make(rank_backends(o_.backend));
    on_cards_ = backends_[0]->gpu().has_value();
    for (const auto& backend : backends_) devices_.push_back(backend->gpu().value_or(0));
    for (const int64_t tokens : parse_tokens(o_.tokens)) {
      Result result;
      result.tokens = tokens;
      const int64_t element = backends_[0]->activation_type() == ops::DType::kF32 ? 4 : 2;
      result.bytes = static_cast<double>((o_.backend.ranks - 1) * tokens * o_.hidden * element);
      with_rows(tokens, [&] {
        result.us = time(tokens, &Rank::sum);
        result.alone_us = time(tokens, &Rank::alone);
        std::atomic<int64_t> can = 0;
        threads_.run([&](int64_t rank) { can += ranks_[static_cast<size_t>(rank)]->sums_alone() ? 1 : 0; });
        if (can == o_.backend.ranks) result.sum_us = time(tokens, &Rank::sum_alone);
      });
      results_.push_back(result);
    }
    description_ = backends_[0]->description();  // by now with how they reach each other
    if (on_cards_) {
      for (size_t way = 0; way < kWays.size() && !group_->failed(); ++way) {
        try {
          time_way(way);
        } catch (const Error& error) {  // the others' figures stand
          if (!group_->failed()) throw;
          eprint("fourfold: sums by {}: {}\n", cuda::name_of(kWays[way]), error.what());
        }
      }
      release();
      measure_beside();
    }
    release();
    o_.json ? print_json() : print();
  }

 private:
  size_t count() const { return static_cast<size_t>(o_.backend.ranks); }

  void make(const model::BackendFactory& factory) {
    threads_.run([&](int64_t rank) {
      backends_[static_cast<size_t>(rank)] = factory(std::make_shared<ranks::Member>(group_, rank));
    });
  }
  void release() {
    threads_.run([&](int64_t rank) { backends_[static_cast<size_t>(rank)].reset(); });
  }

  template <typename F>
  void with_rows(int64_t tokens, F&& work) {
    ranks_.resize(count());
    threads_.run([&](int64_t rank) {
      const auto at = static_cast<size_t>(rank);
      ranks_[at] = std::make_unique<Rank>(backends_[at], tokens, o_.hidden);
    });
    work();
    threads_.run([&](int64_t rank) { ranks_[static_cast<size_t>(rank)].reset(); });
  }

  double time(int64_t tokens, void (Rank::*call)()) {
    const auto on_cards = on_cards_ ? measure_on_cards(threads_, ranks_, tokens, call) : std::nullopt;
    return on_cards ? *on_cards : measure(threads_, ranks_, o_.seconds, call);
  }

  void time_way(size_t way) {
    release();
    make([&](const std::shared_ptr<ranks::Member>& member) {
      cuda::CudaOptions options;
      options.device = devices_[static_cast<size_t>(member->rank())];
      options.threads = 1;
      options.member = member;
      options.sums = cuda::SumTable(kWays[way]);
      return cuda::make_backend(options);
    });
    for (Result& result : results_) {
      with_rows(result.tokens, [&] { result.by_way[way] = time(result.tokens, &Rank::sum); });
    }
  }

  // NCCL's sums, without residual and norm, and the link's copies.
  void measure_beside() {
    std::vector<int> sorted = devices_;
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) return;  // ranks share a card
    link_ = measure::measure_link(devices_[0], devices_[1]);
    const std::unique_ptr<measure::Nccl> nccl = measure::Nccl::open(devices_, &no_nccl_);
    if (nccl == nullptr) return;
    nccl_ = nccl->version();
    for (Result& result : results_) {
      throw_if_interrupted();
      result.nccl_us = nccl->all_reduce(result.tokens * o_.hidden, 40);
    }
  }

  void print_json() const {
    Json rows = Json::array();
    for (const Result& r : results_) {
      rows.push_back({{"tokens", r.tokens}, {"us", r.us}, {"alone_us", r.alone_us}, {"bytes", r.bytes}});
      if (!on_cards_) continue;
      for (size_t i = 0; i < kWays.size(); ++i) {
        if (r.by_way[i] > 0) rows.back()[fmt::format("{}_us", key_of(kWays[i]))] = r.by_way[i];
      }
      if (r.sum_us) rows.back()["sum_us"] = *r.sum_us;
      if (r.nccl_us) rows.back()["nccl_sum_us"] = *r.nccl_us;
    }
    Json out = {{"backend", description_},
                {"ranks", o_.backend.ranks},
                {"hidden", o_.hidden},
                {"way", memory()},
                {"results", rows}};
    if (link_) out["link"] = {{"one_way", link_->one_way}, {"each_of_both", link_->each_of_both}};
    if (!nccl_.empty()) out["nccl"] = nccl_;
    fmt::print("{}\n", out.dump(1));
  }

  void print() const {
    fmt::print("{}: sums of rows of {} over {}, with residual and norm\n\n", description_, o_.hidden, memory());
    fmt::print("{:>8}{:>12}{:>12}{:>16}{:>10}", "rows", "us", "KB read", "one rank's, us", "GB/s");
    if (on_cards_) {
      for (const cuda::SumWay way : kWays) fmt::print("{:>14}", fmt::format("{}, us", cuda::name_of(way)));
      fmt::print("{:>16}", "sum alone, us");
      if (!nccl_.empty()) fmt::print("{:>16}", "NCCL's, us");
    }
    fmt::print("\n");
    for (const Result& r : results_) {
      fmt::print("{:>8}{:>12.2f}{:>12.1f}{:>16.2f}{:>10.2f}", r.tokens, r.us, r.bytes / 1024, r.alone_us,
                 r.bytes / r.us * 1e-3);
      if (on_cards_) {
        for (const double us : r.by_way) fmt::print("{:>14}", us > 0 ? fmt::format("{:.2f}", us) : "-");
        fmt::print("{:>16}", r.sum_us ? fmt::format("{:.2f}", *r.sum_us) : "-");
        if (r.nccl_us) fmt::print("{:>16.2f}", *r.nccl_us);
      }
      fmt::print("\n");
    }
    if (link_) {
      fmt::print("\ncopies from card to card: {:.1f} GB/s, {:.1f} each way at once\n", link_->one_way * 1e-9,
                 link_->each_of_both * 1e-9);
    }
    if (on_cards_) fmt::print("sum alone: without residual and norm, by words where a row has a CTA\n");
    if (!nccl_.empty()) fmt::print("NCCL {}: its sum alone\n", nccl_);
    if (!no_nccl_.empty()) fmt::print("NCCL: {}\n", no_nccl_);
  }

  std::string_view memory() const { return on_cards_ ? "the cards' memory" : "shared memory"; }

  const Options& o_;
  const std::shared_ptr<ranks::Group> group_;
  ranks::Threads threads_;
  std::vector<std::shared_ptr<ops::Backend>> backends_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  bool on_cards_ = false;
  std::string description_;
  std::vector<int> devices_;
  std::vector<Result> results_;
  std::optional<measure::LinkRate> link_;
  std::string nccl_, no_nccl_;  // its version, or why there is none
};

void run(const Options& o) {
  if (o.backend.ranks < 2) fail("--tensor-parallel-size {}: one rank has no sums, wanted 2 or more", o.backend.ranks);
  install_interrupt_handler();
  Bench(o).run();
}

}  // namespace

void add_bench_comm(Command& bench_app) {
  auto options = std::make_shared<Options>();
  options->backend.ranks = 2;
  Command command =
      bench_app.add_command("comm",
                            "Sums between the ranks of a model, with residual and norm: time by number of rows\n\n"
                            "  fourfold bench comm --tensor-parallel-size 2 --hidden 4096");
  command.add_option("--tokens", options->tokens, "Numbers of rows, separated by commas").show_default();
  command.add_option("--hidden", options->hidden, "Columns of a row").range(8, 1 << 20).show_default();
  command.add_option("--seconds", options->seconds, "For each number of rows").real_range(0.001, 60.0).show_default();
  command.add_flag("--json", options->json, "Print JSON");
  add_backend_options(command, options->backend);
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
