// Views of activations and of weights as a checkpoint holds them. Views own nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace fourfold {
class SharedReads;
}

namespace fourfold::ops {

enum class DType : uint8_t { kF32, kF16, kBf16 };

// A matrix of activations [rows, cols], row-major, rows `stride` elements apart. The memory belongs to the backend that
// allocated it (host memory for the CPU backends, device memory for a GPU).
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;

  float* f32() const { return static_cast<float*>(data); }
  float* f32(int64_t row) const { return static_cast<float*>(data) + row * stride; }
  int64_t element_bytes() const { return dtype == DType::kF32 ? 4 : 2; }

  // Rows [begin, end), or columns [begin, end), of the same memory.
  Tensor slice_rows(int64_t begin, int64_t end) const {
    return {static_cast<char*>(data) + begin * stride * element_bytes(), dtype, end - begin, cols, stride};
  }
  Tensor slice_cols(int64_t begin, int64_t end) const {
    return {static_cast<char*>(data) + begin * element_bytes(), dtype, rows, end - begin, stride};
  }
};

// How the elements of a weight matrix are stored.
enum class Format : uint8_t {
  kF32,
  kBf16,
  kF16,
  kFp8,    // e4m3 elements, fp32 scales over a grid of blocks (one block = per tensor, one row per block = per channel)
  kNvfp4,  // packed e2m1 pairs, e4m3 scale per 16 elements along a row, fp32 tensor scale
};

const char* format_name(Format format);

// A weight matrix [rows, columns] in checkpoint form, row-major: y = x W^T, so `rows` are outputs and `columns` inputs.
// The pointers stay valid while `owner` (or the checkpoint it came from) lives.
struct MatrixSource {
  std::string name;  // for error messages
  Format format = Format::kBf16;
  int64_t rows = 0;
  int64_t columns = 0;
  // Of some columns of a wider matrix that lies in a file: how many columns that has, so that its rows are further
  // apart than they are long. 0: `columns`. Only backends of GPUs are given such ones. FP8's scales are this part's
  // own.
  int64_t pitch = 0;
  int64_t first_column = 0;  // of them in that matrix
  // Where such columns, as many of every row, are wanted by all that have a part of the wider matrix: their rows are
  // read once through this. Null: each reads for itself.
  std::shared_ptr<SharedReads> reads;
  const void* data = nullptr;             // kNvfp4: [rows, columns / 2] bytes, low nibble = even column
  const uint8_t* block_scales = nullptr;  // kNvfp4: [rows, columns / 16] e4m3
  float tensor_scale = 1.0f;              // kNvfp4: weight = e2m1 x block scale x tensor_scale
  // kFp8: [ceil(rows / scale_rows), ceil(columns / scale_columns)] fp32, weight = e4m3 x scale
  const float* grid_scales = nullptr;
  int64_t scale_rows = 0;
  int64_t scale_columns = 0;
  // Static activation scale for W4A4 (modelopt's input_scale, the inverse of compressed-tensors' input_global_scale).
  // 0 when the checkpoint has none or it is unusable (zero, denormal, not finite): then activations are not quantised.
  float input_scale = 0.0f;
  std::shared_ptr<const void> owner;

  int64_t row_pitch() const { return pitch > 0 ? pitch : columns; }
  // Bytes of the elements and scales in this form.
  int64_t bytes() const;
};

// One row of a matrix source as fp32, exactly (the tensor scale is applied in fp32).
void dequantize(const MatrixSource& source, int64_t row, float* out);

}  // namespace fourfold::ops
