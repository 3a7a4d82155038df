// cuBLASLt, NVIDIA's library of matrix products, opened at run time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "jit/library.h"

namespace fourfold::jit {

// FOURFOLD_CUBLASLT (a file), the system's library, the toolkit's, the PyPI package (nvidia-cublas) in the active
// virtual environment and in the user's site-packages.
std::vector<std::filesystem::path> cublaslt_candidates();

class CublasLt {
 public:
  struct Functions;
  // The library, or null; *why then says what was tried. Opened once.
  static const CublasLt* find(std::string* why);
  // For tests: what find() gives from then on is a library of these functions, or with null none, whatever the machine
  // has. Handles of an earlier one must be gone.
  static void substitute(std::shared_ptr<const Functions> functions);

  const Functions& call() const { return *call_; }
  // Error, naming `what`, unless status is 0.
  void check(int status, const char* what) const;

 private:
  explicit CublasLt(std::shared_ptr<const Functions> functions, std::optional<SharedLibrary> library = {});
  std::optional<SharedLibrary> library_;
  std::shared_ptr<const Functions> call_;
};

// The entry points that are used, with the types of its ABI (the same in CUDA 12 and 13): handles and descriptors are
// pointers, results are 0 for success.
struct CublasLt::Functions {
  struct Algorithm {
    std::array<uint64_t, 8> data;
  };
  struct Heuristic {  // cublasLtMatmulHeuristicResult_t
    Algorithm algorithm;
    size_t workspace_bytes;
    int status;
    float waves;
    std::array<int, 4> reserved;
  };
  static_assert(sizeof(Heuristic) == 96);
  static constexpr int kNotSupported = 15;      // cublasStatus_t
  static constexpr int kFloat = 0, kBf16 = 14;  // cudaDataType
  static constexpr int kComputeFloat = 68;      // cublasComputeType_t
  static constexpr int kTranspose = 1;          // cublasOperation_t
  static constexpr int kTransposeA = 3;         // cublasLtMatmulDescAttributes_t
  static constexpr int kMostWorkspace = 1;      // cublasLtMatmulPreferenceAttributes_t

  const char* (*status_string)(int status);
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  int (*desc_create)(void** desc, int compute, int scale);
  int (*desc_destroy)(void* desc);
  int (*desc_set)(void* desc, int attribute, const void* value, size_t bytes);
  // Column-major.
  int (*layout_create)(void** layout, int type, uint64_t rows, uint64_t columns, int64_t stride);
  int (*layout_destroy)(void* layout);
  int (*preference_create)(void** preference);
  int (*preference_destroy)(void* preference);
  int (*preference_set)(void* preference, int attribute, const void* value, size_t bytes);
  int (*heuristic)(void* handle, void* desc, void* a, void* b, void* c, void* d, void* preference, int wanted,
                   Heuristic* results, int* found);
  int (*matmul)(void* handle, void* desc, const void* alpha, const void* a, void* a_layout, const void* b,
                void* b_layout, const void* beta, const void* c, void* c_layout, void* d, void* d_layout,
                const Algorithm* algorithm, void* workspace, size_t workspace_bytes, void* stream);
};

}  // namespace fourfold::jit
