#include "measure/nccl.h"

#include <algorithm>
#include <array>
#include <limits>

#include "base/check.h"
#include "cuda/device/device.h"
#include "jit/library.h"
#include "ranks/threads.h"

namespace fourfold::measure {
namespace {

// Of NCCL's public interface.
struct UniqueId {
  std::array<char, 128> bytes;
};
constexpr int kBf16 = 9, kSum = 0;
struct Functions {
  int (*get_version)(int* version);
  int (*get_unique_id)(UniqueId* id);
  int (*init_rank)(void** communicator, int ranks, UniqueId id, int rank);
  int (*destroy)(void* communicator);
  int (*all_reduce)(const void* from, void* to, size_t count, int type, int operation, void* communicator,
                    void* stream);
  const char* (*error_string)(int result);
};

struct End {
  End(const Functions& functions, int device, int ranks, const UniqueId& id, int rank)
      : call(functions), card(device), stream(card), start(card), stop(card) {
    check(call.init_rank(&communicator, ranks, id, rank), "ncclCommInitRank");
  }
  ~End() {
    if (communicator != nullptr) call.destroy(communicator);
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;

  void check(int result, const char* what) const {
    if (result != 0) fail("{}: {}", what, call.error_string(result));
  }

  // The best of a few replays, as each rank sees it.
  double time(int64_t count, int calls) {
    const auto bytes = static_cast<uint64_t>(count) * 2;
    cuda::Buffer data(card, bytes, "numbers that NCCL adds up");
    data.fill(stream, 0);
    const auto sum = [&] {
      check(call.all_reduce(data.as<void>(), data.as<void>(), static_cast<size_t>(count), kBf16, kSum, communicator,
                            stream.handle()),
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

  const Functions& call;
  cuda::Device card;
  cuda::Stream stream;
  cuda::Event start, stop;
  void* communicator = nullptr;
};

}  // namespace

struct Nccl::State {
  State(jit::SharedLibrary opened, const std::vector<int>& devices)
      : library(std::move(opened)),
        threads(std::make_shared<ranks::Group>(static_cast<int64_t>(devices.size()))),
        ends(devices.size()) {
    library.load("ncclGetVersion", &call.get_version);
    library.load("ncclGetUniqueId", &call.get_unique_id);
    library.load("ncclCommInitRank", &call.init_rank);
    library.load("ncclCommDestroy", &call.destroy);
    library.load("ncclAllReduce", &call.all_reduce);
    library.load("ncclGetErrorString", &call.error_string);
    UniqueId id = {};
    if (const int result = call.get_unique_id(&id); result != 0) {
      fail("ncclGetUniqueId: {}", call.error_string(result));
    }
    try {
      threads.run([&](int64_t rank) {
        const auto at = static_cast<size_t>(rank);
        ends[at] =
            std::make_unique<End>(call, devices[at], static_cast<int>(devices.size()), id, static_cast<int>(rank));
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

  jit::SharedLibrary library;
  Functions call = {};
  ranks::Threads threads;
  std::vector<std::unique_ptr<End>> ends;
};

std::unique_ptr<Nccl> Nccl::open(const std::vector<int>& devices, std::string* why) {
  std::optional<jit::SharedLibrary> library = jit::SharedLibrary::open({"libnccl.so.2"}, why);
  if (!library) return nullptr;
  return std::unique_ptr<Nccl>(new Nccl(std::make_unique<State>(*std::move(library), devices)));
}

Nccl::Nccl(std::unique_ptr<State> state) : state_(std::move(state)) {}
Nccl::~Nccl() = default;

std::string Nccl::version() const {
  int version = 0;
  state_->call.get_version(&version);
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

double Nccl::all_reduce(int64_t count, int calls) {
  std::vector<double> us(state_->ends.size());
  state_->threads.run([&](int64_t rank) {
    const auto at = static_cast<size_t>(rank);
    us[at] = state_->ends[at]->time(count, calls);
  });
  return *std::max_element(us.begin(), us.end());
}

}  // namespace fourfold::measure
