// The header of a safetensors file, from its text.
//
// A checkpoint of 35B parameters has a hundred thousand tensors, and their headers are the first thing that loading
// waits for. So a header in the form that writers give it (base/plain_json.h) is cut into pieces that threads read at
// the same time; every other one, and every one in which something is wrong, is read by parse_json() and checked entry
// by entry, which says what it is.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "model/safetensors.h"

namespace fourfold::model {

struct StoredTypeInfo {
  const char* name;
  StoredType type;
  int bits;  // of an element
};
std::span<const StoredTypeInfo> stored_types();

// What is known of a header before its text is read.
struct HeaderPlace {
  uint64_t length = 0;  // of the text, behind 8 bytes that say it
  uint64_t file_bytes = 0;
};

// From the first 8 bytes (fewer: none were there) of a file, of which `available` can be read. An Error when it cannot
// be a safetensors file.
HeaderPlace header_place(std::string_view first, uint64_t file_bytes, uint64_t available, std::string_view name);

class HeaderText {
 public:
  // `name` is what an Error calls the file. Views in the result are of what it owns.
  HeaderText(std::string text, const HeaderPlace& place, std::string name);
  ~HeaderText();
  HeaderText(HeaderText&&) noexcept;
  HeaderText& operator=(HeaderText&&) noexcept;

  // For parse(), in any order and from several threads; then once finish(). The Error is finish()'s.
  size_t pieces() const;
  void parse(size_t piece);
  SafetensorsHeader finish();

  // The two ways in which finish() reads it, for tests that compare them: nothing where the text is not plain.
  std::optional<SafetensorsHeader> plain();
  SafetensorsHeader by_json() const;

 private:
  struct Piece;
  bool parse_entries(Piece& piece, size_t limit) const;

  std::string name_;
  HeaderPlace place_;
  std::shared_ptr<HeaderStorage> storage_;
  std::vector<Piece> pieces_;
};

// Of a file that is mapped; nothing is parsed yet.
HeaderText header_of(const MappedFile& file);

}  // namespace fourfold::model
