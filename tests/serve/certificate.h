// A certificate for tests of TLS.
#pragma once

#include <openssl/pem.h>
#include <openssl/x509.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "base/temporary_directory.h"
#include "serve/tls.h"

namespace fourfold::serve {

// A certificate for this machine that nobody vouches for, and its key.
class Certificate {
 public:
  Certificate() {
    EVP_PKEY* key = ::EVP_EC_gen("P-256");
    X509* certificate = ::X509_new();
    ::ASN1_INTEGER_set(::X509_get_serialNumber(certificate), 1);
    ::X509_gmtime_adj(::X509_getm_notBefore(certificate), -3600);
    ::X509_gmtime_adj(::X509_getm_notAfter(certificate), 3600);
    ::X509_set_pubkey(certificate, key);
    X509_NAME* name = ::X509_get_subject_name(certificate);
    ::X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>("localhost"), -1, -1,
                                 0);
    ::X509_set_issuer_name(certificate, name);
    ::X509_sign(certificate, key, ::EVP_sha256());
    std::FILE* file = std::fopen(certificate_path().c_str(), "w");
    ::PEM_write_X509(file, certificate);
    std::fclose(file);
    file = std::fopen(key_path().c_str(), "w");
    ::PEM_write_PrivateKey(file, key, nullptr, nullptr, 0, nullptr, nullptr);
    std::fclose(file);
    ::X509_free(certificate);
    ::EVP_PKEY_free(key);
  }

  std::filesystem::path certificate_path() const { return directory_ / "certificate.pem"; }
  std::filesystem::path key_path() const { return directory_ / "key.pem"; }
  std::filesystem::path path(const std::string& name) const { return directory_ / name; }
  std::shared_ptr<const TlsContext> context() const {
    return std::make_shared<TlsContext>(certificate_path(), key_path());
  }

 private:
  const TemporaryDirectory directory_;
};

}  // namespace fourfold::serve
