#include "jit/sources.h"

namespace fourfold::jit {

SourceSet with_embedded(std::string name, std::string text) {
  SourceSet set{std::move(name), std::move(text), {}};
  for (const EmbeddedSource& source : embedded_sources()) set.headers.emplace_back(source.name, source.text);
  return set;
}

}  // namespace fourfold::jit
