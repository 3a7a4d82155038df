// Stop strings: texts that end an answer where they occur, and are no part of it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fourfold::chat {

// At most this many strings of at most so many bytes, none of them empty; an Error names the field `name` otherwise.
inline constexpr size_t kMaxStopStrings = 64, kMaxStopBytes = 4096;
void check_stop_strings(const std::vector<std::string>& stops, std::string_view name);

// Text passes through as it arrives, up to the first stop string: the one that ends first, of several the longest. What
// may still become one is held back, so that any cut of a text into pieces gives the same result.
class StopFilter {
 public:
  explicit StopFilter(std::vector<std::string> stops);

  // What is certain to be text, after `text` as well. Nothing any more once a stop string was found.
  std::string push(std::string_view text);
  // What was held back: the text goes on in another part, or has ended.
  std::string flush();
  const std::optional<std::string>& found() const { return found_; }

 private:
  std::vector<std::string> stops_;
  size_t longest_ = 0;
  std::string held_;
  std::optional<std::string> found_;
};

}  // namespace fourfold::chat
