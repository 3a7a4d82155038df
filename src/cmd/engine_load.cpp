#include "cmd/engine_load.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "base/interrupt.h"

namespace fourfold::cmd {
namespace {

class SharedModel final : public model::Model {
 public:
  explicit SharedModel(std::shared_ptr<model::Model> model) : model_(std::move(model)) {}
  const model::ModelConfig& config() const override { return model_->config(); }
  ops::Backend& backend() override { return model_->backend(); }
  const model::ModelOptions& options() const override { return model_->options(); }
  model::Caches make_caches(int64_t pages, int64_t page_size, int64_t slots) override {
    return model_->make_caches(pages, page_size, slots);
  }
  int64_t cache_bytes_per_token() const override { return model_->cache_bytes_per_token(); }
  int64_t state_bytes_per_slot() const override { return model_->state_bytes_per_slot(); }
  void forward(const ops::Batch& batch, model::Caches& caches, const model::LayerObserver& observer) override {
    model_->forward(batch, caches, observer);
  }
  ops::Tensor logits() const override { return model_->logits(); }
  ops::Tensor hidden() const override { return model_->hidden(); }
  bool has_mtp() const override { return model_->has_mtp(); }
  void forward_mtp(const ops::Batch& batch, const ops::Tensor& hidden, model::Caches& caches) override {
    model_->forward_mtp(batch, hidden, caches);
  }
  ops::Tensor mtp_logits() const override { return model_->mtp_logits(); }
  ops::Tensor mtp_hidden() const override { return model_->mtp_hidden(); }
  std::unique_ptr<ops::Stepper> make_stepper(const ops::StepLimits& limits, model::Caches& caches) override {
    return model_->make_stepper(limits, caches);
  }
  std::optional<ops::OperationTimes> time_forward(const ops::Batch& batch, model::Caches& caches) override {
    return model_->time_forward(batch, caches);
  }
  ops::Cost cost(int64_t tokens, int64_t context, int64_t logit_rows) const override {
    return model_->cost(tokens, context, logit_rows);
  }

 private:
  std::shared_ptr<model::Model> model_;
};

// Which streams have something to read, in the order in which it came; filled by the engine's thread.
class Inbox {
 public:
  using Time = std::chrono::steady_clock::time_point;
  void add(size_t stream) {
    {
      const std::lock_guard lock(mutex_);
      ready_.emplace_back(stream, std::chrono::steady_clock::now());
    }
    filled_.notify_one();
  }
  // Until something is there or the time has come.
  bool take(std::deque<std::pair<size_t, Time>>& into, Time until) {
    std::unique_lock lock(mutex_);
    filled_.wait_until(lock, until, [&] { return !ready_.empty(); });
    into.swap(ready_);
    ready_.clear();
    return !into.empty();
  }

