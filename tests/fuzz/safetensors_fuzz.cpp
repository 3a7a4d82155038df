// The header of a safetensors file: any bytes are a header or one Error, and what is accepted lies inside the file. The
// quick way of reading it finds what the whole parser finds, or leaves it alone.
#include <cstdlib>
#include <optional>
#include <string>

#include "base/check.h"
#include "model/safetensors.h"
#include "model/safetensors_header.h"

namespace {

using namespace fourfold;

struct Result {
  std::optional<model::SafetensorsHeader> header;
  std::string error;
};

template <typename F>
Result result_of(F&& read) {
  Result result;
  try {
    result.header = read();
  } catch (const Error& error) {
    result.error = error.what();
  }
  return result;
}

void compare_ways(const uint8_t* data, size_t size) {
  const std::string_view all(reinterpret_cast<const char*>(data), size);
  model::HeaderPlace place;
  try {
    place = model::header_place(all.substr(0, 8), size, size, "fuzz");
  } catch (const Error&) {
    return;
  }
  model::HeaderText text(std::string(all.substr(8, place.length)), place, "fuzz");
  for (size_t i = 0; i < text.pieces(); ++i) text.parse(i);
  const Result plain = result_of([&] { return text.plain(); });
  if (!plain.header && plain.error.empty()) return;
  const Result other = result_of([&] { return std::optional(text.by_json()); });
  if (plain.error != other.error || plain.header.has_value() != other.header.has_value()) std::abort();
  if (!plain.header) return;
  if (plain.header->metadata != other.header->metadata || plain.header->data_begin != other.header->data_begin ||
      plain.header->tensors.size() != other.header->tensors.size()) {
    std::abort();
  }
  for (size_t i = 0; i < plain.header->tensors.size(); ++i) {
    const model::StoredTensor &a = plain.header->tensors[i], &b = other.header->tensors[i];
    if (a.name != b.name || a.type != b.type || std::string_view(a.type_name) != b.type_name ||
        a.shape.list() != b.shape.list() || a.offset != b.offset || a.bytes != b.bytes) {
      std::abort();
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  compare_ways(data, size);
  try {
    const auto header = model::parse_safetensors_header(std::as_bytes(std::span(data, size)), size, "fuzz");
    uint64_t sum = header.data_begin;
    for (const model::StoredTensor& tensor : header.tensors) {
      if (tensor.offset + tensor.bytes > size || tensor.offset < header.data_begin || tensor.elements() < 0)
        std::abort();
      (void)tensor.shape_text();
      (void)model::stored_type_name(tensor.type);
      sum += tensor.bytes;
    }
    if (sum != size) std::abort();
  } catch (const Error&) {
  }
  return 0;
}
