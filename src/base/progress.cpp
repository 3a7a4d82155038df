#include "base/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/console.h"

namespace fourfold {
namespace {

std::string amount(uint64_t count, const std::string& unit) {
  if (unit != "B") return fmt::format("{} {}", count, unit);
  if (count >= 1000000000) return fmt::format("{:.2f} GB", static_cast<double>(count) * 1e-9);
  return fmt::format("{:.1f} MB", static_cast<double>(count) * 1e-6);
}

}  // namespace

Progress::Progress(std::string label, uint64_t total, std::string unit, bool enabled)
    : label_(std::move(label)),
      unit_(std::move(unit)),
      total_(total),
      enabled_(enabled && ::isatty(STDERR_FILENO) == 1),
      start_(std::chrono::steady_clock::now()),
      last_(start_) {}

Progress::~Progress() { finish(); }

void Progress::set(uint64_t done) {
  done_ = done;
  if (!enabled_) return;
  const auto now = std::chrono::steady_clock::now();
  if (drawn_ && now - last_ < std::chrono::milliseconds(100)) return;
  if (now - start_ < std::chrono::milliseconds(300)) return;  // short work draws nothing
  last_ = now;
  draw();
}

void Progress::draw() {
  drawn_ = true;
  constexpr int kWidth = 30;
  const double fraction = total_ == 0 ? 1.0 : std::min(1.0, static_cast<double>(done_) / static_cast<double>(total_));
  const int filled = static_cast<int>(fraction * kWidth);
  const double seconds = std::chrono::duration<double>(last_ - start_).count();
  const std::string left = fraction > 0.01 ? fmt::format(", {:.0f} s left", seconds / fraction - seconds) : "";
  eprint("\r\x1b[K{} [{:=<{}}{: <{}}] {} of {}{}", label_, "", filled, "", kWidth - filled, amount(done_, unit_),
         amount(total_, unit_), left);
}

void Progress::finish() {
  if (drawn_) {
    eprint("\r\x1b[K");
  }
  drawn_ = false;
  enabled_ = false;
}

}  // namespace fourfold
