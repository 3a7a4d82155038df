// Where NVFP4 block scales lie in memory.
//
// On disk: [rows, columns] row-major, one e4m3 byte for 16 consecutive elements (columns = K / 16).
// Interleaved ("128x4", what cuBLAS and the block-scaled tensor-core instructions read): atoms of 512 bytes, each with
// 128 rows x 4 scale columns; atoms run along K first. Rows are padded to 128, columns to 4. Inside an atom row r,
// column c is at (r mod 32) * 16 + (r / 32) * 4 + c. Source: NVIDIA cuBLAS documentation, "1D block scaling factors
// layout".
#pragma once

#include "nvfp4/number.h"

namespace fourfold::nvfp4 {

inline constexpr int kBlock = 16;       // elements that share one block scale
inline constexpr int kAtomRows = 128;   // rows of an interleaved atom
inline constexpr int kAtomColumns = 4;  // scale columns of an interleaved atom
inline constexpr int kAtomBytes = kAtomRows * kAtomColumns;

// Bytes of the interleaved form of [rows, columns] scales.
FOURFOLD_HD constexpr long long interleaved_bytes(long long rows, long long columns) {
  return (rows + kAtomRows - 1) / kAtomRows * ((columns + kAtomColumns - 1) / kAtomColumns) * kAtomBytes;
}

// Byte offset of scale (row, column) in the interleaved form of a matrix with `columns` scale columns.
FOURFOLD_HD constexpr long long interleaved_offset(long long row, long long column, long long columns) {
  const long long atoms_along_k = (columns + kAtomColumns - 1) / kAtomColumns;
  const long long atom = row / kAtomRows * atoms_along_k + column / kAtomColumns;
  return atom * kAtomBytes + row % 32 * 16 + row % kAtomRows / 32 * 4 + column % kAtomColumns;
}

}  // namespace fourfold::nvfp4
