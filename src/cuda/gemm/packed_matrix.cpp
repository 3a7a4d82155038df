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

// Room for a matrix, or for a pair of them, behind what is there.
PackedMatrix::Part& place(PackedMatrix& out, const MatrixSource& m) {
  PackedMatrix::Part part;
  part.format = gemm::packed_format(stored_of(m.format));
  part.rows = static_cast<int>(m.rows);
  part.tiles = gemm::tiles_of(part.rows, out.paired);
  part.first_row = static_cast<int>(out.rows);
  const auto reserve = [&](uint64_t bytes) {
    const uint64_t at = out.size;
    out.size = (at + bytes + 127) / 128 * 128;
    return at;
  };
  part.weights = reserve(gemm::packed_bytes(part.format, part.tiles, static_cast<int>(out.columns)));
  part.factors = reserve(static_cast<uint64_t>(part.tiles) * 16 * sizeof(float));
  if (has_cells(m)) {
    part.cell_units = static_cast<int>(m.scale_columns / gemm::kUnitK);
    const auto cells = static_cast<uint64_t>(ceil_div(m.columns, m.scale_columns));
    part.cells = reserve(static_cast<uint64_t>(part.tiles) * cells * 2 * sizeof(float));
  }
  out.parts.push_back(part);
  out.tiles += part.tiles;
  out.rows += part.rows;
  return out.parts.back();
}

// Factors and cells, from part.factors on; `second` is `first` where there is no pair.
std::vector<uint8_t> factors_of(const PackedMatrix::Part& part, bool paired, const MatrixSource& first,
                                const MatrixSource& second) {
  // Row i of a tile, null beyond the matrix.
  const auto row_of = [&](int tile, int i, int64_t* row) -> const MatrixSource* {
    *row = paired ? tile * 8 + i % 8 : tile * 16 + i;
    const MatrixSource& m = i < 8 || !paired ? first : second;
    return *row < m.rows ? &m : nullptr;
  };
  const int cells = part.cell_units != 0 ? static_cast<int>(ceil_div(first.columns, first.scale_columns)) : 0;
  const uint64_t cell_bytes = static_cast<uint64_t>(part.tiles) * static_cast<uint64_t>(cells) * 2 * sizeof(float);
  const uint64_t factor_bytes = static_cast<uint64_t>(part.tiles) * 16 * sizeof(float);
  std::vector<uint8_t> bytes(cells != 0 ? part.cells - part.factors + cell_bytes : factor_bytes);
  auto* factors = reinterpret_cast<float*>(bytes.data());
  for (int i = 0; i < part.tiles * 16; ++i) {
    int64_t row = 0;
    const MatrixSource* m = row_of(i / 16, i % 16, &row);
    factors[i] = m != nullptr ? factor(*m, row) : 0.0f;
  }
  if (cells == 0) return bytes;
  auto* to = reinterpret_cast<float*>(bytes.data() + (part.cells - part.factors));
  for (int tile = 0; tile < part.tiles; ++tile) {
    for (int cell = 0; cell < cells; ++cell) {
      for (int half = 0; half < 2; ++half) {
        int64_t row = 0;
        const MatrixSource* m = row_of(tile, half * 8, &row);
        to[(tile * cells + cell) * 2 + half] = m != nullptr ? grid_scale(*m, row, cell) : 0.0f;
      }
    }
  }
  return bytes;
}

// Appends a matrix, or a pair of them, with its bytes; `second` is `first` where there is none.
void append(PackedMatrix& out, const MatrixSource& first, const MatrixSource& second) {
  const bool paired = out.paired;
  const PackedMatrix::Part part = place(out, first);
  out.bytes.resize(static_cast<size_t>(out.size));
  const int units = gemm::units_of(static_cast<int>(out.columns));
  const int unit_bytes = gemm::unit_bytes(part.format);
  const gemm::Source sources[2] = {source_of(first), source_of(second)};
  for (int tile = 0; tile < part.tiles; ++tile) {
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
  const std::vector<uint8_t> factors = factors_of(part, paired, first, second);
  std::copy(factors.begin(), factors.end(), out.bytes.begin() + static_cast<int64_t>(part.factors));
}

// What a stack of matrices is checked for before anything of it is packed.
PackedMatrix empty_stack(std::span<const MatrixSource> parts) {
  FF_ASSERT(!parts.empty());
  if (parts.size() > static_cast<size_t>(gemm::kMostParts)) {
    fail("{}: {} matrices in a stack; at most {}", parts[0].name, parts.size(), gemm::kMostParts);
  }
  PackedMatrix out;
  out.columns = parts[0].columns;
  for (const MatrixSource& m : parts) check(m, out.columns);
  return out;
}

// Likewise of gate and up.
PackedMatrix empty_pair(const MatrixSource& gate, const MatrixSource& up) {
  check(gate, gate.columns);
  check(up, gate.columns);
  if (!makes_pair(gate, up)) {
    fail("{} ({} rows, {}) and {} ({} rows, {}): gate and up differ", gate.name, gate.rows,
         ops::format_name(gate.format), up.name, up.rows, ops::format_name(up.format));
  }
  PackedMatrix out;
  out.columns = gate.columns;
  out.paired = true;
  return out;
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

PackedMatrix pack_stack(std::span<const MatrixSource> parts) {
  PackedMatrix out = empty_stack(parts);
  for (const MatrixSource& m : parts) append(out, m, m);
  return out;
}

PackedMatrix place_stack(std::span<const MatrixSource> parts) {
  PackedMatrix out = empty_stack(parts);
  for (const MatrixSource& m : parts) place(out, m);
  return out;
}

std::vector<uint8_t> stack_factors(const PackedMatrix& stack, const PackedMatrix::Part& part,
                                   const MatrixSource& source) {
  return factors_of(part, stack.paired, source, source);
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
  PackedMatrix out = empty_pair(gate, up);
  append(out, gate, up);
  return out;
}

bool makes_pair(const MatrixSource& gate, const MatrixSource& up) {
  return gate.format == up.format && gate.rows == up.rows && gate.columns == up.columns &&
         has_cells(gate) == has_cells(up) && (!has_cells(gate) || gate.scale_columns == up.scale_columns);
}

PackedMatrix place_pair(const MatrixSource& gate, const MatrixSource& up) {
  PackedMatrix out = empty_pair(gate, up);
  place(out, gate);
  return out;
}

std::vector<uint8_t> pair_factors(const PackedMatrix& pair, const MatrixSource& gate, const MatrixSource& up) {
  return factors_of(pair.parts[0], true, gate, up);
}

}  // namespace fourfold::cuda
