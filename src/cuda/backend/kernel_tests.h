// Self-tests of the backend's kernels, those of NVFP4 experts apart (cuda/moe/self_test.h): small cases of each
// operation through the backend's own launches, with extreme scales, odd sizes, several rounds of each loop and
// poisoned results, against plain sums on the host or the reference backend of the processor.
#pragma once

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda/backend/cuda_backend.h"
#include "cuda/backend/kernel_test_data.h"

namespace fourfold::cuda {

// A case: the kernels that it launched, and what was wrong with its results (empty: nothing).
struct KernelCase {
  std::vector<std::string> kernels;
  std::string wrong;
};
// Whom the wrong cases are due to, with what was wrong: of the kernels that no right case has, the one that most of
// them have, and of several the first that was launched; then the same of the cases without it.
std::map<std::string, std::string> blamed(std::vector<KernelCase> cases);

class KernelTests {
 public:
  // Of the kernels that `backend` has loaded, on its card.
  explicit KernelTests(const CudaBackend& backend);
  ~KernelTests();
  // What was right once is not run again in this process: models and ranks on cards of one kind share it.
  std::vector<KernelCase> run();
  // Of products of few rows that are taken like that.
  std::vector<KernelCase> run(const RowsWay& way);

  static constexpr int kSms = 3;  // so few that a CTA has several items in turn
  static constexpr int64_t kPage = 16;

 private:
  // Cases of some kernels, with a name that says of which.
  struct Unit {
    std::string name;
    std::function<void()> run;
  };
  struct Product;
  // What a shared expert has left to a norm.
  struct TestShare {
    TestShare(const KernelTests& tests, CudaBackend& backend, Random& random, int64_t rows, int64_t columns);
    void wait(CudaBackend& backend, const ops::Tensor& added) const;
    float of(size_t i) const { return values[i] / (1 + std::exp(-logits[i / static_cast<size_t>(columns)])); }
    std::vector<float> values, logits;
    TestRows on_card, logits_on_card;
    int64_t columns;
  };
  struct TestRoute;
  struct Recurrent;
  CudaBackend& on(const RowsWay* way = nullptr, int most_middle_tiles = 256, bool all_by_clusters = false);
  void note(const std::string& wrong);
  void products(const RowsWay& way);
  enum class Front { kNothing, kNorm, kSharedNorm };  // of a product; the latter with a share of the shared expert
  void products_of(const Product& problem, CudaBackend& backend, const std::vector<int64_t>& tokens,
                   Front front = Front::kNothing);
  void norms();
  void sums();
  void embeddings();
  void gates();
  void routes();
  void gated_products(const RowsWay& way);
  void choosing_product(const RowsWay& way);
  void routing_product(const RowsWay& way, int route);
  void attention(int64_t head_dim, int64_t rotary_dim);
  void delta_rule(int64_t key_dim, int64_t value_dim, bool updates = false);
  void repacking();
  void plain_experts(int gate_up_formats, int down_formats);
  void choices();

  const CudaBackend& of_;
  std::unique_ptr<CudaBackend> tested_;
  std::shared_ptr<ops::Backend> reference_;
  std::vector<std::string> launched_;
  std::vector<KernelCase> cases_;
};

}  // namespace fourfold::cuda
