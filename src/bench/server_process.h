// A server of this machine that lives as long as the benchmark needs it.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "bench/url.h"

namespace fourfold::bench {

class ServerProcess {
 public:
  // Starts `program` with `arguments` and `serve`'s own for a free port of 127.0.0.1, and waits until it is ready. An
  // Error with what it said where it ends before.
  ServerProcess(const std::string& program, const std::vector<std::string>& arguments);
  ~ServerProcess();  // SIGTERM, and SIGKILL to one that does not end within seconds
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  const Url& url() const { return url_; }

 private:
  void stop();
  std::string said() const;

  pid_t pid_ = -1;
  int log_ = -1;
  Url url_;
};

}  // namespace fourfold::bench
