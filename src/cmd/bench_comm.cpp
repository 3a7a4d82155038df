#include "cmd/bench_comm.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "base/check.h"
#include "base/interrupt.h"
#include "base/json.h"
#include "cmd/arguments.h"
#include "cmd/bench_kernels.h"
#include "cmd/model_options.h"
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
  double us = 0;        // a sum with residual and norm behind it
  double alone_us = 0;  // residual and norm of one rank's delta
  double bytes = 0;     // of deltas that a rank reads from others
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
                                  backend_->tensor(*out_, tokens_, hidden_));
  }
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
double measure_on_cards(ranks::Threads& threads, const std::vector<std::unique_ptr<Rank>>& ranks, int64_t tokens,
                        void (Rank::*call)()) {
  constexpr int kCalls = 40;
  throw_if_interrupted();
  const std::vector<int32_t> rows(static_cast<size_t>(tokens), 0), pages = {0};
  double us = 0;
  threads.run([&](int64_t rank) {
    Rank& r = *ranks[static_cast<size_t>(rank)];
    ops::Sequence sequence;
    sequence.count = static_cast<int32_t>(tokens);
    sequence.pages = pages;
    const auto times = r.backend().time_operations([&] {
      r.backend().begin_step({rows, std::span(&sequence, 1), {}});
      for (int i = 0; i < kCalls; ++i) (r.*call)();
    });
    FF_ASSERT(times.has_value());
    if (rank == 0) us = times->microseconds / kCalls;
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

void run(const Options& o) {
  if (o.backend.ranks < 2) fail("--tensor-parallel-size {}: one rank has no sums, wanted 2 or more", o.backend.ranks);
  install_interrupt_handler();
  const auto group = std::make_shared<ranks::Group>(o.backend.ranks);
  ranks::Threads threads(group);
  const model::BackendFactory make = rank_backends(o.backend);
  std::vector<std::shared_ptr<ops::Backend>> backends(static_cast<size_t>(o.backend.ranks));
  threads.run(
      [&](int64_t rank) { backends[static_cast<size_t>(rank)] = make(std::make_shared<ranks::Member>(group, rank)); });
  const bool on_cards = backends[0]->gpu().has_value();
  const std::string way = on_cards ? "peer memory" : "shared memory";
  std::vector<Result> results;
  for (const int64_t tokens : parse_tokens(o.tokens)) {
    std::vector<std::unique_ptr<Rank>> ranks(backends.size());
    threads.run([&](int64_t rank) {
      const auto at = static_cast<size_t>(rank);
      ranks[at] = std::make_unique<Rank>(backends[at], tokens, o.hidden);
    });
    Result result;
    result.tokens = tokens;
    const auto time = [&](void (Rank::*call)()) {
      return on_cards ? measure_on_cards(threads, ranks, tokens, call) : measure(threads, ranks, o.seconds, call);
    };
    result.us = time(&Rank::sum);
    result.alone_us = time(&Rank::alone);
    const int64_t element = backends[0]->activation_type() == ops::DType::kF32 ? 4 : 2;
    result.bytes = static_cast<double>((o.backend.ranks - 1) * tokens * o.hidden * element);
    results.push_back(result);
    threads.run([&](int64_t rank) { ranks[static_cast<size_t>(rank)].reset(); });
  }
  const std::string description = backends[0]->description();
  threads.run([&](int64_t rank) { backends[static_cast<size_t>(rank)].reset(); });
  if (o.json) {
    Json rows = Json::array();
    for (const Result& r : results) {
      rows.push_back({{"tokens", r.tokens}, {"us", r.us}, {"alone_us", r.alone_us}, {"bytes", r.bytes}});
    }
    const Json out = {
        {"backend", description}, {"ranks", o.backend.ranks}, {"hidden", o.hidden}, {"way", way}, {"results", rows}};
    fmt::print("{}\n", out.dump(1));
    return;
  }
  fmt::print("{}: sums of rows of {} over {}, with residual and norm\n\n", description, o.hidden, way);
  fmt::print("{:>8}{:>12}{:>12}{:>16}{:>10}\n", "rows", "us", "KB read", "one rank's, us", "GB/s");
  for (const Result& r : results) {
    fmt::print("{:>8}{:>12.2f}{:>12.1f}{:>16.2f}{:>10.2f}\n", r.tokens, r.us, r.bytes / 1024, r.alone_us,
               r.bytes / r.us * 1e-3);
  }
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
