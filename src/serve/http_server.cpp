#include "serve/http_server.h"

#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/basic_socket_acceptor.hpp>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <charconv>
#include <condition_variable>
#include <ctime>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <vector>

#include "base/check.h"
#include "base/console.h"

namespace fourfold::serve {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using Protocol = asio::generic::stream_protocol;  // TCP or a Unix socket
using Socket = Protocol::socket;
using Acceptor = asio::basic_socket_acceptor<Protocol>;
using Clock = std::chrono::steady_clock;
using ErrorCode = boost::system::error_code;
using Strand = asio::strand<asio::io_context::executor_type>;

constexpr size_t kReadBytes = 64 << 10;  // at once, of one connection
constexpr size_t kMaxAhead = 64 << 10;   // of requests behind the one that is being answered: then nothing is read
constexpr auto kLook = std::chrono::milliseconds(250);  // while nothing is read: whether the client is there
constexpr size_t kMaxDiscarded = size_t{64} << 20;      // that is read and dropped behind a refusal
constexpr auto kLinger = std::chrono::seconds(2);
// A peer that vanished without a word is asked for after so many seconds, so often, so many times.
constexpr int kKeepIdle = 30, kKeepInterval = 10, kKeepCount = 3;

std::string date() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[64];
  std::strftime(text, sizeof text, "%a, %d %b %Y %H:%M:%S GMT", &parts);
  return text;
}

// Each connection takes a descriptor: as many as this process may have.
size_t raise_descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1024;
  if (limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
    ::getrlimit(RLIMIT_NOFILE, &limit);
  }
  return static_cast<size_t>(limit.rlim_cur);
}

// What the network does is short, and each thread more is one that takes turns with those that compute.
int threads_of(const HttpServerOptions& options) {
  constexpr unsigned kMany = 8;
  if (options.threads > 0) return options.threads;
  return std::thread::hardware_concurrency() < kMany ? 1 : 2;
}

class Connection;

}  // namespace

struct HttpServer::Shared {
  Shared(const HttpServerOptions& given, Handler handle, Refuser refuse)
      : options(given),
        handler(std::move(handle)),
        refuser(std::move(refuse)),
        strand(io.get_executor()),
        acceptor(strand),
        retry(strand),
        guard(io.get_executor()) {}

  void listen();
  void open(const Acceptor::endpoint_type& endpoint, const std::string& name);
  void listen_on_port();
  void listen_on_path();
  void remove_path() const;
  void accept();
  void remove(Connection* connection);
  void each(const std::function<void(Connection&)>& call);

  HttpServerOptions options;
  Handler handler;
  Refuser refuser;

  std::atomic<bool> finishing{false};
  std::atomic<size_t> bodies{0};
  std::atomic<int64_t> accepted{0}, refused{0};

  std::mutex mutex;
  std::condition_variable empty;
  std::unordered_set<Connection*> connections;  // those that were closed excepted
  bool paused = false;                          // as many connections as may be

  uint16_t port = 0;
  asio::io_context io;
  Strand strand;
  Acceptor acceptor;
  dev_t socket_device = 0;  // of the Unix socket that is ours
  ino_t socket_inode = 0;
  asio::steady_timer retry;
  asio::executor_work_guard<asio::io_context::executor_type> guard;
  std::vector<std::thread> threads;
};

namespace {

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(HttpServer::Shared& shared, Socket socket)
      : shared_(shared),
        options_(shared.options),
        socket_(std::move(socket)),
        timer_(socket_.get_executor()),
        parser_(options_.limits),
        tls_(options_.tls ? options_.tls->accept() : nullptr) {}

  ~Connection() { count_body(0); }

  void start() {
    ErrorCode ignored;
    socket_.non_blocking(true, ignored);
    if (options_.unix_socket.empty()) set_tcp_options();
    set_idle_deadline();
    wait_readable();
  }

