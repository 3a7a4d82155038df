#include "ranks/checks.h"

#include <cstring>
#include <utility>
#include <vector>

#include "base/check.h"

namespace fourfold::ranks {

SumChecks::SumChecks(std::shared_ptr<Member> member, int64_t every) : member_(std::move(member)), every_(every) {
  FF_ASSERT(every_ > 0);
}

bool SumChecks::due() { return ++steps_ % every_ == 0; }

void SumChecks::compare(uint64_t checksum) {
  const std::vector<uint64_t> all = member_->meet_with(checksum);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    fail("sums over ranks are wrong: after step {} rank {} has other bits than rank 0 (checksums {:016x} and {:016x})",
         steps_, rank, all[rank], all[0]);
  }
}

uint64_t checksum_of(const ops::Tensor& rows) {
  FF_ASSERT(rows.dtype == ops::DType::kF32);
  uint64_t sum = 0;
  for (int64_t t = 0; t < rows.rows; ++t) {
    const float* row = rows.f32(t);
    for (int64_t i = 0; i < rows.cols; ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, row + i, sizeof(bits));
      sum = (sum ^ bits) * 0x100000001b3ull;
    }
  }
  return sum;
}

}  // namespace fourfold::ranks
