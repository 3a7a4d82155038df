// A client that sends bytes as they are, for requests that no library would send.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace fourfold::serve {

class SocketClient {
 public:
  explicit SocketClient(uint16_t port, int receive_buffer = 0) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    if (receive_buffer > 0) ::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      throw std::runtime_error("cannot connect");
    }
  }
  ~SocketClient() { close(); }
  SocketClient(SocketClient&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  SocketClient& operator=(SocketClient&&) = delete;

  // False when the server has closed its side.
  bool send(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t count = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (count <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(count));
    }
    return true;
  }
  void finish_sending() const { ::shutdown(fd_, SHUT_WR); }
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

  // What comes until `until` is in it, the server closes, or the time is over.
  std::string receive(std::string_view until = "", std::chrono::milliseconds time = std::chrono::seconds(10)) {
    std::string out;
    closed_ = false;
    const auto end = std::chrono::steady_clock::now() + time;
    while (until.empty() || out.find(until) == std::string::npos) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now()).count();
      pollfd ready{fd_, POLLIN, 0};
      if (left <= 0 || ::poll(&ready, 1, static_cast<int>(left)) <= 0) break;
      char buffer[16384];
      const ssize_t count = ::recv(fd_, buffer, sizeof buffer, 0);
      if (count <= 0) {
        closed_ = true;
        break;
      }
      out.append(buffer, static_cast<size_t>(count));
    }
    return out;
  }
  int fd() const { return fd_; }
  bool closed() const { return closed_; }  // by the server, as the last receive() saw it

 private:
  int fd_;
  bool closed_ = false;
};

}  // namespace fourfold::serve
