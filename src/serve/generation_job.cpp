#include "serve/generation_job.h"

#include <algorithm>
#include <utility>

#include "serve/generation_fields.h"
#include "serve/thinking_budget.h"

namespace fourfold::serve {
namespace {

constexpr auto kTick = std::chrono::seconds(1);
constexpr int kHeartbeatTicks = 5;   // without a token, until the client is told that it waits
constexpr size_t kPiece = 32 << 10;  // bytes that are gathered before they are sent

ApiError api_error(const engine::Refused& refused, const GenerationJob::Part& part, const ServedModel& model,
                   const ApiCall& call) {
  switch (refused.reason()) {
    case engine::Refusal::kTooLong:
      return ApiError::too_long(static_cast<int64_t>(part.request.prompt.size()), model.context, call.form,
                                prompt_field(call));
    case engine::Refusal::kFull:
    case engine::Refusal::kDraining:
    case engine::Refusal::kFailed:
      return ApiError::busy(refused.what());
    case engine::Refusal::kInvalid:
      break;
  }
  return {400, refused.what()};
}

}  // namespace

GenerationJob::GenerationJob(Service& service, std::shared_ptr<ApiCall> call, std::vector<Part> parts,
                             std::unique_ptr<AnswerForm> form, bool stream)
    : service_(service), call_(std::move(call)), parts_(std::move(parts)), form_(std::move(form)), stream_(stream) {
  call_->prompt_tokens = 0;
  for (const Part& part : parts_) call_->prompt_tokens += static_cast<int64_t>(part.request.prompt.size());
}

void GenerationJob::start(const std::shared_ptr<GenerationJob>& job) {
  job->call_->exchange->post([job] { job->submit(); });
}

void GenerationJob::submit() {
  Exchange& exchange = *call_->exchange;
  if (exchange.gone()) return client_gone();
  const ServedModel& model = *service_.model();
  int64_t answers = 0;
  for (const Part& part : parts_) answers += part.answers;
  // More than ever fit would be told to come back for ever.
  if (const int64_t most = service_.options().engine.max_queued; answers > most) {
    return fail(ApiError::field(
        "n", fmt::format("the request asks for {} answers, n and its prompts together; at most {} may wait here "
                         "(--max-queued-requests)",
                         answers, most)));
  }
  for (Part& part : parts_) {
    part.request.notify = [weak = weak_from_this()] {
      const auto job = weak.lock();
      if (!job || job->woken_.exchange(true)) return;
      job->service_.deliveries().add(job->call_->exchange, [weak] {
        if (const auto held = weak.lock()) held->pump();
      });
    };
    part.request.deadline = call_->deadline;
    part.request.priority = engine_priority(call_->key ? call_->key->limits().priority : 0, part.request.priority);
    try {
      if (part.answers == 1) {
        answers_.emplace_back();
        answers_.back().stream = model.engine->submit(part.request);
      } else {
        for (auto& stream : model.engine->submit(part.request, part.answers)) {
          answers_.emplace_back();
          answers_.back().stream = std::move(stream);
        }
      }
    } catch (const engine::Refused& refused) {
      answers_.clear();  // those that were taken are cancelled
      return fail(api_error(refused, part, model, *call_));
    } catch (const Error& error) {
      answers_.clear();
      return fail({400, error.what()});
    }
    part.request = {};
  }
  call_->reservation.reset();  // the engine counts them
  unfinished_ = answers_.size();
  exchange.on_gone([self = shared_from_this()] { self->client_gone(); });
  if (ended_) return;
  if (stream_) {
    Headers headers = call_->headers();
    headers.emplace_back("content-type", "text/event-stream; charset=utf-8");
    headers.emplace_back("cache-control", "no-cache");
    headers.emplace_back("x-accel-buffering", "no");
    exchange.begin(200, std::move(headers));
    std::string out;
    form_->begin(out);
    if (out.empty()) out = form_->heartbeat();  // the client sees that it is queued
    send(out);
  }
  tick();
  pump();
}

// Once a second: whoever waits for an engine that never comes round again is told so, and who waits for another reason
// that the connection lives.
void GenerationJob::tick() {
  call_->exchange->after(kTick, [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self || self->ended_) return;
    if (self->service_.stuck()) return self->fail(ApiError::busy("the engine has stopped, the server ends", 5));
    if (self->stream_ && ++self->silent_ticks_ >= kHeartbeatTicks) {
      self->silent_ticks_ = 0;
      if (!self->call_->exchange->crowded()) self->call_->exchange->write(self->form_->heartbeat());
    }
    self->tick();
  });
}

void GenerationJob::send(std::string& out) {
  if (out.empty()) return;
  if (stream_) call_->exchange->write(out);
  silent_ticks_ = 0;
  out.clear();
}

// On the exchange's line of work: takes what the engine has.
void GenerationJob::pump() {
  if (ended_) return;
  woken_ = false;
  const auto self = shared_from_this();
  std::string out;
  for (size_t index = 0; index < answers_.size() && !ended_; ++index) {
    while (!ended_ && !answers_[index].finished) {
      if (stream_ && call_->exchange->crowded()) {  // the rest stays with the engine until the client has read
        send(out);
        call_->exchange->on_drained([weak = weak_from_this()] {
          if (const auto held = weak.lock()) held->pump();
        });
        return;
      }
      const auto event = answers_[index].stream->next(std::chrono::milliseconds(0));
      if (!event) break;
      take(index, *event, out);
      if (out.size() > kPiece) send(out);
    }
  }
  if (ended_) return;
  if (unfinished_ == 0) return complete(out);
  send(out);
}