  // No further request; the one that is being answered is.
  void finish() {
    closing_ = true;
    if (!busy_ && !sending_ && !lingering_) close();
  }

  void close() {
    if (closed_) return;
    closed_ = true;
    ErrorCode ignored;
    socket_.close(ignored);
    timer_.cancel();
    out_.clear();
    shared_.remove(this);
    leave();
    later_.reset();
    look_.reset();
  }

  template <typename F>
  void post(F&& work) {
    asio::post(socket_.get_executor(), std::forward<F>(work));
  }
  template <typename F>
  void dispatch(F&& work) {
    asio::dispatch(socket_.get_executor(), std::forward<F>(work));
  }

  // ---- of the exchange that is current; its number says who asks

  bool is_current(uint64_t exchange) const { return busy_ && exchange == exchanges_; }

  void respond(uint64_t exchange, HttpResponse response) {
    if (!is_current(exchange) || streaming_) return;
    count_body(0);  // before the client can know that there is room again
    if (read_closed_ || response.close) closing_ = true;
    send(head(response.status, response.headers, std::to_string(response.body.size())));
    if (!head_only_ && response.status != 304) send(response.body);
    answered();
  }

  void begin(uint64_t exchange, int status, const Headers& headers) {
    if (!is_current(exchange) || streaming_) return;
    streaming_ = true;
    if (http_1_0_) closing_ = true;  // the end of the connection is the end of the body
    send(head(status, headers, ""));
  }

  void write(uint64_t exchange, std::string_view piece) {
    if (!is_current(exchange) || !streaming_ || piece.empty() || head_only_) return;
    if (http_1_0_) return send(piece);
    char size[24];
    const auto end = std::to_chars(size, size + 16, piece.size(), 16).ptr;
    std::copy_n("\r\n", 2, end);
    send(std::string_view(size, static_cast<size_t>(end + 2 - size)), piece, "\r\n");
  }

  void end(uint64_t exchange) {
    if (!is_current(exchange) || !streaming_) return;
    if (!http_1_0_ && !head_only_) send("0\r\n\r\n");
    answered();
  }

  void abort(uint64_t exchange) {
    if (is_current(exchange)) close();
  }

  bool gone(uint64_t exchange) const { return closed_ || read_closed_ || !is_current(exchange); }

  void on_gone(uint64_t exchange, std::function<void()> call) {
    if (gone(exchange)) return call();
    gone_ = std::move(call);
  }

  bool crowded() const { return out_.size() + sending_bytes_ > options_.crowded; }

  void on_drained(uint64_t exchange, std::function<void()> call) {
    if (is_current(exchange)) drained_ = std::move(call);
  }

  void after(uint64_t exchange, std::chrono::milliseconds time, std::function<void()> call) {
    if (!is_current(exchange)) return;
    if (!later_) later_ = std::make_unique<asio::steady_timer>(socket_.get_executor());
    later_->expires_after(time);
    later_->async_wait([self = shared_from_this(), exchange, call = std::move(call)](ErrorCode error) {
      if (!error && self->is_current(exchange)) call();
    });
  }

  void dropped(uint64_t exchange) {
    if (!is_current(exchange)) return;
    if (streaming_ || read_closed_) return close();  // nobody waits for it
    respond(exchange, shared_.refuser({500, "the request was dropped without an answer"}));
  }

 private:
  void set_tcp_options() {
    const auto set = [&](int level, int name, int value) {
      ::setsockopt(socket_.native_handle(), level, name, &value, sizeof value);
    };
    set(IPPROTO_TCP, TCP_NODELAY, 1);
    set(SOL_SOCKET, SO_KEEPALIVE, 1);
    set(IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdle);
    set(IPPROTO_TCP, TCP_KEEPINTVL, kKeepInterval);
    set(IPPROTO_TCP, TCP_KEEPCNT, kKeepCount);
  }

  // ---- deadlines: one timer, which looks again when it was set too early

