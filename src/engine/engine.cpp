#include "engine/engine.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#include "base/check.h"
#include "engine/constraints.h"
#include "engine/draft_policy.h"
#include "engine/options.h"
#include "engine/pages.h"
#include "engine/prefix_cache.h"
#include "engine/request.h"
#include "engine/scheduler.h"
#include "engine/states.h"
#include "engine/stream.h"
#include "model/model.h"

namespace fourfold::engine {
namespace {

double seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

class EngineImpl final : public Engine {
 public:
  EngineImpl(std::unique_ptr<model::Model> model, const EngineOptions& options)
      : model_(std::move(model)),
        options_(resolve(options, *model_)),
        sizes_(sizes_of(options_, *model_)),
        pages_(sizes_.pages, options_.page_size),
        slots_(sizes_.slots),
        prefixes_(options_.prefix_cache ? std::make_unique<PrefixCache>(sizes_.prefixes, pages_, slots_) : nullptr),
        draft_policy_(options_.drafts, static_cast<int32_t>(sizes_.step.drafts)),
        scheduler_({sizes_.step.lanes, sizes_.step.rows, sizes_.step.logit_rows, sizes_.prefixes.recurrent}, pages_,
                   slots_, prefixes_.get(), draft_policy_,
                   DraftLists(sizes_.step.draft_lists, sizes_.step.vocabulary, options_.draft_tokens > 0)),
        caches_(make_caches(*model_, sizes_)),
        stepper_(model_->make_stepper(sizes_.step, caches_)) {
    lane_work_.reserve(static_cast<size_t>(sizes_.step.lanes));
    starts_.reserve(static_cast<size_t>(sizes_.step.lanes));
    publish(true);
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
    return std::move(submit_all(std::move(request), 1).front());
  }
  std::vector<std::unique_ptr<EventStream>> submit(Request request, int64_t count) override {
    if (count < 1 || count > options_.max_queued) {
      throw Refused(Refusal::kInvalid, fmt::format("request: {} answers asked for, wanted 1 to {} (max_queued)", count,
                                                   options_.max_queued));
    }
    if (count > 1 && request.constraint != nullptr) {
      throw Refused(Refusal::kInvalid, fmt::format("request: {} answers with one constraint, wanted 1", count));
    }
    return submit_all(std::move(request), count);
  }

  EngineStats stats() const override {
    const std::lock_guard lock(mutex_);
    EngineStats stats = stats_;
    stats.waiting += static_cast<int64_t>(inbox_.size());
    stats.waiting_tokens = queued_tokens_;
    stats.heartbeat_seconds = seconds(heartbeat_.load(std::memory_order_relaxed), Clock::now());
    stats.idle = stats.idle && inbox_.empty();
    stats.failure = failure_;
    return stats;
  }

  void drain() override {
    std::unique_lock lock(mutex_);
    draining_ = true;
    done_.wait(lock, [&] { return unfinished_ == 0; });
  }

 private:
  std::vector<std::unique_ptr<EventStream>> submit_all(Request request, int64_t count);

  // ---- everything below runs on the engine thread
  void run();
  bool take_inbox();
  void end_cancelled();
  bool launch();
  void settle();
  void take_tokens(const Work& work, const ops::LaneOutcome& outcome);
  void supply_masks(Flight& flight);
  void deliver(Active& request, const ops::LaneOutcome& outcome, int64_t count);
  Event end_of(const Active& request, FinishReason reason, const std::string& error);
  void finish(Active* request, FinishReason reason, const std::string& error = {});
  void sweep();
  void tell_endings();
  void sleep();
  void stop();
  void fail_everything(const std::string& error);
  void publish(bool idle);
  void measure(const Flight& flight, const ops::StepOutcome& outcome);

  Flight& flight(int64_t index) { return flights_[static_cast<size_t>((first_flight_ + index) % ops::kInFlight)]; }

  const std::unique_ptr<model::Model> model_;
  const EngineOptions options_;
  const Sizes sizes_;
  const std::shared_ptr<Wakeup> wakeup_ = std::make_shared<Wakeup>();

  // Of the engine thread.
  PageAllocator pages_;
  SlotAllocator slots_;
  const std::unique_ptr<PrefixCache> prefixes_;
  DraftPolicy draft_policy_;
  Scheduler scheduler_;
  model::Caches caches_;
  const std::unique_ptr<ops::Stepper> stepper_;  // before the caches it goes
  std::array<Flight, ops::kInFlight> flights_;   // a ring: launched and not yet settled
  int64_t first_flight_ = 0, in_flight_ = 0;
  std::vector<ops::LaneWork> lane_work_;
  std::vector<ops::LaneStart> starts_;
  std::vector<uint32_t> masks_;
  EngineStats counters_;

