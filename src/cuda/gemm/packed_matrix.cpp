#include "cuda/gemm/packed_matrix.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"

namespace fourfold::cuda {
namespace {

using gemm::Stored;
using gemm::Weights;
using ops::Format;
using ops::MatrixSource;

Stored stored_of(Format format) {
  switch (format) {
    case Format::kF32:
      return Stored::kF32;
    case Format::kBf16:
      return Stored::kBf16;
    case Format::kF16:
      return Stored::kF16;
    case Format::kFp8:
      return Stored::kFp8;
    case Format::kNvfp4:
      return Stored::kNvfp4;
  }
  FF_ASSERT(false);
  return Stored::kF32;
}

gemm::Source source_of(const MatrixSource& m) {
  return {stored_of(m.format), m.data, m.block_scales, static_cast<int>(m.rows), static_cast<int>(m.columns)};
}

void check(const MatrixSource& m, int64_t columns) {
  if (m.columns != columns) fail("{}: {} columns, wanted {} as in the rest of the stack", m.name, m.columns, columns);
  if (m.rows < 1 || m.rows > (int64_t{1} << 30) || columns < 16 || columns > (int64_t{1} << 24) || columns % 16 != 0) {
    fail("{}: {} x {}; wanted at least one row and a multiple of 16 columns", m.name, m.rows, m.columns);
  }
  if (m.format != Format::kFp8 || m.scale_columns >= columns) return;
  if (m.scale_columns % gemm::kUnitK != 0 || m.scale_rows % gemm::kTileRows != 0) {
    fail("{}: FP8 scales of {} x {} blocks; wanted multiples of {} x {}, or one scale along a row", m.name,
         m.scale_rows, m.scale_columns, gemm::kTileRows, gemm::kUnitK);
  }
  if (m.scale_columns / gemm::kUnitK * gemm::units_of(static_cast<int>(columns)) > gemm::kMostCellProduct) {
    fail("{}: FP8 scales of {} of {} columns; wanted fewer columns in a block", m.name, m.scale_columns, columns);
  }
}

bool has_cells(const MatrixSource& m) { return m.format == Format::kFp8 && m.scale_columns < m.columns; }

// The scale of a row and, where a row has several, of one of them.
float grid_scale(const MatrixSource& m, int64_t row, int64_t cell) {
  return m.grid_scales[row / m.scale_rows * ceil_div(m.columns, m.scale_columns) + cell];
}

float factor(const MatrixSource& m, int64_t row) {
  if (m.format == Format::kNvfp4) return m.tensor_scale;
  return m.format == Format::kFp8 && !has_cells(m) ? grid_scale(m, row, 0) : 1.0f;
}

// Appends a matrix, or a pair of them; `second` is `first` where there is none.
void append(PackedMatrix& out, const MatrixSource& first, const MatrixSource& second, bool units_too = true) {
  const bool paired = out.paired;
  PackedMatrix::Part part;
  part.format = gemm::packed_format(stored_of(first.format));
  part.rows = static_cast<int>(first.rows);
  part.tiles = gemm::tiles_of(part.rows, paired);
  part.first_row = static_cast<int>(out.rows);
  const int units = gemm::units_of(static_cast<int>(out.columns));
  const auto reserve = [&](uint64_t bytes) {
    const uint64_t at = out.bytes.size();
    out.bytes.resize(static_cast<size_t>((at + bytes + 127) / 128 * 128));
    return at;
  };
  const int unit_bytes = gemm::unit_bytes(part.format);
  part.weights = reserve(gemm::packed_bytes(part.format, part.tiles, static_cast<int>(out.columns)));
  const gemm::Source sources[2] = {source_of(first), source_of(second)};
  for (int tile = 0; units_too && tile < part.tiles; ++tile) {
    for (int unit = 0; unit < units; ++unit) {
      uint8_t* to = out.bytes.data() + part.weights +
                    (static_cast<uint64_t>(tile) * static_cast<uint64_t>(units) + static_cast<uint64_t>(unit)) *
                        static_cast<uint64_t>(unit_bytes);
      if (!gemm::repack_unit(sources[0], sources[1], paired, tile, unit, to)) {
        const std::string name = paired && second.name != first.name ? first.name + " or " + second.name : first.name;
        fail("{}: a weight in row {} to {} is NaN", name, tile * (paired ? 8 : 16),
             std::min<int64_t>(first.rows, (tile + 1) * (paired ? 8 : 16)) - 1);
      }
    }
  }
  // Row i of a tile, null beyond the matrix.
  const auto row_of = [&](int tile, int i, int64_t* row) -> const MatrixSource* {
    *row = paired ? tile * 8 + i % 8 : tile * 16 + i;
    const MatrixSource& m = i < 8 || !paired ? first : second;
    return *row < m.rows ? &m : nullptr;
  };
  part.factors = reserve(static_cast<uint64_t>(part.tiles) * 16 * sizeof(float));
  auto* factors = reinterpret_cast<float*>(out.bytes.data() + part.factors);
  for (int i = 0; i < part.tiles * 16; ++i) {
    int64_t row = 0;
    const MatrixSource* m = row_of(i / 16, i % 16, &row);
    factors[i] = m != nullptr ? factor(*m, row) : 0.0f;
  }
  if (has_cells(first)) {
    part.cell_units = static_cast<int>(first.scale_columns / gemm::kUnitK);
    const int cells = static_cast<int>(ceil_div(first.columns, first.scale_columns));
    part.cells = reserve(static_cast<uint64_t>(part.tiles) * static_cast<uint64_t>(cells) * 2 * sizeof(float));
    auto* to = reinterpret_cast<float*>(out.bytes.data() + part.cells);
    for (int tile = 0; tile < part.tiles; ++tile) {
      for (int cell = 0; cell < cells; ++cell) {
        for (int half = 0; half < 2; ++half) {
          int64_t row = 0;
          const MatrixSource* m = row_of(tile, half * 8, &row);
          to[(tile * cells + cell) * 2 + half] = m != nullptr ? grid_scale(*m, row, cell) : 0.0f;
        }
      }
    }
  }
  out.parts.push_back(part);
  out.tiles += part.tiles;
  out.rows += part.rows;
}

// Rows [begin, begin + rows) of a matrix.
MatrixSource slice(const MatrixSource& m, int64_t begin, int64_t rows) {
  MatrixSource s = m;
  s.rows = rows;
  const int64_t bits = m.format == Format::kF32     ? 32
                       : m.format == Format::kFp8   ? 8
                       : m.format == Format::kNvfp4 ? 4
                                                    : 16;
  s.data = static_cast<const uint8_t*>(m.data) + begin * m.columns * bits / 8;
  if (m.format == Format::kNvfp4) s.block_scales += begin * (m.columns / gemm::kBlockK);
  if (m.format == Format::kFp8 && m.scale_rows < m.rows) {
    if (begin % m.scale_rows != 0) {
      fail("{}: FP8 scales of {} rows lie across gate and up, {} rows each", m.name, m.scale_rows, rows);
    }
    s.grid_scales += begin / m.scale_rows * ceil_div(m.columns, m.scale_columns);
  }
  return s;
}

}  // namespace

gemm::Matrix PackedMatrix::at(const uint8_t* buffer) const {
  gemm::Matrix m = {};
  m.count = static_cast<int>(parts.size());
  m.tiles = tiles;
  m.units = gemm::units_of(static_cast<int>(columns));
  m.columns = static_cast<int>(columns);
  int first_tile = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& p = parts[i];
    m.parts[i] = {buffer + p.weights,
                  reinterpret_cast<const float*>(buffer + p.factors),
                  p.cell_units != 0 ? reinterpret_cast<const float*>(buffer + p.cells) : nullptr,
                  p.cell_units != 0 ? (m.units + p.cell_units - 1) / p.cell_units : 0,
                  p.cell_units,
                  p.cell_units != 0 ? gemm::cell_of(p.cell_units) : 0u,
                  p.format,
                  first_tile,
                  p.rows,
                  p.first_row};
    first_tile += p.tiles;
  }
  return m;
}

