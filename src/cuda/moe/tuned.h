// What `fourfold tune` measured to be the fastest for an expert layer (device/tuned_file.h): one file for a shape on a
// card, with the winners of each token bucket. A file that does not verify is ignored with a warning; the plans are
// used instead.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "cuda/device/device.h"
#include "plan/moe/problem.h"

namespace fourfold::cuda {

struct TunedChoice {
  std::string gate_up, down;  // candidates as plan::moe::to_string() names them
  double microseconds = 0;
  std::string activations;  // what these two multiply: "bf16" or "nvfp4" (the choice, where the problem leaves one)
};

// Everything that decides which kernel is fastest and can change: a table of another identity is not used.
std::string tuned_identity(const Device& device, const plan::moe::Problem& problem);
std::string tuned_identity(const std::string& device, int driver_version, const plan::moe::Problem& problem);

class TunedTable {
 public:
  explicit TunedTable(std::string identity) : identity_(std::move(identity)) {}

  // Nothing when there is no file, or (with a warning on stderr) a damaged one.
  static std::optional<TunedTable> load(const std::filesystem::path& store, const std::string& identity);
  // Whole or not at all; replaces an older one.
  void save(const std::filesystem::path& store);

  const TunedChoice* find(int64_t bucket) const;  // null: not measured
  void set(int64_t bucket, TunedChoice choice) { choices_[bucket] = std::move(choice); }
  size_t size() const { return choices_.size(); }
  const std::filesystem::path& path() const { return path_; }  // of the last load or save

 private:
  std::string identity_;
  std::map<int64_t, TunedChoice> choices_;
  std::filesystem::path path_;
};

}  // namespace fourfold::cuda
