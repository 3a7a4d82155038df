// A progress bar on stderr: drawn only on a terminal, at most ten times a second, and erased at the end.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace fourfold {

class Progress {
 public:
  // `unit` is "B" for bytes (printed as MB / GB), otherwise the name of what is counted. Draws nothing when stderr is
  // not a terminal, or when `enabled` is false.
  Progress(std::string label, uint64_t total, std::string unit, bool enabled = true);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance(uint64_t amount) { set(done_ + amount); }
  void set(uint64_t done);
  void finish();

 private:
  void draw();
  std::string label_, unit_;
  uint64_t total_, done_ = 0;
  bool enabled_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_, last_;
};

}  // namespace fourfold