  // Ends that are certain, and not yet told: whoever hears of one may count on what the statistics say.
  struct Ending {
    std::shared_ptr<Channel> channel;
    Event event;
  };
  std::vector<Ending> endings_;

  // Shared with the callers.
  mutable std::mutex mutex_;
  std::condition_variable done_;
  std::atomic<Clock::time_point> heartbeat_{Clock::now()};
  std::vector<std::unique_ptr<Active>> inbox_;
  EngineStats stats_;
  uint64_t next_id_ = 1;
  int64_t queued_ = 0, queued_tokens_ = 0;  // submitted and in no step yet
  int64_t unfinished_ = 0;                  // submitted, and not yet over with all given back
  bool draining_ = false;
  bool stopping_ = false;
  std::string failure_;

  std::thread thread_;  // last: it starts when all else is there
};

std::vector<std::unique_ptr<EventStream>> EngineImpl::submit_all(Request request, int64_t count) {
  check_request(request, {sizes_.step.vocabulary, options_.max_context, static_cast<int32_t>(sizes_.step.drafts)});
  const auto tokens = static_cast<int64_t>(request.prompt.size());
  std::vector<std::unique_ptr<EventStream>> streams;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) {
      throw Refused(Refusal::kFailed, fmt::format("engine: stopped by an earlier error: {}", failure_));
    }
    if (draining_) throw Refused(Refusal::kDraining, "engine: draining, new requests are refused");
    if (queued_ + count > options_.max_queued) {
      throw Refused(Refusal::kFull, fmt::format("engine: {} requests are waiting, wanted at most {} (max_queued)",
                                                queued_, options_.max_queued));
    }
    // A prompt that is longer than the queue may wait when nothing else does.
    if (queued_tokens_ > 0 && queued_tokens_ + count * tokens > options_.max_queued_tokens) {
      throw Refused(Refusal::kFull,
                    fmt::format("engine: requests of {} tokens are waiting, wanted at most {} (max_queued_tokens) with "
                                "the {} of this one",
                                queued_tokens_, options_.max_queued_tokens, count * tokens));
    }
    for (int64_t i = 0; i < count; ++i) {
      const bool last = i + 1 == count;
      Request one = last ? std::move(request) : request;
      const uint64_t seed = one.sampling.seed ? *one.sampling.seed + static_cast<uint64_t>(i) : fresh_seed();
      auto channel = std::make_shared<Channel>(std::move(one.notify));
      auto active = std::make_unique<Active>(next_id_++, std::move(one), seed, options_.max_context, channel);
      streams.push_back(make_stream(active->id, std::move(channel), wakeup_));
      inbox_.push_back(std::move(active));
      ++queued_;
      queued_tokens_ += tokens;
      ++unfinished_;
    }
  }
  wakeup_->signal();
  return streams;
}

void EngineImpl::run() {
  try {
    while (take_inbox()) {
      end_cancelled();
      const bool launched = launch();
      if (in_flight_ == ops::kInFlight || (in_flight_ > 0 && !launched)) {
        settle();
      } else if (!launched) {
        sleep();
      }
    }
    stop();
  } catch (const std::exception& error) {
    fail_everything(error.what());
  } catch (...) {
    fail_everything("unknown exception");
  }
}

