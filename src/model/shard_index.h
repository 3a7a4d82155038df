// The index of a checkpoint of several files (model.safetensors.index.json): in which of them each tensor is.
//
// Like headers (model/safetensors_header.h) it is read in pieces by several threads where it is written plainly, and
// otherwise by parse_json().
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fourfold::model {

struct ShardIndex {
  struct Entry {
    std::string_view tensor;
    uint32_t file = 0;  // of `files`
  };
  std::vector<std::string> files;           // sorted
  std::vector<std::vector<Entry>> entries;  // in the order of the text, in parts; may hold a tensor twice if `plain`
  bool plain = false;
  std::optional<double> total_size;  // as the index has it

  // What tensors' names are views of.
  std::shared_ptr<const void> owner;
};

class IndexText {
 public:
  // `name` is what an Error calls the file.
  IndexText(std::string text, std::string name);
  ~IndexText();
  IndexText(IndexText&&) noexcept;
  IndexText& operator=(IndexText&&) noexcept;

  // For parse(), in any order and from several threads; then once finish(). The Error is finish()'s.
  size_t pieces() const;
  void parse(size_t piece);
  // Where the text is plain a tensor may be in it twice: whoever finds that takes by_json(), which is the Error.
  ShardIndex finish();

  // The two ways in which finish() reads it: nothing where the text is not plain.
  std::optional<ShardIndex> plain();
  ShardIndex by_json() const;

 private:
  struct Piece;
  void find_entries();
  bool parse_entries(Piece& piece, size_t limit) const;

  std::string name_;
  std::shared_ptr<const std::string> text_;
  std::vector<Piece> pieces_;
  size_t brace_ = 0;  // of "weight_map", where it opens
};

}  // namespace fourfold::model
