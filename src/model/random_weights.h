// Random weights of any shape, the same on every machine for the same seed: for speed runs without files
// (make_random_weights) and for the checkpoint generator.
//
// Every weight has its own seed, made from the seed and its internal name, so that the order of generation does not
// matter. Matrices have an rms of 1 / sqrt(columns), so that activations and logits stay of order one; norm offsets,
// decay rates and time steps lie in the ranges of trained models.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "model/inventory.h"
#include "model/weight_source.h"

namespace fourfold::model {

// The shape of a published model: 35B-A3B, 122B-A10B, 397B-A17B, 27B (dense). An Error lists them for another name.
ModelConfig shape_config(std::string_view name);

// Sets the number of layers (every fourth is attention) or any other size is up to the caller; this one keeps
// layer_kinds in step.
void set_layers(ModelConfig& config, int64_t layers);

// Weights in memory, one at a time: a matrix is made when it is asked for and freed with the last copy of its
// MatrixSource. NVFP4 for routed and shared experts, dense MLPs, attention and delta-net projections; bf16 for the
// other matrices.
std::unique_ptr<WeightSource> make_random_weights(const ModelConfig& config, uint64_t seed);

// ---- building blocks of the generator

// The bytes of one tensor as a deterministic stream that can be started at any multiple of kChunk bytes.
struct RandomStream {
  enum class Kind : uint8_t {
    kF32,  // bell-shaped, rms `scale`, around `offset`
    kBf16,
    kF16,
    kUniformF32,  // [offset, offset + scale)
    kUniformBf16,
    kCodes,        // random bytes: pairs of e2m1 codes
    kBlockScales,  // e4m3 from 8 to 120
    kFp8,          // e4m3 of either sign, magnitudes from 2^-3 to 30
    kByte,         // every byte is `byte`
  };
  static constexpr uint64_t kChunk = 65536;

  Kind kind = Kind::kByte;
  uint64_t seed = 0;
  float scale = 0, offset = 0;
  uint8_t byte = 0;

  void fill(uint64_t first_byte, std::span<uint8_t> out) const;
};

// The rms of a decoded kCodes x kBlockScales product and of kFp8, before tensor scales.
float random_nvfp4_rms();
float random_fp8_rms();

uint64_t weight_seed(uint64_t seed, std::string_view name);
float weight_rms(const WeightSpec& spec);
// The stream of a vector parameter in fp32 or bf16.
RandomStream vector_stream(const WeightSpec& spec, uint64_t seed, bool bf16);
bool quantized_by_default(WeightKind kind);

}  // namespace fourfold::model