  void set_deadline(std::chrono::milliseconds time) {
    deadline_ = Clock::now() + time;
    if (!timer_set_ || deadline_ < timer_.expiry()) arm();
  }
  void no_deadline() { deadline_ = Clock::time_point::max(); }
  void set_idle_deadline() { set_deadline(tls_ && !tls_->established() ? options_.head : options_.idle); }

  void arm() {
    if (closed_ || deadline_ == Clock::time_point::max()) {
      timer_set_ = false;
      return;
    }
    timer_set_ = true;
    timer_.expires_at(deadline_);
    timer_.async_wait([self = shared_from_this()](ErrorCode error) {
      if (error || self->closed_) return;
      if (Clock::now() < self->deadline_) return self->arm();
      self->timer_set_ = false;
      self->deadline_passed();
    });
  }

  void deadline_passed() {
    if (!busy_ && !sending_ && !lingering_ && parser_.begun() && !parser_.failed()) {
      const char* what = parser_.in_body() ? "body" : "head";
      return refuse({408, fmt::format("the {} of the request did not come in time", what)});
    }
    close();
  }

  // ---- reading

  void wait_readable() {
    if (reading_ || closed_ || read_closed_) return;
    if (has_enough()) return look_again();
    reading_ = true;
    socket_.async_wait(Socket::wait_read, [self = shared_from_this()](ErrorCode error) {
      self->reading_ = false;
      if (error || self->closed_) return;
      self->read();
    });
  }

  void read() {
    thread_local std::vector<char> buffer(kReadBytes);
    ErrorCode error;
    const size_t count = socket_.read_some(asio::buffer(buffer.data(), buffer.size()), error);
    if (error == asio::error::would_block || error == asio::error::try_again) return wait_readable();
    if (error == asio::error::eof) return end_of_input();
    if (error) return close();
    if (!tls_) {
      received({buffer.data(), count});
      return wait_readable();
    }
    thread_local std::string plain;
    plain.clear();
    const TlsSession::State state = tls_->receive({buffer.data(), count}, plain, raw_);
    if (!raw_.empty() && !sending_) flush();
    if (!plain.empty()) received(plain);
    if (state == TlsSession::State::kClosed) return end_of_input();
    // Why is said in what is being sent; nothing that comes behind it could be read.
    if (state == TlsSession::State::kFailed) return post([self = shared_from_this()] { self->close(); });
    wait_readable();
  }

  // What has come is read when its turn comes: the rest stays in the sockets' buffers, and then with the client.
  bool has_enough() const { return ahead_.size() >= kMaxAhead && !lingering_; }

  // Nothing is read, and so its end is not, either. It is seen all the same, unless bytes before it have no room.
  void look_again() {
    if (!look_) look_ = std::make_unique<asio::steady_timer>(socket_.get_executor());
    look_->expires_after(kLook);
    look_->async_wait([self = shared_from_this()](ErrorCode error) {
      if (error || self->closed_ || self->read_closed_) return;
      pollfd client = {self->socket_.native_handle(), POLLRDHUP, 0};
      if (self->has_enough() && ::poll(&client, 1, 0) > 0) return self->end_of_input();
      self->wait_readable();
    });
  }

  void end_of_input() {
    read_closed_ = closing_ = true;
    if (!busy_ && !sending_) return close();
    const auto keep = shared_from_this();
    // Whoever closes its side may still read, but nothing tells such a client from one that is gone: what takes long
    // ends, what is answered at once is sent.
    if (gone_) std::exchange(gone_, nullptr)();
  }

  void received(std::string_view bytes) {
    if (closed_) return;
    if (lingering_) {
      discarded_ += bytes.size();
      if (discarded_ > kMaxDiscarded) return close();
    } else if (busy_ || sending_ || !ahead_.empty()) {
      ahead_ += bytes;
    } else {
      take(bytes);
    }
  }

