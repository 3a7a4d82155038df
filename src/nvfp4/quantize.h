// NVFP4 quantisation of matrices on the host.
//
// A weight is   e2m1 code x e4m3 block scale (one for 16 consecutive elements along K) x fp32 tensor scale.
// modelopt stores the tensor scale (weight_scale_2), compressed-tensors its inverse (weight_global_scale); here it is
// always the factor to multiply with.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "nvfp4/layout.h"

namespace fourfold::nvfp4 {

enum class ScaleSearch {
  kMax,           // block scale = block maximum / 6: what modelopt and llm-compressor do by default
  kSquaredError,  // of the e4m3 scales around it, the one with the least squared error of the block
};

// The tensor scale that lets the block scales use the whole e4m3 range: largest magnitude / (6 x 448). For an all-zero
// tensor 1, so that nothing divides by zero.
float tensor_scale_for(float largest_magnitude);

// The largest magnitude; an Error that names the element when one is NaN or infinite.
float largest_magnitude(std::span<const float> values);

// The e4m3 code of a block's scale under ScaleSearch::kMax. 1 for a block that is all zero.
uint8_t block_scale_for(float largest_magnitude, float tensor_scale);

// Quantises one row of K = 16 x scales.size() elements. codes: K / 2 bytes, scales: K / 16 bytes.
// A block that is all zero gets scale 1 and codes 0. Block scales lie in [2^-9, 448]: never 0, never NaN.
// Returns the sum of squared errors of the row. The inputs must be finite, tensor_scale positive and finite.
double quantize_row(std::span<const float> row, float tensor_scale, ScaleSearch search, std::span<uint8_t> codes,
                    std::span<uint8_t> scales);

// The same codes and scales under ScaleSearch::kMax, several times faster since nobody asks for the error.
void quantize_row(std::span<const float> row, float tensor_scale, std::span<uint8_t> codes, std::span<uint8_t> scales);

// The way back. Exact: products have at most 6 significant bits before the tensor scale is applied in fp32.
void dequantize_row(std::span<const uint8_t> codes, std::span<const uint8_t> scales, float tensor_scale,
                    std::span<float> row);

// Activation quantisation of one token (W4A4): dynamic block scales under a static global scale
// G = 1 / input_scale; scale = e4m3(min(G x max / 6, 448)); when that is 0 all codes are 0; code = e2m1(clamp(x G /
// scale)).
void quantize_activations(std::span<const float> row, float global_scale, std::span<uint8_t> codes,
                          std::span<uint8_t> scales);

// Row-major [rows, columns] scales to the interleaved 128x4 layout and back; padding is written as zero.
std::vector<uint8_t> interleave_scales(std::span<const uint8_t> scales, int64_t rows, int64_t columns);
std::vector<uint8_t> deinterleave_scales(std::span<const uint8_t> interleaved, int64_t rows, int64_t columns);

}  // namespace fourfold::nvfp4
