#include "engine/engine.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#include "base/check.h"
#include "engine/pages.h"
#include "engine/request.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "engine/states.h"
#include "engine/stream.h"
#include "model/model.h"
#include "ops/batch.h"

namespace fourfold::engine {
namespace {

// Rows of logits that are copied to the host at a time.
constexpr int64_t kReadRows = 16;

double seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

void check_limit(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) fail("engine: {} is {}, wanted {} to {}", field, value, low, high);
}

// The options with their defaults filled in, checked against the model and each other.
EngineOptions resolve(EngineOptions options, const model::Model& model) {
  const model::ModelConfig& config = model.config();
  check_limit("max_context", options.max_context, 2, config.max_positions);
  check_limit("max_sequences", options.max_sequences, 1, std::min<int64_t>(4096, model.options().max_logit_rows));
  check_limit("max_step_tokens", options.max_step_tokens, options.max_sequences, model.options().max_step_tokens);
  check_limit("page_size", options.page_size, 1, 65536);
  check_limit("max_queued", options.max_queued, 1, 1 << 20);
  if (options.cache_tokens == 0) {
    options.cache_tokens = std::max(options.max_context, options.max_sequences * ((options.max_context + 1) / 2));
  }
  check_limit("cache_tokens", options.cache_tokens, options.max_context, int64_t{1} << 30);
  return options;
}

model::Caches make_caches(model::Model& model, int64_t pages, int64_t page_size, int64_t slots) {
  try {
    return model.make_caches(pages, page_size, slots);
  } catch (const std::bad_alloc&) {
    fail("engine: no memory for the caches: {} positions of {} bytes and {} states of {} bytes", pages * page_size,
         model.cache_bytes_per_token(), slots, model.state_bytes_per_slot());
  }
}

class EngineImpl final : public Engine {
 public:
  EngineImpl(std::unique_ptr<model::Model> model, const EngineOptions& options)
      : model_(std::move(model)),
        options_(resolve(options, *model_)),
        vocabulary_(model_->config().vocabulary),
        pages_((options_.cache_tokens + options_.page_size - 1) / options_.page_size, options_.page_size),
        slots_(options_.max_sequences),
        scheduler_({options_.max_sequences, options_.max_step_tokens}, pages_, slots_),
        caches_(make_caches(*model_, pages_.total(), pages_.page_size(), slots_.total())),
        sampler_(vocabulary_),
        rows_(static_cast<size_t>(std::min(kReadRows, options_.max_sequences) * vocabulary_)) {
    tokens_.reserve(static_cast<size_t>(options_.max_step_tokens));
    publish();
    thread_ = std::thread([this] { run(); });
  }

  ~EngineImpl() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wakeup_->signal();
    thread_.join();
  }

  std::unique_ptr<EventStream> submit(Request request) override {
    check_request(request, {vocabulary_, options_.max_context});
    auto channel = std::make_shared<Channel>(std::move(request.notify));
    std::unique_ptr<EventStream> stream;
    {
      const std::lock_guard lock(mutex_);
      if (!failure_.empty()) fail("engine: stopped by an earlier error: {}", failure_);
      if (draining_) fail("engine: draining, new requests are refused");
      if (queued_ >= options_.max_queued) {
        fail("engine: {} requests are waiting, wanted at most {} (max_queued)", queued_, options_.max_queued);
      }
      auto active = std::make_unique<Active>(next_id_++, std::move(request), options_.max_context, channel);
      stream = make_stream(active->id, std::move(channel), wakeup_);
      inbox_.push_back(std::move(active));
      ++queued_;
      ++unfinished_;
    }
    wakeup_->signal();
    return stream;
  }

  EngineStats stats() const override {
    const std::lock_guard lock(mutex_);
    EngineStats stats = stats_;
    stats.waiting += static_cast<int64_t>(inbox_.size());
    return stats;
  }

  void drain() override {
    std::unique_lock lock(mutex_);
    draining_ = true;
    done_.wait(lock, [&] { return unfinished_ == 0; });
  }

 private:
  // ---- everything below runs on the engine thread

  void run() {
    try {
      while (take_inbox()) {
        drop_cancelled();
        if (scheduler_.idle()) {
          scheduler_.check();
          FF_ASSERT(pages_.used() == 0 && slots_.used() == 0);
          wakeup_->wait();
        } else {
          step();
        }
      }
      finish_all(FinishReason::kCancelled, "");
    } catch (const std::exception& error) {
      fail_everything(error.what());
    } catch (...) {
      fail_everything("unknown exception");
    }
  }

