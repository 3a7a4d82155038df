// The device sources, embedded in the binary when it is built: src/kernels and the headers that it may include.
#pragma once

#include <span>
#include <string_view>

#include "jit/nvrtc.h"

namespace fourfold::jit {

struct EmbeddedSource {
  std::string_view name;  // relative to src/, as device code includes it
  std::string_view text;
};
std::span<const EmbeddedSource> embedded_sources();

// A main source with all embedded sources as its headers.
SourceSet with_embedded(std::string name, std::string text);

}  // namespace fourfold::jit
