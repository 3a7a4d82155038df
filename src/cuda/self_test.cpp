#include "cuda/self_test.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "base/check.h"
#include "base/math.h"
#include "base/random.h"
#include "cuda/reference.h"
#include "kernels/moe/fp4_layout.h"
#include "kernels/moe/layout.h"
#include "kernels/moe/tables.h"
#include "nvfp4/number.h"

namespace fourfold::cuda {
namespace {

constexpr int64_t kExperts = 6, kTopK = 3;
// Of a value before it is quantised: approximate exponential and reciprocal.
constexpr float kActivationError = 1e-5f;
constexpr float kGroupError = 1.0f / 8192;  // of PackedGroup, relative to twice a power of two above its values

// A shape that makes the tiles work for it: rows that fill one tile and a part of the next, several stages of K with
// the last one short.
plan::MoeProblem slice_of(const plan::MoeProblem& problem, const PlannedPair& pair) {
  plan::MoeProblem p = problem;
  p.name = "self-test";
  p.experts = kExperts;
  p.top_k = kTopK;
  p.shared = plan::SharedExpert::kNone;
  p.activations = plan::activations_of(pair.gate_up.tile);
  const auto rows = [](const plan::Candidate& c) { return round_up(c.tile.n + c.tile.n / 2, 16); };
  const auto depth = [](const plan::Candidate& c) {
    const int64_t units = c.tile.k / 64;
    return 64 * (units == 1 ? 3 : units + units / 2);
  };
  p.hidden = round_up(std::max(rows(pair.down), depth(pair.gate_up)), 64);
  const int resident = pair.gate_up.tile.resident_k;
  if (resident > 0) p.hidden = std::min<int64_t>(p.hidden, resident);
  p.intermediate = std::max(rows(pair.gate_up), depth(pair.down));
  return p;
}

struct Data {
  std::vector<std::vector<uint8_t>> bytes;
  std::vector<ExpertMatrices> experts;
  std::vector<uint16_t> x;
  std::vector<int> ids;
  std::vector<float> weights;
  int64_t tokens = 0;
};

uint8_t scale_code(Random& random, int64_t expert) {
  switch (expert % 3) {
    case 0:  // every code, one in fifty negative
      return static_cast<uint8_t>(random.below(127) | (random.below(50) == 0 ? 0x80 : 0));
    case 1: {  // the ends: zero, the smallest, the largest subnormal, the smallest normal, 448
      constexpr uint8_t kEnds[] = {0x00, 0x01, 0x07, 0x08, 0x7e};
      return kEnds[random.below(std::size(kEnds))];
    }
    default:  // 0.5 to 1.875
      return static_cast<uint8_t>(0x30 + random.below(16));
  }
}

// Input scales of h, which is about 1: as calibrated, so large that block scales are subnormal or 0, so small that most
// codes saturate, and one that no calibration has seen.
float inner_scale(int64_t expert) {
  constexpr float kScales[kExperts] = {8.0f / 2688, 60.0f, 0.25f / 2688, 4.0f / 2688, 400.0f, 0.0f};
  return kScales[expert];
}
constexpr float kInputScale = 4.5f / 2688;  // of x

// NVFP4 activations: rows far below and far above what the input scale was calibrated for.
float row_magnitude(int64_t token) {
  constexpr float kMagnitudes[] = {1.0f, 1.0f, 1.0f / 4096, 64.0f, 1.0f, 1.0f / 300000};
  return kMagnitudes[static_cast<size_t>(token) % std::size(kMagnitudes)];
}

float scale_rms(int64_t expert) { return expert % 3 == 0 ? 140.0f : expert % 3 == 1 ? 200.0f : 1.2f; }

Data make_data(const plan::MoeProblem& p, const PlannedPair& pair) {
  Random random(20251);
  Data d;
  const auto matrix = [&](int64_t rows, int64_t k, int64_t expert) {
    std::vector<uint8_t> codes(static_cast<size_t>(rows * k / 2)), scales(static_cast<size_t>(rows * k / 16));
    for (uint8_t& c : codes) c = static_cast<uint8_t>(random.below(256));
    for (uint8_t& s : scales) s = scale_code(random, expert);
    // 2.9: root mean square of the e2m1 values
    const float tensor =
        static_cast<float>(random.uniform(0.8, 1.2)) / (2.9f * scale_rms(expert) * std::sqrt(static_cast<float>(k)));
    d.bytes.push_back(std::move(codes));
    d.bytes.push_back(std::move(scales));
    return contiguous(d.bytes[d.bytes.size() - 2].data(), d.bytes.back().data(), tensor, k);
  };
  d.bytes.reserve(static_cast<size_t>(p.experts) * 6);
  for (int64_t e = 0; e < p.experts; ++e) {
    ExpertMatrices m;
    if (p.gated()) m.gate = matrix(p.intermediate, p.hidden, e);
    m.up = matrix(p.intermediate, p.hidden, e);
    m.up.tensor_scale *= 2;
    m.down = matrix(p.hidden, p.intermediate, e);
    // The largest of all is x's; one expert has none.
    m.gate.input_scale = e == 2 ? 0.0f : kInputScale / static_cast<float>(e + 1);
    m.up.input_scale = m.gate.input_scale;
    m.down.input_scale = inner_scale(e);
    d.experts.push_back(m);
  }
  // Expert 0 has more rows than a block, the last expert none.
  d.tokens = pair.inline_routes() ? pair.gate_up.tile.token_rows : pair.gate_up.tile.tokens + 5;
  const int64_t padding = d.tokens > 2 ? d.tokens / 2 : -1;
  for (int64_t t = 0; t < d.tokens; ++t) {
    const float magnitude = pair.fp4() ? row_magnitude(t) : 1.0f;
    for (int64_t i = 0; i < p.hidden; ++i) {
      d.x.push_back(t == padding ? uint16_t{0x7fc0}
                                 : nvfp4::float_to_bf16(magnitude * static_cast<float>(random.normal())));
    }
    if (pair.fp4()) d.x[d.x.size() - 1 - static_cast<size_t>(t % p.hidden)] = 0x7fc0;  // a NaN counts as 0
    // 0: a duplicate
    const int second = t % 5 == 0 ? (d.tokens == 1 ? 0 : 1) : t % 5 == 1 ? 0 : -1;
    const int third = t % 3 == 0 ? 2 + static_cast<int>(t / 3 % 3) : static_cast<int>(p.experts) + 7;
    for (const int id : {0, second, third}) {
      d.ids.push_back(t == padding ? -1 : id);
      d.weights.push_back(static_cast<float>(random.uniform(0.02, 0.5)));
    }
  }
  return d;
}

// What was wrong first, and how many values were.
struct Mismatch {
  int64_t count = 0;
  std::string first;
  void compare(float got, float want, float bound, const char* what, int64_t row, int64_t column) {
    if (std::fabs(got - want) <= bound) return;  // false for NaN
    if (count++ == 0)
      first =
          fmt::format("{} of row {}, column {} is {}, wanted {} within {:.1e}", what, row, column, got, want, bound);
  }
  std::string text(int64_t of) const {
    return count == 0 ? "" : fmt::format("{} ({} of {} values are wrong)", first, count, of);
  }
};

// Row of the activations that a (token, expert) pair has, and what it is.
struct Row {
  int64_t at, token;
  int expert;
  float factor;  // what gate-up multiplies in: router weight and down's tensor scale when routed inline
};

class Check {
 public:
  Check(const KernelLoader& loader, const plan::MoeProblem& problem, const PlannedPair& pair)
      : device_(loader.device()),
        pair_(pair),
        problem_(slice_of(problem, pair)),
        context_{&device_, problem_, &loader.fixed()},
        data_(make_data(problem_, pair)),
        stream_(device_),
        workspace_(context_, data_.tokens) {
    // Few CTAs, so that each has several items in turn.
    pair_.gate_up_grid = std::min(pair_.gate_up_grid, 3u);
    pair_.down_grid = std::min(pair_.down_grid, 3u);
  }

