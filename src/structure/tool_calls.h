// Tool calls as grammars, in the XML form that the Qwen models are trained on (text/output_parser.h reads it):
//
//   <tool_call>
//   <function=NAME>
//   <parameter=KEY>
//   VALUE
//   </parameter>
//   </function>
//   </tool_call>
//
// A value is a text as it is where its schema says string, and JSON elsewhere. No value holds what ends it: neither
// </function>, </tool_call> nor <parameter=; </parameter> it may hold.
#pragma once

#include <string>

#include "base/json.h"

namespace fourfold::structure {

struct ToolCallOptions {
  std::string name;              // the one tool that may be called; empty: any
  bool parallel = true;          // more than one call
  bool after_reasoning = false;  // line ends may come first
};

// Calls and nothing else. `tools` are functions in the form of OpenAI's chat. Rejected, with its place behind `tools`,
// where a schema of parameters is not taken.
std::string call_grammar(const Json& tools, const ToolCallOptions& options);
// Text, and calls in it: what a model may say to tools that are only offered.
std::string text_with_calls_grammar(const Json& tools, const ToolCallOptions& options);
// Calls, or JSON by a schema, in which < is always escaped, so that no call is ever read in it. What the schema is
// rejected for has its place behind a space, to be told from those of tools.
std::string json_or_call_grammar(const Json& schema, const Json& tools, const ToolCallOptions& options);

// The same tools, with schemas of their parameters that say which type a value is read as: what follows from
// references and combinations, which the reader of calls does not look into.
Json readable_tools(const Json& tools);

}  // namespace fourfold::structure
