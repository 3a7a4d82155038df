#include "cmd/shape_options.h"

#include "base/check.h"
#include "cmd/arguments.h"

namespace fourfold::cmd {
namespace {
template <typename Row>
std::string names(std::span<const Row> rows) {
  std::string list;
  for (const Row& row : rows) list += (list.empty() ? "" : ", ") + std::string(row.name);
  return list;
}
}  // namespace

void ShapeOptions::add_to(Command& command, bool directories) {
  add_card_to(command);
  add_shape_to(command, directories);
}

void ShapeOptions::add_card_to(Command& command) {
  command.add_option("--gpu", gpu, "Card: " + names<plan::Gpu>(plan::kGpus) + " (default: h200)");
  command.add_option("--arch", arch, "Architecture instead of a card: " + names<plan::Arch>(plan::kArchs));
}

void ShapeOptions::add_shape_to(Command& command, bool directories) {
  command.add_option("--model", model,
                     (directories ? "A checkpoint directory, or the shape of a model: " : "Shape of a model: ") +
                         names<plan::moe::NamedShape>(plan::moe::named_shapes()));
  constexpr plan::moe::Limits kLimits = plan::moe::kLimits;
  command.add_option("--experts", experts, "Number of routed experts").range(1, kLimits.experts);
  command.add_option("--top-k", top_k, "Experts per token").range(1, kLimits.top_k);
  command.add_option("--hidden", hidden, "Hidden size").range(kLimits.hidden_min, kLimits.hidden);
  command.add_option("--intermediate", intermediate, "Intermediate size of one expert")
      .range(kLimits.intermediate_min, kLimits.intermediate);
  command.add_option("--tp,--tensor-parallel-size", ranks, "Tensor-parallel ranks, of which each has a slice")
      .show_default()
      .range(1, kLimits.ranks);
  command
      .add_option("--activations", activations,
                  "Activations that kernels multiply: bf16 (W4A16), nvfp4 (W4A4), or auto (the faster one for each "
                  "number of tokens)")
      .show_default();
  command.add_option("--weights", weights, "Weight format: nvfp4 or mxfp4").show_default();
  command.add_option("--activation", activation, "Activation function: swiglu, swiglu-clamp or relu2");
  command.add_option("--shared", shared, "Shared expert beside the routed ones: none, bf16 or nvfp4").show_default();
}

const plan::Gpu& ShapeOptions::card() const {
  if (gpu.empty()) return arch.empty() ? plan::find_gpu("h200") : plan::representative_gpu(plan::find_arch(arch));
  const plan::Gpu& row = plan::find_gpu(gpu);
  if (!arch.empty() && plan::find_arch(arch).name != row.arch) {
    fail("--gpu {} is {}, --arch says {}: wanted one of them, or both the same", gpu, row.arch, printable(arch));
  }
  return row;
}

plan::moe::Problem ShapeOptions::problem() const {
  plan::moe::Problem p;
  if (!model.empty()) {
    p = plan::moe::find_shape(model);
  } else if (!experts || !top_k || !hidden || !intermediate) {
    fail("no shape: wanted --model, or all of --experts, --top-k, --hidden and --intermediate");
  }
  p.experts = experts.value_or(p.experts);
  p.top_k = top_k.value_or(p.top_k);
  p.hidden = hidden.value_or(p.hidden);
  p.intermediate = intermediate.value_or(p.intermediate);

  if (weights == "nvfp4") {
    p.weights = plan::moe::WeightFormat::kNvfp4;
  } else if (weights == "mxfp4") {
    p.weights = plan::moe::WeightFormat::kMxfp4;
  } else {
    fail("--weights '{}': wanted nvfp4 or mxfp4", printable(weights));
  }
  p.activations = plan::moe::parse_activations(activations);
  if (activation == "swiglu") {
    p.activation = plan::moe::Activation::kSwiGlu;
  } else if (activation == "swiglu-clamp") {
    p.activation = plan::moe::Activation::kSwiGluClamp;
  } else if (activation == "relu2") {
    p.activation = plan::moe::Activation::kRelu2;
  } else if (!activation.empty()) {
    fail("--activation '{}': wanted swiglu, swiglu-clamp or relu2", printable(activation));
  }
  if (shared == "bf16") {
    p.shared = plan::moe::SharedExpert::kBf16;
  } else if (shared == "nvfp4") {
    p.shared = plan::moe::SharedExpert::kNvfp4;
  } else if (shared != "none") {
    fail("--shared '{}': wanted none, bf16 or nvfp4", printable(shared));
  }
  if (p.shared != plan::moe::SharedExpert::kNone && p.shared_intermediate == 0) {
    fail("--shared {}: the shape has no shared expert, wanted none", shared);
  }
  plan::moe::validate(p);
  if (ranks != 1) p = plan::moe::rank_slice(p, ranks);
  return p;
}

}  // namespace fourfold::cmd