  // Bytes of a request.
  void take(std::string_view bytes) {
    const bool begun = parser_.begun(), was_in_body = parser_.in_body();
    const size_t taken = parser_.feed(bytes);
    ahead_ += bytes.substr(taken);
    if (parser_.failed()) return refuse(parser_.failure());
    if (!count_body(parser_.body_bytes())) {
      return refuse({503, fmt::format("bodies of requests that are being read have more than {} bytes together",
                                      options_.bodies)});
    }
    if (parser_.done()) return handle();
    if (parser_.in_body()) {
      if (!was_in_body) {
        body_end_ = Clock::now() + options_.whole;
        if (parser_.expects_continue() && parser_.body_bytes() == 0) send("HTTP/1.1 100 Continue\r\n\r\n");
      }
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(body_end_ - Clock::now());
      if (left.count() <= 0) return deadline_passed();
      set_deadline(std::min(options_.body, left));
    } else if (!begun && parser_.begun()) {
      set_deadline(options_.head);
    }
  }

  void handle();

  // What was read is no request: an answer, and the end.
  void refuse(const HttpFailure& failure) {
    shared_.refused.fetch_add(1, std::memory_order_relaxed);
    closing_ = lingering_ = true;
    count_body(0);  // before the client can know that there is room again
    HttpResponse response = shared_.refuser(failure);
    http_1_0_ = head_only_ = false;
    send(head(response.status, response.headers, std::to_string(response.body.size())));
    send(response.body);
    ahead_.clear();
  }

  bool count_body(size_t bytes) {
    const size_t before = std::exchange(counted_, bytes);
    const size_t all = shared_.bodies.fetch_add(bytes - before) + (bytes - before);
    return bytes <= before || all <= options_.bodies;
  }

  // ---- answering

  std::string head(int status, const Headers& headers, const std::string& length) const {
    std::string out =
        fmt::format("HTTP/1.1 {} {}\r\ndate: {}\r\nserver: fourfold\r\n", status, status_text(status), date());
    for (const auto& [name, value] : headers) out += fmt::format("{}: {}\r\n", name, value);
    if (!length.empty()) {
      out += fmt::format("content-length: {}\r\n", length);
    } else if (!http_1_0_) {
      out += "transfer-encoding: chunked\r\n";
    }
    const bool close = closing_ || !keep_alive_ || shared_.finishing;
    if (close) {
      out += "connection: close\r\n";
    } else if (http_1_0_) {
      out += "connection: keep-alive\r\n";
    }
    return out + "\r\n";
  }

  template <typename... Pieces>
  void send(const Pieces&... pieces) {
    if (closed_) return;
    (out_.append(pieces), ...);
    if (!sending_) flush();
  }

  void flush() {
    sending_ = true;
    sent_ = 0;
    sending_now_.clear();
    sending_now_.swap(tls_ ? raw_ : out_);
    if (tls_ && !out_.empty()) {
      tls_->send(out_, sending_now_);
      out_.clear();
    }
    sending_bytes_ = sending_now_.size();
    set_deadline(options_.write);
    flush_more();
  }

  void flush_more() {
    // Most answers fit into the socket's buffer.
    ErrorCode error;
    while (sent_ < sending_now_.size()) {
      const size_t count =
          socket_.write_some(asio::buffer(sending_now_.data() + sent_, sending_now_.size() - sent_), error);
      if (error) break;
      sent_ += count;
      sending_bytes_ = sending_now_.size() - sent_;
      set_deadline(options_.write);
    }
    if (error == asio::error::would_block || error == asio::error::try_again) {
      socket_.async_wait(Socket::wait_write, [self = shared_from_this()](ErrorCode wait_error) {
        if (self->closed_) return;
        if (wait_error) return self->close();
        self->flush_more();
      });
      return;
    }
    // Later and not from here: who wrote must be able to go on.
    if (error) return post([self = shared_from_this()] { self->close(); });
    if (!out_.empty() || !raw_.empty()) return flush();
    sending_ = false;
    if (sending_now_.capacity() > kReadBytes) sending_now_ = {};
    // In the middle of a stream there is nothing to be done about it, mostly.
    if (busy_ && !drained_) return no_deadline();
    post([self = shared_from_this()] { self->sent(); });
  }