void GenerationJob::take(size_t index, const engine::Event& event, std::string& out) {
  Answer& answer = answers_[index];
  const auto now = Clock::now();
  if (event.kind == engine::Event::Kind::kToken) {
    if (!answer.wanted) return;
    if (call_->first_token_seconds < 0) call_->first_token_seconds = call_->seconds();
    if (answer.tokens++ > 0) service_.metrics().gap(std::chrono::duration<double>(now - answer.last).count());
    answer.last = now;
    answer.wanted = form_->token(index, event, out);
    if (!answer.wanted) answer.stream->cancel();
    return;
  }
  answer.finished = true;
  --unfinished_;
  FinishedAnswer figures;
  figures.prompt_tokens = event.prompt_tokens;
  figures.output_tokens = event.output_tokens;
  figures.cached_tokens = event.cached_tokens;
  figures.first_token_seconds = call_->first_token_seconds;
  figures.whole_seconds = call_->seconds();
  figures.queue_seconds = event.queue_seconds;
  figures.prefill_seconds = event.prefill_seconds;
  figures.decode_seconds = event.decode_seconds;
  if (event.reason == engine::FinishReason::kDeadline && answer.tokens == 0) {
    figures.reason = "abort";
    service_.metrics().answer(figures);
    send(out);
    return fail(ApiError::too_late());
  }
  const bool cancelled = event.reason == engine::FinishReason::kCancelled && answer.wanted;
  if (event.reason == engine::FinishReason::kError || cancelled) {
    figures.reason = cancelled ? "abort" : "error";
    service_.metrics().answer(figures);
    send(out);
    return fail(cancelled ? ApiError::busy("the server is shutting down", 5) : ApiError(500, event.error));
  }
  figures.reason = form_->finish(index, event, out);
  service_.metrics().answer(figures);
  call_->finish = figures.reason;
  call_->output_tokens += event.output_tokens;
  call_->cached_tokens += event.cached_tokens;
}

void GenerationJob::client_gone() {
  if (ended_) return;
  ended_ = true;
  FinishedAnswer figures;
  figures.reason = "abort";
  figures.whole_seconds = call_->seconds();
  for (Answer& answer : answers_) {
    if (answer.finished) continue;
    answer.stream->cancel();
    figures.output_tokens = answer.tokens;
    service_.metrics().answer(figures);
    call_->output_tokens += answer.tokens;
  }
  call_->finish = "abort";
  service_.finished(*call_, 499);
  end();
}

void GenerationJob::complete(std::string& out) {
  ended_ = true;
  form_->complete(out);
  if (stream_) {
    send(out);
    service_.finished(*call_, 200);
    call_->exchange->end();
  } else {
    service_.respond(call_, json_text_response(form_->whole()));
  }
  end();
}

void GenerationJob::fail(const ApiError& error) {
  if (std::exchange(ended_, true)) return;
  call_->finish = "error";
  if (stream_ && !answers_.empty()) {
    call_->exchange->write(form_->failure(error));
    service_.finished(*call_, error.status);
    call_->exchange->end();
  } else {
    service_.fail(call_, error);
  }
  end();
}

// What the engine still does for this is cancelled with its streams.
void GenerationJob::end() {
  for (Answer& answer : answers_) {
    if (!answer.finished && answer.stream) answer.stream->cancel();
  }
  call_->release();
}

std::vector<GenerationJob::Part> thinking_parts(engine::Request request, int64_t answers, std::optional<int64_t> budget,
                                                const chat::ChatText& text, chat::Reasoning reasoning) {
  std::vector<GenerationJob::Part> parts;
  if (!budget || reasoning == chat::Reasoning::kNone) {
    parts.emplace_back();
    parts.back().request = std::move(request);
    parts.back().answers = answers;
    return parts;
  }
  ThinkingTokens tokens;
  const text::Tokenizer& tokenizer = text.tokenizer();
  tokens.open = tokenizer.find("<think>").value_or(-1);
  tokens.close = tokenizer.find("</think>").value_or(-1);
  text::EncodeOptions options;
  options.add_special_tokens = false;
  tokens.end = tokenizer.encode_ids("\n</think>\n\n", options);
  if (std::find(tokens.end.begin(), tokens.end.end(), tokens.close) == tokens.end.end()) {
    throw ApiError::field("thinking_token_budget",
                          "a budget of thinking is given, but this model has no token </think>");
  }
  // Constraints are not shared: each answer is a request of its own.
  for (int64_t i = 0; i < answers; ++i) {
    GenerationJob::Part part;
    part.request = request;
    if (part.request.sampling.seed) *part.request.sampling.seed += static_cast<uint64_t>(i);
    part.request.constraint = std::make_shared<ThinkingBudget>(tokens, *budget, reasoning == chat::Reasoning::kInside);
    parts.push_back(std::move(part));
  }
  return parts;
}

}  // namespace fourfold::serve
