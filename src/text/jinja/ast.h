// The syntax tree of a template.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "text/jinja/value.h"

namespace fourfold::text::jinja {

enum class Op : uint8_t {
  // Expressions
  kConst,      // value
  kName,       // name
  kList,       // children
  kTuple,      // children
  kDict,       // children: key, value, key, value ...
  kAttribute,  // child.name
  kItem,       // child[child]
  kSlice,      // child[child:child:child], absent ones are null
  kCall,       // child(arguments)
  kFilter,     // child | text(arguments)
  kTest,       // child is text(arguments)
  kNot,
  kNegate,
  kPlus,
  kAnd,
  kOr,
  kCondition,  // child if child else child
  kCompare,    // child, then child by child; texts: operators
  kBinary,     // child text child
  kConcat,     // children
  // Statements
  kText,         // text
  kOutput,       // child
  kIf,           // children: condition, body, condition, body, ..., [else body]
  kFor,          // target, iterable, filter or null, body, else or null; flag: recursive
  kSet,          // target, value
  kSetBlock,     // target, filter chain or null (around a kHole), body
  kMacro,        // name; parameters; body
  kCallBlock,    // call expression, parameters, body
  kFilterBlock,  // filter chain around a kHole, body
  kWith,         // targets and values, body
  kBody,         // children
  kBreak,
  kContinue,
  kHole,  // what a filter block or block set pipes in
};

struct Node;
using NodePtr = std::unique_ptr<Node>;

struct Parameter {
  int name;
  NodePtr fallback;  // may be null
};

struct CallArguments {
  std::vector<NodePtr> positional;
  std::vector<std::pair<std::string, NodePtr>> named;
  NodePtr star;       // *expression
  NodePtr star_star;  // **expression
};

struct Node {
  Op op;
  int line = 0;
  int depth = 1;
  int name = -1;  // in the table of names
  bool flag = false;
  std::string text;
  Value value;
  std::vector<NodePtr> children;
  std::vector<std::string> texts;
  std::vector<Parameter> parameters;
  CallArguments arguments;
};

struct Tree {
  NodePtr root;
  std::vector<std::string> names;
};

// Throws Error with the line for a syntax error or a construct that is not supported.
Tree parse_template(std::string_view source, std::string_view name);

}  // namespace fourfold::text::jinja
