// The way of one request through the engine: submitted, its events made into an answer by the API that asked, sent as
// they come or when all are there, cancelled when the client is gone.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "serve/service.h"

namespace fourfold::serve {

// What an API makes of the tokens of its answers. `out` takes what is to be sent, where the answer is streamed.
class AnswerForm {
 public:
  virtual ~AnswerForm() = default;
  virtual void begin(std::string& out) = 0;
  // The next token of answer `index`. False: the answer is complete, no more of it is wanted.
  virtual bool token(size_t index, const engine::Event& event, std::string& out) = 0;
  // It has ended: the reason as the API calls it.
  virtual std::string finish(size_t index, const engine::Event& event, std::string& out) = 0;
  // All have ended.
  virtual void complete(std::string& out) = 0;
  // The answer of a request that is not streamed, as JSON.
  virtual std::string whole() const = 0;
  // What tells the client of a stream that the connection lives.
  virtual std::string heartbeat() const { return ": waiting\n\n"; }
  // The end of a stream that failed.
  virtual std::string failure(const ApiError& error) const = 0;
};

class GenerationJob : public std::enable_shared_from_this<GenerationJob> {
 public:
  // Requests with how many answers each gets; answers are numbered through.
  struct Part {
    engine::Request request;
    int64_t answers = 1;
  };

  GenerationJob(Service& service, std::shared_ptr<ApiCall> call, std::vector<Part> parts,
                std::unique_ptr<AnswerForm> form, bool stream);

  // Goes on with it on the exchange's own line of work. `call` gets an error where the engine refuses.
  static void start(const std::shared_ptr<GenerationJob>& job);

 private:
  struct Answer {
    std::unique_ptr<engine::EventStream> stream;
    bool wanted = true, finished = false;
    int64_t tokens = 0;
    Clock::time_point last;
  };

  void submit();
  void pump();
  void take(size_t index, const engine::Event& event, std::string& out);
  void tick();
  void client_gone();
  void complete(std::string& out);
  void fail(const ApiError& error);
  void end();
  void send(std::string& out);

  Service& service_;
  const std::shared_ptr<ApiCall> call_;
  std::vector<Part> parts_;
  std::unique_ptr<AnswerForm> form_;
  const bool stream_;
  std::vector<Answer> answers_;
  size_t unfinished_ = 0;
  bool ended_ = false;
  int silent_ticks_ = 0;
  std::atomic<bool> woken_{false};
};

// The parts of a request for `answers` answers to one prompt. With a budget, the reasoning of each is closed after so
// many tokens: an ApiError where the model has no token that closes it.
std::vector<GenerationJob::Part> thinking_parts(engine::Request request, int64_t answers, std::optional<int64_t> budget,
                                                const chat::ChatText& text, chat::Reasoning reasoning);

}  // namespace fourfold::serve
