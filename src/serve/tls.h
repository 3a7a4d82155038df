// TLS over bytes: what comes from the socket goes in, what is to be sent comes out. It knows no socket and never waits,
// so that a connection with TLS is driven as one without.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace fourfold::serve {

// One connection, the server's side. Used by one thread at a time.
class TlsSession {
 public:
  enum class State {
    kOpen,
    kClosed,  // the client said that it sends no more
    kFailed,  // what came is no TLS, or a TLS that is not taken
  };

  virtual ~TlsSession() = default;
  // Takes all of `bytes`. Appends to `plain` what the client says, to `out` what TLS itself has to answer.
  virtual State receive(std::string_view bytes, std::string& plain, std::string& out) = 0;
  // Only after established().
  virtual void send(std::string_view plain, std::string& out) = 0;
  // The last that is sent: so that a client can tell the end from a connection that was cut.
  virtual void close(std::string& out) = 0;
  virtual bool established() const = 0;
};

// Certificate and key of the server: TLS 1.2 and later, HTTP/1.1 alone. May be used from many threads.
class TlsContext {
 public:
  // PEM files: the certificate with those above it, and its key, which has no password. An Error names the file.
  TlsContext(const std::filesystem::path& certificates, const std::filesystem::path& key);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  std::unique_ptr<TlsSession> accept() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fourfold::serve