 private:
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<std::pair<size_t, Time>> ready_;
};

}  // namespace

std::unique_ptr<model::Model> share_model(std::shared_ptr<model::Model> model) {
  return std::make_unique<SharedModel>(std::move(model));
}

int64_t LoadFigures::output_tokens() const {
  int64_t sum = 0;
  for (const RequestTimes& request : requests) sum += request.end.output_tokens;
  return sum;
}

int64_t LoadFigures::prompt_tokens() const {
  int64_t sum = 0;
  for (const RequestTimes& request : requests) sum += request.end.prompt_tokens;
  return sum;
}

std::vector<double> LoadFigures::first_token_seconds() const {
  std::vector<double> all;
  for (const RequestTimes& request : requests) {
    if (!request.tokens.empty()) all.push_back(request.tokens.front() - request.submitted);
  }
  return all;
}

double LoadFigures::decode_tokens_per_s() const {
  double tokens = 0, seconds_of_all = 0;
  for (const RequestTimes& request : requests) {
    if (request.tokens.size() < 2) continue;
    tokens += static_cast<double>(request.tokens.size() - 1);
    seconds_of_all += request.tokens.back() - request.tokens.front();
  }
  return seconds_of_all > 0 ? tokens / seconds_of_all : 0;
}

std::vector<double> LoadFigures::between_tokens_seconds() const {
  std::vector<double> all;
  for (const RequestTimes& request : requests) {
    for (size_t i = 1; i < request.tokens.size(); ++i) all.push_back(request.tokens[i] - request.tokens[i - 1]);
  }
  return all;
}

LoadFigures run_load(engine::Engine& engine, std::vector<engine::Request> requests, int64_t concurrency,
                     std::span<const double> arrivals, const std::function<void(int64_t)>& progress) {
  FF_ASSERT(arrivals.empty() || arrivals.size() == requests.size());
  using Clock = std::chrono::steady_clock;
  LoadFigures figures;
  figures.requests.resize(requests.size());
  figures.before = engine.stats();
  const auto inbox = std::make_shared<Inbox>();  // streams may call it until they are gone
  std::vector<std::unique_ptr<engine::EventStream>> streams(requests.size());
  const auto begin = Clock::now();
  const auto since = [&](Clock::time_point t) { return std::chrono::duration<double>(t - begin).count(); };
  size_t sent = 0;
  int64_t done = 0, running = 0;
  std::deque<std::pair<size_t, Inbox::Time>> ready;
  while (done < static_cast<int64_t>(requests.size())) {
    throw_if_interrupted();
    const auto due = [&] {
      if (sent == requests.size()) return false;
      return arrivals.empty() ? running < concurrency : arrivals[sent] <= since(Clock::now());
    };
    while (due()) {
      const size_t i = sent++;
      requests[i].notify = [inbox, i] { inbox->add(i); };
      figures.requests[i].submitted = since(Clock::now());
      streams[i] = engine.submit(std::move(requests[i]));
      ++running;
    }
    auto until = Clock::now() + std::chrono::milliseconds(100);
    if (!arrivals.empty() && sent < requests.size()) {
      until = std::min(
          until, begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(arrivals[sent])));
    }
    if (!inbox->take(ready, until)) continue;
    // The engine calls for each event: one that is there already came at the time of a later call.
    for (const auto& [i, time] : ready) {
      const auto event = streams[i]->next(std::chrono::milliseconds(0));
      FF_ASSERT(event.has_value());
      if (event->kind == engine::Event::Kind::kToken) {
        figures.requests[i].tokens.push_back(since(time));
        continue;
      }
      if (event->reason == engine::FinishReason::kError) fail("{}", event->error);
      figures.requests[i].end = *event;
      streams[i].reset();
      ++done;
      --running;
      if (progress) progress(done);
    }
    ready.clear();
  }
  figures.seconds = since(Clock::now());
  figures.after = engine.stats();
  return figures;
}

Percentiles percentiles(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    const auto i = static_cast<size_t>(std::ceil(share * static_cast<double>(values.size())));
    return values[std::clamp<size_t>(i, 1, values.size()) - 1];
  };
  return {at(0.5), at(0.9), at(0.99)};
}

DraftFigures draft_figures(const engine::EngineStats& before, const engine::EngineStats& after) {
  DraftFigures figures;
  const int64_t rounds = after.drafts.rounds - before.drafts.rounds;
  double accepted = 0;
  for (int64_t i = 0; i < ops::kMaxDrafts; ++i) {
    const int64_t drafted = after.drafts.drafted[i] - before.drafts.drafted[i];
    const int64_t taken = after.drafts.accepted[i] - before.drafts.accepted[i];
    if (drafted == 0) break;
    figures.by_position.push_back(static_cast<double>(taken) / static_cast<double>(drafted));
    accepted += static_cast<double>(taken);
  }
  if (rounds > 0) figures.accepted_per_step = accepted / static_cast<double>(rounds);
  return figures;
}

int32_t parse_drafts(const std::string& text) {
  if (text == "auto") return engine::kAutoDrafts;
  if (text.size() == 1 && text[0] >= '0' && text[0] <= '5') return text[0] - '0';
  fail("--draft is '{}', wanted 0 to {} or auto", printable(text), ops::kMaxDrafts);
}

int64_t parse_draft_tokens(const std::string& text) {
  if (text == "auto") return engine::kAutoDraftTokens;
  if (text == "all") return 0;
  int64_t tokens = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, tokens);
  if (error == std::errc() && stop == end && tokens > 0 && tokens <= int64_t{1} << 30) return tokens;
  fail("--draft-tokens is '{}', wanted auto, all or a number of tokens", printable(text));
}

void add_draft_tokens_option(Command& command, std::string& text) {
  command
      .add_option("--draft-tokens", text,
                  "What drafts are chosen from: all tokens, the first N of the vocabulary, or auto, by the text")
      .show_default();
}

}  // namespace fourfold::cmd
