// Forms whose tokens are not sorted: gate-up and down are a whole layer and run side by side, with gate-up's rows in
// ExpertWorkspace::exchange().
#include <algorithm>

#include "cuda/moe/form.h"
#include "nvfp4/number.h"

namespace fourfold::cuda {
namespace {

using plan::moe::Pass;

class UnsortedReader : public LayerReader {
 public:
  UnsortedReader(const LayerCall& call, const LayerData& data)
      : LayerReader(call, data),
        // The first layer of a workspace is in the first half.
        hidden_(call.workspace.exchange().download<uint16_t>(call.stream, call.workspace.exchange().bytes() / 2)) {}

  bool down_sums() const override { return true; }
  Partial partial(int64_t, int64_t, float) const override { return {}; }

 protected:
  // What gate-up multiplies a choice with.
  float factor(size_t choice) const {
    return data_.weights[choice] * data_.experts[static_cast<size_t>(data_.ids[choice])].down.tensor_scale;
  }
  float value(int64_t row, int64_t place) const {
    return nvfp4::bf16_to_float(hidden_[static_cast<size_t>(row * call_.problem().padded_depth(Pass::kDown) + place)]);
  }

 private:
  std::vector<uint16_t> hidden_;
};

class OneTokenReader final : public UnsortedReader {
 public:
  using UnsortedReader::UnsortedReader;

  // Each valid choice is an expert of its own.
  std::vector<Row> rows() const override {
    std::vector<Row> rows;
    for (size_t i = 0; i < data_.ids.size(); ++i) {
      if (valid(data_.ids[i])) rows.push_back({static_cast<int64_t>(rows.size()), 0, data_.ids[i], factor(i)});
    }
    return rows;
  }
  std::vector<float> inner(int64_t row) const override {
    std::vector<float> h;
    for (int64_t i = 0; i < call_.problem().intermediate; ++i) {
      h.push_back(value(row, moe::one_place(static_cast<int>(i))) / moe::kOneTokenScale);
    }
    return h;
  }
};

class FewTokensReader final : public UnsortedReader {
 public:
  using UnsortedReader::UnsortedReader;

  // A token's choices of the same expert are one row with the sum of their weights.
  std::vector<Row> rows() const override {
    std::vector<Row> rows;
    for (size_t i = 0; i < data_.ids.size(); ++i) {
      if (!valid(data_.ids[i])) continue;
      const auto token = static_cast<int64_t>(i) / call_.problem().picks_per_token();
      const auto same = std::find_if(rows.begin(), rows.end(),
                                     [&](const Row& row) { return row.token == token && row.expert == data_.ids[i]; });
      if (same == rows.end()) {
        rows.push_back({static_cast<int64_t>(i), token, data_.ids[i], factor(i)});
      } else {
        same->factor += factor(i);
      }
    }
    return rows;
  }
  std::vector<float> inner(int64_t row) const override {
    std::vector<float> h;
    for (int64_t i = 0; i < call_.problem().intermediate; ++i) h.push_back(value(row, i));
    return h;
  }
};

template <typename Reader>
class UnsortedForm final : public LayerForm {
 public:
  void launch(const LayerCall& call) const override { launch_gemms(call, arguments(call)); }
  bool launch_gate_up(const LayerCall& call) const override {
    launch_first_gemm(call, arguments(call));
    return true;
  }

  // Unwritten again.
  void poison(const Stream& stream, const LayerContext&, ExpertWorkspace& workspace) const override {
    workspace.exchange().fill(stream, 0xff);
  }

  std::unique_ptr<LayerReader> read(const LayerCall& call, const LayerData& data) const override {
    return std::make_unique<Reader>(call, data);
  }

 private:
  static GemmPair arguments(const LayerCall& call) {
    GemmPair args = arguments_of(call, padded_input(call));
    args.up.out = call.workspace.exchange().as<void>();
    args.down.source = call.workspace.exchange().as<unsigned short>();
    args.down.out = device_pointer<void>(call.inputs.out);
    args.up.turn = args.down.turn = call.workspace.turn().as<moe::OneTurn>();
    args.down.inner_blocks = static_cast<int>(call.problem().intermediate / moe::kBlockK);
    return args;
  }
};

}  // namespace

const LayerForm& one_token_form() {
  static const UnsortedForm<OneTokenReader> form;
  return form;
}
const LayerForm& few_tokens_form() {
  static const UnsortedForm<FewTokensReader> form;
  return form;
}

}  // namespace fourfold::cuda
