// Whole plans, pinned. A change of the ledger, of a rule or of the cost model shows here as a diff to be read.
// To write them anew: FOURFOLD_REGENERATE=1 build/release/tests/plan/plan_test --gtest_filter='Plans/*'
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "base/file.h"
#include "plan/moe/plan.h"

namespace fourfold::plan::moe {
namespace {

struct Case {
  const char* gpu;
  const char* model;
  int64_t tokens;
  ActivationFormat activations;
};

class Golden : public testing::TestWithParam<Case> {};

std::string file_name(const Case& c) {
  return fmt::format("{}_{}_{}{}.txt", c.gpu, c.model, c.tokens,
                     c.activations == ActivationFormat::kNvfp4  ? "_w4a4"
                     : c.activations == ActivationFormat::kAuto ? "_auto"
                                                                : "");
}

void PrintTo(const Case& c, std::ostream* out) { *out << file_name(c); }

TEST_P(Golden, Plan) {
  const Case& c = GetParam();
  Problem p = find_shape(c.model);
  p.tokens = c.tokens;
  p.activations = c.activations;
  const std::string text = to_text(plan_layer(p, find_gpu(c.gpu)));
  const std::filesystem::path path =
      std::filesystem::path(FOURFOLD_SOURCE_DIR) / "tests" / "plan" / "goldens" / file_name(c);
  if (std::getenv("FOURFOLD_REGENERATE") != nullptr) {
    std::filesystem::create_directories(path.parent_path());
    write_file_atomically(path, text);
    GTEST_SKIP() << "wrote " << path;
  }
  EXPECT_EQ(text, read_file(path)) << "see the top of golden_test.cpp if this change is wanted";
}

INSTANTIATE_TEST_SUITE_P(Plans, Golden,
                         testing::Values(Case{"h200", "397B-A17B", 1, ActivationFormat::kBf16},
                                         Case{"h200", "397B-A17B", 8192, ActivationFormat::kBf16},
                                         Case{"h200", "35B-A3B", 64, ActivationFormat::kBf16},
                                         Case{"rtx-pro-6000", "397B-A17B", 8, ActivationFormat::kBf16},
                                         Case{"rtx-pro-6000", "35B-A3B", 1, ActivationFormat::kBf16},
                                         Case{"rtx-pro-6000", "35B-A3B", 8192, ActivationFormat::kNvfp4},
                                         Case{"rtx-pro-6000", "35B-A3B", 512, ActivationFormat::kAuto},
                                         Case{"dgx-spark", "nemotron-30B", 63, ActivationFormat::kBf16},
                                         Case{"rtx-4090", "flash-next-tp2", 512, ActivationFormat::kBf16}),
                         [](const testing::TestParamInfo<Case>& parameter) {
                           std::string name = file_name(parameter.param);
                           for (char& c : name) {
                             if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
                           }
                           return name;
                         });

}  // namespace
}  // namespace fourfold::plan::moe
