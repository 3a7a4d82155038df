// Regular expressions as parts of a grammar: the regular subset of ECMA-262's, which JSON Schema uses.
#pragma once

#include <string>
#include <string_view>

#include "structure/grammar_text.h"

namespace fourfold::structure {

// How text is written down: as it is, or inside the quotes of a JSON string, with what must be escaped there.
struct Writing {
  bool json = false;
  bool escape_angle = false;  // json: < is \u003c, so that no tag is ever read in it
};

// One character of the set, as it is written. In JSON those that must be escaped are left out where the set has others:
// a text of plain characters can be compiled for large vocabularies at little cost. The set must have a character.
Part character(const CharSet& set, const Writing& writing);
// A text, as it is written.
Part written(std::string_view text, const Writing& writing);

enum class Anchoring {
  kWhole,   // the pattern is all of the text
  kSearch,  // as JSON Schema means it, but without an anchor on either side it is all of the text: one that a side
            // has leaves the other side open
};

// The texts that match the pattern. Characters are code points, \d, \w and \s are ASCII's, the dot is no line end.
// Rejected, with the place in the pattern, where it is no regular expression, or none of the regular ones (references
// back, looks around, word boundaries), or larger than is sensible.
Part pattern(std::string_view text, const Writing& writing, Anchoring anchoring);

}  // namespace fourfold::structure
