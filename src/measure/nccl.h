// NCCL's sums between cards, beside which this program's are measured.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fourfold::measure {

class Nccl {
 public:
  // Joins these devices by the library of jit::Nccl. Null where there is none; *why says what was tried. Error when it
  // does not work.
  static std::unique_ptr<Nccl> open(const std::vector<int>& devices, std::string* why);
  ~Nccl();
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  // "2.27.3"
  std::string version() const;
  // Microseconds of a sum of `count` bf16 numbers over all devices, each of a graph of `calls`.
  double all_reduce(int64_t count, int calls);

 private:
  struct State;
  explicit Nccl(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace fourfold::measure
