#include "model/name_table.h"

#include <functional>

namespace fourfold::model {
namespace {

constexpr std::array<std::string_view, 10> kNames = {"weight",           "weight_packed",
                                                     "weight_scale",     "weight_scale_2",
                                                     "weight_scale_inv", "weight_global_scale",
                                                     "input_scale",      "input_global_scale",
                                                     "weight_shape",     ""};
static_assert(kNames.size() == static_cast<size_t>(Parameter::kCount));

}  // namespace

std::string_view parameter_name(Parameter parameter) { return kNames[static_cast<size_t>(parameter)]; }

SplitName split_name(std::string_view name) {
  const size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return {name, Parameter::kItself};
  const std::string_view last = name.substr(dot + 1);
  if (last.starts_with("weight") || last.starts_with("input_")) {
    for (size_t i = 0; i + 1 < kNames.size(); ++i) {
      if (last == kNames[i]) return {name.substr(0, dot), static_cast<Parameter>(i)};
    }
  }
  return {name, Parameter::kItself};
}

size_t NameTable::hash_of(std::string_view module) { return std::hash<std::string_view>()(module); }

void NameTable::reserve(size_t modules) {
  modules_.reserve(modules);
  while (places_.size() < 2 * modules) grow();
}

uint32_t NameTable::add(const SplitName& name, size_t hash, uint32_t tensor) {
  if (places_.size() < 2 * (modules_.size() + 1)) grow();
  size_t at = hash & (places_.size() - 1);
  for (; places_[at] != 0; at = (at + 1) & (places_.size() - 1)) {
    Module& module = modules_[places_[at] - 1];
    if (module.hash != hash || module.name != name.module) continue;
    uint32_t& place = module.tensors[static_cast<size_t>(name.parameter)];
    if (place != kNone) return place;
    place = tensor;
    return kNone;
  }
  Module& module = modules_.emplace_back();
  module.name = name.module;
  module.hash = hash;
  module.tensors.fill(kNone);
  module.tensors[static_cast<size_t>(name.parameter)] = tensor;
  places_[at] = static_cast<uint32_t>(modules_.size());
  return kNone;
}

const NameTable::Module* NameTable::find(std::string_view name, size_t hash) const {
  if (places_.empty()) return nullptr;
  for (size_t at = hash & (places_.size() - 1); places_[at] != 0; at = (at + 1) & (places_.size() - 1)) {
    const Module& module = modules_[places_[at] - 1];
    if (module.hash == hash && module.name == name) return &module;
  }
  return nullptr;
}

void NameTable::grow() {
  const size_t size = places_.empty() ? 64 : 2 * places_.size();
  places_.assign(size, 0);
  for (size_t i = 0; i < modules_.size(); ++i) {
    size_t at = modules_[i].hash & (size - 1);
    while (places_[at] != 0) at = (at + 1) & (size - 1);
    places_[at] = static_cast<uint32_t>(i + 1);
  }
}

}  // namespace fourfold::model