  // Moves new requests to the scheduler. False when the engine is to stop.
  bool take_inbox() {
    wakeup_->clear();
    const std::lock_guard lock(mutex_);
    for (auto& active : inbox_) scheduler_.add(std::move(active));
    inbox_.clear();
    return !stopping_;
  }

  void drop_cancelled() {
    finished_.clear();
    for (const auto* queue : {&scheduler_.running(), &scheduler_.waiting()}) {
      for (const auto& active : *queue) {
        if (active->channel->cancelled()) finished_.push_back(active.get());
      }
    }
    for (Active* active : finished_) finish(active, FinishReason::kCancelled, "");
  }

  void step() {
    const std::vector<Scheduler::Work>& work = scheduler_.plan();
    tokens_.clear();
    sequences_.clear();
    logit_rows_.clear();
    sampling_.clear();
    int64_t prefill = 0, decode = 0, started = 0;
    const auto begin = Clock::now();
    for (const auto& [active, count] : work) {
      if (!active->started) {
        active->started = true;
        active->first_step = begin;
        ++started;
      }
      ops::Sequence sequence;
      sequence.first = static_cast<int32_t>(tokens_.size());
      sequence.count = static_cast<int32_t>(count);
      sequence.position = static_cast<int32_t>(active->cached);
      sequence.state_in = sequence.state_out = active->slot;
      sequence.pages = active->pages;
      sequences_.push_back(sequence);
      const auto first = active->tokens.begin() + active->cached;
      tokens_.insert(tokens_.end(), first, first + count);
      (active->pending() == 1 ? decode : prefill) += count;
      if (count == active->pending()) {
        logit_rows_.push_back(static_cast<int32_t>(tokens_.size()) - 1);
        sampling_.push_back(active);
      }
      active->cached += count;
    }
    {
      const std::lock_guard lock(mutex_);
      queued_ -= started;
    }
    publish();

    model_->forward({tokens_, sequences_, logit_rows_}, caches_);
    double step_seconds = seconds(begin, Clock::now()), sample_seconds = 0;
    for (size_t group = 0; group < sampling_.size(); group += kReadRows) {
      const size_t rows = std::min<size_t>(kReadRows, sampling_.size() - group);
      const std::span logits = std::span(rows_).first(rows * static_cast<size_t>(vocabulary_));
      const auto read = Clock::now();
      model_->backend().read(
          model_->logits().slice_rows(static_cast<int64_t>(group), static_cast<int64_t>(group + rows)), logits);
      const auto sample = Clock::now();
      for (size_t i = 0; i < rows; ++i) {
        advance(sampling_[group + i],
                logits.subspan(i * static_cast<size_t>(vocabulary_), static_cast<size_t>(vocabulary_)));
      }
      step_seconds += seconds(read, sample);
      sample_seconds += seconds(sample, Clock::now());
    }
    counters_.steps += 1;
    counters_.prefill_tokens += prefill;
    counters_.decode_tokens += decode;
    counters_.step_seconds += step_seconds;
    counters_.sample_seconds += sample_seconds;
    publish();
    for (const auto& [active, reason, error] : endings_) finish(active, reason, error);
    endings_.clear();
  }

  // Chooses and delivers the next token of a request, from the logits of its last one. Requests that end are noted in
  // endings_: they are removed when the step is over.
  void advance(Active* active, std::span<float> logits) {
    if (active->channel->cancelled()) return;
    Sampled sampled;
    try {
      sampled = sampler_.sample(logits, active->request, active->history, active->seed, active->output_tokens());
    } catch (const Error& error) {
      endings_.push_back({active, FinishReason::kError,
                          fmt::format("request {}, token {}: {}", active->id, active->length(), error.what())});
      return;
    }
    active->tokens.push_back(sampled.token);
    active->history.add_output(sampled.token);
    active->last_token = Clock::now();
    if (active->output_tokens() == 1) active->first_token = active->last_token;

    Event event;
    event.token = sampled.token;
    event.logprobs = std::move(sampled.logprobs);
    active->channel->push(std::move(event));

    const std::vector<int32_t>& stops = active->request.stop_tokens;
    if (std::find(stops.begin(), stops.end(), sampled.token) != stops.end()) {
      endings_.push_back({active, FinishReason::kStop, ""});
    } else if (active->output_tokens() >= active->max_output) {
      endings_.push_back({active, FinishReason::kLength, ""});
    }
  }

