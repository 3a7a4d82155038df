// Every weight that a configuration needs, by its internal name (weight_source.h) and shape, and what kind of weight it
// is. The one list that the generator, the random weights, `inspect` and `quantize` walk.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/config.h"

namespace fourfold::model {

enum class WeightKind : uint8_t {
  kEmbedding,
  kHead,
  kNorm,
  kAttention,      // q, k, v, o projections
  kDeltaNet,       // projections qkv, z, out
  kDeltaNetGate,   // projections a and b: small, and left unquantised by every recipe we know
  kDeltaNetSmall,  // conv1d, A_log, dt_bias, norm
  kRouter,
  kRoutedExpert,
  kSharedExpert,
  kSharedGate,
  kMlp,       // dense gate, up, down
  kMtpInput,  // mtp.fc
};

const char* weight_kind_name(WeightKind kind);

struct WeightSpec {
  std::string name;  // internal; without ".weight"
  WeightKind kind = WeightKind::kNorm;
  bool is_vector = false;  // fetched with WeightSource::vector: `rows` is the count, columns 1
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t layer = -1;   // of the trunk; -1 outside of layers and in the MTP head
  int64_t expert = -1;  // routed expert
  bool mtp = false;

  int64_t elements() const { return rows * columns; }
};

// In loading order: embedding, layers, norm, head (unless tied), MTP head (when config.mtp_layers > 0).
std::vector<WeightSpec> weight_specs(const ModelConfig& config);

}  // namespace fourfold::model
