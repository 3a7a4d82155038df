#include "serve/service.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <random>

#include "base/console.h"
#include "base/file.h"
#include "base/interrupt.h"
#include "chat/conversation.h"
#include "serve/routes.h"
#include "text/chat_template.h"

namespace fourfold::serve {
namespace {

constexpr int kWorkers = 2, kCompilers = 2;

// What a prompt may have of tokens before it is tokenised: a guess from its bytes that is rather too large for text.
constexpr int64_t kBytesPerToken = 3;

// The key that a client gives, as OpenAI's and as Anthropic's clients do.
std::string_view given_key(const HttpRequest& request) {
  if (const std::string* header = request.header("authorization"); header != nullptr && header->size() > 7) {
    std::string scheme = header->substr(0, 7);
    for (char& c : scheme) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
    return scheme == "bearer " ? std::string_view(*header).substr(7) : "";
  }
  const std::string* key = request.header("x-api-key");
  return key == nullptr ? "" : std::string_view(*key);
}

// An id that the client gave, if it may stand in a header and in a log.
std::string request_id(const HttpRequest& request) {
  const std::string* given = request.header("x-request-id");
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == '.';
  };
  if (given != nullptr && !given->empty() && given->size() <= 128 && std::all_of(given->begin(), given->end(), plain)) {
    return *given;
  }
  return random_id("req_");
}

// Only application/json: what a page in a browser may send elsewhere without being asked has another type.
bool is_json(const HttpRequest& request) {
  const std::string* type = request.header("content-type");
  if (type == nullptr) return false;
  std::string word = type->substr(0, type->find(';'));
  while (!word.empty() && (word.back() == ' ' || word.back() == '\t')) word.pop_back();
  for (char& c : word) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  return word == "application/json" || (word.starts_with("application/") && word.ends_with("+json"));
}

// A route's path; one that ends in * stands for all that go on from there with a name.
bool matches(std::string_view route, std::string_view path) {
  if (!route.ends_with('*')) return route == path;
  route.remove_suffix(1);
  return path.starts_with(route) && path.size() > route.size() &&
         path.find('/', route.size()) == std::string_view::npos;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

// What tokens write. Special ones and those that end an answer write nothing that is part of it.
structure::Vocabulary vocabulary_of(const chat::ChatText& text, const model::ModelConfig& config) {
  const text::Tokenizer& tokenizer = text.tokenizer();
  structure::Vocabulary out;
  out.size = config.vocabulary;
  out.tokens.resize(std::min(tokenizer.size(), static_cast<size_t>(config.vocabulary)));
  for (size_t i = 0; i < out.tokens.size(); ++i) {
    const auto id = static_cast<int32_t>(i);
    if (tokenizer.is_defined(id) && !tokenizer.is_special(id) && !text.is_stop(id)) {
      out.tokens[i] = tokenizer.token_bytes(id);
    }
  }
  return out;
}

std::string read_template(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / "chat_template.jinja";
  return file_exists(path) ? read_file(path, 4u << 20) : "";
}

}  // namespace

std::string random_id(std::string_view prefix) {
  thread_local std::mt19937_64 random{std::random_device{}()};
  return fmt::format("{}{:016x}{:08x}", prefix, random(), random() >> 32);
}

Json ApiCall::body() const {
  JsonLimits limits;
  limits.max_bytes = exchange->request().body.size() + 1;
  limits.max_depth = 100;
  limits.max_values = 4u << 20;
  limits.reject_duplicate_keys = false;
  Json json;
  try {
    json = parse_json(exchange->request().body, "the request's body", limits);
  } catch (const Error& error) {
    throw ApiError(400, error.what());
  }
  if (!json.is_object())
    throw ApiError(400, fmt::format("the request's body is {}, an object is wanted", json_kind(json)));
  return json;
}

Headers ApiCall::headers() const {
  Headers out = {{"x-request-id", id}};
  if (ignored.empty()) return out;
  std::string names;
  for (const std::string& name : ignored) {
    if (names.size() > 1024) break;
    std::string plain = name.substr(0, 100);
    for (char& c : plain) c = c > 0x20 && c < 0x7f && c != ',' ? c : '?';
    names += (names.empty() ? "" : ", ") + plain;
  }
  out.emplace_back("x-fourfold-ignored", names);
  return out;
}

void ApiCall::release() {
  reservation.reset();
  key_admission.reset();
  admission.reset();
}

Service::Service(ServiceOptions options)
    : options_(std::move(options)),
      max_in_flight_(options_.engine.max_sequences + options_.engine.max_queued),
      workers_(kWorkers, static_cast<size_t>(max_in_flight_) + 1024),
      compiling_(kCompilers, static_cast<size_t>(max_in_flight_) + 1024) {}

Service::~Service() { stop(); }

void Service::set_phase(std::string phase, int64_t done, int64_t total) {
  const std::lock_guard lock(mutex_);
  phase_ = std::move(phase);
  done_ = done;
  total_ = total;
}

void Service::load() {
  auto served = std::make_unique<ServedModel>();
  set_phase("reading the tokenizer");
  served->config = model::read_config(options_.directory);
  served->text = std::make_unique<chat::ChatText>(options_.directory, served->config);
  served->chat_template = read_template(options_.directory);
  served->context = chat::choose_context(options_.context, served->config.max_positions, "--max-model-len");
  std::vector<int32_t> ends = model::read_generation_config(options_.directory).eos_tokens;
  ends.insert(ends.end(), served->config.eos_tokens.begin(), served->config.eos_tokens.end());
  if (!ends.empty()) served->end_token = served->text->tokenizer().token_bytes(ends.front());
  served->directory = options_.directory.string();
  served->created = std::time(nullptr);
  served->names = options_.names;
  if (served->names.empty()) served->names.push_back(chat::model_name(options_.directory));

  engine::EngineOptions engine = options_.engine;
  engine.max_context = served->context;
  engine.notified = [this] { deliveries_.pass(); };
  engine.max_step_tokens = std::max(std::min(engine.max_step_tokens, served->context), engine.max_sequences);
  if (engine.drafts > 0 && served->config.mtp_layers == 0) {
    fourfold::fail("--speculative-config asks for {} drafts, but {} has no MTP head", engine.drafts,
                   options_.directory.string());
  }
  model::ModelOptions options;
  options.max_step_tokens = engine.max_step_tokens;
  options.max_logit_rows = engine::logit_rows(engine);
  options.mtp = engine.drafts != 0 && served->config.mtp_layers > 0;
  options.progress = [this](int64_t done, int64_t total) {
    set_phase("loading weights", done, total);
    if (stop_loading_) throw Interrupted();
  };
  if (structure::has_compiler()) {
    set_phase("sorting the vocabulary");
    const structure::Vocabulary vocabulary = vocabulary_of(*served->text, served->config);
    structure::CompilerOptions compiling;
    compiling.stop = [this] { return stopped_.load(); };
    served->compiler = structure::make_compiler(vocabulary, compiling);
    served->reasoning_end = std::make_shared<structure::ReasoningEnd>(vocabulary);
  }
  set_phase("opening the checkpoint");
  chat::LoadedModel loaded =
      chat::load_model(options_.directory, options_.make_backend, std::move(options), options_.ranks);
  const ops::Backend& backend = loaded.model->backend();
  set_phase("making the caches");
  served->max_sequences = engine.max_sequences;
  served->drafts = engine.drafts;
  served->engine = engine::make_engine(std::move(loaded.model), engine);
  served->backend = backend.description();  // by now with how ranks reach each other
  served->cache_tokens = served->engine->stats().pages_total * engine.page_size;
  metrics_.set_page_size(engine.page_size);
  model_ = std::move(served);
  set_phase("ready");
  ready_ = true;
}

const ServedModel& Service::require_model() const {
  if (const ServedModel* served = model()) return *served;
  const std::lock_guard lock(mutex_);
  throw ApiError::busy(fmt::format("the model is not ready: {}", phase_));
}

void Service::require_name(const std::optional<std::string>& asked) const {
  const std::vector<std::string>& names = require_model().names;
  if (!asked || std::find(names.begin(), names.end(), *asked) != names.end()) return;
  ApiError error(404,
                 fmt::format("The model `{}` does not exist: this server has {}.", printable(*asked), names.front()));
  error.param = "model";
  error.code = "model_not_found";
  throw error;
}

HttpServerStats Service::network_stats() const {
  const HttpServer* network = network_.load();
  return network == nullptr ? HttpServerStats() : network->stats();
}

std::string Service::fault() const {
  if (stuck()) return fmt::format("the engine has not come round for {} s", options_.stuck.count());
  const ServedModel* served = model();
  if (served == nullptr) return "";
  const std::string failure = served->engine->stats().failure;
  return failure.empty() ? "" : "the engine has failed: " + failure;
}

bool Service::stuck() const {
  const ServedModel* served = model();
  if (served == nullptr) return false;
  const engine::EngineStats stats = served->engine->stats();
  return !stats.idle && stats.heartbeat_seconds > static_cast<double>(options_.stuck.count());
}

Json Service::health(int& status) const {
  Json out = Json::object();
  const ServedModel* served = model();
  {
    const std::lock_guard lock(mutex_);
    out["status"] = served == nullptr ? "loading" : "ok";
    out["phase"] = phase_;
    if (total_ > 0) out["progress"] = {{"done", done_}, {"total", total_}};
  }
  status = served == nullptr ? 503 : 200;
  if (served != nullptr) {
    const engine::EngineStats stats = served->engine->stats();
    out["running"] = stats.running;
    out["waiting"] = stats.waiting;
    out["heartbeat_seconds"] = stats.idle ? 0.0 : stats.heartbeat_seconds;
  }
  if (draining_) {
    out["status"] = out["phase"] = "draining";
    status = 503;
  } else if (const std::string found = fault(); !found.empty()) {
    out["status"] = stuck() ? "stuck" : "failed";
    out["phase"] = found;
    status = 503;
  }
  return out;
}

void Service::admit(ApiCall& call) {
  if (draining_) throw ApiError::busy("the server is shutting down", 5);
  set_deadline(call);
  if (call.key) call.key_admission = ApiKey::admit(call.key, call.begin);
  if (in_flight_.fetch_add(1) >= max_in_flight_) {
    in_flight_.fetch_sub(1);
    throw ApiError::busy(fmt::format("{} requests are being answered or waiting, more are not taken", max_in_flight_));
  }
  call.admission = std::shared_ptr<void>(nullptr, [this](void*) { in_flight_.fetch_sub(1); });
  reserve_tokens(call);
}

// Before anything is tokenised: what waits for that counts as what waits for the engine, which knows the true number.
// As with the engine, one prompt that is longer may wait alone.
void Service::reserve_tokens(ApiCall& call) {
  const auto tokens = static_cast<int64_t>(call.exchange->request().body.size()) / kBytesPerToken;
  const int64_t waiting = reserved_tokens_.fetch_add(tokens) + model_->engine->stats().waiting_tokens;
  call.reservation = std::shared_ptr<void>(nullptr, [this, tokens](void*) { reserved_tokens_.fetch_sub(tokens); });
  const int64_t most = options_.engine.max_queued_tokens;
  if (waiting > 0 && waiting + tokens > most) {
    throw ApiError::busy(fmt::format(
        "about {} tokens of prompts are waiting, at most {} may with those of this request", waiting, most));
  }
}

// The server's limit, and the client's where it is sooner.
void Service::set_deadline(ApiCall& call) const {
  std::chrono::milliseconds time = options_.request_timeout;
  if (const std::string* header = call.exchange->request().header("x-request-timeout")) {
    double seconds = 0;
    const auto [end, error] = std::from_chars(header->data(), header->data() + header->size(), seconds);
    if (error != std::errc() || end != header->data() + header->size() || !(seconds > 0 && seconds <= 1e6)) {
      throw ApiError::field("x-request-timeout",
                            fmt::format("the header x-request-timeout is '{}', a number of seconds "
                                        "above 0 and up to 1000000 is wanted",
                                        printable(*header, 40)));
    }
    const auto asked = std::chrono::milliseconds(static_cast<int64_t>(std::ceil(seconds * 1000)));
    time = time.count() == 0 ? asked : std::min(time, asked);
  }
  if (time.count() > 0) call.deadline = call.begin + time;
}

void Service::guarded(const std::shared_ptr<ApiCall>& call, const std::function<void()>& work) {
  try {
    work();
  } catch (const ApiError& error) {
    fail(call, error);
  } catch (const chat::FieldError& error) {
    fail(call, ApiError::field(error.field(), error.what()));
  } catch (const Error& error) {  // what a template or a tokenizer says of the request
    fail(call, ApiError(400, error.what()));
  } catch (const std::exception& error) {
    eprint("fourfold: request {} failed: {}\n", call->id, error.what());
    fail(call, ApiError(500, "the request failed"));
  }
}

void Service::handle(const std::shared_ptr<Exchange>& exchange) {
  const HttpRequest& request = exchange->request();
  const auto call = std::make_shared<ApiCall>(exchange, request_id(request));
  call->path = "other";
  if (request.path.starts_with("/v1/messages")) call->form = ErrorForm::kAnthropic;
  guarded(call, [&] {
    const Route* route = nullptr;
    std::string allowed;
    for (const Route& one : routes()) {
      if (!matches(one.path, request.path)) continue;
      call->path = one.path;
      allowed += (allowed.empty() ? "" : ", ") + std::string(one.method);
      if (request.method == one.method || (request.method == "HEAD" && std::string_view(one.method) == "GET")) {
        route = &one;
      }
    }
    if (allowed.empty()) throw ApiError(404, fmt::format("there is nothing at {}", printable(request.path, 200)));
    if (route == nullptr) {
      ApiError error(405, fmt::format("{} takes {}, not {}", request.path, allowed, request.method));
      HttpResponse response = error.response(call->form);
      response.headers.emplace_back("allow", allowed);
      return respond(call, std::move(response));
    }
    call->form = route->form;
    if (!options_.api_keys.empty()) call->key = options_.api_keys.find(given_key(request));
    if (!route->open && !options_.api_keys.empty() && !call->key) {
      ApiError error(401, "the API key is missing or wrong");
      error.code = "invalid_api_key";
      throw error;
    }
    if (request.method == "POST" && !is_json(request)) {
      throw ApiError(415, "the header Content-Type is not application/json");
    }
    if (route->needs_model) require_model();
    if (!route->generates) return route->handle(*this, call);
    admit(*call);
    const bool taken = workers_.submit([this, call, route] {
      if (call->exchange->gone()) return;
      guarded(call, [&] {
        if (call->deadline && Clock::now() >= *call->deadline) throw ApiError::too_late();
        route->handle(*this, call);
      });
    });
    if (!taken) throw ApiError::busy("too many requests are waiting");
  });
}

void Service::respond(const std::shared_ptr<ApiCall>& call, HttpResponse response) {
  const Headers headers = call->headers();
  response.headers.insert(response.headers.end(), headers.begin(), headers.end());
  finished(*call, response.status);
  call->exchange->post([call, response = std::move(response)]() mutable {
    call->release();
    call->exchange->respond(std::move(response));
  });
}

void Service::fail(const std::shared_ptr<ApiCall>& call, const ApiError& error) {
  respond(call, error.response(call->form));
}

void Service::finished(const ApiCall& call, int status) {
  metrics_.request(call.path, status);
  if (!options_.log_requests) return;
  const bool probe = call.prompt_tokens < 0 && status < 400;
  if (probe) return;
  Json line = {{"time", utc_now()}, {"id", call.id},    {"method", call.exchange->request().method},
               {"path", call.path}, {"status", status}, {"ms", static_cast<int64_t>(call.seconds() * 1000)}};
  if (call.key) line["key"] = call.key->name();
  if (call.prompt_tokens >= 0) {
    line["prompt_tokens"] = call.prompt_tokens;
    line["cached_tokens"] = call.cached_tokens;
    line["output_tokens"] = call.output_tokens;
    line["finish"] = call.finish;
    if (call.first_token_seconds >= 0) line["first_token_ms"] = static_cast<int64_t>(call.first_token_seconds * 1000);
  }
  write_stderr(dump(line) + "\n");
}

void Service::drain() { draining_ = true; }

void Service::stop() {
  draining_ = stopped_ = true;
  workers_.stop();
  compiling_.stop();
  ready_ = false;
  model_.reset();  // its thread calls into exchanges
}

}  // namespace fourfold::serve