  // All that there was is sent.
  void sent() {
    if (closed_ || sending_) return;
    if (busy_) {
      no_deadline();
      if (drained_) drained_();
      return;
    }
    if (lingering_ || (closing_ && !read_closed_)) {
      // Closing at once would make the system drop what the client has not read yet.
      lingering_ = true;
      ahead_.clear();
      wait_readable();  // what comes is dropped, until the client has closed its side
      if (tls_ && !std::exchange(said_goodbye_, true)) {
        tls_->close(raw_);
        if (!raw_.empty()) return flush();
      }
      ErrorCode ignored;
      socket_.shutdown(Socket::shutdown_send, ignored);
      set_deadline(kLinger);
      return;
    }
    if (closing_ || shared_.finishing) return close();
    next();
  }

  // The answer is complete.
  void answered() {
    leave();
    if (!keep_alive_ || shared_.finishing) closing_ = true;
    post([self = shared_from_this()] { self->sent(); });
  }

  void leave() {
    busy_ = false;
    count_body(0);
    if (later_) later_->cancel();
    const auto drained = std::exchange(drained_, nullptr);
    if (const auto gone = std::exchange(gone_, nullptr); gone && closed_) gone();
  }

  void next() {
    streaming_ = false;
    if (ahead_.empty() && !parser_.begun()) {
      set_idle_deadline();
    } else {
      const std::string bytes = std::exchange(ahead_, {});
      set_deadline(options_.head);
      take(bytes);
    }
    wait_readable();
  }

  HttpServer::Shared& shared_;
  const HttpServerOptions& options_;
  Socket socket_;
  asio::steady_timer timer_;
  std::unique_ptr<asio::steady_timer> later_, look_;
  Clock::time_point deadline_ = Clock::time_point::max(), body_end_;
  HttpParser parser_;
  std::string ahead_;  // of requests behind the one that is being answered
  std::string out_, sending_now_;
  std::unique_ptr<TlsSession> tls_;  // out_ is encrypted as it is sent
  std::string raw_;                  // what TLS says for itself
  size_t sent_ = 0, sending_bytes_ = 0, discarded_ = 0, counted_ = 0;
  uint64_t exchanges_ = 0;  // so far; the number of the last one
  std::function<void()> gone_, drained_;
  bool timer_set_ = false, reading_ = false, sending_ = false, read_closed_ = false;
  bool busy_ = false;       // a request is being answered
  bool streaming_ = false;  // in pieces
  bool closing_ = false;    // no further request
  bool lingering_ = false;  // all is said
  bool closed_ = false;
  bool said_goodbye_ = false;                                      // in TLS
  bool http_1_0_ = false, head_only_ = false, keep_alive_ = true;  // of the request
};

class ExchangeImpl final : public Exchange, public std::enable_shared_from_this<ExchangeImpl> {
 public:
  ExchangeImpl(std::shared_ptr<Connection> connection, uint64_t number, HttpRequest request)
      : connection_(std::move(connection)), number_(number), request_(std::move(request)) {}
  ~ExchangeImpl() override {
    connection_->post([connection = connection_, number = number_] { connection->dropped(number); });
  }

