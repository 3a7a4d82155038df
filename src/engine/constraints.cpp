#include "engine/constraints.h"

#include <algorithm>
#include <exception>

#include "base/check.h"

namespace fourfold::engine {
namespace {

// What the constraint throws becomes an Error that says whose it is.
template <typename F>
auto guarded(const char* what, F&& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    fail("constraint: {} failed: {}", what, error.what());
  } catch (...) {
    fail("constraint: {} failed: unknown exception", what);
  }
}

// False when no token may come next.
bool append_mask(Constraint& constraint, int64_t vocabulary, std::vector<uint32_t>& rows) {
  const size_t begin = rows.size();
  rows.resize(begin + static_cast<size_t>((vocabulary + 31) / 32), 0);
  const std::span<uint32_t> bits = std::span(rows).subspan(begin);
  if (!guarded("mask()", [&] { return constraint.mask(bits); })) std::fill(bits.begin(), bits.end(), ~uint32_t{0});
  if (vocabulary % 32 != 0) bits.back() &= (uint32_t{1} << (vocabulary % 32)) - 1;
  return std::any_of(bits.begin(), bits.end(), [](uint32_t word) { return word != 0; });
}

}  // namespace

void accept_token(Constraint& constraint, int32_t token) {
  if (!guarded("accept()", [&] { return constraint.accept(token); })) {
    fail("constraint: token {} was chosen from its mask, and is refused now", token);
  }
}

void append_masks(Constraint& constraint, std::span<const int32_t> drafts, int64_t vocabulary,
                  std::vector<uint32_t>& rows) {
  if (!append_mask(constraint, vocabulary, rows)) fail("constraint: no token may come next");
  int64_t tried = 0;
  for (const int32_t draft : drafts) {
    const size_t before = rows.size();
    if (!guarded("accept()", [&] { return constraint.accept(draft); })) break;
    ++tried;
    if (!append_mask(constraint, vocabulary, rows)) {
      rows.resize(before);  // the lane stops behind the draft, should it be chosen, and the next step says so
      break;
    }
  }
  if (tried > 0) {
    guarded("roll_back()", [&] {
      constraint.roll_back(tried);
      return true;
    });
  }
}

}  // namespace fourfold::engine