// Moves new requests to the scheduler. False when the engine is to stop.
bool EngineImpl::take_inbox() {
  wakeup_->clear();
  heartbeat_.store(Clock::now(), std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  for (auto& active : inbox_) scheduler_.add(std::move(active));
  inbox_.clear();
  return !stopping_;
}

// Requests that were cancelled, or whose deadline has passed.
void EngineImpl::end_cancelled() {
  const auto now = Clock::now();
  for (const auto& request : scheduler_.all()) {
    if (request->over) continue;
    if (request->channel->cancelled()) {
      finish(request.get(), FinishReason::kCancelled);
    } else if (request->request.deadline && now >= *request->request.deadline) {
      finish(request.get(), FinishReason::kDeadline);
    }
  }
  if (!endings_.empty()) sweep();
}

// Plans the next step and launches it. False when there is none.
bool EngineImpl::launch() {
  FF_ASSERT(in_flight_ < ops::kInFlight);
  Flight& next = flight(in_flight_);
  if (!scheduler_.plan(next)) {
    // Whatever waits, waits for a step under way.
    FF_ASSERT(in_flight_ > 0 || scheduler_.idle());
    return false;
  }
  lane_work_.clear();
  starts_.clear();
  const auto now = Clock::now();
  int64_t started = 0, started_tokens = 0;
  for (const Work& work : next.work) {
    Active& request = *work.request;
    if (!request.started) {
      request.started = true;
      request.first_step = now;
      ++started;
      started_tokens += request.prompt_tokens;
    }
    const auto tokens = std::span<const int32_t>(request.tokens);
    ops::LaneWork lane;
    lane.lane = work.lane;
    if (work.starts) {
      ops::LaneStart start;
      start.sampling = request.request.sampling;
      start.seed = request.seed;
      start.prompt = tokens.first(static_cast<size_t>(request.prompt_tokens));
      start.output = tokens.subspan(static_cast<size_t>(request.prompt_tokens));
      start.max_output = request.max_output;
      start.min_output = request.request.min_tokens;
      if (!request.request.ignore_eos) start.stop_tokens = request.request.stop_tokens;
      start.banned_tokens = request.request.banned_tokens;
      start.defined_tokens = request.request.defined_tokens;
      start.constrained = request.request.constraint != nullptr;
      starts_.push_back(start);  // never beyond what was reserved: they are pointed to
      lane.start = &starts_.back();
    }
    if (work.tokens > 0) {
      lane.tokens = tokens.subspan(static_cast<size_t>(work.first), static_cast<size_t>(work.tokens));
      lane.position = static_cast<int32_t>(work.first);
      if (!work.chooses) lane.next = tokens[static_cast<size_t>(work.first + work.tokens)];
      if (request.output_tokens() == 0) lane.prompt_logprobs = request.request.prompt_logprobs;
    }
    lane.drafts = work.drafts;
    lane.new_drafts = work.new_drafts;
    lane.feed_drafter = request.lane.feeds;
    lane.first_page = static_cast<int32_t>(work.first_page);
    lane.pages = std::span(request.lane.pages).subspan(static_cast<size_t>(work.first_page));
    lane.state_in = work.state_in;
    lane.state_out = std::span(request.lane.slots).first(static_cast<size_t>(work.states));
    lane_work_.push_back(lane);
  }
  if (started > 0) {
    const std::lock_guard lock(mutex_);
    queued_ -= started;
    queued_tokens_ -= started_tokens;
  }
  publish(false);
  next.ticket = stepper_->launch({next.copies, lane_work_, next.draft_list});
  ++in_flight_;
  if (in_flight_ == 1) supply_masks(next);
  return true;
}

// Waits for the oldest step, and makes of it what is to be made.
void EngineImpl::settle() {
  Flight& oldest = flight(0);
  const ops::StepOutcome& outcome = stepper_->wait(oldest.ticket);
  if (!outcome.error.empty()) throw Error(outcome.error);
  FF_ASSERT(outcome.lanes.size() == oldest.work.size());
  for (size_t i = 0; i < oldest.work.size(); ++i) take_tokens(oldest.work[i], outcome.lanes[i]);
  if (options_.notified) options_.notified();
  if (in_flight_ > 1) supply_masks(flight(1));
  for (size_t i = 0; i < oldest.work.size(); ++i) scheduler_.record(oldest.work[i], outcome.lanes[i]);
  measure(oldest, outcome);
  scheduler_.land(oldest);
  first_flight_ = (first_flight_ + 1) % ops::kInFlight;
  --in_flight_;
  sweep();
}

// The tokens that a step chose for a request, as far as they are its: delivered, with what ends it.
void EngineImpl::take_tokens(const Work& work, const ops::LaneOutcome& outcome) {
  Active& request = *work.request;
  if (request.over) {
    // Nobody hears of them; what they left in the caches is as good as any.
    request.tokens.insert(request.tokens.end(), outcome.tokens.begin(), outcome.tokens.end());
    return;
  }
  for (const auto& entry : outcome.prompt_logprobs) {
    if (static_cast<int64_t>(request.prompt_logprobs.size()) + 1 < request.prompt_tokens) {
      request.prompt_logprobs.push_back(entry);
    }
  }
  if (request.request.constraint != nullptr) request.drafts.assign(outcome.drafts.begin(), outcome.drafts.end());
  request.drafted += outcome.verified;
  request.accepted += outcome.accepted;
  FinishReason reason = FinishReason::kError;
  bool ends = false;
  std::string error;
  int64_t good = 0;
  const std::vector<int32_t>& stops = request.request.stop_tokens;
  for (const int32_t token : outcome.tokens) {
    request.tokens.push_back(token);
    if (ends) continue;
    if (!request.request.ignore_eos && std::find(stops.begin(), stops.end(), token) != stops.end()) {
      reason = FinishReason::kStop;
      ends = true;
    } else if (request.output_tokens() >= request.max_output) {
      reason = FinishReason::kLength;
      ends = true;
    }
    if (!ends && request.request.constraint != nullptr) {
      try {
        accept_token(*request.request.constraint, token);
      } catch (const Error& refused) {
        error = fmt::format("request {}, token {}: {}", request.id, request.length(), refused.what());
        ends = true;
        continue;
      }
    }
    ++good;
  }
  if (!outcome.error.empty()) {
    error = fmt::format("request {}, token {}: {}", request.id, request.length(), outcome.error);
    ends = true;
  }
  FF_ASSERT(ends || !outcome.ended);
  deliver(request, outcome, good);
  if (!request.over && ends) finish(&request, error.empty() ? reason : FinishReason::kError, error);
}

// The first `count` tokens of an outcome.
void EngineImpl::deliver(Active& request, const ops::LaneOutcome& outcome, int64_t count) {
  if (count == 0) return;
  request.last_token = Clock::now();
  if (request.delivered == 0) request.first_token = request.last_token;
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    Event event;
    event.token = outcome.tokens[i];
    if (i < outcome.logprobs.size()) event.logprobs = outcome.logprobs[i];
    if (request.delivered == 0) event.prompt_logprobs = std::move(request.prompt_logprobs);
    ++request.delivered;
    try {
      request.channel->push(std::move(event));
    } catch (const std::exception& error) {
      return finish(&request, FinishReason::kError,
                    fmt::format("request {}: notify failed: {}", request.id, error.what()));
    } catch (...) {
      return finish(&request, FinishReason::kError, fmt::format("request {}: notify failed", request.id));
    }
  }
}

