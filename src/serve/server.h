// The server as a process runs it: port, model, signals.
#pragma once

#include <chrono>
#include <functional>

#include "serve/http_server.h"
#include "serve/service.h"

namespace fourfold::serve {

struct ServerOptions {
  ServiceOptions service;
  HttpServerOptions http;
  std::function<void()> ready = nullptr;  // called when the model is loaded
  std::chrono::seconds drain{30};         // that running answers get when the server is to end
};

// The engine has stopped coming round: the process cannot go on, and must be started again by who watches it.
inline constexpr int kStuckStatus = 4;

// Opens the port, loads the model, and serves until SIGTERM or SIGINT; then what runs may end. `opened` is called with
// the port, before the model is loaded.
void serve(const ServerOptions& options, const std::function<void(uint16_t port)>& opened);

}  // namespace fourfold::serve