  const HttpRequest& request() const override { return request_; }
  void post(std::function<void()> work) override {
    connection_->post([self = shared_from_this(), work = std::move(work)] { work(); });
  }
  void dispatch(std::function<void()> work) override {
    connection_->dispatch([self = shared_from_this(), work = std::move(work)] { work(); });
  }
  void respond(HttpResponse response) override { connection_->respond(number_, std::move(response)); }
  void begin(int status, Headers headers) override { connection_->begin(number_, status, headers); }
  void write(std::string_view piece) override { connection_->write(number_, piece); }
  void end() override { connection_->end(number_); }
  void abort() override { connection_->abort(number_); }
  void on_gone(std::function<void()> call) override { connection_->on_gone(number_, std::move(call)); }
  bool gone() const override { return connection_->gone(number_); }
  bool crowded() const override { return connection_->crowded(); }
  void on_drained(std::function<void()> call) override { connection_->on_drained(number_, std::move(call)); }
  void after(std::chrono::milliseconds time, std::function<void()> call) override {
    connection_->after(number_, time, std::move(call));
  }

 private:
  std::shared_ptr<Connection> connection_;
  uint64_t number_;
  HttpRequest request_;
};

void Connection::handle() {
  HttpRequest request = parser_.take();
  busy_ = true;
  streaming_ = false;
  http_1_0_ = request.http_1_0;
  head_only_ = request.method == "HEAD";
  keep_alive_ = request.keep_alive;
  no_deadline();
  const auto exchange = std::make_shared<ExchangeImpl>(shared_from_this(), ++exchanges_, std::move(request));
  try {
    shared_.handler(exchange);
  } catch (const std::exception& error) {
    eprint("fourfold: a request failed: {}\n", error.what());
    respond(exchanges_, shared_.refuser({500, "the request failed"}));
  }
}

}  // namespace

void HttpServer::Shared::listen() { options.unix_socket.empty() ? listen_on_port() : listen_on_path(); }

void HttpServer::Shared::open(const Acceptor::endpoint_type& endpoint, const std::string& name) {
  ErrorCode error;
  const auto check = [&](const char* what) {
    if (error) fail("cannot {} {}: {}", what, name, error.message());
  };
  acceptor.open(endpoint.protocol(), error);
  check("open a socket for");
  acceptor.set_option(Acceptor::reuse_address(true), error);
  acceptor.bind(endpoint, error);
  check("bind to");
  acceptor.listen(4096, error);
  check("listen on");
}

