#include "jit/cubin.h"

#include <gtest/gtest.h>

#include <random>

#include "base/check.h"
#include "testing.h"

namespace fourfold::jit {
namespace {

TEST(Cubin, ReadsWhatAKernelUses) {
  const auto kernels = read_cubin(hand_made_cubin("moe", 96, 24, 1024 + 400), "test");
  ASSERT_EQ(kernels.size(), 1u);
  EXPECT_EQ(kernels[0].name, "moe");
  EXPECT_EQ(kernels[0].registers, 96);
  EXPECT_EQ(kernels[0].stack_bytes, 24);
  EXPECT_EQ(kernels[0].shared_bytes, 400);
  EXPECT_EQ(kernels[0].code_bytes, 64);
}

std::string error_of(std::string_view bytes) {
  try {
    read_cubin(bytes, "x");
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Cubin, NamesWhatIsWrong) {
  EXPECT_EQ(error_of(""), "x: ELF header at 0 with 64 bytes, the file has 0");
  EXPECT_EQ(error_of(std::string(200, 'a')), "x: not a little-endian ELF64 file");
  std::string other = hand_made_cubin("k", 1, 0, 0);
  other[18] = 62;
  EXPECT_EQ(error_of(other), "x: ELF machine 62, wanted 190 (CUDA)");
  std::string far = hand_made_cubin("k", 1, 0, 0);
  for (int i = 0; i < 8; ++i) far[40 + static_cast<size_t>(i)] = '\x7f';
  EXPECT_NE(error_of(far).find("section headers at"), std::string::npos);
}

TEST(Cubin, EveryTruncationIsAnErrorOrFewerKernels) {
  const std::string whole = hand_made_cubin("kernel", 32, 0, 0);
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(error_of(std::string_view(whole).substr(0, size)), "") << size;
  }
}

TEST(Cubin, DamageIsNeverUndefined) {
  const std::string whole = hand_made_cubin("kernel", 32, 0, 0);
  std::mt19937 random(1);
  for (int trial = 0; trial < 20000; ++trial) {
    std::string bytes = whole;
    const int changes = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < changes; ++i) bytes[random() % bytes.size()] = static_cast<char>(random());
    error_of(bytes);  // an Error or an answer; the sanitizers watch
  }
}

}  // namespace
}  // namespace fourfold::jit
