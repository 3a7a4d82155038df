#include "cuda/moe/self_test.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/math.h"
#include "base/random.h"
#include "cuda/moe/form.h"
#include "cuda/moe/reference.h"
#include "kernels/moe/layout.h"
#include "nvfp4/number.h"

namespace fourfold::cuda {
namespace {

constexpr int64_t kExperts = 6, kTopK = 3;
constexpr float kGroupError = 1.0f / 8192;  // of PackedGroup, relative to twice a power of two above its values

// A shape that makes the tiles work for it: rows that fill one tile and a part of the next, several stages of K with
// the last one short.
plan::moe::Problem slice_of(const plan::moe::Problem& problem, const PlannedPair& pair) {
  plan::moe::Problem p = problem;
  p.name = "self-test";
  p.experts = kExperts;
  p.top_k = kTopK;
  p.shared = plan::moe::SharedExpert::kNone;
  p.activations = plan::moe::activations_of(pair.gate_up.tile);
  const auto rows = [](const plan::moe::Candidate& c) { return round_up(c.tile.n + c.tile.n / 2, 16); };
  const auto depth = [](const plan::moe::Candidate& c) {
    const int64_t units = c.tile.k / 64;
    return 64 * (units == 1 ? 3 : units + units / 2);
  };
  p.hidden = round_up(std::max(rows(pair.down), depth(pair.gate_up)), 64);
  const int resident = pair.gate_up.tile.resident_k;
  if (resident > 0) p.hidden = std::min<int64_t>(p.hidden, resident);
  p.intermediate = std::max(rows(pair.gate_up), depth(pair.down));
  return p;
}

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

LayerData make_data(const plan::moe::Problem& p, const PlannedPair& pair) {
  Random random(20251);
  LayerData d;
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
  d.tokens = pair.unsorted() ? pair.gate_up.tile.token_rows : pair.gate_up.tile.tokens + 5;
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

class Check {
 public:
  Check(const LayerContext& context, const PlannedPair& pair)
      : device_(*context.device),
        pair_(pair),
        form_(form_of(plan::moe::row_form(pair.gate_up.tile))),
        context_{&device_, slice_of(context.problem, pair), context.kernels},
        data_(make_data(context_.problem, pair)),
        stream_(device_),
        workspace_(context_, data_.tokens),
        weights_(context_) {
    // Few CTAs, so that each has several items in turn.
    pair_.gate_up_grid = std::min(pair_.gate_up_grid, 3u);
    pair_.down_grid = std::min(pair_.down_grid, 3u);
  }

  SelfTestResult run() {
    const plan::moe::Problem& p = context_.problem;
    weights_.upload(stream_, 0, data_.experts);
    check_stored();
    Buffer x(device_, data_.x.size() * 2, "self-test"), ids(device_, data_.ids.size() * 4, "self-test"),
        router(device_, data_.weights.size() * 4, "self-test"),
        out(device_, static_cast<uint64_t>(data_.tokens * p.hidden) * 2, "self-test");
    x.upload(stream_, data_.x);
    ids.upload(stream_, data_.ids);
    router.upload(stream_, data_.weights);
    form_.poison(stream_, context_, workspace_);
    workspace_.partial().fill(stream_, 0xff);
    out.fill(stream_, 0xff);
    const LayerInputs inputs = {x.address(), ids.address(), router.address(), out.address(), data_.tokens, 0.0f, true};
    const LayerCall call = {stream_, context_, pair_, workspace_, weights_, inputs};
    SelfTestResult result;
    if (form_.launch_gate_up(call)) {
      const std::unique_ptr<LayerReader> reader = form_.read(call, data_);
      result.gate_up = check_gate_up(*reader, reader->rows());
      if (!result.gate_up.empty()) return result;
      form_.poison(stream_, context_, workspace_);
    }
    form_.launch(call);
    out_ = out.download<uint16_t>(stream_, static_cast<size_t>(data_.tokens * p.hidden));
    const std::unique_ptr<LayerReader> reader = form_.read(call, data_);
    const std::vector<LayerReader::Row> rows = reader->rows();
    result.gate_up = check_gate_up(*reader, rows);
    if (result.gate_up.empty()) result.down = check_down(*reader, rows);
    return result;
  }

 private:
  // The first and the last expert's weights, as the host repacks them.
  void check_stored() const {
    const plan::moe::Problem& p = context_.problem;
    const auto side = [](const Nvfp4Matrix& m) {
      return moe::SourceMatrix{m.codes, m.scales, m.code_stride, m.scale_stride};
    };
    for (const plan::moe::Pass pass : {plan::moe::Pass::kGateUp, plan::moe::Pass::kDown}) {
      const bool gate_up = pass == plan::moe::Pass::kGateUp, paired = gate_up && p.gated();
      const auto units = static_cast<int>(p.padded_depth(pass) / moe::kUnitK);
      const auto tiles = static_cast<int>(p.rows(pass) * p.operands(pass) / moe::kTileRows);
      const uint64_t each = gate_up ? ExpertWeights::gate_up_bytes(p) : ExpertWeights::down_bytes(p);
      for (const int64_t expert : {int64_t{0}, p.experts - 1}) {
        const ExpertMatrices& m = data_.experts[static_cast<size_t>(expert)];
        std::vector<uint8_t> stored(each);
        (gate_up ? weights_.gate_up() : weights_.down())
            .download(stream_, stored.data(), each, static_cast<uint64_t>(expert) * each);
        stream_.synchronize();
        for (int i = 0; i < tiles * units; ++i) {
          const int row = i / units * (paired ? 8 : 16), unit = i % units;
          alignas(4) uint8_t want[moe::kUnitBytes];
          moe::repack_unit(side(!gate_up ? m.down
                                : paired ? m.gate
                                         : m.up),
                           row, side(gate_up ? m.up : m.down), paired ? row : row + 8, unit, want,
                           static_cast<int>(p.depth(pass) - unit * moe::kUnitK) / moe::kBlockK);
          if (std::equal(want, want + sizeof(want), stored.data() + static_cast<size_t>(i) * sizeof(want))) continue;
          fail("the kernel that repacks experts' weights failed its self-test on {}: {} of expert {}, rows from {} on",
               device_.info().name, gate_up ? "gate and up" : "down", expert, row);
        }
      }
    }
  }

  std::string check_gate_up(const LayerReader& reader, const std::vector<LayerReader::Row>& rows) const {
    const plan::moe::Problem& p = context_.problem;
    for (int e = 0; e < p.experts; ++e) {
      const ExpertMatrices& m = data_.experts[static_cast<size_t>(e)];
      std::vector<float> gate, up;
      for (const LayerReader::Row& row : rows) {
        if (row.expert != e) continue;
        if (up.empty()) {
          if (p.gated()) gate = dequantised(m.gate, p.intermediate, p.hidden);
          up = dequantised(m.up, p.intermediate, p.hidden);
        }
        const std::vector<float> x = reader.input(row.token);
        const float gate_scale = m.gate.tensor_scale * reader.input_factor(),
                    up_scale = m.up.tensor_scale * reader.input_factor();
        std::vector<float> values, errors;
        for (int64_t i = 0; i < p.intermediate; ++i) {
          Dot g, u = dot(&up[static_cast<size_t>(i * p.hidden)], x.data(), p.hidden);
          if (p.gated()) g = dot(&gate[static_cast<size_t>(i * p.hidden)], x.data(), p.hidden);
          const Activated a = activate(p.activation, 0, g.value * gate_scale, kDotError * g.magnitude * gate_scale,
                                       u.value * up_scale, kDotError * u.magnitude * up_scale);
          values.push_back(a.value * row.factor);
          errors.push_back(std::fabs(row.factor) * a.error + 1e-30f);
        }
        const std::string wrong = reader.check_inner(row, values, errors);
        if (!wrong.empty()) return fmt::format("h of row {}, {}", row.at, wrong);
      }
    }
    return "";
  }

  std::string check_down(const LayerReader& reader, const std::vector<LayerReader::Row>& rows) const {
    const plan::moe::Problem& p = context_.problem;
    const int64_t hidden = p.hidden, inner = p.intermediate;
    std::vector<float> want(static_cast<size_t>(data_.tokens * hidden)), bound = want;
    for (int e = 0; e < p.experts; ++e) {
      const ExpertMatrices& m = data_.experts[static_cast<size_t>(e)];
      std::vector<float> down;
      for (const LayerReader::Row& row : rows) {
        if (row.expert != e) continue;
        if (down.empty()) down = dequantised(m.down, hidden, inner);
        const std::vector<float> h = reader.inner(row.at);
        const float scale = reader.down_sums() ? 1 : m.down.tensor_scale * reader.inner_factor(e);
        for (int64_t i = 0; i < hidden; ++i) {
          const Dot d = dot(&down[static_cast<size_t>(i * inner)], h.data(), inner);
          if (reader.down_sums()) {
            want[static_cast<size_t>(row.token * hidden + i)] += d.value;
            bound[static_cast<size_t>(row.token * hidden + i)] += kDotError * d.magnitude;
            continue;
          }
          const LayerReader::Partial got = reader.partial(row.at, i, scale);
          const std::string wrong =
              compare(got.value, d.value * scale,
                      kDotError * d.magnitude * std::fabs(scale) + kGroupError * got.group + 1e-30f);
          if (!wrong.empty()) return fmt::format("row {}, column {} is {}", row.at, i, wrong);
        }
      }
    }
    if (!reader.down_sums()) sum_rows(reader, &want, &bound);
    const std::string wrong = check_output(want, bound);
    if (!reader.down_sums() && !wrong.empty()) {
      fail("the summing kernel failed its self-test on {}: {}", device_.info().name, wrong);
    }
    return wrong;
  }

  std::string check_output(const std::vector<float>& want, const std::vector<float>& bound) const {
    const auto hidden = static_cast<size_t>(context_.problem.hidden);
    for (size_t at = 0; at < want.size(); ++at) {
      const std::string wrong =
          compare(nvfp4::bf16_to_float(out_[at]), want[at], bound[at] + kRoundError * std::fabs(want[at]) + 1e-30f);
      if (!wrong.empty()) return fmt::format("output of token {}, column {} is {}", at / hidden, at % hidden, wrong);
    }
    return "";
  }

  // The weighted sum over down's rows as the device made them.
  void sum_rows(const LayerReader& reader, std::vector<float>* want, std::vector<float>* bound) const {
    const int64_t hidden = context_.problem.hidden;
    const std::vector<int> slots = reader.slots_of_picks();
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] < 0) continue;
      const float scale = data_.experts[static_cast<size_t>(data_.ids[i])].down.tensor_scale;
      for (int64_t c = 0; c < hidden; ++c) {
        const float term = data_.weights[i] * reader.partial(slots[i], c, scale).value;
        const auto at = static_cast<size_t>(static_cast<int64_t>(i) / kTopK * hidden + c);
        (*want)[at] += term;
        (*bound)[at] += kDotError * std::fabs(term);
      }
    }
  }

  const Device& device_;
  PlannedPair pair_;
  const LayerForm& form_;
  LayerContext context_;
  LayerData data_;
  Stream stream_;
  ExpertWorkspace workspace_;
  ExpertWeights weights_;
  std::vector<uint16_t> out_;
};

}  // namespace

SelfTestResult self_test(const LayerContext& context, const PlannedPair& pair) { return Check(context, pair).run(); }

}  // namespace fourfold::cuda