  void finish(Active* active, FinishReason reason, const std::string& error) {
    const std::unique_ptr<Active> owned = scheduler_.remove(active);
    deliver_end(*owned, reason, error);
  }

  void deliver_end(const Active& active, FinishReason reason, const std::string& error) {
    Event event;
    event.kind = Event::Kind::kFinished;
    event.reason = reason;
    event.error = error;
    event.prompt_tokens = active.prompt_tokens;
    event.output_tokens = active.output_tokens();
    const auto now = Clock::now();
    event.queue_seconds = seconds(active.submitted, active.started ? active.first_step : now);
    if (active.started) {
      event.prefill_seconds = seconds(active.first_step, event.output_tokens > 0 ? active.first_token : now);
    }
    if (event.output_tokens > 0) event.decode_seconds = seconds(active.first_token, active.last_token);
    // Counted as finished before the event is out: whoever sees it sees the pages free.
    if (!active.started) {
      const std::lock_guard lock(mutex_);
      --queued_;
    }
    publish();
    active.channel->push(std::move(event));
    {
      const std::lock_guard lock(mutex_);
      --unfinished_;
    }
    done_.notify_all();
  }

  void finish_all(FinishReason reason, const std::string& error) {
    while (!scheduler_.running().empty()) finish(scheduler_.running().front().get(), reason, error);
    while (!scheduler_.waiting().empty()) finish(scheduler_.waiting().front().get(), reason, error);
  }

  // A model step failed, and what the caches hold is unknown: every request ends with the error, and new ones are
  // refused with it.
  void fail_everything(const std::string& error) {
    std::vector<std::unique_ptr<Active>> inbox;
    {
      const std::lock_guard lock(mutex_);
      failure_ = error.empty() ? "unknown error" : error;
      inbox.swap(inbox_);
    }
    // Without giving anything back: the books of pages and slots may be what is wrong.
    for (const auto* queue : {&scheduler_.running(), &scheduler_.waiting()}) {
      for (const auto& active : *queue) deliver_end(*active, FinishReason::kError, error);
    }
    for (const auto& active : inbox) deliver_end(*active, FinishReason::kError, error);
  }

  void publish() {
    counters_.waiting = static_cast<int64_t>(scheduler_.waiting().size());
    counters_.running = static_cast<int64_t>(scheduler_.running().size());
    counters_.pages_total = pages_.total();
    counters_.pages_free = pages_.free();
    counters_.slots_total = slots_.total();
    counters_.slots_free = slots_.free();
    counters_.preemptions = scheduler_.preemptions();
    const std::lock_guard lock(mutex_);
    stats_ = counters_;
  }

  struct Ending {
    Active* active;
    FinishReason reason;
    std::string error;
  };

  const std::unique_ptr<model::Model> model_;
  const EngineOptions options_;
  const int64_t vocabulary_;
  const std::shared_ptr<Wakeup> wakeup_ = std::make_shared<Wakeup>();

  // Of the engine thread.
  PageAllocator pages_;
  SlotAllocator slots_;
  Scheduler scheduler_;
  model::Caches caches_;
  Sampler sampler_;
  EngineStats counters_;
  std::vector<int32_t> tokens_, logit_rows_;
  std::vector<ops::Sequence> sequences_;
  std::vector<Active*> sampling_, finished_;
  std::vector<Ending> endings_;
  std::vector<float> rows_;

  // Shared with the callers.
  mutable std::mutex mutex_;
  std::condition_variable done_;
  std::vector<std::unique_ptr<Active>> inbox_;
  EngineStats stats_;
  uint64_t next_id_ = 1;
  int64_t queued_ = 0;      // submitted and in no step yet
  int64_t unfinished_ = 0;  // submitted and without kFinished
  bool draining_ = false;
  bool stopping_ = false;
  std::string failure_;

  std::thread thread_;  // last: it starts when all else is there
};

}  // namespace

std::unique_ptr<Engine> make_engine(std::unique_ptr<model::Model> model, const EngineOptions& options) {
  FF_ASSERT(model != nullptr);
  return std::make_unique<EngineImpl>(std::move(model), options);
}

}  // namespace fourfold::engine
