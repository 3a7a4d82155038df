// FOURFOLD_PROPERTY(Suite, Name) { ... }: a test of something that holds for any input, which its body makes from
// `random`: run with 100 seeds, other ones each time. A failure names its seed; FOURFOLD_TEST_SEED=N runs that one.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

#include "base/random.h"

namespace fourfold {

inline void for_random_seeds(void (*property)(Random& random)) {
  const char* asked = std::getenv("FOURFOLD_TEST_SEED");
  uint64_t start = 0;
  ASSERT_EQ(::getentropy(&start, sizeof(start)), 0);
  Random seeds(start);
  for (int i = 0; i < (asked != nullptr ? 1 : 100); ++i) {
    const uint64_t seed = asked != nullptr ? std::strtoull(asked, nullptr, 10) : seeds.next();
    SCOPED_TRACE(testing::Message() << "FOURFOLD_TEST_SEED=" << seed);
    Random random(seed);
    property(random);
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace fourfold

#define FOURFOLD_PROPERTY(suite, name)                                         \
  static void suite##_##name##_holds(::fourfold::Random& random);              \
  TEST(suite, name) { ::fourfold::for_random_seeds(&suite##_##name##_holds); } \
  static void suite##_##name##_holds([[maybe_unused]] ::fourfold::Random& random)
