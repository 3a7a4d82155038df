// The server without its network: what is served, in which phase it is, who may ask, and what every request has in
// common. The port opens first; the model is loaded behind it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "chat/chat_text.h"
#include "chat/model_directory.h"
#include "engine/engine.h"
#include "model/config.h"
#include "serve/api_error.h"
#include "serve/api_keys.h"
#include "serve/deliveries.h"
#include "serve/http_server.h"
#include "serve/metrics.h"
#include "serve/response_store.h"
#include "serve/workers.h"
#include "structure/compiler.h"
#include "structure/constraint.h"

namespace fourfold::serve {

using Clock = std::chrono::steady_clock;

struct ServiceOptions {
  std::filesystem::path directory;
  std::vector<std::string> names;  // under which the model is served; empty: the directory's
  ApiKeys api_keys;                // empty: everybody may ask
  chat::BackendFactory make_backend;
  model::RankOptions ranks;
  int64_t context = 0;           // 0: chat::choose_context()
  engine::EngineOptions engine;  // max_context excepted
  bool log_requests = true;
  std::function<int64_t()> kernels_disabled;     // GPU kernels that are not used because they are wrong; null: none
  std::chrono::seconds stuck{300};               // a step of the engine that takes longer: it is taken for dead
  std::chrono::milliseconds request_timeout{0};  // from the request to the end of its answer; 0: any
};

// A model that is ready to be asked. Does not change; all of it may be used from many threads.
struct ServedModel {
  std::vector<std::string> names;
  std::string directory, backend;
  std::string chat_template;  // its text; empty when there is none
  std::string end_token;      // the text of the one that ends a turn
  model::ModelConfig config;
  int64_t context = 0, max_sequences = 0, cache_tokens = 0;
  int32_t drafts = 0;
  int64_t created = 0;  // seconds since 1970
  std::unique_ptr<chat::ChatText> text;
  std::unique_ptr<structure::Compiler> compiler;  // null in a build without grammars
  std::shared_ptr<const structure::ReasoningEnd> reasoning_end;
  std::unique_ptr<engine::Engine> engine;

  const std::string& name() const { return names.front(); }
};

// One request on its way through an API.
class ApiCall {
 public:
  ApiCall(std::shared_ptr<Exchange> the_exchange, std::string the_id)
      : exchange(std::move(the_exchange)), id(std::move(the_id)) {}

  const std::shared_ptr<Exchange> exchange;
  const std::string id;
  const Clock::time_point begin = Clock::now();
  ErrorForm form = ErrorForm::kOpenAi;
  std::string path;             // of the route; "other" when there is none
  std::shared_ptr<ApiKey> key;  // null where everybody may ask
  // Held while the request counts: as one that is being answered, under its key, and with its tokens until the engine
  // counts them.
  std::shared_ptr<void> admission, key_admission, reservation;
  std::optional<Clock::time_point> deadline;
  std::vector<std::string> ignored;  // fields that change nothing
  // Figures for the log line.
  int64_t prompt_tokens = -1, output_tokens = 0, cached_tokens = 0;
  std::string finish;
  double first_token_seconds = -1;

  // The body as JSON; an ApiError when it is none, or no object.
  Json body() const;
  Headers headers() const;  // that every answer has
  void release();           // it does not count any more
  double seconds() const { return std::chrono::duration<double>(Clock::now() - begin).count(); }
};

class Service {
 public:
  explicit Service(ServiceOptions options);
  ~Service();

  // Loads the model; what goes wrong is thrown. To be called once, on a thread of its own.
  void load();
  // Ends load() soon, with Interrupted.
  void stop_loading() { stop_loading_ = true; }

  void handle(const std::shared_ptr<Exchange>& exchange);

  // No new work; what runs goes on.
  void drain();
  // Requests that were admitted and not answered.
  int64_t in_flight() const { return in_flight_.load(); }
  // The engine does not come round any more.
  bool stuck() const;
  // Why nobody will be answered any more: the engine is stuck, or has failed. Empty: it is alive.
  std::string fault() const;
  // Ends everything that uses an exchange. load() must have returned, and the network be closed; it must still exist.
  void stop();

  // ---- for those who answer

  const ServiceOptions& options() const { return options_; }
  const ServedModel* model() const { return ready_.load() ? model_.get() : nullptr; }
  // An ApiError 503 while there is none, or no more.
  const ServedModel& require_model() const;
  // An ApiError 404 where `asked` is no name of the model.
  void require_name(const std::optional<std::string>& asked) const;
  Metrics& metrics() { return metrics_; }
  // What the engine has for streams; passed on behind each of its steps.
  Deliveries& deliveries() { return deliveries_; }
  ResponseStore& stored_responses() { return stored_responses_; }
  ResponseStore& stored_threads() { return stored_threads_; }  // of messages
  void set_network(const HttpServer* network) { network_ = network; }
  HttpServerStats network_stats() const;

  // Status and description, for /health and its kind.
  Json health(int& status) const;

  void respond(const std::shared_ptr<ApiCall>& call, HttpResponse response);
  void fail(const std::shared_ptr<ApiCall>& call, const ApiError& error);
  // Work that takes its time, a grammar to be compiled, beside all else. False: there is too much of it.
  bool compile(std::function<void()> work) { return compiling_.submit(std::move(work)); }
  // The call is answered: log line and figures.
  void finished(const ApiCall& call, int status);

 private:
  void admit(ApiCall& call);
  void reserve_tokens(ApiCall& call);
  void set_deadline(ApiCall& call) const;
  void set_phase(std::string phase, int64_t done = 0, int64_t total = 0);
  void guarded(const std::shared_ptr<ApiCall>& call, const std::function<void()>& work);

  ServiceOptions options_;
  Metrics metrics_;
  Deliveries deliveries_;
  ResponseStore stored_responses_, stored_threads_;
  std::unique_ptr<ServedModel> model_;
  std::atomic<bool> ready_{false}, draining_{false}, stopped_{false}, stop_loading_{false};
  std::atomic<int64_t> in_flight_{0}, reserved_tokens_{0};
  std::atomic<const HttpServer*> network_{nullptr};
  int64_t max_in_flight_;
  mutable std::mutex mutex_;
  std::string phase_ = "starting";
  int64_t done_ = 0, total_ = 0;
  Workers workers_, compiling_;
};

std::string random_id(std::string_view prefix);

}  // namespace fourfold::serve
