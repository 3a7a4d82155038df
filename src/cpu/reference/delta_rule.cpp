#include "cpu/reference/delta_rule.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"

namespace fourfold::cpu {

void delta_rule_recurrent(const DeltaRule& rule) {
  const int64_t dk = rule.key_dim;
  const int64_t dv = rule.value_dim;
  std::vector<double> change(static_cast<size_t>(dv));
  for (int64_t t = 0; t < rule.tokens; ++t) {
    const float* q = rule.q + t * dk;
    const float* k = rule.k + t * dk;
    const float* v = rule.v + t * dv;
    const auto decay = static_cast<float>(std::exp(static_cast<double>(rule.log_decay[t])));
    std::fill(change.begin(), change.end(), 0.0);
    for (int64_t i = 0; i < dk; ++i) {
      for (int64_t j = 0; j < dv; ++j) {
        rule.state[i * dv + j] *= decay;
        change[static_cast<size_t>(j)] += static_cast<double>(k[i]) * static_cast<double>(rule.state[i * dv + j]);
      }
    }
    for (int64_t j = 0; j < dv; ++j) {
      double& c = change[static_cast<size_t>(j)];
      c = static_cast<double>(rule.beta[t]) * (static_cast<double>(v[j]) - c);
    }
    std::vector<double> result(static_cast<size_t>(dv));
    for (int64_t i = 0; i < dk; ++i) {
      for (int64_t j = 0; j < dv; ++j) {
        float& s = rule.state[i * dv + j];
        s = static_cast<float>(static_cast<double>(s) + static_cast<double>(k[i]) * change[static_cast<size_t>(j)]);
        result[static_cast<size_t>(j)] += static_cast<double>(q[i]) * static_cast<double>(s);
      }
    }
    for (int64_t j = 0; j < dv; ++j) rule.out[t * dv + j] = static_cast<float>(result[static_cast<size_t>(j)]);
  }
}

void delta_rule_chunked(const DeltaRule& rule, int64_t chunk) {
  FF_ASSERT(chunk >= 1);
  const int64_t dk = rule.key_dim;
  const int64_t dv = rule.value_dim;
  for (int64_t first = 0; first < rule.tokens; first += chunk) {
    const int64_t n = std::min(chunk, rule.tokens - first);
    const float* q = rule.q + first * dk;
    const float* k = rule.k + first * dk;
    const float* v = rule.v + first * dv;
    const float* beta = rule.beta + first;
    std::vector<double> c(static_cast<size_t>(n));
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) c[static_cast<size_t>(i)] = sum += static_cast<double>(rule.log_decay[first + i]);
    const auto dot = [dk](const float* a, const float* b) {
      double total = 0;
      for (int64_t i = 0; i < dk; ++i) total += static_cast<double>(a[i]) * static_cast<double>(b[i]);
      return total;
    };
    // S0^T x for one vector x
    const auto project = [&](const float* x, int64_t column) {
      double total = 0;
      for (int64_t i = 0; i < dk; ++i)
        total += static_cast<double>(x[i]) * static_cast<double>(rule.state[i * dv + column]);
      return total;
    };
    std::vector<double> delta(static_cast<size_t>(n * dv));
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t x = 0; x < dv; ++x) {
        delta[static_cast<size_t>(i * dv + x)] =
            static_cast<double>(beta[i]) *
            (static_cast<double>(v[i * dv + x]) - std::exp(c[static_cast<size_t>(i)]) * project(k + i * dk, x));
      }
      for (int64_t j = 0; j < i; ++j) {
        const double a = static_cast<double>(beta[i]) * dot(k + i * dk, k + j * dk) *
                         std::exp(c[static_cast<size_t>(i)] - c[static_cast<size_t>(j)]);
        for (int64_t x = 0; x < dv; ++x) {
          delta[static_cast<size_t>(i * dv + x)] -= a * delta[static_cast<size_t>(j * dv + x)];
        }
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      std::vector<double> o(static_cast<size_t>(dv));
      for (int64_t x = 0; x < dv; ++x)
        o[static_cast<size_t>(x)] = std::exp(c[static_cast<size_t>(i)]) * project(q + i * dk, x);
      for (int64_t j = 0; j <= i; ++j) {
        const double p = dot(q + i * dk, k + j * dk) * std::exp(c[static_cast<size_t>(i)] - c[static_cast<size_t>(j)]);
        for (int64_t x = 0; x < dv; ++x) o[static_cast<size_t>(x)] += p * delta[static_cast<size_t>(j * dv + x)];
      }
      for (int64_t x = 0; x < dv; ++x) rule.out[(first + i) * dv + x] = static_cast<float>(o[static_cast<size_t>(x)]);
    }
    for (int64_t i = 0; i < dk; ++i) {
      for (int64_t x = 0; x < dv; ++x) {
        double s = std::exp(sum) * static_cast<double>(rule.state[i * dv + x]);
        for (int64_t j = 0; j < n; ++j) {
          s += std::exp(sum - c[static_cast<size_t>(j)]) * static_cast<double>(k[j * dk + i]) *
               delta[static_cast<size_t>(j * dv + x)];
        }
        rule.state[i * dv + x] = static_cast<float>(s);
      }
    }
  }
}

}  // namespace fourfold::cpu
