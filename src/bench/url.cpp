#include "bench/url.h"

#include <algorithm>
#include <charconv>

#include "base/check.h"

namespace fourfold::bench {

Url Url::parse(std::string_view text) {
  const auto refuse = [&](const char* found) {
    fail("{}: {}, wanted http[s]://HOST[:PORT][/PATH]", printable(text, 200), found);
  };
  Url url;
  url.tls = text.starts_with("https://");
  url.port = url.tls ? 443 : 80;
  if (!url.tls && !text.starts_with("http://")) refuse("no http:// at its beginning");
  const std::string_view rest = text.substr(text.find("//") + 2);
  const bool plain =
      std::all_of(rest.begin(), rest.end(), [](char c) { return c > 0x20 && c < 0x7f && c != '?' && c != '#'; });
  if (!plain) refuse("a query, a fragment, white space or a byte outside of ASCII");
  const size_t slash = std::min(rest.find('/'), rest.size());
  std::string_view place = rest.substr(0, slash), path = rest.substr(slash);
  if (place.find('@') != std::string_view::npos) refuse("a user name");
  size_t colon = place.rfind(':');
  if (place.starts_with('[')) {
    const size_t end = place.find(']');
    if (end == std::string_view::npos) refuse("no ] behind the address");
    url.host = place.substr(1, end - 1);
    colon = end + 1 == place.size() ? std::string_view::npos : end + 1;
    if (colon != std::string_view::npos && place[colon] != ':') refuse("something between ] and the port");
  } else {
    url.host = place.substr(0, colon);
  }
  if (url.host.empty()) refuse("no host");
  if (colon != std::string_view::npos) {
    const std::string_view digits = place.substr(colon + 1);
    const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), url.port);
    if (error != std::errc() || stop != digits.data() + digits.size() || url.port == 0)
      refuse("no port from 1 to 65535");
  }
  while (path.ends_with('/')) path.remove_suffix(1);
  // Clients' base URLs end in /v1, and every path here begins with it.
  if (path.ends_with("/v1")) path.remove_suffix(3);
  url.path = path;
  return url;
}

std::string Url::authority() const {
  const bool six = host.find(':') != std::string::npos;
  return fmt::format("{}{}{}:{}", six ? "[" : "", host, six ? "]" : "", port);
}

std::string Url::text() const { return (tls ? "https://" : "http://") + authority() + path; }

bool Url::local() const { return host == "localhost" || host == "::1" || host.starts_with("127."); }

}  // namespace fourfold::bench
