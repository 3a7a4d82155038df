#include <map>

#include "op_table.h"

namespace fourfold::test {
namespace {

struct Cell {
  const OpCase* op;
  cpu::Isa isa;
};

void PrintTo(const Cell& cell, std::ostream* out) { *out << cell.op->name << " on " << cpu::isa_name(cell.isa); }

std::vector<Cell> cells() {
  std::vector<Cell> all;
  for (const cpu::Isa isa : fast_isas()) {
    for (const OpCase& op : op_cases()) all.push_back({&op, isa});
  }
  return all;
}

const std::vector<Result>& reference_of(const OpCase& op) {
  static std::map<const OpCase*, std::vector<Result>> results;
  auto& result = results[&op];
  CpuColumn reference(backend_of(cpu::Isa::kReference, op.nvfp4_activations));
  if (result.empty()) result = op.run(reference);
  return result;
}

class OpTable : public ::testing::TestWithParam<Cell> {};

TEST_P(OpTable, AgreesWithReference) {
  const auto [op, isa] = GetParam();
  CpuColumn column(backend_of(isa, op->nvfp4_activations));
  expect_agrees(*op, reference_of(*op), column);
}

std::string cell_name(const ::testing::TestParamInfo<Cell>& cell) {
  return std::string(cpu::isa_name(cell.param.isa)) + "_" + cell.param.op->name;
}

INSTANTIATE_TEST_SUITE_P(Cpu, OpTable, ::testing::ValuesIn(cells()), cell_name);
// A processor without AVX2 has only the reference.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OpTable);

}  // namespace
}  // namespace fourfold::test
