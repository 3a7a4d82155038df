// The header of a safetensors file: any bytes are a header or one Error, and what is accepted lies inside the file.
#include <cstdlib>

#include "base/check.h"
#include "model/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fourfold;
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
