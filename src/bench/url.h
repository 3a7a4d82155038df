// Where a server is: http://HOST[:PORT][/PATH], or https.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fourfold::bench {

struct Url {
  std::string host;  // a name or an address, IPv6 without its brackets
  uint16_t port = 80;
  bool tls = false;
  std::string path;  // without a slash at the end, so that "/v1/models" can follow

  // An Error for anything else: other schemes, user names, queries.
  static Url parse(std::string_view text);

  std::string text() const;
  std::string authority() const;  // as the header Host has it
  // Whether the name says that the server is on this machine.
  bool local() const;
};

}  // namespace fourfold::bench
