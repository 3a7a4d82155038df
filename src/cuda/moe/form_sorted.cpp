// Forms whose tokens are sorted by expert and cut into blocks: bf16 rows, rows in the order of shared memory, NVFP4.
#include <algorithm>
#include <cmath>
#include <optional>

#include "base/check.h"
#include "base/math.h"
#include "cuda/moe/form.h"
#include "cuda/moe/reference.h"
#include "kernels/moe/fp4_layout.h"
#include "nvfp4/number.h"

namespace fourfold::cuda {
namespace {

using plan::moe::Pass;

void launch_sort(const LayerCall& call, const moe::GemmArgs& args) {
  const FixedKernels& fixed = *call.context.kernels;
  const int block = call.pair.gate_up.tile.tokens;
  if (call.picks() <= moe::kRouteOnePass) {
    launch(call.stream, fixed.route, {1, 1}, Overlap::kProgrammatic, args.routing, args.route, block);
    return;
  }
  const auto ctas = static_cast<unsigned>(ceil_div(call.picks(), moe::kRouteManyPicks));
  launch(call.stream, fixed.route_count, {ctas, 1}, Overlap::kProgrammatic, args.routing, args.route, block);
  launch(call.stream, fixed.route_scatter, {ctas, 1}, Overlap::kProgrammatic, args.routing, args.route);
}

// The sum over a token's experts, now or later.
void launch_or_leave(const LayerCall& call, const moe::GemmArgs& down, moe::RowSum sum) {
  sum.pick_slot = call.workspace.pick_slot().as<int>();
  sum.weights = down.routing.weights;
  sum.ids = down.routing.ids;
  sum.top_k = down.routing.top_k;
  sum.columns = static_cast<int>(call.problem().hidden);
  sum.out = device_pointer<unsigned short>(call.inputs.out);
  sum.out_stride = call.problem().hidden;
  sum.keep = static_cast<int>(call.inputs.keep_rows);
  if (call.inputs.left != nullptr) {
    *call.inputs.left = sum;
  } else {
    launch_sum(call.stream, *call.context.kernels, sum, call.inputs.tokens);
  }
}

// Of rows of groups; `scales`: down's tensor scales where the rows are without, otherwise null.
void finish_groups(const LayerCall& call, const moe::GemmArgs& down, const float* scales) {
  moe::RowSum sum = {};
  sum.groups = call.workspace.partial().as<moe::PackedGroup>();
  sum.stride = down.out_stride;
  sum.scales = scales;
  launch_or_leave(call, down, sum);
}

long long groups_of(const LayerCall& call) {
  return moe::packed_row_values(static_cast<int>(call.problem().hidden)) / 4;
}

int64_t slots_of(const plan::moe::Problem& p, int64_t picks) {
  return moe::max_slots(static_cast<long long>(picks), static_cast<int>(p.all_experts()));
}

// ---- reading back ---------------------------------------------------------------------------------------------------

class SortedReader : public LayerReader {
 public:
  SortedReader(const LayerCall& call, const LayerData& data)
      : LayerReader(call, data),
        pick_slot_(call.workspace.pick_slot().download<int>(call.stream, data.ids.size())),
        partial_(call.workspace.partial().download<uint32_t>(call.stream, call.workspace.partial().bytes() / 4)) {}

