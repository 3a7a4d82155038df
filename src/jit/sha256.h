// SHA-256 (FIPS 180-4): names kernels by their content and finds damaged files. Not for secrets.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fourfold::jit {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  Sha256();
  void update(std::string_view bytes);
  // A length before the bytes, so that ("ab", "c") and ("a", "bc") differ.
  void update_field(std::string_view bytes);
  Digest finish();

 private:
  void block(const uint8_t* data);
  std::array<uint32_t, 8> state_;
  std::array<uint8_t, 64> buffer_;
  uint64_t length_ = 0;
};

Digest sha256(std::string_view bytes);
std::string to_hex(const Digest& digest);

}  // namespace fourfold::jit
