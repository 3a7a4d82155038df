// fourfold serve: the model behind the APIs that people's clients speak.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/console.h"
#include "base/env.h"
#include "base/file.h"
#include "base/json.h"
#include "chat/model_directory.h"
#include "cmd/arguments.h"
#include "cmd/commands.h"
#include "cmd/engine_load.h"
#include "cmd/served_model.h"
#include "serve/cache_events.h"
#include "serve/server.h"

namespace fourfold::cmd {
namespace {

// Seconds: a prompt's chunk on an old processor; more than the GPU's own limit of a step (cuda::kStepDeadline), which
// ends requests with what does not end.
constexpr int64_t kStuckOnCpu = 300, kStuckOnCard = 9;

struct Options {
  std::string host = "127.0.0.1", unix_socket, certificates, key, api_key_file;
  int64_t port = 8000;
  std::vector<std::string> api_keys;
  int64_t queued = 256, queued_tokens = 0;
  int64_t body_mb = 32, drain_seconds = 30, stuck_seconds = 0, request_seconds = 0;
  std::string cache_events;
  std::string reasoning_parser = "qwen3", tool_parser = "qwen3_coder", speculative, draft_tokens = "auto";
  int64_t pipeline_parallel = 1;
  bool auto_tools = false, prefix_cache = false, no_prefix_cache = false, log_requests = false, no_log_requests = false;
  ServedModelArgs model{16};
};

// {"method": "mtp", "num_speculative_tokens": N}; without a number, what pays is measured.
int32_t read_drafts(const std::string& text) {
  if (text.empty()) return 0;
  const Json json = parse_json(text, "--speculative-config");
  if (!json.is_object()) fail("--speculative-config is {}, an object is wanted", json_kind(json));
  int32_t drafts = engine::kAutoDrafts;
  for (const auto& [key, value] : json.items()) {
    if (key == "method") {
      const bool known = value == "mtp" || value == "qwen3_5_mtp" || value == "qwen3_next_mtp";
      if (!known) fail("--speculative-config: method is {}, only mtp is known", printable(value.dump(), 60));
    } else if (key == "num_speculative_tokens") {
      const bool fits = value.is_number_integer() && value.get<int64_t>() >= 0 && value.get<int64_t>() <= 5;
      if (!fits) fail("--speculative-config: num_speculative_tokens is {}, wanted 0 to 5", printable(value.dump(), 60));
      drafts = value.get<int32_t>();
    } else {
      fail("--speculative-config: {} is not known, wanted method and num_speculative_tokens", printable(key, 60));
    }
  }
  return drafts;
}

// What other servers take and this one cannot honour is refused by its name.
void require_supported(const Options& options) {
  if (options.pipeline_parallel != 1) {
    fail("--pipeline-parallel-size is {}, only 1 is built in", options.pipeline_parallel);
  }
  if (options.reasoning_parser != "qwen3") {
    fail("--reasoning-parser is {}, only qwen3 is known", printable(options.reasoning_parser, 40));
  }
  if (options.tool_parser != "qwen3_coder" && options.tool_parser != "qwen3_xml") {
    fail("--tool-call-parser is {}, only qwen3_coder is known", printable(options.tool_parser, 40));
  }
}

serve::ApiKeys read_keys(const Options& options) {
  serve::ApiKeys keys;
  int number = 0;
  for (const std::string& key : options.api_keys) keys.add(key, fmt::format("key-{}", ++number), {}, "--api-key");
  if (const auto key = env("FOURFOLD_API_KEY")) keys.add(*key, "environment", {}, "FOURFOLD_API_KEY");
  if (!options.api_key_file.empty()) {
    keys.read(options.api_key_file);
    if (keys.empty()) fail("--api-key-file {}: there is no key in it", printable(options.api_key_file, 200));
  }
  return keys;
}

std::shared_ptr<const serve::TlsContext> read_tls(const Options& options) {
  if (options.certificates.empty() && options.key.empty()) return nullptr;
  if (options.certificates.empty() || options.key.empty()) {
    fail("serve: --ssl-certfile and --ssl-keyfile, wanted both of them");
  }
  return std::make_shared<serve::TlsContext>(options.certificates, options.key);
}

void run(const Options& options) {
  require_supported(options);
  if (options.prefix_cache && options.no_prefix_cache) {
    fail("serve: --enable-prefix-caching and --no-enable-prefix-caching, wanted one of them");
  }
  if (options.log_requests && options.no_log_requests) {
    fail("serve: --enable-log-requests and --disable-log-requests, wanted one of them");
  }
  serve::ServerOptions server;
  serve::ServiceOptions& service = server.service;
  set_served_model(service, options.model, "serve");
  service.api_keys = read_keys(options);
  service.engine.max_queued = options.queued;
  if (options.queued_tokens > 0) service.engine.max_queued_tokens = options.queued_tokens;
  service.engine.prefix_cache = !options.no_prefix_cache;
  service.engine.drafts = read_drafts(options.speculative);
  service.engine.draft_tokens = parse_draft_tokens(options.draft_tokens);
  if (!options.cache_events.empty()) {
    bool enabled = false;
    const auto events = serve::CacheEventsOptions::read(options.cache_events, enabled);
    if (enabled && !service.engine.prefix_cache) {
      fail("serve: --kv-events-config and --no-enable-prefix-caching, wanted one of them");
    }
    if (enabled) {
      service.engine.cache_observer = serve::publish_cache_events(events, service.engine.page_size);
    }
  }
  const std::optional<memory::Plan> plan = plan_served_model(service, options.model);
  if (plan) {
    eprint("{}", memory::text(*plan));
    server.ready = [plan] { eprint("fourfold: {}", taken_text(*plan, taken_since(*plan))); };
  }
  service.log_requests = !options.no_log_requests;
  const int64_t usual = plan ? kStuckOnCard : kStuckOnCpu;
  service.stuck = std::chrono::seconds(options.stuck_seconds > 0 ? options.stuck_seconds : usual);
  service.request_timeout = std::chrono::seconds(options.request_seconds);
  server.http.host = options.host;
  server.http.port = static_cast<uint16_t>(options.port);
  server.http.unix_socket = options.unix_socket;
  server.http.tls = read_tls(options);
  server.http.limits.body = static_cast<size_t>(options.body_mb) << 20;
  server.drain = std::chrono::seconds(options.drain_seconds);
  serve::serve(server, [&](uint16_t port) {
    const bool local = !options.unix_socket.empty();
    const bool brackets = options.host.find(':') != std::string::npos;
    const std::string host = brackets ? fmt::format("[{}]", options.host) : options.host;
    const std::string place = local ? options.unix_socket : fmt::format("{}:{}", host, port);
    const char* protocol = server.http.tls ? "https" : "http";
    eprint("fourfold: listening on {}{}://{}, loading {}\n", protocol, local ? "+unix" : "", place,
           service.directory.string());
    if (service.api_keys.empty() && !local && options.host != "127.0.0.1" && options.host != "localhost" &&
        options.host != "::1") {
      warn("everybody who reaches this port may ask: there is no --api-key");
    }
  });
}

}  // namespace

void add_serve(Command& app) {
  const auto options = std::make_shared<Options>();
  Command command = app.add_command(
      "serve",
      "Serve a model to clients of OpenAI's APIs\n\n"
      "  fourfold serve                       the demo model, on http://127.0.0.1:8000\n"
      "  fourfold serve DIR --port 8080       a checkpoint\n\n"
      "The port answers at once; /health tells when the model is loaded. SIGTERM and Ctrl-C let running answers end.");
  add_served_model_options(command, options->model);
  command.add_config_file();
  command.add_option("--host", options->host, "Address to listen on").show_default();
  command.add_option("--port", options->port, "0: any that is free, printed").range(0, 65535).show_default();
  command.add_option("--served-model-name", options->model.names,
                     "Names of the model in the API (default: the directory's)");
  command.add_option("--uds", options->unix_socket, "Path of a Unix socket to listen on, instead of the port");
  command.add_option("--ssl-certfile", options->certificates, "TLS: certificate, and those above it, in PEM form");
  command.add_option("--ssl-keyfile", options->key, "TLS: the certificate's key");
  command.add_option("--api-key", options->api_keys, "Keys that clients must send (also FOURFOLD_API_KEY)");
  command.add_option("--api-key-file", options->api_key_file,
                     "A key in each line, and behind it its limits: name=NAME max-requests=N requests-per-minute=N "
                     "priority=N");
  command.add_flag("--enable-prefix-caching", options->prefix_cache,
                   "Keep what prompts have in common: always so, but for");
  command.add_flag("--no-enable-prefix-caching", options->no_prefix_cache, "Compute every prompt as a whole");
  command.add_option("--speculative-config", options->speculative,
                     R"({"method": "mtp", "num_speculative_tokens": N}: drafts of the model's MTP head)");
  add_draft_tokens_option(command, options->draft_tokens);
  command.add_option("--kv-events-config", options->cache_events,
                     R"({"endpoint": "tcp://*:5557", "topic": ""}: tells routers over ZeroMQ what is cached)");
  command.add_option("--max-queued-requests", options->queued, "Waiting requests; more get 503")
      .range(1, 1 << 20)
      .show_default();
  command
      .add_option("--max-queued-tokens", options->queued_tokens,
                  "Tokens of waiting prompts; more get 503 (default: any)")
      .range(1, int64_t{1} << 40);
  command
      .add_option("--request-timeout", options->request_seconds,
                  "Seconds from a request to the end of its answer; 0: any (also the header x-request-timeout)")
      .range(0, 86400)
      .show_default();
  command.add_option("--max-body-mb", options->body_mb, "Largest body of a request").range(1, 1024).show_default();
  command.add_option("--drain-seconds", options->drain_seconds, "For running answers when the server ends")
      .range(0, 86400)
      .show_default();
  command
      .add_option("--stuck-seconds", options->stuck_seconds,
                  fmt::format("A step of the model that takes longer ends the process, with status 4 (default: {}, on "
                              "a GPU {})",
                              kStuckOnCpu, kStuckOnCard))
      .range(1, 86400);
  command.add_flag("--enable-log-requests", options->log_requests,
                   "One line of JSON on standard error for each request, without its text: always so, but for");
  command.add_flag("--disable-log-requests", options->no_log_requests, "No such lines");
  command.add_option("--reasoning-parser", options->reasoning_parser, "qwen3").show_default();
  command.add_option("--tool-call-parser", options->tool_parser, "qwen3_coder").show_default();
  command.add_flag("--enable-auto-tool-choice", options->auto_tools, "Always so: a request with tools may get calls");
  command.add_option("--pipeline-parallel-size", options->pipeline_parallel, "1").show_default();
  command.callback([options] { run(*options); });
}

}  // namespace fourfold::cmd