int PackedMatrix::formats() const {
  int bits = 0;
  for (const Part& p : parts) bits |= 1 << static_cast<int>(p.format) | (p.cell_units != 0 ? gemm::kCells : 0);
  return bits;
}

PackedMatrix pack_stack(std::span<const MatrixSource> parts, bool units_too) {
  FF_ASSERT(!parts.empty());
  if (parts.size() > static_cast<size_t>(gemm::kMostParts)) {
    fail("{}: {} matrices in a stack; at most {}", parts[0].name, parts.size(), gemm::kMostParts);
  }
  PackedMatrix out;
  out.columns = parts[0].columns;
  for (const MatrixSource& m : parts) {
    check(m, out.columns);
    append(out, m, m, units_too);
  }
  return out;
}

PackedMatrix pack_pair(std::span<const MatrixSource> parts) {
  FF_ASSERT(!parts.empty());
  MatrixSource gate = parts[0], up = parts.back();
  if (parts.size() > 2) fail("{}: gate and up in {} matrices; wanted one or two", gate.name, parts.size());
  if (parts.size() == 1) {
    if (gate.rows % 2 != 0) fail("{}: {} rows of gate and up; wanted an even number", gate.name, gate.rows);
    up = slice(gate, gate.rows / 2, gate.rows / 2);
    gate = slice(gate, 0, gate.rows / 2);
  }
  check(gate, gate.columns);
  check(up, gate.columns);
  if (gate.format != up.format || gate.rows != up.rows || has_cells(gate) != has_cells(up) ||
      (has_cells(gate) && gate.scale_columns != up.scale_columns)) {
    fail("{} ({} rows, {}) and {} ({} rows, {}): gate and up differ", gate.name, gate.rows,
         ops::format_name(gate.format), up.name, up.rows, ops::format_name(up.format));
  }
  PackedMatrix out;
  out.columns = gate.columns;
  out.paired = true;
  append(out, gate, up);
  return out;
}

}  // namespace fourfold::cuda
