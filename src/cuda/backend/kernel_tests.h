// Self-tests of the backend's kernels, those of experts apart (cuda/moe/self_test.h): small cases of each operation
// through the backend's own launches, with extreme scales, odd sizes, several rounds of each loop and poisoned results,
// against plain sums on the host or the reference backend of the processor.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda/backend/cuda_backend.h"

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
  std::vector<KernelCase> run();

 private:
  struct Product;
  CudaBackend& on(const RowsWay* way = nullptr, int most_middle_tiles = 256);
  void note(const std::string& wrong);
  void products(const RowsWay& way);
  void products_of(const Product& problem, CudaBackend& backend, const std::vector<int64_t>& tokens, bool normed);
  void norms();
  void embeddings();
  void gates();
  void routes();
  void attention(int64_t head_dim, int64_t rotary_dim);
  void delta_rule(int64_t key_dim, int64_t value_dim);

  const CudaBackend& of_;
  std::unique_ptr<CudaBackend> tested_;
  std::shared_ptr<ops::Backend> reference_;
  std::vector<std::string> launched_;
  std::vector<KernelCase> cases_;
};

}  // namespace fourfold::cuda
