#include "kernels/comm_kernels.h"

#include "executor/cuda.h"
#include "kernels/comm/each.cuh"
#include "kernels/comm/front.cuh"
#include "kernels/comm/reduce.cuh"
#include "kernels/comm/two_shot.cuh"
#include "kernels/comm/words.cuh"

namespace fourfold::comm {
namespace {

template <int Pieces, bool Share>
void front(const ReduceArgs& args) {
  __shared__ float sums[2][norm::kRowThreads / 32];
  norm::NormArgs n = args.norm;
  const int thread = static_cast<int>(threadIdx.x), cta = static_cast<int>(blockIdx.x);
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  n.out += static_cast<long long>(cta) * args.rows * n.columns;
  if (cta != 0) n.residual_out = nullptr;
  FrontSum<Pieces, Share> sum(args.peers, n.delta, n.delta_stride, n.share, n.columns, thread);
  const int ctas = static_cast<int>(gridDim.x);
  if (cta + 1 == ctas) sum.clear();
  for (int i = 0; i < args.rows; ++i) {
    const int t = args.rows > 1 ? (i ^ cta) & 1 : 0;
    norm::Piece x[Pieces];
    sum.add(x, n.residual + t * n.residual_stride, t, t == cta || ctas == 1);
    float squares = 0.0f;
    sum.each([&](int p, int column) { squares = norm::keep_piece(n, t, column, x[p], squares); });
    norm::share_squares(squares, sums[t], thread);
    if (i == 0 && thread == 0) sum.end(cta, ctas);
    const float inverse = norm::inverse_rms(sums[t], n.columns, n.eps);
    sum.each([&](int p, int column) {
      norm::store_normed(n, t, column, x[p], inverse, norm::load_floats(n.weight + column));
    });
  }
}

template <int Pieces>
void reduce(const ReduceArgs& args, Way way) {
  switch (way) {
    case Way::kFlags:
      return reduce_norm_rows<Pieces>(args);
    case Way::kWords:
      return args.norm.share.x != nullptr ? reduce_norm_words<Pieces, true>(args) : reduce_norm_words<Pieces>(args);
    case Way::kTwoShot:
      return reduce_norm_two_shot<Pieces>(args);
    case Way::kEach:
      return args.norm.share.x != nullptr ? reduce_norm_each<Pieces, true>(args) : reduce_norm_each<Pieces>(args);
    case Way::kInFront:
      return args.norm.share.x != nullptr ? front<Pieces, true>(args) : front<Pieces, false>(args);
  }
}

}  // namespace

void await_ctas(int* counted, int count) {
  ptx::add_count(counted);
  ptx::wait_count(counted, count);
}

void reduce_kernel(const ReduceArgs& args, Way way) {
  switch (norm::norm_pieces(args.norm.columns)) {
    case 1:
      return reduce<1>(args, way);
    case 2:
      return reduce<2>(args, way);
    default:
      return reduce<4>(args, way);
  }
}

}  // namespace fourfold::comm