  SelfTestResult run() {
    launch();
    const std::vector<Row> rows = pair_.inline_routes() ? inline_rows() : sorted_rows();
    SelfTestResult result;
    if (pair_.fp4()) check_quantising();
    result.gate_up = check_gate_up(rows);
    if (result.gate_up.empty()) result.down = check_down(rows);
    return result;
  }

 private:
  int64_t padded() const { return problem_.padded_depth(plan::Pass::kDown); }
  bool one_token() const { return pair_.inline_routes() && !plan::few_tokens(pair_.gate_up.tile); }
  bool swizzled() const { return plan::row_form(pair_.gate_up.tile) == plan::RowForm::kSwizzled; }
  int64_t slots() const {
    return moe::max_slots(static_cast<long long>(data_.ids.size()), static_cast<int>(problem_.all_experts()));
  }

  // The layer's input of a token as gate-up got it; NVFP4: without the input scale.
  std::vector<float> input_row(int64_t token) const {
    const int64_t hidden = problem_.hidden;
    if (pair_.fp4()) return fp4_row(x_, workspace_.fp4_x(), token, hidden).values();
    std::vector<float> row;
    for (int64_t i = 0; i < hidden; ++i) {
      row.push_back(nvfp4::bf16_to_float(data_.x[static_cast<size_t>(token * hidden + i)]));
    }
    return row;
  }
  // What its products are to be multiplied with.
  float input_factor() const { return pair_.fp4() ? input_scales_->gate_up : 1.0f; }
  float inner_factor(int expert) const { return pair_.fp4() ? input_scales_->down[static_cast<size_t>(expert)] : 1.0f; }

