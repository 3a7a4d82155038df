#include "model/ranked.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "model/ranked_stepper.h"
#include "model/shared_source.h"
#include "ranks/threads.h"

namespace fourfold::model {
namespace {

// The caches of all ranks, made and freed on their threads.
class RankCaches {
 public:
  RankCaches(std::shared_ptr<ranks::Threads> threads, size_t count) : threads_(std::move(threads)), caches(count) {}
  ~RankCaches() {
    threads_->run([this](int64_t rank) { caches[static_cast<size_t>(rank)] = {}; });
  }
  RankCaches(const RankCaches&) = delete;
  RankCaches& operator=(const RankCaches&) = delete;

 private:
  std::shared_ptr<ranks::Threads> threads_;

 public:
  std::vector<Caches> caches;  // by rank
};

// What the model hands out: pages and slots are the same on all ranks.
class RankedKvCache final : public ops::KvCache {
 public:
  explicit RankedKvCache(std::shared_ptr<RankCaches> ranks) : ranks_(std::move(ranks)) {}
  const ops::KvCacheShape& shape() const override { return ranks_->caches[0].kv->shape(); }
  int64_t bytes() const override {
    int64_t sum = 0;
    for (const Caches& caches : ranks_->caches) sum += caches.kv->bytes();
    return sum;
  }
  void copy_page(int64_t from, int64_t to) override {
    for (Caches& caches : ranks_->caches) caches.kv->copy_page(from, to);
  }
  const std::shared_ptr<RankCaches>& ranks() const { return ranks_; }

 private:
  std::shared_ptr<RankCaches> ranks_;
};

class RankedStateCache final : public ops::StateCache {
 public:
  explicit RankedStateCache(std::shared_ptr<RankCaches> ranks) : ranks_(std::move(ranks)) {}
  const ops::StateCacheShape& shape() const override { return ranks_->caches[0].states->shape(); }
  int64_t bytes() const override {
    int64_t sum = 0;
    for (const Caches& caches : ranks_->caches) sum += caches.states->bytes();
    return sum;
  }
  void copy(int64_t from, int64_t to) override {
    for (Caches& caches : ranks_->caches) caches.states->copy(from, to);
  }
  const std::shared_ptr<RankCaches>& ranks() const { return ranks_; }

 private:
  std::shared_ptr<RankCaches> ranks_;
};

class RankedModel final : public Model {
 public:
  RankedModel(std::shared_ptr<ranks::Group> group, std::shared_ptr<ranks::Threads> threads,
              std::vector<std::unique_ptr<Model>> models)
      : group_(std::move(group)), threads_(std::move(threads)), models_(std::move(models)) {}
  ~RankedModel() override {
    threads_->run([this](int64_t rank) { of(rank).reset(); });
  }

  const ModelConfig& config() const override { return first().config(); }
  // Rank 0's: logits() and hidden() are its tensors.
  ops::Backend& backend() override { return models_[0]->backend(); }
  const ModelOptions& options() const override { return first().options(); }

  Caches make_caches(int64_t pages, int64_t page_size, int64_t slots) override {
    const auto all = std::make_shared<RankCaches>(threads_, models_.size());
    threads_->run(
        [&](int64_t rank) { all->caches[static_cast<size_t>(rank)] = of(rank)->make_caches(pages, page_size, slots); });
    Caches caches;
    if (all->caches[0].kv != nullptr) caches.kv = std::make_unique<RankedKvCache>(all);
    if (all->caches[0].states != nullptr) caches.states = std::make_unique<RankedStateCache>(all);
    return caches;
  }

  int64_t cache_bytes_per_token() const override { return sum(&Model::cache_bytes_per_token); }
  int64_t state_bytes_per_slot() const override { return sum(&Model::state_bytes_per_slot); }

  void forward(const ops::Batch& batch, Caches& caches, const LayerObserver& observer) override {
    std::vector<Caches>& all = ranks_of(caches);
    // All ranks compute what somebody looks at.
    const LayerObserver nobody = [](int64_t, const ops::Tensor&) {};
    threads_->run([&](int64_t rank) {
      of(rank)->forward(batch, all[static_cast<size_t>(rank)], rank == 0 || !observer ? observer : nobody);
    });
  }
  ops::Tensor logits() const override { return first().logits(); }
  ops::Tensor hidden() const override { return first().hidden(); }
  bool has_mtp() const override { return first().has_mtp(); }