// Masks for the constrained lanes of the launched step after the last settled one.
void EngineImpl::supply_masks(Flight& flight) {
  for (Work& work : flight.work) {
    Active& request = *work.request;
    if (request.request.constraint == nullptr || !work.chooses || work.masked) continue;
    std::span<const int32_t> drafts = request.drafts;
    drafts = drafts.first(std::min(drafts.size(), static_cast<size_t>(work.drafts)));
    if (!request.request.ignore_eos) {  // nothing comes behind a stop token
      const std::vector<int32_t>& stops = request.request.stop_tokens;
      const auto stop = std::find_first_of(drafts.begin(), drafts.end(), stops.begin(), stops.end());
      drafts = drafts.first(static_cast<size_t>(stop - drafts.begin()));
    }
    masks_.clear();
    if (!request.over) {
      try {
        append_masks(*request.request.constraint, drafts, sizes_.step.vocabulary, masks_);
      } catch (const Error& error) {
        masks_.clear();
        finish(&request, FinishReason::kError,
               fmt::format("request {}, token {}: {}", request.id, request.length() + 1, error.what()));
      }
    }
    work.masked = true;
    stepper_->supply_masks(flight.ticket, work.lane, masks_);  // none: the lane ends
  }
}

Event EngineImpl::end_of(const Active& request, FinishReason reason, const std::string& error) {
  Event event;
  event.kind = Event::Kind::kFinished;
  event.reason = reason;
  event.error = error;
  event.prompt_tokens = request.prompt_tokens;
  event.output_tokens = request.delivered;
  event.cached_tokens = request.cached_tokens;
  event.drafted = request.drafted;
  event.accepted = request.accepted;
  const auto now = Clock::now();
  event.queue_seconds = seconds(request.submitted, request.started ? request.first_step : now);
  if (request.started) {
    event.prefill_seconds = seconds(request.first_step, event.output_tokens > 0 ? request.first_token : now);
  }
  if (event.output_tokens > 0) event.decode_seconds = seconds(request.first_token, request.last_token);
  ++counters_.finished[static_cast<size_t>(reason)];
  return event;
}

// The request is over: its lane is free, and its kFinished goes out with the next sweep().
void EngineImpl::finish(Active* request, FinishReason reason, const std::string& error) {
  if (request->over) return;
  request->over = true;
  endings_.push_back({request->channel, end_of(*request, reason, error)});
  if (!request->started) {
    const std::lock_guard lock(mutex_);
    --queued_;
    queued_tokens_ -= request->prompt_tokens;
  }
  scheduler_.end(request);
}

