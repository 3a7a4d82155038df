// NCCL on the host driver: gathers what ranks have when all have come to it on their streams.
#include "jit/nccl.h"

#include <cstdio>
#include <memory>

#include "hostcuda/card.h"

namespace fourfold::hostcuda {
namespace {

struct Communicator {
  int rank, ranks;
  std::shared_ptr<const int> in_graphs = std::make_shared<const int>(0);
};

// NCCL waits here, for ever, for the graphs that its calls are recorded in: one that is still there is an error.
int end(void* communicator) {
  constexpr int kInternalError = 3;
  const std::lock_guard lock(card().mutex);
  const std::unique_ptr<Communicator> ended(static_cast<Communicator*>(communicator));
  if (ended->in_graphs.use_count() > 1) return kInternalError;
  --card().live.communicators;
  return 0;
}

}  // namespace

std::shared_ptr<const jit::Nccl::Functions> nccl_functions() {
  auto call = std::make_shared<jit::Nccl::Functions>();
  call->get_version = [](int* version) {
    *version = card().card().nccl;
    return 0;
  };
  call->get_unique_id = [](jit::Nccl::Functions::UniqueId* id) {
    std::snprintf(id->bytes.data(), id->bytes.size(), "the only group");
    return 0;
  };
  call->init_rank = [](void** communicator, int ranks, jit::Nccl::Functions::UniqueId id, int rank) {
    constexpr int kInvalidUsage = 5;
    if (std::string(id.bytes.data()) != "the only group" || card().card().nccl_refuses) return kInvalidUsage;
    *communicator = std::make_unique<Communicator>(Communicator{.rank = rank, .ranks = ranks}).release();
    const std::lock_guard lock(card().mutex);
    ++card().live.communicators;
    return 0;
  };
  call->destroy = end;
  call->abort = end;
  call->all_gather = [](const void* from, void* to, size_t count, int type, void* communicator, void* stream) {
    constexpr int kInvalidArgument = 4;
    if (type != jit::Nccl::Functions::kBytes) return kInvalidArgument;
    const auto& c = *static_cast<const Communicator*>(communicator);
    const std::lock_guard lock(card().mutex);
    ++card().gathers;
    return card().all_gather(from, to, count, c.rank, c.ranks, c.in_graphs, stream_of(stream));
  };
  call->all_reduce = [](const void*, void*, size_t, int, int, void*, void*) { return 1; };
  call->error_string = [](int) { return "a fault that a test asked for"; };
  return call;
}

int64_t nccl_calls() {
  const std::lock_guard lock(card().mutex);
  return card().gathers;
}

}  // namespace fourfold::hostcuda