  struct Fp4Bytes {
    std::vector<uint8_t> codes, scales;
  };
  static Nvfp4Row fp4_row(const Fp4Bytes& bytes, const ExpertWorkspace::Fp4Rows& form, int64_t row, int64_t columns) {
    return read_nvfp4_row(&bytes.codes[static_cast<size_t>(row * form.code_stride())],
                          &bytes.scales[static_cast<size_t>(row * form.scale_stride())], columns);
  }
  Fp4Bytes download(const ExpertWorkspace::Fp4Rows& rows) const {
    return {rows.codes.download<uint8_t>(stream_, rows.codes.bytes()),
            rows.scales.download<uint8_t>(stream_, rows.scales.bytes())};
  }

  // The activation's output of a row, as the device left it; NVFP4: without the input scale.
  std::vector<float> inner_row(int64_t row) const {
    if (pair_.fp4()) return fp4_row(fp4_hidden_, workspace_.fp4_hidden(), row, problem_.intermediate).values();
    std::vector<float> h;
    for (int64_t i = 0; i < problem_.intermediate; ++i) h.push_back(h_at(row, i));
    return h;
  }
  float h_at(int64_t row, int64_t i) const {
    int64_t at = row * padded() + i;
    if (one_token()) at = row * padded() + moe::one_place(static_cast<int>(i));
    if (swizzled()) at = (i / 64 * slots() + row) * 64 + ((i % 64 / 8) ^ (row % 8)) * 8 + i % 8;
    return nvfp4::bf16_to_float(hidden_[static_cast<size_t>(at)]) / (one_token() ? moe::kOneTokenScale : 1.0f);
  }

  // Down's row of a slot, with down's tensor scale; `group` is the magnitude that its error is relative to.
  struct Partial {
    float value, group;
  };
  Partial partial_at(int64_t row, int64_t i, float scale) const {
    const int64_t hidden = problem_.hidden;
    if (!swizzled() && !pair_.fp4()) {
      const auto tile = static_cast<int>(i / 16), g = static_cast<int>(i % 16);
      const int place = g < 8 ? moe::partial_place(tile, g) : moe::partial_place(tile, g - 8) + 1;
      return {nvfp4::float_of(partial_[static_cast<size_t>(row * hidden + place)]), 0};
    }
    // Groups of rows 32 w + g + {0, 8, 16, 24}: see PackedGroup.
    const int64_t stride = moe::packed_row_values(static_cast<int>(hidden)) / 4;
    const auto at = static_cast<size_t>(row * stride + i / 32 * 8 + i % 8) * 2;
    const auto member = static_cast<unsigned>(i % 32 / 8);
    const uint32_t w0 = partial_[at], w1 = partial_[at + 1];
    const uint32_t field = ((member < 2 ? w0 : w1) >> (14 * (member % 2))) & 0x3fffu;
    const auto exponent = static_cast<int>(w0 >> 28 | (w1 >> 28) << 4);
    if (exponent == 255) return {NAN, 0};
    // The wgmma kernels' groups are without the tensor scale, and the 2^20 that other epilogues multiply with.
    const float unit = pair_.fp4() ? 1.0f : scale * moe::kEpilogueScale;
    return {std::ldexp(static_cast<float>(static_cast<int>(field) - 8192), exponent - 139) * unit,
            std::ldexp(2.0f, exponent - 127) * std::fabs(unit)};
  }

