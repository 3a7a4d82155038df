// How rows go through an expert layer: an object for each plan::moe::RowForm. It knows which kernels run around the two
// GEMMs, which arguments these take, and how the self-test finds in memory what they left. A kernel family names its
// form in its row (plan/moe/families.cpp); nothing here asks which family it is.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/moe/layer.h"
#include "kernels/moe/tables.h"

namespace fourfold::cuda {

struct LayerCall {
  const Stream& stream;
  const LayerContext& context;
  const PlannedPair& pair;
  const ExpertWorkspace& workspace;
  const ExpertWeights& weights;
  const LayerInputs& inputs;

  const plan::moe::Problem& problem() const { return context.problem; }
  int64_t picks() const { return inputs.tokens * problem().picks_per_token(); }
};

// ---- for the self-test ----------------------------------------------------------------------------------------------

struct LayerData {
  std::vector<std::vector<uint8_t>> bytes;  // of the experts
  std::vector<ExpertMatrices> experts;
  std::vector<uint16_t> x;  // bf16 [tokens][hidden]
  std::vector<int> ids;     // [tokens][top_k]
  std::vector<float> weights;
  int64_t tokens = 0;
};

// How far a value may be from another one, and how far it was.
std::string compare(float got, float want, float bound);  // empty where it is close enough

// What a layer left in memory.
class LayerReader {
 public:
  LayerReader(const LayerCall& call, const LayerData& data) : call_(call), data_(data) {}
  virtual ~LayerReader() = default;
  LayerReader(const LayerReader&) = delete;
  LayerReader& operator=(const LayerReader&) = delete;

  // A (token, expert) pair that the layer computes: the row of gate-up's output, and what gate-up multiplies it with
  // (unsorted: router weight and down's tensor scale).
  struct Row {
    int64_t at, token;
    int expert;
    float factor;
  };
  // Error when the routing tables are wrong.
  virtual std::vector<Row> rows() const = 0;

  // The layer's input of a token as gate-up gets it, and what its products are to be multiplied with.
  virtual std::vector<float> input(int64_t token) const;
  virtual float input_factor() const { return 1; }
  // Gate-up's output as down gets it; likewise.
  virtual std::vector<float> inner(int64_t row) const = 0;
  virtual float inner_factor(int /*expert*/) const { return 1; }
  // What is wrong with a row of it, whose values are known to within `errors` before they are rounded; empty: nothing.
  virtual std::string check_inner(const Row& row, const std::vector<float>& values,
                                  const std::vector<float>& errors) const;

  // Whether down adds up the experts of a token; otherwise its row of a slot, with down's tensor scale (`scale`), and
  // the magnitude that its rounding error is relative to.
  virtual bool down_sums() const { return false; }
  struct Partial {
    float value, group;
  };
  virtual Partial partial(int64_t row, int64_t column, float scale) const = 0;
  // The slot of each choice; -1: none.
  virtual std::vector<int> slots_of_picks() const { return {}; }

 protected:
  bool valid(int id) const { return id >= 0 && id < call_.problem().experts; }

  const LayerCall& call_;
  const LayerData& data_;
};

// ---- forms ----------------------------------------------------------------------------------------------------------

class LayerForm {
 public:
  virtual ~LayerForm() = default;
  // The launches of one layer.
  virtual void launch(const LayerCall& call) const = 0;
  // Where down polls for what gate-up stores: gate-up alone, which waits for nobody. What it leaves out would be waited
  // for. False where down does not poll, and nothing is launched.
  virtual bool launch_gate_up(const LayerCall&) const { return false; }
  // Poisons what the kernels must write, in a workspace that serves nothing but the self-test.
  virtual void poison(const Stream& stream, const LayerContext& context, ExpertWorkspace& workspace) const = 0;
  // Reads what launch() left, and waits for it. Both arguments must outlive the reader.
  virtual std::unique_ptr<LayerReader> read(const LayerCall& call, const LayerData& data) const = 0;
};

const LayerForm& form_of(plan::moe::RowForm form);

// ---- what forms have in common --------------------------------------------------------------------------------------

struct GemmPair {
  moe::GemmArgs up, down;
};
// bf16 rows from `x` to ExpertWorkspace::hidden() to ExpertWorkspace::partial(); forms change what differs.
GemmPair arguments_of(const LayerCall& call, DeviceAddress x);
// The layer's input with rows that are a multiple of 64 long: itself, or a padded copy.
DeviceAddress padded_input(const LayerCall& call);
void launch_gemms(const LayerCall& call, const GemmPair& args);
void launch_first_gemm(const LayerCall& call, const GemmPair& args);  // gate-up

// One object for each form (form_sorted.cpp, form_unsorted.cpp).
const LayerForm& rows_form();
const LayerForm& swizzled_form();
const LayerForm& fp4_form();
const LayerForm& one_token_form();
const LayerForm& few_tokens_form();

}  // namespace fourfold::cuda