  // Also checks the routing tables.
  std::vector<Row> rows() const override {
    const auto wrong = [&](const std::string& what) {
      fail("the routing kernel failed its self-test on {}: {}", call_.stream.device().info().name, what);
    };
    const auto counts = call_.workspace.counts().download<int>(call_.stream, 2);
    const auto slot_token = call_.workspace.slot_token().download<int>(call_.stream, static_cast<size_t>(slots()));
    const int64_t picks = std::count_if(data_.ids.begin(), data_.ids.end(), [&](int id) { return valid(id); });
    if (counts[1] < picks || counts[1] > slots()) {
      wrong(fmt::format("{} slots, wanted {} to {}", counts[1], picks, slots()));
    }
    const auto most = static_cast<int>(call_.workspace.blocks().bytes() / sizeof(moe::Block));
    if (counts[0] < 1 || counts[0] > most) wrong(fmt::format("{} blocks, wanted 1 to {}", counts[0], most));
    const auto blocks = call_.workspace.blocks().download<moe::Block>(call_.stream, static_cast<size_t>(counts[0]));
    std::vector<int> expert_of(static_cast<size_t>(slots()), -1);
    for (const moe::Block& b : blocks) {
      if (b.count < 1 || b.count > call_.pair.gate_up.tile.tokens || b.first < 0 || b.first + b.count > slots()) {
        wrong(fmt::format("a block of {} slots from {}", b.count, b.first));
      }
      for (int s = b.first; s < b.first + b.count; ++s) {
        if (expert_of[static_cast<size_t>(s)] != -1) wrong(fmt::format("slot {} is in two blocks", s));
        expert_of[static_cast<size_t>(s)] = b.expert;
      }
    }
    std::vector<Row> rows;
    std::vector<bool> used(static_cast<size_t>(slots()));
    for (size_t i = 0; i < data_.ids.size(); ++i) {
      const int slot = pick_slot_[i];
      if (!valid(data_.ids[i])) {
        if (slot != -1) wrong(fmt::format("choice {} has no expert, but slot {}", i, slot));
        continue;
      }
      const auto token = static_cast<int64_t>(i) / call_.problem().picks_per_token();
      if (slot < 0 || slot >= slots() || used[static_cast<size_t>(slot)]) {
        wrong(fmt::format("choice {}: slot {}", i, slot));
      }
      const auto at = static_cast<size_t>(slot);
      used[at] = true;
      if (slot_token[at] != token || expert_of[at] != data_.ids[i]) {
        wrong(fmt::format("slot {}: token {} of expert {}, wanted {} of {}", slot, slot_token[at], expert_of[at], token,
                          data_.ids[i]));
      }
      rows.push_back({slot, token, data_.ids[i], 1});
    }
    return rows;
  }
  std::vector<int> slots_of_picks() const override { return pick_slot_; }

 protected:
  int64_t slots() const { return slots_of(call_.problem(), static_cast<int64_t>(data_.ids.size())); }

  // Groups of rows 32 w + g + {0, 8, 16, 24}: see PackedGroup. `unit`: what their values are to be multiplied with.
  Partial group_member(int64_t row, int64_t column, float unit) const {
    const auto at = static_cast<size_t>(row * groups_of(call_) + column / 32 * 8 + column % 8) * 2;
    const auto member = static_cast<unsigned>(column % 32 / 8);
    const uint32_t w0 = partial_[at], w1 = partial_[at + 1];
    const uint32_t field = ((member < 2 ? w0 : w1) >> (14 * (member % 2))) & 0x3fffu;
    const auto exponent = static_cast<int>(w0 >> 28 | (w1 >> 28) << 4);
    if (exponent == 255) return {NAN, 0};
    return {std::ldexp(static_cast<float>(static_cast<int>(field) - 8192), exponent - 139) * unit,
            std::ldexp(2.0f, exponent - 127) * std::fabs(unit)};
  }

  std::vector<int> pick_slot_;
  std::vector<uint32_t> partial_;  // fp32 rows, or groups
};

// ---- bf16 rows ------------------------------------------------------------------------------------------------------

class RowsReader final : public SortedReader {
 public:
  RowsReader(const LayerCall& call, const LayerData& data)
      : SortedReader(call, data),
        hidden_(call.workspace.hidden().download<uint16_t>(call.stream, call.workspace.hidden().bytes() / 2)) {}

