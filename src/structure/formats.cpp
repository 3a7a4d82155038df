#include "structure/formats.h"

#include <fmt/format.h>

#include <utility>

namespace fourfold::structure {
namespace {

constexpr std::string_view kDate =
    "[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-"
    "8]))";
constexpr std::string_view kTime =
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
constexpr std::string_view kLabel = "[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?";
constexpr std::string_view kByte = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";

std::string host() { return fmt::format("({0}\\.){{0,3}}{0}", kLabel); }

std::string pattern_of(std::string_view format) {
  if (format == "date") return std::string(kDate);
  if (format == "time") return std::string(kTime);
  if (format == "date-time") return fmt::format("{}T{}", kDate, kTime);
  if (format == "duration") {
    return "P([0-9]{1,4}W|[0-9]{1,4}D(T[0-9]{1,4}[HMS])?|[0-9]{1,4}Y([0-9]{1,2}M([0-9]{1,3}D)?)?|[0-9]{1,4}M([0-9]{1,3}"
           "D)?|"
           "T([0-9]{1,4}H([0-9]{1,4}M([0-9]{1,4}S)?)?|[0-9]{1,4}M([0-9]{1,4}S)?|[0-9]{1,4}S))";
  }
  if (format == "email") {
    return fmt::format("[A-Za-z0-9_+-]{{1,32}}(\\.[A-Za-z0-9_+-]{{1,32}}){{0,3}}@({}\\.){{1,3}}[a-z]{{2,16}}", kLabel);
  }
  if (format == "hostname") return host();
  if (format == "ipv4") return fmt::format("{0}(\\.{0}){{3}}", kByte);
  if (format == "ipv6") return "([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}";
  if (format == "uuid") return "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}";
  if (format == "uri") {
    return "https?://" + host() +
           "(:[1-9][0-9]{0,3})?(/[A-Za-z0-9._~+-]{0,64}){0,8}(\\?[A-Za-z0-9._~&=+-]{0,64})?(#[A-Za-z0-9._~-]{0,64})?";
  }
  return "";
}

}  // namespace

std::optional<std::string> format_pattern(std::string_view format) {
  std::string out = pattern_of(format);
  return out.empty() ? std::nullopt : std::optional(std::move(out));
}

std::string known_formats() { return "date, time, date-time, duration, email, hostname, ipv4, ipv6, uuid, uri"; }

}  // namespace fourfold::structure
