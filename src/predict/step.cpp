#include "predict/step.h"

#include <algorithm>
#include <mutex>
#include <numeric>

#include "base/check.h"
#include "base/math.h"
#include "cuda/backend/backend.h"
#include "memory/plan.h"
#include "model/ranked.h"

namespace fourfold::predict {
namespace {

constexpr int64_t kPage = 64;
// Nothing is too large for a card that only counts.
constexpr uint64_t kBytes = uint64_t{1} << 50;

ops::Format stored_as(plan::step::Format format) {
  switch (format) {
    case plan::step::Format::kNvfp4:
      return ops::Format::kNvfp4;
    case plan::step::Format::kFp8:
      return ops::Format::kFp8;
    case plan::step::Format::kBf16:
      return ops::Format::kBf16;
  }
  return ops::Format::kBf16;
}

// Of a trunk's weights: vectors, matrices and experts.
uint64_t weights_of(const ops::Backend& backend) {
  const cuda::MemoryCounts counts = cuda::memory_of(backend);
  uint64_t bytes = 0;
  for (size_t i = 0; i <= static_cast<size_t>(cuda::MemoryKind::kWeightsF32); ++i) bytes += counts.of[i].bytes;
  return bytes;
}

// Lanes, their pages and their slots, and the steps that they take.
class Lanes {
 public:
  Lanes(const plan::step::Shape& shape, int64_t pages_each) : shape_(shape) {
    count_ = shape.prefill ? 1 : shape.tokens;
    slots_each_ = shape.drafts + 1;
    pages_.resize(static_cast<size_t>(pages_each * count_));
    std::iota(pages_.begin(), pages_.end(), 0);
    slots_.resize(static_cast<size_t>(slots_each_ * count_));
    std::iota(slots_.begin(), slots_.end(), 0);
    tokens_.assign(static_cast<size_t>(shape.prefill ? shape.tokens : 1), 0);
    starts_.resize(static_cast<size_t>(count_));
    for (ops::LaneStart& start : starts_) {
      start.sampling.temperature = 0;
      start.max_output = int64_t{1} << 20;
    }
  }
  int64_t count() const { return count_; }
  int64_t slots() const { return slots_each_ * count_; }

  // `first`: with tokens of the host, at the context's end; otherwise the lanes go on from there.
  std::vector<ops::LaneWork> work(bool first) const {
    std::vector<ops::LaneWork> all;
    const auto pages_each = pages_.size() / static_cast<size_t>(count_);
    for (int64_t i = 0; i < count_; ++i) {
      ops::LaneWork work;
      const auto at = static_cast<size_t>(i);
      const auto slots =
          std::span(slots_).subspan(at * static_cast<size_t>(slots_each_), static_cast<size_t>(slots_each_));
      work.lane = static_cast<int32_t>(i);
      work.new_drafts = static_cast<int32_t>(shape_.drafts);
      work.feed_drafter = shape_.drafts > 0;
      work.state_out = slots;
      if (first) {
        work.start = &starts_[at];
        work.tokens = tokens_;
        work.position = static_cast<int32_t>(shape_.context);
        work.pages = std::span(pages_).subspan(at * pages_each, pages_each);
        work.state_in = slots[0];
        work.state_out = slots.first(1);
      } else {
        work.drafts = static_cast<int32_t>(shape_.drafts);
      }
      all.push_back(work);
    }
    return all;
  }