  std::vector<float> inner(int64_t row) const override {
    const int64_t stride = call_.problem().padded_depth(Pass::kDown);
    std::vector<float> h;
    for (int64_t i = 0; i < call_.problem().intermediate; ++i) {
      h.push_back(nvfp4::bf16_to_float(hidden_[static_cast<size_t>(row * stride + i)]));
    }
    return h;
  }
  Partial partial(int64_t row, int64_t column, float) const override {
    const auto tile = static_cast<int>(column / 16), g = static_cast<int>(column % 16);
    const int place = g < 8 ? moe::partial_place(tile, g) : moe::partial_place(tile, g - 8) + 1;
    return {nvfp4::float_of(partial_[static_cast<size_t>(row * call_.problem().hidden + place)]), 0};
  }

 private:
  std::vector<uint16_t> hidden_;
};

class RowsForm final : public LayerForm {
 public:
  void launch(const LayerCall& call) const override {
    const plan::moe::TileConfig& tile = call.pair.gate_up.tile;
    GemmPair args = arguments_of(call, padded_input(call));
    if (raises_flags(tile)) {
      args.down.ready = ceil_div(args.up.row_tiles, tile.operands * tile.n / moe::kTileRows);
    }
    launch_sort(call, args.up);
    launch_gemms(call, args);
    const int hidden = static_cast<int>(call.problem().hidden);
    const auto stride = static_cast<long long>(hidden);
    const auto keep = static_cast<int>(call.inputs.keep_rows);
    if (raises_flags(call.pair.down.tile)) {  // the sum runs beside down
      const Grid pieces = {static_cast<unsigned>(call.inputs.tokens),
                           static_cast<unsigned>(ceil_div(hidden, moe::kSumColumns))};
      cuda::launch(call.stream, call.context.kernels->combine_beside, pieces, Overlap::kProgrammatic,
                   call.workspace.partial().address(), stride, args.down.route, call.inputs.weights,
                   args.down.routing.top_k, hidden, call.inputs.out, stride, keep);
    } else {
      moe::RowSum sum = {};
      sum.partial = call.workspace.partial().as<float>();
      sum.stride = stride;
      launch_or_leave(call, args.down, sum);
    }
  }

  // The columns past the intermediate size are zero by contract.
  void poison(const Stream& stream, const LayerContext& context, ExpertWorkspace& workspace) const override {
    const auto stride = static_cast<size_t>(context.problem.padded_depth(Pass::kDown));
    std::vector<uint16_t> poison(workspace.hidden().bytes() / 2, 0x7fc0);
    for (size_t at = 0; at < poison.size(); at += stride) {
      std::fill(poison.begin() + static_cast<std::ptrdiff_t>(at) + context.problem.intermediate,
                poison.begin() + static_cast<std::ptrdiff_t>(at + stride), uint16_t{0});
    }
    workspace.hidden().upload(stream, poison);
  }

  std::unique_ptr<LayerReader> read(const LayerCall& call, const LayerData& data) const override {
    return std::make_unique<RowsReader>(call, data);
  }
};

// ---- swizzled: see kernels/moe/tables.h -----------------------------------------------------------------------------

class SwizzledReader final : public SortedReader {
 public:
  SwizzledReader(const LayerCall& call, const LayerData& data)
      : SortedReader(call, data),
        hidden_(call.workspace.swizzled().download<uint16_t>(call.stream, call.workspace.swizzled().bytes() / 2)) {}

  std::vector<float> inner(int64_t row) const override {
    std::vector<float> h;
    for (int64_t i = 0; i < call_.problem().intermediate; ++i) {
      const int64_t at = (i / 64 * slots() + row) * 64 + ((i % 64 / 8) ^ (row % 8)) * 8 + i % 8;
      h.push_back(nvfp4::bf16_to_float(hidden_[static_cast<size_t>(at)]));
    }
    return h;
  }
  // Groups are without the tensor scale, and the 2^20 that other epilogues multiply with.
  Partial partial(int64_t row, int64_t column, float scale) const override {
    return group_member(row, column, scale * moe::kEpilogueScale);
  }

