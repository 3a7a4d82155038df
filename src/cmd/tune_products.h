// fourfold tune --products: how the products of few rows of a model are taken on this GPU.
#pragma once

#include <string>
#include <vector>

#include "cmd/options.h"

namespace fourfold::cmd {

struct TuneProducts {
  std::string model, mix;     // a checkpoint directory, or a shape with its mix
  int64_t layers = 12;        // of a shape
  int64_t context = 128;      // positions before the steps that are measured
  std::vector<int64_t> rows;  // of each step, a sequence each
  GpuOptions gpu;
  bool json = false, all = false, dry = false;
};

void tune_products(const TuneProducts& options);

}  // namespace fourfold::cmd
