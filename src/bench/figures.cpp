#include "bench/figures.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

#include "base/check.h"

namespace fourfold::bench {

Distribution distribution(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto n = static_cast<double>(values.size());
  const auto at = [&](double share) {
    const auto i = static_cast<size_t>(std::ceil(share * n));
    return values[std::clamp<size_t>(i, 1, values.size()) - 1];
  };
  Distribution out;
  out.count = static_cast<int64_t>(values.size());
  out.mean = std::accumulate(values.begin(), values.end(), 0.0) / n;
  double squares = 0;
  for (const double value : values) squares += (value - out.mean) * (value - out.mean);
  out.deviation = std::sqrt(squares / n);
  out.p50 = at(0.5);
  out.p90 = at(0.9);
  out.p99 = at(0.99);
  return out;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

Goodput Goodput::parse(const std::vector<std::string>& limits) {
  Goodput out;
  for (const std::string& limit : limits) {
    const size_t colon = limit.find(':');
    const std::string name = limit.substr(0, colon);
    const std::string_view number =
        colon == std::string::npos ? std::string_view() : std::string_view(limit).substr(colon + 1);
    double ms = 0;
    const auto [stop, error] = std::from_chars(number.data(), number.data() + number.size(), ms);
    std::optional<double>* field = name == "ttft"   ? &out.first
                                   : name == "tpot" ? &out.per_token
                                   : name == "e2el" ? &out.whole
                                                    : nullptr;
    const bool good =
        error == std::errc() && stop == number.data() + number.size() && !number.empty() && std::isfinite(ms) && ms > 0;
    if (field == nullptr || !good) {
      fail("--goodput {}: wanted ttft:MS, tpot:MS or e2el:MS", printable(limit, 60));
    }
    *field = ms / 1e3;
  }
  return out;
}

std::optional<double> per_token_seconds(const RequestRecord& request) {
  const int64_t tokens = request.delivered();
  if (tokens < 2 || request.pieces.size() < 2) return std::nullopt;
  return (request.pieces.back() - request.first) / static_cast<double>(tokens - 1);
}

bool Goodput::met(const RequestRecord& request) const {
  if (!request.good()) return false;
  if (first && request.first - request.start > *first) return false;
  if (per_token && per_token_seconds(request).value_or(0) > *per_token) return false;
  return !whole || request.end - request.start <= *whole;
}

Figures figures(const std::vector<LoadResult>& repetitions, const Goodput& goodput) {
  Figures out;
  std::vector<double> first, first_content, per_token, between, whole, request_rates, total_rates, good_rates;
  for (const LoadResult& repetition : repetitions) {
    int64_t delivered = 0, prompts = 0, completed = 0, good = 0;
    for (const RequestRecord& request : repetition.requests) {
      if (!request.good()) {
        ++out.failed;
        ++out.errors[request.error];
        continue;
      }
      ++completed;
      delivered += request.delivered();
      prompts += std::max<int64_t>(request.prompt_tokens, 0);
      out.cached_tokens += std::max<int64_t>(request.cached_tokens, 0);
      out.reasoning_tokens += std::max<int64_t>(request.reasoning_tokens, 0);
      out.server_counts = out.server_counts && request.output_tokens >= 0;
      first.push_back(request.first - request.start);
      if (request.first_content >= 0) first_content.push_back(request.first_content - request.start);
      if (const auto seconds = per_token_seconds(request)) per_token.push_back(*seconds);
      for (size_t i = 1; i < request.pieces.size(); ++i) between.push_back(request.pieces[i] - request.pieces[i - 1]);
      whole.push_back(request.end - request.start);
      good += goodput.met(request) ? 1 : 0;
    }
    out.completed += completed;
    out.output_tokens += delivered;
    out.prompt_tokens += prompts;
    out.seconds += repetition.seconds;
    out.peak = std::max(out.peak, repetition.peak);
    const double seconds = std::max(repetition.seconds, 1e-9);
    out.output_rates.push_back(static_cast<double>(delivered) / seconds);
    request_rates.push_back(static_cast<double>(completed) / seconds);
    total_rates.push_back(static_cast<double>(delivered + prompts) / seconds);
    good_rates.push_back(static_cast<double>(good) / seconds);
  }
  out.repetitions = static_cast<int64_t>(repetitions.size());
  out.request_rate = median(request_rates);
  out.total_rate = median(total_rates);
  out.good_rate = median(good_rates);
  out.first = distribution(std::move(first));
  out.first_content = distribution(std::move(first_content));
  out.per_token = distribution(std::move(per_token));
  out.between = distribution(std::move(between));
  out.whole = distribution(std::move(whole));
  return out;
}

}  // namespace fourfold::bench
