// The build without xgrammar.
#include "base/check.h"
#include "structure/compiler.h"

namespace fourfold::structure {

bool has_compiler() { return false; }

std::unique_ptr<Compiler> make_compiler(const Vocabulary&, const CompilerOptions&) {
  fail("this program was built without grammars (FOURFOLD_XGRAMMAR=OFF)");
}

}  // namespace fourfold::structure