 private:
  std::vector<uint16_t> hidden_;
};

class SwizzledForm final : public LayerForm {
 public:
  void launch(const LayerCall& call) const override {
    const auto hidden = static_cast<uint64_t>(call.problem().hidden);
    GemmPair args = arguments_of(call, call.inputs.x);  // tensor copies have zeros past the last column
    args.down.source_stride = args.up.out_stride = slots_of(call.problem(), call.picks()) * moe::kUnitK;
    args.up.out = call.workspace.swizzled().as<void>();
    args.down.source = call.workspace.swizzled().as<unsigned short>();
    args.down.out_stride = groups_of(call);
    launch_sort(call, args.up);
    const ptx::TensorMap rows =
        row_pieces(call.stream.device(), call.inputs.x, static_cast<uint64_t>(call.inputs.tokens), hidden, hidden * 2);
    cuda::launch(call.stream, call.pair.gate_up_kernel, {call.pair.gate_up_grid, 1}, Overlap::kProgrammatic, rows,
                 args.up);
    cuda::launch(call.stream, call.pair.down_kernel, {call.pair.down_grid, 1}, Overlap::kProgrammatic, args.down);
    finish_groups(call, args.down, call.weights.down_scales().as<float>());
  }

  void poison(const Stream& stream, const LayerContext&, ExpertWorkspace& workspace) const override {
    workspace.swizzled().upload(stream, std::vector<uint16_t>(workspace.swizzled().bytes() / 2, 0x7fc0));
  }

  std::unique_ptr<LayerReader> read(const LayerCall& call, const LayerData& data) const override {
    return std::make_unique<SwizzledReader>(call, data);
  }
};

// ---- NVFP4 activations: codes and scales instead of bf16 rows, strides in bytes -------------------------------------

struct Fp4Bytes {
  Fp4Bytes(const Stream& stream, const ExpertWorkspace::Fp4Rows& rows)
      : codes(rows.codes.download<uint8_t>(stream, rows.codes.bytes())),
        scales(rows.scales.download<uint8_t>(stream, rows.scales.bytes())),
        code_stride(rows.code_stride()),
        scale_stride(rows.scale_stride()) {}
  Nvfp4Row row(int64_t at, int64_t columns) const {
    return read_nvfp4_row(&codes[static_cast<size_t>(at * code_stride)],
                          &scales[static_cast<size_t>(at * scale_stride)], columns);
  }
  std::vector<uint8_t> codes, scales;
  int64_t code_stride, scale_stride;
};

class Fp4Reader final : public SortedReader {
 public:
  Fp4Reader(const LayerCall& call, const LayerData& data)
      : SortedReader(call, data),
        x_(call.stream, call.workspace.fp4_x()),
        h_(call.stream, call.workspace.fp4_hidden()),
        scales_(*call.weights.input_scales()) {
    // Codes and scales of the layer's input must be those of the host, bit by bit.
    const int64_t hidden = call.problem().hidden;
    for (int64_t t = 0; t < data.tokens; ++t) {
      if (x_.row(t, hidden) != quantised(LayerReader::input(t), scales_.gate_up)) {
        fail("the quantising kernel failed its self-test on {}: codes or scales of token {} are not the reference's",
             call.stream.device().info().name, t);
      }
    }
  }

  std::vector<float> input(int64_t token) const override { return x_.row(token, call_.problem().hidden).values(); }
  float input_factor() const override { return scales_.gate_up; }
  std::vector<float> inner(int64_t row) const override { return h_.row(row, call_.problem().intermediate).values(); }
  float inner_factor(int expert) const override { return scales_.down[static_cast<size_t>(expert)]; }
  std::string check_inner(const Row& row, const std::vector<float>& values,
                          const std::vector<float>& errors) const override {
    constexpr float kActivationError = 1e-5f;  // of a value before it is quantised: approximate exponential, reciprocal
    std::vector<float> all = errors;
    for (size_t i = 0; i < all.size(); ++i) all[i] += kActivationError * std::fabs(values[i]);
    return check_quantised(h_.row(row.at, call_.problem().intermediate), values, all, inner_factor(row.expert));
  }
  Partial partial(int64_t row, int64_t column, float) const override { return group_member(row, column, 1); }

