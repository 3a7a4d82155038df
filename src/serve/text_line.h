// Lines of a stream that differ in their text alone: written as JSON once, and then around each further text.
#pragma once

#include <cstddef>
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

}  // namespace fourfold::serve
