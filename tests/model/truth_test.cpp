// The model against another implementation: Hugging Face transformers in fp32 on the dequantised weights
// (tools/goldens makes the files; tests/goldens/model/README.md says how). The checkpoints are the demo model and
// random ones that `fourfold generate` makes again here from their seeds; what `fourfold logits` calls computes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/temporary_directory.h"
#include "cpu/backend.h"
#include "model/checkpoint.h"
#include "model/model.h"
#include "model/safetensors.h"
#include "model/text_logits.h"

namespace fourfold::model {
namespace {

namespace fs = std::filesystem;

const fs::path kGoldens = fs::path(FOURFOLD_SOURCE_DIR) / "tests/goldens/model";

struct Golden {
  std::string name;
  std::string arguments;  // of `fourfold generate`, or "dir PATH" relative to the source tree
};

std::vector<Golden> goldens() {
  std::vector<Golden> all;
  std::ifstream file(kGoldens / "checkpoints.txt");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.empty() || line[0] == '#' || colon == std::string::npos) continue;
    all.push_back({line.substr(0, colon), line.substr(colon + 2)});
  }
  return all;
}

struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<float> values;
  const float* row(int64_t r) const { return values.data() + r * cols; }
};

const StoredTensor* find(const SafetensorsFile& file, const std::string& name) {
  for (const StoredTensor& tensor : file.tensors()) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

Matrix read_matrix(const SafetensorsFile& file, const std::string& name) {
  const StoredTensor* tensor = find(file, name);
  if (tensor == nullptr) fail("{}: no tensor {}", file.path().string(), name);
  if (tensor->type != StoredType::kF32 || tensor->shape.size() != 2)
    fail("{}: {} is not a fp32 matrix", file.path().string(), name);
  Matrix matrix{tensor->shape[0], tensor->shape[1], std::vector<float>(static_cast<size_t>(tensor->elements()))};
  std::memcpy(matrix.values.data(), file.data(*tensor).data(), tensor->bytes);
  return matrix;
}

void run(const std::string& command) {
  const std::string full = command + " 2>&1";
  FILE* pipe = ::popen(full.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string output;
  char buffer[512];
  while (std::fgets(buffer, sizeof buffer, pipe) != nullptr) output += buffer;
  ASSERT_EQ(::pclose(pipe), 0) << command << "\n" << output;
}

std::vector<double> softmax(const float* logits, int64_t n) {
  const double largest = *std::max_element(logits, logits + n);
  std::vector<double> p(static_cast<size_t>(n));
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += p[static_cast<size_t>(i)] = std::exp(logits[i] - largest);
  for (double& x : p) x /= sum;
  return p;
}

struct Agreement {
  double mean_kl = 0, max_kl = 0;
  int64_t wrong_top = 0;  // other top-1 although the reference's top-2 gap exceeds 0.05
};

Agreement compare(const Matrix& reference, const Matrix& ours) {
  Agreement result;
  EXPECT_EQ(reference.rows, ours.rows);
  EXPECT_EQ(reference.cols, ours.cols);
  for (int64_t row = 0; row < reference.rows; ++row) {
    const float* a = reference.row(row);
    const float* b = ours.row(row);
    const std::vector<double> p = softmax(a, reference.cols), q = softmax(b, reference.cols);
    double kl = 0;
    for (size_t i = 0; i < p.size(); ++i) {
      if (p[i] > 0) kl += p[i] * (std::log(p[i]) - std::log(std::max(q[i], 1e-300)));
    }
    if (!std::isfinite(kl)) kl = 1e9;
    result.mean_kl += kl / static_cast<double>(reference.rows);
    result.max_kl = std::max(result.max_kl, kl);
    std::vector<float> sorted(a, a + reference.cols);
    std::partial_sort(sorted.begin(), sorted.begin() + 2, sorted.end(), std::greater<>());
    if (sorted[0] - sorted[1] > 0.05f &&
        std::max_element(a, a + reference.cols) - a != std::max_element(b, b + reference.cols) - b) {
      ++result.wrong_top;
    }
  }
  return result;
}

double relative_error(const Matrix& reference, const Matrix& ours) {
  EXPECT_EQ(reference.values.size(), ours.values.size());
  double difference = 0, energy = 0;
  for (size_t i = 0; i < reference.values.size(); ++i) {
    difference += std::pow(static_cast<double>(reference.values[i]) - ours.values[i], 2);
    energy += std::pow(static_cast<double>(reference.values[i]), 2);
  }
  const double error = std::sqrt(difference / energy);
  return std::isfinite(error) ? error : 1e9;
}

class Truth : public testing::TestWithParam<Golden> {
 protected:
  void SetUp() override {
    const std::string& arguments = GetParam().arguments;
    if (arguments.rfind("dir ", 0) == 0) {
      checkpoint_ = fs::path(FOURFOLD_SOURCE_DIR) / arguments.substr(4);
    } else {
      checkpoint_ = work_ / "checkpoint";
      run(fmt::format("{} generate {} {}", FOURFOLD_BINARY, checkpoint_.string(), arguments));
    }
  }

  // What `fourfold logits` would write for the golden's tokens, by the golden's names.
  std::map<std::string, Matrix> compute(const SafetensorsFile& golden, cpu::Isa isa, int64_t chunk) {
    const StoredTensor* stored = find(golden, "tokens");
    if (stored == nullptr || stored->type != StoredType::kI64) fail("{}: no I64 tensor tokens", golden.path().string());
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < stored->elements(); ++i) {
      int64_t token = 0;
      std::memcpy(&token, golden.data(*stored).data() + 8 * i, 8);
      tokens.push_back(static_cast<int32_t>(token));
    }
    const auto count = static_cast<int64_t>(tokens.size());
    chunk = std::min(chunk, count);
    ModelOptions options;
    options.max_step_tokens = options.max_logit_rows = chunk;
    options.mtp = find(golden, "mtp.logits") != nullptr;
    cpu::CpuOptions backend;
    backend.isa = isa;
    Checkpoint checkpoint(checkpoint_);
    const auto model = load_model(checkpoint, cpu::make_backend(backend), options);
    TextLogits text = compute_text_logits(*model, tokens, {chunk, true, options.mtp, {}});
    const ModelConfig& config = model->config();
    std::map<std::string, Matrix> computed;
    computed["logits"] = {count, config.vocabulary, std::move(text.logits)};
    for (size_t layer = 0; layer < text.hidden.size(); ++layer) {
      computed[fmt::format("hidden.{}", layer)] = {count, config.hidden, std::move(text.hidden[layer])};
    }
    if (options.mtp) computed["mtp.logits"] = {count - 1, config.vocabulary, std::move(text.mtp_logits)};
    return computed;
  }

  const TemporaryDirectory work_;
  fs::path checkpoint_;
};

TEST_P(Truth, EqualsTransformers) {
  const SafetensorsFile golden(kGoldens / (GetParam().name + ".safetensors"));
  for (cpu::Isa isa : cpu::supported_isas()) {
    const bool reference = isa == cpu::Isa::kReference;
    for (int chunk : {1000, 7}) {
      if (chunk == 7 && !reference && isa != cpu::best_isa()) continue;
      SCOPED_TRACE(fmt::format("{} chunk {}", cpu::isa_name(isa), chunk));
      const std::map<std::string, Matrix> ours = compute(golden, isa, chunk);
      double worst_layer = 0;
      for (const StoredTensor& tensor : golden.tensors()) {
        if (tensor.name.rfind("hidden.", 0) != 0) continue;
        const std::string name(tensor.name);
        const double error = relative_error(read_matrix(golden, name), ours.at(name));
        EXPECT_LT(error, reference ? 1e-4 : 2e-2) << tensor.name;
        worst_layer = std::max(worst_layer, error);
      }
      for (const char* name : {"logits", "mtp.logits"}) {
        if (find(golden, name) == nullptr) continue;
        const Agreement agreement = compare(read_matrix(golden, name), ours.at(name));
        fmt::print(
            "{:<12} {:<11} chunk {:<4} {:<10}: mean KL {:.2e}, max KL {:.2e}, other top-1 {}, worst layer {:.1e}\n",
            GetParam().name, cpu::isa_name(isa), chunk, name, agreement.mean_kl, agreement.max_kl, agreement.wrong_top,
            worst_layer);
        if (reference) {
          EXPECT_LT(agreement.max_kl, 1e-5) << name;
        } else {
          EXPECT_LT(agreement.mean_kl, 1e-3) << name;
        }
        EXPECT_EQ(agreement.wrong_top, 0) << name;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, Truth, testing::ValuesIn(goldens()),
                         [](const testing::TestParamInfo<Golden>& golden) { return golden.param.name; });

TEST(TruthGoldens, AreThere) { EXPECT_GE(goldens().size(), 5u) << kGoldens; }

}  // namespace
}  // namespace fourfold::model