  bool valid(int id) const { return id >= 0 && id < problem_.experts; }

  void launch() {
    ExpertWeights weights(context_);
    weights.upload(stream_, 0, data_.experts);
    Buffer x(device_, data_.x.size() * 2, "self-test"), ids(device_, data_.ids.size() * 4, "self-test"),
        router(device_, data_.weights.size() * 4, "self-test"),
        out(device_, static_cast<uint64_t>(data_.tokens * problem_.hidden) * 2, "self-test");
    x.upload(stream_, data_.x);
    ids.upload(stream_, data_.ids);
    router.upload(stream_, data_.weights);
    // NaN wherever something must be written; in rows, the columns past the intermediate size are zero by contract.
    pair_.fp4() ? poison_fp4() : poison_rows();
    workspace_.partial().fill(stream_, 0xff);
    out.fill(stream_, 0xff);
    launch_layer(stream_, context_, pair_, workspace_, weights,
                 {x.address(), ids.address(), router.address(), out.address(), data_.tokens, 0.0f, true});
    if (pair_.fp4()) {
      x_ = download(workspace_.fp4_x());
      fp4_hidden_ = download(workspace_.fp4_hidden());
      input_scales_ = weights.input_scales();
    } else {
      // Without sorting the first layer is in the first half.
      const Buffer& hidden = pair_.inline_routes() ? workspace_.exchange()
                             : swizzled()          ? workspace_.swizzled()
                                                   : workspace_.hidden();
      hidden_ = hidden.download<uint16_t>(stream_, hidden.bytes() / 2);
    }
    out_ = out.download<uint16_t>(stream_, static_cast<size_t>(data_.tokens * problem_.hidden));
    if (!pair_.inline_routes()) {
      partial_ = workspace_.partial().download<uint32_t>(stream_, workspace_.partial().bytes() / 4);
    }
  }

  void poison_rows() {
    Buffer& hidden = swizzled() ? workspace_.swizzled() : workspace_.hidden();
    std::vector<uint16_t> poison(hidden.bytes() / 2, 0x7fc0);
    if (!swizzled()) {
      for (size_t at = 0; at < poison.size(); at += static_cast<size_t>(padded())) {
        std::fill(poison.begin() + static_cast<std::ptrdiff_t>(at) + problem_.intermediate,
                  poison.begin() + static_cast<std::ptrdiff_t>(at) + padded(), uint16_t{0});
      }
    }
    hidden.upload(stream_, poison);
  }

  // NaN scales for x, all of whose blocks are written; the largest values in the blocks of h below the intermediate
  // size.
  void poison_fp4() {
    for (Buffer* buffer : {&workspace_.fp4_x().codes, &workspace_.fp4_x().scales}) buffer->fill(stream_, 0xff);
    ExpertWorkspace::Fp4Rows& h = workspace_.fp4_hidden();
    Fp4Bytes poison = {std::vector<uint8_t>(h.codes.bytes()), std::vector<uint8_t>(h.scales.bytes())};
    const int64_t blocks = problem_.intermediate / 16;
    for (int64_t row = 0; row < slots(); ++row) {
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t place = b / 4 * 4 + moe::group_place(static_cast<int>(b % 4));
        poison.scales[static_cast<size_t>(row * h.scale_stride() + place)] = 0x7e;
        std::fill_n(poison.codes.begin() + row * h.code_stride() + place * 8, 8, uint8_t{0x77});
      }
    }
    h.codes.upload(stream_, poison.codes);
    h.scales.upload(stream_, poison.scales);
  }

  // Codes and scales of the layer's input must be those of the host, bit by bit.
  void check_quantising() const {
    const int64_t hidden = problem_.hidden;
    for (int64_t t = 0; t < data_.tokens; ++t) {
      std::vector<float> row;
      for (int64_t i = 0; i < hidden; ++i) {
        row.push_back(nvfp4::bf16_to_float(data_.x[static_cast<size_t>(t * hidden + i)]));
      }
      if (fp4_row(x_, workspace_.fp4_x(), t, hidden) != quantised(row, input_scales_->gate_up)) {
        fail("the quantising kernel failed its self-test on {}: codes or scales of token {} are not the reference's",
             device_.info().name, t);
      }
    }
  }

