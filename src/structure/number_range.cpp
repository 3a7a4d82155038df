#include "structure/number_range.h"

#include <algorithm>
#include <string>
#include <vector>

namespace fourfold::structure {
namespace {

using Wide = __int128;

constexpr int kIntegerDigits = 18, kDecimalDigits = 15, kPlaces = 6;

Wide power_of_ten(int exponent) {
  Wide out = 1;
  for (int i = 0; i < exponent; ++i) out *= 10;
  return out;
}

// number x 10^places, rounded down or up. Numbers beyond `bound` count as just beyond it.
Wide scaled(const Json& number, int places, bool up, Wide bound) {
  // The shortest decimal form that reads back as the number is what its author wrote: digits x 10^exponent.
  const std::string text = number.is_number_unsigned()  ? fmt::format("{}", number.get<uint64_t>())
                           : number.is_number_integer() ? fmt::format("{}", number.get<int64_t>())
                                                        : fmt::format("{:e}", number.get<double>());
  Wide digits = 0;
  int exponent = places;
  bool negative = false, point = false;
  const std::string shortest = number.is_number_float() ? fmt::format("{}", number.get<double>()) : text;
  for (size_t i = 0; i < shortest.size(); ++i) {
    const char c = shortest[i];
    if (c == '-') {
      negative = true;
    } else if (c == '.') {
      point = true;
    } else if (c == 'e') {
      exponent += std::stoi(shortest.substr(i + 1));
      break;
    } else {
      digits = digits * 10 + (c - '0');
      if (point) --exponent;
    }
  }
  Wide value = digits, rest = 0;
  if (digits != 0 && exponent > 19) {
    value = bound + 1;
  } else if (exponent > 0) {
    value = digits * power_of_ten(exponent);
  } else if (exponent < -30) {
    value = 0;
    rest = digits;
  } else if (exponent < 0) {
    value = digits / power_of_ten(-exponent);
    rest = digits % power_of_ten(-exponent);
  }
  value = std::min(value, bound + 1);
  if (rest != 0 && up != negative) ++value;
  return negative ? -value : value;
}

std::string digits_of(Wide value, size_t least) {
  std::string out;
  for (; value > 0 || out.size() < least; value /= 10) out.insert(out.begin(), static_cast<char>('0' + value % 10));
  return out;
}

Part digit(char low, char high) {
  return one_of({{static_cast<unsigned char>(low), static_cast<unsigned char>(high)}});
}

// Any digits where `form` has digits; its point stays.
Part any_digits(const std::string& form) {
  std::vector<Part> out;
  for (size_t i = 0; i < form.size();) {
    const size_t end = std::min(form.find('.', i), form.size());
    if (end > i) out.push_back(repeated(digit('0', '9'), static_cast<int64_t>(end - i), static_cast<int64_t>(end - i)));
    if (end < form.size()) out.push_back(literal("."));
    i = end + 1;
  }
  return out.empty() ? literal("") : sequence(out);
}

// Texts of one form, from `low` to `high`, where these bind at all.
Part between(const std::string& low, bool low_binds, const std::string& high, bool high_binds) {
  low_binds = low_binds && low.find_first_not_of("0.") != std::string::npos;
  high_binds = high_binds && high.find_first_not_of("9.") != std::string::npos;
  if (low.empty() || (!low_binds && !high_binds)) return any_digits(low);
  const std::string low_rest = low.substr(1), high_rest = high.substr(1);
  if (low[0] == '.') return sequence({literal("."), between(low_rest, low_binds, high_rest, high_binds)});
  const char first = low_binds ? low[0] : '0', last = high_binds ? high[0] : '9';
  if (first == last && low_binds && high_binds) {
    return sequence({digit(first, last), between(low_rest, true, high_rest, true)});
  }
  std::vector<Part> out;
  if (low_binds) out.push_back(sequence({digit(first, first), between(low_rest, true, high_rest, false)}));
  const char inner_first = low_binds ? static_cast<char>(first + 1) : first;
  const char inner_last = high_binds ? static_cast<char>(last - 1) : last;
  if (inner_first <= inner_last) out.push_back(sequence({digit(inner_first, inner_last), any_digits(low_rest)}));
  if (high_binds) out.push_back(sequence({digit(last, last), between(low_rest, false, high_rest, true)}));
  return choice(out);
}

// From low to high, both at least 0, with a point before the last `places` digits.
void add_range(Wide low, Wide high, int places, std::vector<Part>& out) {
  const auto least = static_cast<size_t>(places) + 1;
  const auto with_point = [&](std::string text) {
    if (places > 0) text.insert(text.size() - static_cast<size_t>(places), ".");
    return text;
  };
  // Lengths at which every number that does not begin with 0 is in the range.
  int64_t full_first = -1, full_last = -1;
  while (low <= high) {
    const std::string first = digits_of(low, least);
    const Wide end = std::min(high, power_of_ten(static_cast<int>(first.size())) - 1);
    const Wide begin = power_of_ten(static_cast<int>(first.size()) - 1);
    if (first.size() > least && low == begin && end == begin * 10 - 1) {
      if (full_first < 0) full_first = static_cast<int64_t>(first.size());
      full_last = static_cast<int64_t>(first.size());
    } else {
      out.push_back(between(with_point(first), true, with_point(digits_of(end, least)), true));
    }
    low = end + 1;
  }
  if (full_first > 0) {
    std::vector<Part> parts = {digit('1', '9'),
                               repeated(digit('0', '9'), full_first - 1 - places, full_last - 1 - places)};
    if (places > 0) parts.push_back(any_digits("." + std::string(static_cast<size_t>(places), '0')));
    out.push_back(sequence(parts));
  }
}

void add_signed(const std::optional<Limit>& low, const std::optional<Limit>& high, int places, int digits,
                std::vector<Part>& out) {
  const Wide bound = power_of_ten(digits + places) - 1;
  Wide first = -bound, last = bound;
  if (low) {
    first = scaled(low->number, places, true, bound);
    if (low->open && first == scaled(low->number, places, false, bound)) ++first;
  }
  if (high) {
    last = scaled(high->number, places, false, bound);
    if (high->open && last == scaled(high->number, places, true, bound)) --last;
  }
  first = std::max(first, -bound);
  last = std::min(last, bound);
  if (first > last) return;
  if (last >= 0) add_range(std::max<Wide>(first, 0), last, places, out);
  if (first < 0) {
    std::vector<Part> negative;
    add_range(std::max<Wide>(-last, 1), -first, places, negative);
    if (!negative.empty()) out.push_back(sequence({literal("-"), choice(negative)}));
  }
}

}  // namespace

std::optional<Part> integers(const std::optional<Limit>& low, const std::optional<Limit>& high) {
  std::vector<Part> out;
  add_signed(low, high, 0, kIntegerDigits, out);
  return out.empty() ? std::nullopt : std::optional(choice(out));
}

std::optional<Part> decimals(const std::optional<Limit>& low, const std::optional<Limit>& high) {
  std::vector<Part> out;
  for (int places = 0; places <= kPlaces; ++places) add_signed(low, high, places, kDecimalDigits, out);
  return out.empty() ? std::nullopt : std::optional(choice(out));
}

}  // namespace fourfold::structure
