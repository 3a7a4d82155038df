#include "measure/nccl.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "cuda/device/device.h"
#include "jit/nccl.h"
#include "ranks/threads.h"

namespace fourfold::measure {
namespace {

struct End {
  End(const jit::Nccl& library, int device, int ranks, const jit::Nccl::Functions::UniqueId& id, int rank)
      : nccl(library), call(nccl.call()), card(device), stream(card), start(card), stop(card) {
    nccl.check(call.init_rank(&communicator, ranks, id, rank), "ncclCommInitRank");
  }
  ~End() {
    if (communicator != nullptr) call.destroy(communicator);
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;

  // The best of a few replays, as each rank sees it.
  double time(int64_t count, int calls) {
    const auto bytes = static_cast<uint64_t>(count) * 2;
    cuda::Buffer data(card, bytes, "numbers that NCCL adds up");
    data.fill(stream, 0);
    const auto sum = [&] {
      nccl.check(
          call.all_reduce(data.as<void>(), data.as<void>(), static_cast<size_t>(count), jit::Nccl::Functions::kBf16,
                          jit::Nccl::Functions::kSum, communicator, stream.handle()),
          "ncclAllReduce");
    };
    sum();  // it connects now
    stream.synchronize();
    cuda::Recording recording(stream);
    for (int i = 0; i < calls; ++i) sum();
    const cuda::Graph graph(recording);
    double best = std::numeric_limits<double>::infinity();
    for (int replay = 0; replay < 5; ++replay) {
      graph.launch(stream);
      start.record(stream);
      graph.launch(stream);
      stop.record(stream);
      best = std::min(best, cuda::Event::microseconds(start, stop));
    }
    return best / calls;
  }

  const jit::Nccl& nccl;
  const jit::Nccl::Functions& call;
  cuda::Device card;
  cuda::Stream stream;
  cuda::Event start, stop;
  void* communicator = nullptr;
};

}  // namespace

struct Nccl::State {
  State(const jit::Nccl& library, const std::vector<int>& devices)
      : nccl(library),
        threads(std::make_shared<ranks::Group>(static_cast<int64_t>(devices.size()))),
        ends(devices.size()) {
    jit::Nccl::Functions::UniqueId id = {};
    nccl.check(nccl.call().get_unique_id(&id), "ncclGetUniqueId");
    try {
      threads.run([&](int64_t rank) {
        const auto at = static_cast<size_t>(rank);
        ends[at] =
            std::make_unique<End>(nccl, devices[at], static_cast<int>(devices.size()), id, static_cast<int>(rank));
      });
    } catch (...) {
      close();
      throw;
    }
  }
  ~State() { close(); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  void close() {
    threads.run([&](int64_t rank) { ends[static_cast<size_t>(rank)].reset(); });
  }

  const jit::Nccl& nccl;
  ranks::Threads threads;
  std::vector<std::unique_ptr<End>> ends;
};

std::unique_ptr<Nccl> Nccl::open(const std::vector<int>& devices, std::string* why) {
  const jit::Nccl* nccl = jit::Nccl::find(why);
  if (nccl == nullptr) return nullptr;
  return std::unique_ptr<Nccl>(new Nccl(std::make_unique<State>(*nccl, devices)));
}

Nccl::Nccl(std::unique_ptr<State> state) : state_(std::move(state)) {}
Nccl::~Nccl() = default;

std::string Nccl::version() const { return state_->nccl.version(); }

double Nccl::all_reduce(int64_t count, int calls) {
  std::vector<double> us(state_->ends.size());
  state_->threads.run([&](int64_t rank) {
    const auto at = static_cast<size_t>(rank);
    us[at] = state_->ends[at]->time(count, calls);
  });
  return *std::max_element(us.begin(), us.end());
}

}  // namespace fourfold::measure
