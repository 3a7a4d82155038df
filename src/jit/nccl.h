// NCCL, NVIDIA's library of sums and copies between cards, opened at run time.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "jit/library.h"

namespace fourfold::jit {

// FOURFOLD_NCCL (a file), the system's library, the PyPI package (nvidia-nccl) in the active virtual environment and
// in the user's site-packages.
std::vector<std::filesystem::path> nccl_candidates();

class Nccl {
 public:
  struct Functions;
  // The library, or null; *why then says what was tried. Opened once.
  static const Nccl* find(std::string* why);
  // For tests: what find() gives from then on is a library of these functions, or with null none, whatever the machine
  // has. Communicators of an earlier one must be gone.
  static void substitute(std::shared_ptr<const Functions> functions);

  std::string version() const;  // "2.27.3"
  // Its calls may be recorded in a graph.
  bool records() const { return version_ >= 20906; }

  const Functions& call() const { return *call_; }
  // Error, naming `what`, unless result is 0.
  void check(int result, const char* what) const;

 private:
  explicit Nccl(std::shared_ptr<const Functions> functions, std::optional<SharedLibrary> library = {});
  std::optional<SharedLibrary> library_;
  std::shared_ptr<const Functions> call_;
  int version_ = 0;
};

// The entry points that are used, with the types of its ABI: handles are pointers, results are 0 for success.
struct Nccl::Functions {
  struct UniqueId {
    std::array<char, 128> bytes;
  };
  static constexpr int kBytes = 0, kBf16 = 9;  // ncclDataType_t
  static constexpr int kSum = 0;               // ncclRedOp_t

  int (*get_version)(int* version);
  int (*get_unique_id)(UniqueId* id);
  int (*init_rank)(void** communicator, int ranks, UniqueId id, int rank);
  int (*destroy)(void* communicator);
  int (*abort)(void* communicator);  // ends what it still does on the card
  int (*all_gather)(const void* from, void* to, size_t count, int type, void* communicator, void* stream);
  int (*all_reduce)(const void* from, void* to, size_t count, int type, int operation, void* communicator,
                    void* stream);
  const char* (*error_string)(int result);
};

}  // namespace fourfold::jit
