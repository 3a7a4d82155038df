// The kernels of a whole model on a card, without the card and without the weights' bytes: for warm and plan --kernels.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/json_forward.h"
#include "cuda/backend/backend.h"
#include "model/ranked.h"
#include "model/weight_source.h"

namespace fourfold::cmd {

// Whether `model` names a checkpoint directory, or a published shape that is known as a whole model and not only by its
// experts.
bool is_whole_model(const std::string& model);

class ModelKernels {
 public:
  // Of a checkpoint directory, in the formats that it stores; or of a shape, in those of a mix (plan::step::find_mix),
  // or of every mix where none is named, FP8 with one scale and with blocks. With the MTP head, and with both kinds of
  // caches for keys and values.
  // Of a model that is split those of all ranks, on a card each.
  ModelKernels(const jit::DeviceInfo& card, const std::string& model, const std::string& mix,
               const model::RankOptions& ranks = {});

  // Without those of experts that `refused` names.
  std::vector<cuda::ListedKernel> list(const std::set<std::string>& refused = {}) const;
  // Their self-tests on a card of that kind: {device, kernels, wrong[{kernel, reason}]}.
  Json test(int device, const std::filesystem::path& store) const;

 private:
  void rehearse(model::WeightSource& source);

  jit::DeviceInfo card_;
  model::RankOptions ranks_;
  struct Counted {
    std::shared_ptr<ops::Backend> backend;  // that counts what a model asks for
    bool fp8_cache = false;
  };
  std::vector<Counted> backends_;
};

}  // namespace fourfold::cmd