  // A single token's choices, each an expert of its own; or those of few tokens, where a token's choices of the same
  // expert are one row with the sum of their weights.
  std::vector<Row> inline_rows() const {
    std::vector<Row> rows;
    for (size_t i = 0; i < data_.ids.size(); ++i) {
      if (!valid(data_.ids[i])) continue;
      const float scale = data_.experts[static_cast<size_t>(data_.ids[i])].down.tensor_scale;
      if (one_token()) {
        rows.push_back({static_cast<int64_t>(rows.size()), 0, data_.ids[i], data_.weights[i] * scale});
        continue;
      }
      const auto token = static_cast<int64_t>(i) / kTopK;
      const auto same = std::find_if(rows.begin(), rows.end(),
                                     [&](const Row& row) { return row.token == token && row.expert == data_.ids[i]; });
      if (same == rows.end()) {
        rows.push_back({static_cast<int64_t>(i), token, data_.ids[i], data_.weights[i] * scale});
      } else {
        same->factor += data_.weights[i] * scale;
      }
    }
    return rows;
  }

  // Also checks the routing tables.
  std::vector<Row> sorted_rows() {
    const auto counts = workspace_.counts().download<int>(stream_, 2);
    const auto pick_slot = workspace_.pick_slot().download<int>(stream_, data_.ids.size());
    const auto slot_token = workspace_.slot_token().download<int>(stream_, static_cast<size_t>(slots()));
    const int64_t picks = std::count_if(data_.ids.begin(), data_.ids.end(), [&](int id) { return valid(id); });
    const auto wrong = [&](const std::string& what) {
      fail("the routing kernel failed its self-test on {}: {}", device_.info().name, what);
    };
    if (counts[1] < picks || counts[1] > slots()) {
      wrong(fmt::format("{} slots, wanted {} to {}", counts[1], picks, slots()));
    }
    const auto most = static_cast<int>(workspace_.blocks().bytes() / sizeof(moe::Block));
    if (counts[0] < 1 || counts[0] > most) wrong(fmt::format("{} blocks, wanted 1 to {}", counts[0], most));
    const auto blocks = workspace_.blocks().download<moe::Block>(stream_, static_cast<size_t>(counts[0]));
    std::vector<int> expert_of(static_cast<size_t>(slots()), -1);
    for (const moe::Block& b : blocks) {
      if (b.count < 1 || b.count > pair_.gate_up.tile.tokens || b.first < 0 || b.first + b.count > slots()) {
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
      const int slot = pick_slot[i];
      if (!valid(data_.ids[i])) {
        if (slot != -1) wrong(fmt::format("choice {} has no expert, but slot {}", i, slot));
        continue;
      }
      const auto token = static_cast<int64_t>(i) / kTopK;
      if (slot < 0 || slot >= slots() || used[static_cast<size_t>(slot)])
        wrong(fmt::format("choice {}: slot {}", i, slot));
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

  std::string check_gate_up(const std::vector<Row>& rows) const {
    const int64_t hidden = problem_.hidden, inner = problem_.intermediate;
    Mismatch mismatch;
    for (int e = 0; e < problem_.experts; ++e) {
      const ExpertMatrices& m = data_.experts[static_cast<size_t>(e)];
      std::vector<float> gate, up;
      for (const Row& row : rows) {
        if (row.expert != e) continue;
        if (up.empty()) {
          if (problem_.gated()) gate = dequantised(m.gate, inner, hidden);
          up = dequantised(m.up, inner, hidden);
        }
        const std::vector<float> x = input_row(row.token);
        const float gate_scale = m.gate.tensor_scale * input_factor(), up_scale = m.up.tensor_scale * input_factor();
        std::vector<float> wanted, errors;
        for (int64_t i = 0; i < inner; ++i) {
          Dot g, u = dot(&up[static_cast<size_t>(i * hidden)], x.data(), hidden);
          if (problem_.gated()) g = dot(&gate[static_cast<size_t>(i * hidden)], x.data(), hidden);
          const Activated a =
              activate(problem_.activation, 0, g.value * gate_scale, kDotError * g.magnitude * gate_scale,
                       u.value * up_scale, kDotError * u.magnitude * up_scale);
          const float want = a.value * row.factor;
          if (pair_.fp4()) {
            wanted.push_back(want);
            errors.push_back(a.error + kActivationError * std::fabs(want) + 1e-30f);
            continue;
          }
          mismatch.compare(h_at(row.at, i), want,
                           std::fabs(row.factor) * a.error + kRoundError * std::fabs(want) + 1e-30f, "h", row.at, i);
        }
        if (!pair_.fp4()) continue;
        const std::string wrong = check_quantised(fp4_row(fp4_hidden_, workspace_.fp4_hidden(), row.at, inner), wanted,
                                                  errors, inner_factor(e));
        if (!wrong.empty()) return fmt::format("h of row {}, {}", row.at, wrong);
      }
    }
    return mismatch.text(static_cast<int64_t>(rows.size()) * inner);
  }

  std::string check_down(const std::vector<Row>& rows) const {
    const int64_t hidden = problem_.hidden, inner = problem_.intermediate;
    const bool sums = pair_.inline_routes();  // down itself adds up a token's experts
    std::vector<float> want(static_cast<size_t>(data_.tokens * hidden)), bound = want;
    Mismatch mismatch;
    for (int e = 0; e < problem_.experts; ++e) {
      const ExpertMatrices& m = data_.experts[static_cast<size_t>(e)];
      std::vector<float> down;
      for (const Row& row : rows) {
        if (row.expert != e) continue;
        if (down.empty()) down = dequantised(m.down, hidden, inner);
        const std::vector<float> h = inner_row(row.at);
        const float scale = sums ? 1 : m.down.tensor_scale * inner_factor(e);
        for (int64_t i = 0; i < hidden; ++i) {
          const Dot d = dot(&down[static_cast<size_t>(i * inner)], h.data(), inner);
          if (sums) {
            want[static_cast<size_t>(row.token * hidden + i)] += d.value;
            bound[static_cast<size_t>(row.token * hidden + i)] += kDotError * d.magnitude;
          } else {
            const Partial p = partial_at(row.at, i, scale);
            mismatch.compare(p.value, d.value * scale,
                             kDotError * d.magnitude * std::fabs(scale) + kGroupError * p.group + 1e-30f, "row", row.at,
                             i);
          }
        }
      }
    }
    const auto values = sums ? data_.tokens * hidden : static_cast<int64_t>(rows.size()) * hidden;
    if (!sums) {
      if (mismatch.count > 0) return mismatch.text(values);
      sum_rows(&want, &bound);
    }
    for (int64_t t = 0; t < data_.tokens; ++t) {
      for (int64_t i = 0; i < hidden; ++i) {
        const auto at = static_cast<size_t>(t * hidden + i);
        mismatch.compare(nvfp4::bf16_to_float(out_[at]), want[at],
                         bound[at] + kRoundError * std::fabs(want[at]) + 1e-30f, "output", t, i);
      }
    }
    if (!sums && mismatch.count > 0) {
      fail("the summing kernel failed its self-test on {}: {}", device_.info().name, mismatch.text(values));
    }
    return mismatch.text(values);
  }

  // The weighted sum over down's rows as the device made them.
  void sum_rows(std::vector<float>* want, std::vector<float>* bound) const {
    const int64_t hidden = problem_.hidden;
    const auto pick_slot = workspace_.pick_slot().download<int>(stream_, data_.ids.size());
    for (size_t i = 0; i < pick_slot.size(); ++i) {
      if (pick_slot[i] < 0) continue;
      const float scale = data_.experts[static_cast<size_t>(data_.ids[i])].down.tensor_scale;
      for (int64_t c = 0; c < hidden; ++c) {
        const float term = data_.weights[i] * partial_at(pick_slot[i], c, scale).value;
        const auto at = static_cast<size_t>(static_cast<int64_t>(i) / kTopK * hidden + c);
        (*want)[at] += term;
        (*bound)[at] += kDotError * std::fabs(term);
      }
    }
  }

  const Device& device_;
  PlannedPair pair_;
  plan::MoeProblem problem_;
  LayerContext context_;
  Data data_;
  Stream stream_;
  ExpertWorkspace workspace_;
  std::vector<uint16_t> hidden_, out_;
  Fp4Bytes x_, fp4_hidden_;
  std::optional<nvfp4::LayerInputScales> input_scales_;
  std::vector<uint32_t> partial_;  // fp32 rows, or groups
};

}  // namespace

SelfTestResult self_test(const KernelLoader& loader, const plan::MoeProblem& problem, const PlannedPair& pair) {
  return Check(loader, problem, pair).run();
}

}  // namespace fourfold::cuda