void HttpServer::Shared::listen_on_port() {
  ErrorCode error;
  const auto address = asio::ip::make_address(options.host == "localhost" ? "127.0.0.1" : options.host, error);
  if (error) fail("--host is {}, wanted an IP address, such as 127.0.0.1 or 0.0.0.0", printable(options.host));
  open(tcp::endpoint(address, options.port), fmt::format("{} port {}", options.host, options.port));
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  ::getsockname(acceptor.native_handle(), reinterpret_cast<sockaddr*>(&bound), &size);
  // Where both families have the port is the same place in both structures.
  port = ntohs(reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
}

void HttpServer::Shared::listen_on_path() {
  const std::string& path = options.unix_socket;
  if (path.size() >= sizeof(sockaddr_un::sun_path)) {
    fail("--uds has {} bytes, a socket's path has at most {}", path.size(), sizeof(sockaddr_un::sun_path) - 1);
  }
  const asio::local::stream_protocol::endpoint endpoint(path);
  struct stat info {};
  if (::lstat(path.c_str(), &info) == 0) {
    if (!S_ISSOCK(info.st_mode)) fail("--uds {}: there is something else than a socket", printable(path));
    asio::local::stream_protocol::socket probe(io);
    ErrorCode error;
    probe.connect(endpoint, error);
    if (error != asio::error::connection_refused) {
      fail("--uds {}: another server listens there", printable(path));
    }
    ::unlink(path.c_str());
  }
  open(endpoint, printable(path));
  if (::lstat(path.c_str(), &info) == 0) {
    socket_device = info.st_dev;
    socket_inode = info.st_ino;
  }
}

// Unless somebody else has taken the name since.
void HttpServer::Shared::remove_path() const {
  struct stat info {};
  const std::string& path = options.unix_socket;
  if (path.empty() || ::lstat(path.c_str(), &info) != 0) return;
  if (info.st_dev == socket_device && info.st_ino == socket_inode) ::unlink(path.c_str());
}

void HttpServer::Shared::accept() {
  acceptor.async_accept(asio::make_strand(io), [this](ErrorCode error, auto socket) {
    if (!acceptor.is_open()) return;
    if (error) {  // most likely no descriptor is left
      retry.expires_after(std::chrono::milliseconds(100));
      retry.async_wait([this](ErrorCode) {
        if (acceptor.is_open()) accept();
      });
      return;
    }
    accepted.fetch_add(1, std::memory_order_relaxed);
    const auto connection = std::make_shared<Connection>(*this, Socket(std::move(socket)));
    bool full = false;
    {
      const std::lock_guard lock(mutex);
      connections.insert(connection.get());
      full = paused = connections.size() >= options.max_connections;
    }
    connection->post([connection] { connection->start(); });
    if (!full) accept();
  });
}

void HttpServer::Shared::remove(Connection* connection) {
  const std::lock_guard lock(mutex);
  connections.erase(connection);
  if (connections.empty()) empty.notify_all();
  if (std::exchange(paused, false)) {
    asio::post(strand, [this] {
      if (acceptor.is_open()) accept();
    });
  }
}

void HttpServer::Shared::each(const std::function<void(Connection&)>& call) {
  const std::lock_guard lock(mutex);
  for (Connection* connection : connections) {
    if (const auto held = connection->weak_from_this().lock()) held->post([held, call] { call(*held); });
  }
}

HttpServer::HttpServer(const HttpServerOptions& options, Handler handler, Refuser refuser)
    : shared_(std::make_unique<Shared>(options, std::move(handler), std::move(refuser))) {
  const size_t descriptors = raise_descriptor_limit();
  shared_->options.max_connections =
      std::clamp<size_t>(descriptors > 128 ? descriptors - 128 : 1, 1, options.max_connections);
  shared_->listen();
  asio::post(shared_->strand, [this] { shared_->accept(); });
  for (int i = 0; i < threads_of(options); ++i) {
    shared_->threads.emplace_back([this] {
      for (;;) {
        try {
          shared_->io.run();
          return;
        } catch (const std::exception& error) {  // of one piece of work; the others go on
          eprint("fourfold: internal error in the server: {}\n", error.what());
        }
      }
    });
  }
}

HttpServer::~HttpServer() { close(); }

uint16_t HttpServer::port() const { return shared_->port; }

HttpServerStats HttpServer::stats() const {
  HttpServerStats stats;
  stats.accepted = shared_->accepted;
  stats.refused = shared_->refused;
  const std::lock_guard lock(shared_->mutex);
  stats.connections = static_cast<int64_t>(shared_->connections.size());
  return stats;
}

void HttpServer::finish_connections() {
  shared_->finishing = true;
  asio::post(shared_->strand, [this] {
    ErrorCode ignored;
    shared_->acceptor.close(ignored);
    shared_->retry.cancel();
  });
  shared_->each([](Connection& connection) { connection.finish(); });
}

void HttpServer::close() {
  if (shared_->threads.empty()) return;
  finish_connections();
  shared_->remove_path();
  {
    // A connection that was accepted as the port was closed may come late: it is closed as well.
    std::unique_lock lock(shared_->mutex);
    for (int i = 0; i < 100 && !shared_->connections.empty(); ++i) {
      lock.unlock();
      shared_->each([](Connection& connection) { connection.close(); });
      lock.lock();
      shared_->empty.wait_for(lock, std::chrono::milliseconds(50), [this] { return shared_->connections.empty(); });
    }
  }
  shared_->guard.reset();
  for (std::thread& thread : shared_->threads) thread.join();
  shared_->threads.clear();
}

}  // namespace fourfold::serve
