// Random weights of any shape, the same on every machine for the same seed: for speed runs without files
// (make_random_weights) and for the checkpoint generator.
//
// Every weight has its own seed, made from the seed and its internal name, so that the order of generation does not
// matter. Larger matrices in NVFP4 and bf16 are places of a block that all such have in common. Matrices have an rms of
// 1 / sqrt(columns), so that activations and logits stay of order one; norm offsets, decay rates and time steps lie in
// the ranges of trained models.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/inventory.h"
#include "model/weight_source.h"

namespace fourfold::model {

// The shape of a published model: 35B-A3B, 122B-A10B, 397B-A17B, 27B (dense). An Error lists them for another name.
ModelConfig shape_config(std::string_view name);
std::vector<std::string> shape_names();

// Sets the number of layers (every fourth is attention) or any other size is up to the caller; this one keeps
// layer_kinds in step.
void set_layers(ModelConfig& config, int64_t layers);

// Weights in memory, one at a time: a matrix is made when it is asked for and freed with the last copy of its
// MatrixSource. `formats` says how matrices are stored: NVFP4, FP8 (one scale a matrix) or bf16.
using FormatOf = std::function<ops::Format(WeightKind)>;
std::unique_ptr<WeightSource> make_random_weights(const ModelConfig& config, uint64_t seed, FormatOf formats);
// NVFP4 for routed and shared experts, dense MLPs, attention and delta-net projections; bf16 for the other matrices.
std::unique_ptr<WeightSource> make_random_weights(const ModelConfig& config, uint64_t seed);
// The format that a matrix of these weights gets: NVFP4 needs columns in blocks of 16.
ops::Format random_format(const FormatOf& formats, const WeightSpec& spec);
ops::Format default_format(WeightKind kind);

// ---- building blocks of the generator

// The values of one weight before they are rounded to any format, as a deterministic stream of numbers that can be
// started at any multiple of kChunk.
struct RandomValues {
  enum class Kind : uint8_t {
    kBell,     // bell-shaped, rms `scale`, around `offset`
    kUniform,  // [offset, offset + scale)
    kZero,
  };
  static constexpr uint64_t kChunk = 16384;

  Kind kind = Kind::kZero;
  uint64_t seed = 0;
  float scale = 0, offset = 0;

  void fill(uint64_t first, std::span<float> out) const;
  float largest() const;  // no value has a larger magnitude
};

uint64_t weight_seed(uint64_t seed, std::string_view name);
float weight_rms(const WeightSpec& spec);
RandomValues matrix_values(const WeightSpec& spec, uint64_t seed);
RandomValues vector_values(const WeightSpec& spec, uint64_t seed);
bool quantized_by_default(WeightKind kind);

}  // namespace fourfold::model