 private:
  plan::step::Shape shape_;
  int64_t count_ = 0, slots_each_ = 0;
  std::vector<int32_t> pages_, slots_, tokens_;
  std::vector<ops::LaneStart> starts_;
};

void take(ops::Stepper& stepper, const std::vector<ops::LaneWork>& work) {
  const ops::StepOutcome& outcome = stepper.wait(stepper.launch({{}, work}));
  if (!outcome.error.empty()) fail("a step that is counted: {}", outcome.error);
  for (const ops::LaneOutcome& lane : outcome.lanes) {
    if (!lane.error.empty()) fail("a step that is counted: {}", lane.error);
  }
}

}  // namespace

model::FormatOf formats_of(const plan::step::Mix& mix) {
  return [mix](model::WeightKind kind) {
    switch (kind) {
      case model::WeightKind::kRoutedExpert:
      case model::WeightKind::kMlp:
        return stored_as(mix.experts);
      case model::WeightKind::kSharedExpert:
        return stored_as(mix.shared);
      case model::WeightKind::kAttention:
        return stored_as(mix.attention);
      case model::WeightKind::kDeltaNet:
        return stored_as(mix.delta);
      case model::WeightKind::kHead:
        return stored_as(mix.head);
      default:
        return ops::Format::kBf16;
    }
  };
}

Launched launched_by(const Request& request) {
  const plan::step::Shape& shape = request.shape;
  check(shape);
  const std::unique_ptr<model::WeightSource> source = request.shapes();
  // With drafts a step goes before the one that counts.
  const int64_t end = shape.context + (shape.prefill ? shape.tokens : shape.drafts > 0 ? 2 * (shape.drafts + 1) : 1);
  if (end > source->config().max_positions) {
    fail("context: {} positions with the step's own, the model has {}", end, source->config().max_positions);
  }
  if (shape.drafts > 0 && source->config().mtp_layers == 0) fail("drafts: the model has no MTP head to make them");
  const int64_t pages_each = ceil_div(end, kPage);
  const Lanes lanes(shape, pages_each);
  const int64_t rows = shape.prefill ? shape.tokens : shape.tokens * (shape.drafts + 1);
  const int64_t logit_rows = shape.prefill ? 1 : rows;

  std::mutex mutex;
  std::vector<std::shared_ptr<ops::Backend>> backends;
  cuda::CudaOptions options;
  options.fp8_cache = shape.fp8_cache;
  options.graphs = false;  // what is recorded is not launched
  const jit::DeviceInfo card = memory::published_card(request.gpu).info;
  const auto make_backend = [&](const std::shared_ptr<ranks::Member>& member) {
    cuda::CudaOptions mine = options;
    mine.member = member;
    mine.device = member == nullptr ? 0 : static_cast<int>(member->rank());
    const std::shared_ptr<ops::Backend> backend = cuda::make_counting_backend(mine, card, kBytes);
    const std::lock_guard lock(mutex);
    backends.push_back(backend);
    return backend;
  };
  model::ModelOptions model_options;
  model_options.max_step_tokens = rows;
  model_options.max_logit_rows = logit_rows;
  model_options.mtp = shape.drafts > 0;
  const std::unique_ptr<model::Model> model =
      model::load_model(*source, make_backend, {.ranks = shape.ranks, .by_expert = shape.by_expert}, model_options);
  Launched launched;
  for (const auto& backend : backends) launched.weight_bytes = std::max(launched.weight_bytes, weights_of(*backend));
  backends.clear();
  model::Caches caches = model->make_caches(pages_each * lanes.count(), kPage, lanes.slots());
  const std::unique_ptr<ops::Stepper> stepper = model->make_stepper({.lanes = lanes.count(),
                                                                     .rows = rows,
                                                                     .logit_rows = logit_rows,
                                                                     .drafts = shape.drafts,
                                                                     .context = pages_each * kPage,
                                                                     .page_size = kPage,
                                                                     .vocabulary = model->config().vocabulary},
                                                                    caches);
  // Drafts are there from the second step on.
  if (shape.drafts > 0) take(*stepper, lanes.work(true));
  launched.works = cuda::works_of(model->backend(), [&] { take(*stepper, lanes.work(shape.drafts == 0)); });
  return launched;
}

plan::step::StepPlan predict(const Request& request) {
  const Launched launched = launched_by(request);
  plan::step::StepPlan plan = add_up(launched.works, request.shape, request.gpu);
  plan.weight_bytes = static_cast<double>(launched.weight_bytes);
  // Experts the other way.
  const auto experts = [&](const std::vector<plan::step::Work>& works) {
    return std::find_if(works.begin(), works.end(), [](const plan::step::Work& w) { return w.experts.has_value(); });
  };
  const auto mine = experts(launched.works);
  if (request.shape.ranks == 1 || mine == launched.works.end()) return plan;
  Request other = request;
  other.shape.by_expert = !request.shape.by_expert;
  const Launched others = launched_by(other);
  const auto theirs = experts(others.works);
  if (theirs == others.works.end()) return plan;
  const plan::step::Machine machine = {request.gpu, request.shape.ranks, request.shape.link};
  const double here = price(*mine, machine).us, there = price(*theirs, machine).us;
  const auto picks = static_cast<double>(mine->experts->tokens * mine->experts->top_k);
  plan.experts = request.shape.by_expert
                     ? plan::step::ExpertSplit{there, here, plan::step::busiest_share(picks, request.shape.ranks)}
                     : plan::step::ExpertSplit{here, there, plan::step::busiest_share(picks, request.shape.ranks)};
  return plan;
}

}  // namespace fourfold::predict
