#include "serve/tls.h"

#include <openssl/err.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <climits>
#include <new>
#include <vector>

#include "base/check.h"

namespace fourfold::serve {
namespace {

struct Free {
  void operator()(SSL_CTX* context) const { ::SSL_CTX_free(context); }
  void operator()(SSL* ssl) const { ::SSL_free(ssl); }
};

// What OpenSSL says of the last failure on this thread; the record of failures is empty behind it.
std::string last_error() {
  char text[256] = "no reason is given";
  if (const unsigned long code = ::ERR_peek_last_error(); code != 0) ::ERR_error_string_n(code, text, sizeof text);
  ::ERR_clear_error();
  return text;
}

// A client that knows other protocols only is refused in the handshake.
int choose_protocol(SSL*, const unsigned char** out, unsigned char* out_length, const unsigned char* offered,
                    unsigned int offered_length, void*) {
  static constexpr unsigned char kWanted[] = "\x08http/1.1";
  unsigned char* chosen = nullptr;
  const int result = ::SSL_select_next_proto(&chosen, out_length, kWanted, sizeof kWanted - 1, offered, offered_length);
  *out = chosen;
  return result == OPENSSL_NPN_NEGOTIATED ? SSL_TLSEXT_ERR_OK : SSL_TLSEXT_ERR_ALERT_FATAL;
}

int no_password(char*, int, int, void*) { return 0; }

class Session final : public TlsSession {
 public:
  explicit Session(SSL_CTX* context) : ssl_(::SSL_new(context)) {
    BIO* in = ::BIO_new(::BIO_s_mem());
    BIO* out = ::BIO_new(::BIO_s_mem());
    if (ssl_ == nullptr || in == nullptr || out == nullptr) {
      ::BIO_free(in);
      ::BIO_free(out);
      throw std::bad_alloc();
    }
    ::SSL_set_bio(ssl_.get(), in, out);  // they are its own from here on
    ::SSL_set_accept_state(ssl_.get());
  }

  State receive(std::string_view bytes, std::string& plain, std::string& out) override {
    while (!bytes.empty()) {
      const int count = ::BIO_write(::SSL_get_rbio(ssl_.get()), bytes.data(), piece(bytes));
      if (count <= 0) return State::kFailed;
      bytes.remove_prefix(static_cast<size_t>(count));
    }
    State state = State::kOpen;
    for (;;) {
      char buffer[16384];  // a record's most
      ::ERR_clear_error();
      const int count = ::SSL_read(ssl_.get(), buffer, sizeof buffer);
      if (count > 0) {
        plain.append(buffer, static_cast<size_t>(count));
        continue;
      }
      const int error = ::SSL_get_error(ssl_.get(), count);
      if (error == SSL_ERROR_ZERO_RETURN) {
        state = State::kClosed;
      } else if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) {
        state = State::kFailed;
        ::ERR_clear_error();
      }
      break;
    }
    collect(out);
    return state;
  }

  void send(std::string_view plain, std::string& out) override {
    FF_ASSERT(established());
    while (!plain.empty()) {
      ::ERR_clear_error();
      const int count = ::SSL_write(ssl_.get(), plain.data(), piece(plain));
      if (count <= 0) fail("TLS cannot encrypt: {}", last_error());
      plain.remove_prefix(static_cast<size_t>(count));
    }
    collect(out);
  }

  void close(std::string& out) override {
    ::ERR_clear_error();
    if (established()) ::SSL_shutdown(ssl_.get());
    ::ERR_clear_error();
    collect(out);
  }

  bool established() const override { return ::SSL_is_init_finished(ssl_.get()) != 0; }

 private:
  static int piece(std::string_view bytes) { return static_cast<int>(std::min<size_t>(bytes.size(), INT_MAX)); }

  void collect(std::string& out) {
    BIO* bio = ::SSL_get_wbio(ssl_.get());
    const size_t waiting = ::BIO_ctrl_pending(bio), before = out.size();
    if (waiting == 0) return;
    out.resize(before + waiting);
    const int count = ::BIO_read(bio, out.data() + before, static_cast<int>(waiting));
    FF_ASSERT(count == static_cast<int>(waiting));
  }

  std::unique_ptr<SSL, Free> ssl_;
};

}  // namespace

struct TlsContext::Impl {
  std::unique_ptr<SSL_CTX, Free> context;
};

TlsContext::TlsContext(const std::filesystem::path& certificates, const std::filesystem::path& key)
    : impl_(std::make_unique<Impl>()) {
  impl_->context.reset(::SSL_CTX_new(::TLS_server_method()));
  SSL_CTX* context = impl_->context.get();
  if (context == nullptr) throw std::bad_alloc();
  ::SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  ::SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION | SSL_OP_CIPHER_SERVER_PREFERENCE);
  ::SSL_CTX_set_mode(context, SSL_MODE_RELEASE_BUFFERS);
  ::SSL_CTX_set_alpn_select_cb(context, choose_protocol, nullptr);
  ::SSL_CTX_set_default_passwd_cb(context, no_password);  // and not a question on the terminal
  ::ERR_clear_error();
  if (::SSL_CTX_use_certificate_chain_file(context, certificates.c_str()) != 1) {
    fail("--ssl-certfile {}: no certificate in PEM form: {}", printable(certificates.string(), 200), last_error());
  }
  if (::SSL_CTX_use_PrivateKey_file(context, key.c_str(), SSL_FILETYPE_PEM) != 1) {
    fail("--ssl-keyfile {}: no key in PEM form that fits the certificate: {}", printable(key.string(), 200),
         last_error());
  }
}

TlsContext::~TlsContext() = default;

std::unique_ptr<TlsSession> TlsContext::accept() const { return std::make_unique<Session>(impl_->context.get()); }

}  // namespace fourfold::serve