// Gives back what nobody needs any more, then tells of the ends.
void EngineImpl::sweep() {
  const int64_t gone = scheduler_.sweep();
  if (endings_.empty() && gone == 0) return;
  publish(in_flight_ == 0 && scheduler_.idle());
  tell_endings();
  if (gone > 0) {
    const std::lock_guard lock(mutex_);
    unfinished_ -= gone;
  }
  done_.notify_all();
}

void EngineImpl::tell_endings() {
  for (Ending& ending : endings_) {
    try {
      ending.channel->push(std::move(ending.event));
    } catch (...) {  // of its notify: the event is in the stream, and there is nobody to tell
    }
  }
  if (!endings_.empty() && options_.notified) options_.notified();
  endings_.clear();
}

// Nothing to do.
void EngineImpl::sleep() {
  scheduler_.check();
  FF_ASSERT(pages_.used() == pages_.only_cached());
  publish(true);
  wakeup_->wait();
}

void EngineImpl::stop() {
  for (const auto& request : scheduler_.all()) finish(request.get(), FinishReason::kCancelled);
  while (in_flight_ > 0) settle();
  sweep();
  if (prefixes_ != nullptr) prefixes_->check();
}

// A step failed, and what the caches hold is unknown, or the books are wrong: every request ends with the error, and
// new ones are refused with it. Nothing is given back.
void EngineImpl::fail_everything(const std::string& error) {
  const std::string reason = error.empty() ? "unknown error" : error;
  std::vector<std::unique_ptr<Active>> inbox;
  {
    const std::lock_guard lock(mutex_);
    failure_ = reason;
    inbox.swap(inbox_);
    queued_ = queued_tokens_ = 0;
  }
  const auto end = [&](Active& request) {
    if (request.over) return;
    request.over = true;
    endings_.push_back({request.channel, end_of(request, FinishReason::kError, reason)});
  };
  for (const auto& request : scheduler_.all()) end(*request);
  for (const auto& request : inbox) end(*request);
  {
    const std::lock_guard lock(mutex_);
    stats_ = counters_;
    stats_.waiting = stats_.running = 0;
    stats_.idle = true;
  }
  tell_endings();
  {
    const std::lock_guard lock(mutex_);
    unfinished_ = 0;
  }
  done_.notify_all();
}

// What a settled step tells about times and drafts.
void EngineImpl::measure(const Flight& flight, const ops::StepOutcome& outcome) {
  DraftPolicy::Step step;
  for (size_t i = 0; i < flight.work.size(); ++i) {
    const Work& work = flight.work[i];
    const ops::LaneOutcome& lane = outcome.lanes[i];
    counters_.prefill_tokens += work.tokens;
    step.feeds = step.feeds || work.feeds;
    for (int32_t pass = 0; pass < lane.passes; ++pass) ++step.passes[static_cast<size_t>(pass)];
    if (work.tokens > 0) {
      step.prompts = true;
      continue;
    }
    if (lane.tokens.empty()) continue;  // it had ended before
    const auto tokens = static_cast<int64_t>(lane.tokens.size());
    counters_.decode_tokens += tokens;
    ++step.lanes;
    step.rows += 1 + lane.verified;
    step.tokens += tokens;
    if (lane.verified == 0) continue;
    ++counters_.drafts.rounds;
    for (int32_t d = 0; d < lane.verified; ++d) ++counters_.drafts.drafted[d];
    for (int32_t d = 0; d < lane.accepted; ++d) ++counters_.drafts.accepted[d];
    draft_policy_.record(work.request->acceptance, lane.verified, lane.accepted);
  }
  ++counters_.steps;
  counters_.step_seconds += outcome.seconds;
  if (outcome.prepared) ++counters_.prepared_steps;
  if (!outcome.prepared) draft_policy_.measure(step, outcome.seconds);
}

void EngineImpl::publish(bool idle) {
  counters_.waiting = static_cast<int64_t>(scheduler_.waiting().size());
  counters_.running = static_cast<int64_t>(scheduler_.running().size());
  counters_.pages_total = pages_.total();
  counters_.pages_free = pages_.free() + pages_.only_cached();
  counters_.slots_total = slots_.total();
  counters_.slots_free = slots_.free();
  counters_.preemptions = scheduler_.preemptions();
  if (prefixes_ != nullptr) counters_.prefix = prefixes_->stats();
  counters_.idle = idle;
  const std::lock_guard lock(mutex_);
  stats_ = counters_;
}

}  // namespace

std::unique_ptr<Engine> make_engine(std::unique_ptr<model::Model> model, const EngineOptions& options) {
  FF_ASSERT(model != nullptr);
  return std::make_unique<EngineImpl>(std::move(model), options);
}

}  // namespace fourfold::engine