 private:
  Fp4Bytes x_, h_;
  nvfp4::LayerInputScales scales_;
};

class Fp4Form final : public LayerForm {
 public:
  void launch(const LayerCall& call) const override {
    const ExpertWorkspace::Fp4Rows &rows = call.workspace.fp4_x(), &between = call.workspace.fp4_hidden();
    const auto* scales = call.weights.input_scale_values().as<float>();
    GemmPair args = arguments_of(call, rows.codes.address());
    args.up.source_stride = rows.code_stride();
    args.up.out = between.codes.as<void>();
    args.up.out_stride = args.down.source_stride = between.code_stride();
    args.down.source = between.codes.as<unsigned short>();
    args.down.out_stride = groups_of(call);
    const moe::Fp4Args up = {args.up,    rows.scales.as<unsigned char>(),    rows.scale_stride(),   scales,
                             scales + 1, between.scales.as<unsigned char>(), between.scale_stride()};
    const moe::Fp4Args down = {
        args.down, between.scales.as<unsigned char>(), between.scale_stride(), scales + 1, nullptr, nullptr, 0};

    const int hidden = static_cast<int>(call.problem().hidden);
    const auto units = static_cast<int>(rows.units);
    const Grid blocks = {static_cast<unsigned>(ceil_div(units * 4, moe::kQuantizeThreads)),
                         static_cast<unsigned>(call.inputs.tokens)};
    cuda::launch(call.stream, call.context.kernels->quantise, blocks, Overlap::kProgrammatic, call.inputs.x,
                 static_cast<long long>(hidden), hidden, units, scales, rows.codes.address(),
                 static_cast<long long>(rows.code_stride()), rows.scales.address(),
                 static_cast<long long>(rows.scale_stride()));
    launch_sort(call, args.up);
    cuda::launch(call.stream, call.pair.gate_up_kernel, {call.pair.gate_up_grid, 1}, Overlap::kProgrammatic, up);
    cuda::launch(call.stream, call.pair.down_kernel, {call.pair.down_grid, 1}, Overlap::kProgrammatic, down);
    finish_groups(call, args.down, nullptr);  // the kernels multiply with both scales of the expert themselves
  }

  // NaN scales for x, all of whose blocks are written; the largest values in the blocks of h below the intermediate
  // size.
  void poison(const Stream& stream, const LayerContext& context, ExpertWorkspace& workspace) const override {
    for (Buffer* buffer : {&workspace.fp4_x().codes, &workspace.fp4_x().scales}) buffer->fill(stream, 0xff);
    ExpertWorkspace::Fp4Rows& h = workspace.fp4_hidden();
    std::vector<uint8_t> codes(h.codes.bytes()), scales(h.scales.bytes());
    const int64_t blocks = context.problem.intermediate / 16;
    for (int64_t row = 0; (row + 1) * h.code_stride() <= static_cast<int64_t>(codes.size()); ++row) {
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t place = b / 4 * 4 + moe::group_place(static_cast<int>(b % 4));
        scales[static_cast<size_t>(row * h.scale_stride() + place)] = 0x7e;
        std::fill_n(codes.begin() + row * h.code_stride() + place * 8, 8, uint8_t{0x77});
      }
    }
    h.codes.upload(stream, codes);
    h.scales.upload(stream, scales);
  }

  std::unique_ptr<LayerReader> read(const LayerCall& call, const LayerData& data) const override {
    return std::make_unique<Fp4Reader>(call, data);
  }
};

}  // namespace

const LayerForm& rows_form() {
  static const RowsForm form;
  return form;
}
const LayerForm& swizzled_form() {
  static const SwizzledForm form;
  return form;
}
const LayerForm& fp4_form() {
  static const Fp4Form form;
  return form;
}

}  // namespace fourfold::cuda
