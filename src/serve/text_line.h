// Lines of a stream that differ in their text alone: written as JSON once, and then around each further text.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace fourfold::serve {

// The inside of a JSON string, appended: what dump() writes between the quotes.
void append_json_text(std::string_view text, std::string& out);

class TextLine {
 public:
  // Stands for the text in what is given to set(); no text has it by chance.
  static const std::string& place();

  bool empty() const { return pieces_.empty(); }
  void clear() { pieces_.clear(); }
  // The line as it is sent, with place() wherever the text is to stand.
  void set(std::string_view line);
  void append(std::string_view text, std::string& out) const;

 private:
  std::vector<std::string> pieces_;  // around the texts
};

// Log-probabilities are many values for each token, and as a tree of JSON many times their text: they are written when
// they come, and put in at the end.
//
// A string for a place in a tree; no text has it by chance. It may stand beside nothing else in an array, since what is
// put in may be several values or none.
std::string json_mark(size_t index);
// What dump() wrote, with texts(index) in the place of each mark and its quotes.
std::string put_in(std::string_view json, const std::function<std::string_view(size_t)>& texts);

}  // namespace fourfold::serve
