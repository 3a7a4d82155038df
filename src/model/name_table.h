// The tensors of a checkpoint by what they belong to: a matrix in NVFP4 is four of them, whoever loads it asks for nine
// that it may be made of, and there are tens of thousands of matrices. So tensors are kept by module, with a place for
// each parameter that a module may have, and one search finds them all.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace fourfold::model {

// Last parts of names, behind a dot.
enum class Parameter : uint8_t {
  kWeight,
  kWeightPacked,
  kWeightScale,
  kWeightScale2,
  kWeightScaleInv,
  kWeightGlobalScale,
  kInputScale,
  kInputGlobalScale,
  kWeightShape,
  kItself,  // the tensor has the module's name: norms without ".weight", A_log, tensors of all experts
  kCount
};
std::string_view parameter_name(Parameter parameter);  // "weight_scale"; "" of kItself

struct SplitName {
  std::string_view module;
  Parameter parameter = Parameter::kItself;
};
// "a.b.weight_scale" is the weight_scale of a.b; "a.b.norm" is a.b.norm itself.
SplitName split_name(std::string_view name);

class NameTable {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Module {
    std::string_view name;
    size_t hash = 0;
    std::array<uint32_t, static_cast<size_t>(Parameter::kCount)> tensors = {};  // kNone where there is none

    uint32_t at(Parameter parameter) const { return tensors[static_cast<size_t>(parameter)]; }
  };

  static size_t hash_of(std::string_view module);
  void reserve(size_t modules);
  // Names must live as long as the table. kNone, or the tensor that has the name already: then that stays.
  uint32_t add(const SplitName& name, size_t hash, uint32_t tensor);
  // Null where there is none; valid until the next add().
  const Module* find(std::string_view module) const { return find(module, hash_of(module)); }
  const Module* find(std::string_view module, size_t hash) const;

 private:
  void grow();

  std::vector<Module> modules_;
  std::vector<uint32_t> places_;  // numbers of modules from 1; a power of two of them, at most half taken
};

}  // namespace fourfold::model
