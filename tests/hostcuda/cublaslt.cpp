// cuBLASLt on the host driver: plain sums, in the order of the stream.
#include "jit/cublaslt.h"

#include <memory>

#include "hostcuda/card.h"
#include "nvfp4/number.h"

namespace fourfold::hostcuda {
namespace {

using Functions = jit::CublasLt::Functions;

constexpr int kInvalidValue = 7;  // cublasStatus_t

struct Layout {
  int type;
  int64_t rows, columns, stride;
};
struct Desc {
  bool transposed = false;  // the first matrix
};

template <typename T, typename... Values>
int make(void** to, Values... values) {
  *to = std::make_unique<T>(T{values...}).release();
  const std::lock_guard lock(card().mutex);
  ++card().live.library_objects;
  return 0;
}
template <typename T>
int end(void* object) {
  delete static_cast<T*>(object);
  const std::lock_guard lock(card().mutex);
  --card().live.library_objects;
  return 0;
}

bool fit(const Layout& a, const Layout& b, const Layout& d) {
  return a.type == Functions::kBf16 && b.type == Functions::kBf16 && a.rows == b.rows && d.rows == a.columns &&
         d.columns == b.columns && a.stride >= a.rows && b.stride >= b.rows && d.stride >= d.rows;
}

void multiply(float factor, const void* a, const Layout& as, const void* b, const Layout& bs, void* d,
              const Layout& ds) {
  const auto at = [](const void* m, const Layout& layout, int64_t row, int64_t column) {
    return nvfp4::bf16_to_float(static_cast<const uint16_t*>(m)[column * layout.stride + row]);
  };
  for (int64_t n = 0; n < ds.columns; ++n) {
    for (int64_t m = 0; m < ds.rows; ++m) {
      float sum = 0;
      for (int64_t k = 0; k < as.rows; ++k) sum += at(a, as, k, m) * at(b, bs, k, n);
      const int64_t to = n * ds.stride + m;
      if (ds.type == Functions::kFloat) {
        static_cast<float*>(d)[to] = factor * sum;
      } else {
        static_cast<uint16_t*>(d)[to] = nvfp4::float_to_bf16(factor * sum);
      }
    }
  }
}

}  // namespace

std::shared_ptr<const Functions> cublaslt_functions() {
  auto call = std::make_shared<Functions>();
  call->status_string = [](int) { return "a fault that a test asked for"; };
  call->create = [](void** handle) { return make<int>(handle); };
  call->destroy = end<int>;
  call->desc_create = [](void** desc, int compute, int scale) {
    if (compute != Functions::kComputeFloat || scale != Functions::kFloat) return kInvalidValue;
    return make<Desc>(desc);
  };
  call->desc_destroy = end<Desc>;
  call->desc_set = [](void* desc, int attribute, const void* value, size_t bytes) {
    if (attribute != Functions::kTransposeA || bytes != sizeof(int)) return kInvalidValue;
    static_cast<Desc*>(desc)->transposed = *static_cast<const int*>(value) == Functions::kTranspose;
    return 0;
  };
  call->layout_create = [](void** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    return make<Layout>(layout, type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), stride);
  };
  call->layout_destroy = end<Layout>;
  call->preference_create = [](void** preference) { return make<uint64_t>(preference); };
  call->preference_destroy = end<uint64_t>;
  call->preference_set = [](void* preference, int attribute, const void* value, size_t bytes) {
    if (attribute != Functions::kMostWorkspace || bytes != sizeof(uint64_t)) return kInvalidValue;
    *static_cast<uint64_t*>(preference) = *static_cast<const uint64_t*>(value);
    return 0;
  };
  call->heuristic = [](void*, void* desc, void* a, void* b, void* c, void* d, void* preference, int wanted,
                       Functions::Heuristic* results, int* found) {
    if (!static_cast<Desc*>(desc)->transposed || c != d || wanted < 1) return kInvalidValue;
    if (!fit(*static_cast<Layout*>(a), *static_cast<Layout*>(b), *static_cast<Layout*>(d))) return kInvalidValue;
    const std::lock_guard lock(card().mutex);
    ++card().library_questions;
    const Layout& out = *static_cast<Layout*>(d);
    *found = 0;
    // It says so in one of two ways.
    if (out.rows > card().card().cublaslt_most) return out.type == Functions::kFloat ? 0 : Functions::kNotSupported;
    *results = {};
    results->workspace_bytes = *static_cast<uint64_t*>(preference);
    *found = 1;
    return 0;
  };
  call->matmul = [](void*, void*, const void* alpha, const void* a, void* a_layout, const void* b, void* b_layout,
                    const void* beta, const void*, void*, void* d, void* d_layout, const Functions::Algorithm*,
                    void* workspace, size_t workspace_bytes, void* stream) {
    if (*static_cast<const float*>(beta) != 0) return kInvalidValue;
    const Layout as = *static_cast<Layout*>(a_layout), bs = *static_cast<Layout*>(b_layout),
                 ds = *static_cast<Layout*>(d_layout);
    const float factor = *static_cast<const float*>(alpha);
    const std::lock_guard lock(card().mutex);
    ++card().library_products;
    return card().add(stream_of(stream), [=] {
      std::memset(workspace, 0xff, workspace_bytes);
      multiply(factor, a, as, b, bs, d, ds);
    });
  };
  return call;
}

int64_t library_products() {
  const std::lock_guard lock(card().mutex);
  return card().library_products;
}

int64_t library_questions() {
  const std::lock_guard lock(card().mutex);
  return card().library_questions;
}

}  // namespace fourfold::hostcuda