  // `hidden` is the trunk's output for its first rows, which each rank has.
  void forward_mtp(const ops::Batch& batch, const ops::Tensor& hidden, Caches& caches) override {
    std::vector<Caches>& all = ranks_of(caches);
    const bool of_trunk = hidden.data == first().hidden().data;
    if (!of_trunk && hidden.data != first().mtp_hidden().data) {
      fail("the MTP head of a model of several ranks reads the output of the trunk or its own");
    }
    threads_->run([&](int64_t rank) {
      Model& model = *of(rank);
      const ops::Tensor own = of_trunk ? model.hidden() : model.mtp_hidden();
      model.forward_mtp(batch, own.slice_rows(0, hidden.rows), all[static_cast<size_t>(rank)]);
    });
  }
  ops::Tensor mtp_logits() const override { return first().mtp_logits(); }
  ops::Tensor mtp_hidden() const override { return first().mtp_hidden(); }

  std::unique_ptr<ops::Stepper> make_stepper(const ops::StepLimits& limits, Caches& caches) override {
    std::vector<Caches>& all = ranks_of(caches);
    std::vector<std::unique_ptr<ops::Stepper>> steppers(models_.size());
    threads_->run([&](int64_t rank) {
      steppers[static_cast<size_t>(rank)] = of(rank)->make_stepper(limits, all[static_cast<size_t>(rank)]);
    });
    return make_ranked_stepper(group_, std::move(steppers));
  }

  // All ranks at once: each times what it does, and where they meet all are there.
  std::optional<ops::OperationTimes> time_forward(const ops::Batch& batch, Caches& caches) override {
    std::vector<Caches>& all = ranks_of(caches);
    std::optional<ops::OperationTimes> times;
    threads_->run([&](int64_t rank) {
      std::optional<ops::OperationTimes> mine = of(rank)->time_forward(batch, all[static_cast<size_t>(rank)]);
      if (rank == 0) times = std::move(mine);
    });
    return times;
  }

  // What all ranks together move and compute.
  ops::Cost cost(int64_t tokens, int64_t context, int64_t logit_rows) const override {
    ops::Cost total;
    for (const auto& model : models_) total += model->cost(tokens, context, logit_rows);
    return total;
  }

 private:
  std::unique_ptr<Model>& of(int64_t rank) { return models_[static_cast<size_t>(rank)]; }
  const Model& first() const { return *models_[0]; }
  int64_t sum(int64_t (Model::*bytes)() const) const {
    int64_t total = 0;
    for (const auto& model : models_) total += ((*model).*bytes)();
    return total;
  }
  static std::vector<Caches>& ranks_of(Caches& caches) {
    if (caches.kv != nullptr) return static_cast<RankedKvCache&>(*caches.kv).ranks()->caches;
    FF_ASSERT(caches.states != nullptr);
    return static_cast<RankedStateCache&>(*caches.states).ranks()->caches;
  }

  std::shared_ptr<ranks::Group> group_;
  std::shared_ptr<ranks::Threads> threads_;
  std::vector<std::unique_ptr<Model>> models_;
};

}  // namespace

std::unique_ptr<Model> load_model(WeightSource& source, const BackendFactory& make_backend, const RankOptions& ranks,
                                  ModelOptions options) {
  options.shard = {};
  check_shard(source.config(), ranks.ranks, ranks.by_expert);
  if (ranks.ranks == 1) return load_model(source, make_backend(nullptr), std::move(options));
  const auto group = std::make_shared<ranks::Group>(ranks.ranks, ranks.patience);
  const auto threads = std::make_shared<ranks::Threads>(group);
  SharedSource shared(source, ranks.ranks);
  std::vector<std::unique_ptr<Model>> models(static_cast<size_t>(ranks.ranks));
  const auto load = [&](int64_t rank) {
    ModelOptions own = options;
    own.shard = {std::make_shared<ranks::Member>(group, rank), ranks.by_expert};
    if (rank != 0) own.progress = {};
    const std::unique_ptr<WeightSource> reader = shared.reader(rank);
    std::shared_ptr<ops::Backend> backend = make_backend(own.shard.member);
    models[static_cast<size_t>(rank)] = load_model(*reader, std::move(backend), std::move(own));
  };
  try {
    threads->run(load, [&] { shared.stop(); });
  } catch (...) {
    threads->run([&](int64_t rank) { models[static_cast<size_t>(rank)].reset(); });
    throw;
  }
  return std::make_unique<RankedModel>(group, threads, std::move(models));
}

}  // namespace fourfold::model
