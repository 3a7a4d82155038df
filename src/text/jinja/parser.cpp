#include <algorithm>

#include "base/check.h"
#include "text/jinja/ast.h"
#include "text/jinja/lexer.h"

namespace fourfold::text::jinja {
namespace {

constexpr int kMaxNesting = 100;    // of brackets, operators and blocks while parsing
constexpr int kMaxTreeDepth = 300;  // of the tree: long chains of operators lean to one side

class Parser {
 public:
  Parser(std::string_view source, std::string_view name) : name_(name), tokens_(tokenize(source, name)) {}

  Tree run() {
    Tree tree;
    tree.root = body({});
    if (!at_end()) error("unexpected end of the template");
    tree.names = std::move(names_);
    return tree;
  }

 private:
  struct Nest {
    explicit Nest(Parser& parser) : parser_(parser) {
      if (++parser.nesting_ > kMaxNesting) parser.error(fmt::format("nested deeper than {} levels", kMaxNesting));
    }
    ~Nest() { --parser_.nesting_; }
    Parser& parser_;
  };

  const Token& current() const { return tokens_[at_]; }
  const Token& peek() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  bool at_end() const { return current().kind == TokenKind::kEnd; }
  void next() {
    if (!at_end()) ++at_;
  }
  bool is_op(std::string_view op) const { return current().kind == TokenKind::kOperator && current().text == op; }
  bool is_name(std::string_view name) const { return current().kind == TokenKind::kName && current().text == name; }
  bool skip_op(std::string_view op) {
    if (!is_op(op)) return false;
    next();
    return true;
  }
  bool skip_name(std::string_view name) {
    if (!is_name(name)) return false;
    next();
    return true;
  }

  [[noreturn]] void error(std::string_view what) const { fail("{}: line {}: {}", name_, current().line, what); }
  [[noreturn]] void unexpected(std::string_view wanted) const {
    std::string found;
    switch (current().kind) {
      case TokenKind::kEnd:
        found = "the end of the template";
        break;
      case TokenKind::kData:
        found = "text";
        break;
      case TokenKind::kBlockEnd:
        found = "'%}'";
        break;
      case TokenKind::kVariableEnd:
        found = "'}}'";
        break;
      case TokenKind::kString:
        found = "a string";
        break;
      default:
        found = fmt::format("'{}'", printable(current().text));
    }
    error(fmt::format("found {}, {} is wanted", found, wanted));
  }
  void expect_op(std::string_view op) {
    if (!skip_op(op)) unexpected(fmt::format("'{}'", op));
  }
  void expect_block_end() {
    if (current().kind != TokenKind::kBlockEnd) unexpected("'%}'");
    next();
  }
  std::string expect_name() {
    if (current().kind != TokenKind::kName) unexpected("a name");
    std::string out = current().text;
    next();
    return out;
  }

  int intern(const std::string& name) {
    const auto [found, added] = name_ids_.try_emplace(name, static_cast<int>(names_.size()));
    if (added) names_.push_back(name);
    return found->second;
  }

  NodePtr leaf(Op op, int line) const {
    auto node = std::make_unique<Node>();
    node->op = op;
    node->line = line;
    return node;
  }

  // Adds a child and keeps account of the depth.
  void add(Node& node, NodePtr child) {
    if (child) deepen(node, *child);
    node.children.push_back(std::move(child));
  }
  void deepen(Node& node, const Node& child) {
    node.depth = std::max(node.depth, child.depth + 1);
    if (node.depth > kMaxTreeDepth) error(fmt::format("an expression of more than {} levels", kMaxTreeDepth));
  }
  template <typename... Children>
  NodePtr make(Op op, int line, Children... children) {
    NodePtr node = leaf(op, line);
    (add(*node, std::move(children)), ...);
    return node;
  }

  // ---- statements

  // Up to one of the given block names, which is left as the current token.
  NodePtr body(const std::vector<std::string>& ends) {
    const Nest nest(*this);
    NodePtr out = make(Op::kBody, current().line);
    while (!at_end()) {
      const int line = current().line;
      if (current().kind == TokenKind::kData) {
        NodePtr text = make(Op::kText, line);
        text->text = current().text;
        next();
        add(*out, std::move(text));
      } else if (current().kind == TokenKind::kVariableBegin) {
        next();
        NodePtr value = tuple(true);
        if (current().kind != TokenKind::kVariableEnd) unexpected("'}}'");
        next();
        add(*out, make(Op::kOutput, line, std::move(value)));
      } else {
        next();  // block begin
        if (current().kind == TokenKind::kName && std::find(ends.begin(), ends.end(), current().text) != ends.end()) {
          return out;
        }
        add(*out, statement());
      }
    }
    if (!ends.empty()) unexpected(fmt::format("'{{% {} %}}'", ends.back()));
    return out;
  }

  NodePtr block_body(std::string_view end) {
    expect_block_end();
    NodePtr out = body({std::string(end)});
    next();
    expect_block_end();
    return out;
  }

  NodePtr statement() {
    const int line = current().line;
    const std::string keyword = expect_name();
    if (keyword == "set") return set_statement(line);
    if (keyword == "if") return if_statement(line);
    if (keyword == "for") return for_statement(line);
    if (keyword == "macro") return macro_statement(line);
    if (keyword == "call") return call_statement(line);
    if (keyword == "with") return with_statement(line);
    if (keyword == "generation") {
      // A scope of its own, for training masks; the text is what matters here.
      NodePtr node = make(Op::kWith, line);
      node->flag = true;
      add(*node, guarded_body("endgeneration"));
      return node;
    }
    if (keyword == "filter") {
      NodePtr chain = make(Op::kHole, line);
      chain = filters(std::move(chain), true);
      NodePtr inner = guarded_body("endfilter");
      return make(Op::kFilterBlock, line, std::move(chain), std::move(inner));
    }
    if (keyword == "print") {
      NodePtr value = tuple(true);
      expect_block_end();
      return make(Op::kOutput, line, std::move(value));
    }
    if (keyword == "break" || keyword == "continue") {
      if (loops_ == 0) error(fmt::format("'{}' outside of a loop", keyword));
      expect_block_end();
      return make(keyword == "break" ? Op::kBreak : Op::kContinue, line);
    }
    error(fmt::format("the tag '{}' is not known or not supported in a chat template", printable(keyword)));
  }

  // The body of something that is a function in jinja2: break and continue do not leave it.
  NodePtr guarded_body(std::string_view end) {
    const int loops = std::exchange(loops_, 0);
    NodePtr out = block_body(end);
    loops_ = loops;
    return out;
  }

  NodePtr set_statement(int line) {
    NodePtr target = assign_target(true);
    if (skip_op("=")) {
      NodePtr value = tuple(true);
      expect_block_end();
      return make(Op::kSet, line, std::move(target), std::move(value));
    }
    NodePtr chain;
    if (is_op("|")) chain = filters(make(Op::kHole, line), false);
    NodePtr inner = block_body("endset");
    return make(Op::kSetBlock, line, std::move(target), std::move(chain), std::move(inner));
  }

  NodePtr if_statement(int line) {
    NodePtr node = make(Op::kIf, line);
    add(*node, tuple(false));
    while (true) {
      expect_block_end();
      add(*node, body({"elif", "else", "endif"}));
      if (skip_name("elif")) {
        add(*node, tuple(false));
        continue;
      }
      if (skip_name("else")) {
        expect_block_end();
        add(*node, body({"endif"}));
      }
      next();
      expect_block_end();
      return node;
    }
  }

  NodePtr for_statement(int line) {
    NodePtr node = make(Op::kFor, line);
    add(*node, assign_target(false));
    if (!skip_name("in")) unexpected("'in'");
    add(*node, tuple(false));
    add(*node, skip_name("if") ? expression(true) : nullptr);
    node->flag = skip_name("recursive");
    expect_block_end();
    ++loops_;
    add(*node, body({"else", "endfor"}));
    --loops_;
    NodePtr otherwise;
    if (skip_name("else")) {
      expect_block_end();
      otherwise = body({"endfor"});
    }
    next();
    expect_block_end();
    add(*node, std::move(otherwise));
    return node;
  }

  void signature(Node& node) {
    expect_op("(");
    while (!is_op(")")) {
      Parameter parameter;
      parameter.name = intern(expect_name());
      for (const Parameter& other : node.parameters) {
        if (other.name == parameter.name) error("a parameter is named twice");
      }
      if (skip_op("=")) {
        parameter.fallback = expression(true);
        deepen(node, *parameter.fallback);
      } else if (!node.parameters.empty() && node.parameters.back().fallback) {
        error("a parameter without a default follows one with a default");
      }
      node.parameters.push_back(std::move(parameter));
      if (!skip_op(",") && !is_op(")")) unexpected("',' or ')'");
    }
    next();
  }

  NodePtr macro_statement(int line) {
    NodePtr node = make(Op::kMacro, line);
    node->text = expect_name();
    node->name = intern(node->text);
    signature(*node);
    add(*node, guarded_body("endmacro"));
    return node;
  }

  NodePtr call_statement(int line) {
    NodePtr node = make(Op::kCallBlock, line);
    if (is_op("(")) signature(*node);
    NodePtr call = expression(true);
    if (call->op != Op::kCall) error("'call' wants a call");
    add(*node, std::move(call));
    add(*node, guarded_body("endcall"));
    return node;
  }

  NodePtr with_statement(int line) {
    NodePtr node = make(Op::kWith, line);
    while (current().kind != TokenKind::kBlockEnd) {
      if (!node->children.empty()) expect_op(",");
      add(*node, assign_target(false));
      expect_op("=");
      add(*node, expression(true));
    }
    add(*node, block_body("endwith"));
    return node;
  }

  NodePtr assign_target(bool with_namespace) {
    const int line = current().line;
    if (with_namespace && current().kind == TokenKind::kName && peek().kind == TokenKind::kOperator &&
        peek().text == ".") {
      NodePtr object = make(Op::kName, line);
      object->text = expect_name();
      object->name = intern(object->text);
      next();
      NodePtr node = make(Op::kAttribute, line, std::move(object));
      node->text = expect_name();
      return node;
    }
    NodePtr first = single_target();
    if (!is_op(",")) return first;
    NodePtr node = make(Op::kTuple, line, std::move(first));
    while (skip_op(",")) {
      if (current().kind != TokenKind::kName && !is_op("(")) break;
      add(*node, single_target());
    }
    return node;
  }

  NodePtr single_target() {
    const Nest nest(*this);
    const int line = current().line;
    if (skip_op("(")) {
      NodePtr node = make(Op::kTuple, line);
      bool comma = false;
      while (!is_op(")")) {
        add(*node, single_target());
        if (!skip_op(",")) break;
        comma = true;
      }
      expect_op(")");
      if (node->children.size() == 1 && !comma) return std::move(node->children[0]);
      return node;
    }
    NodePtr node = make(Op::kName, line);
    node->text = expect_name();
    for (const char* reserved : {"true", "false", "none", "True", "False", "None"}) {
      if (node->text == reserved) error(fmt::format("'{}' cannot be assigned to", reserved));
    }
    node->name = intern(node->text);
    return node;
  }

  // ---- expressions

  bool at_tuple_end() const {
    return current().kind == TokenKind::kVariableEnd || current().kind == TokenKind::kBlockEnd || is_op(")") ||
           at_end();
  }

  NodePtr tuple(bool with_condition, bool parenthesized = false) {
    const Nest nest(*this);
    const int line = current().line;
    NodePtr node = make(Op::kTuple, line);
    bool comma = false;
    while (!at_tuple_end() && !(!parenthesized && is_name("recursive"))) {
      add(*node, expression(with_condition));
      if (!skip_op(",")) {
        comma = comma && node->children.size() > 1;
        break;
      }
      comma = true;
    }
    if (!comma && node->children.size() == 1) return std::move(node->children[0]);
    if (node->children.empty() && !parenthesized) unexpected("an expression");
    return node;
  }

  NodePtr expression(bool with_condition) {
    const Nest nest(*this);
    if (!with_condition) return or_expression();
    const int line = current().line;
    NodePtr value = or_expression();
    while (skip_name("if")) {
      NodePtr condition = or_expression();
      NodePtr otherwise;
      if (skip_name("else")) otherwise = expression(true);
      value = make(Op::kCondition, line, std::move(value), std::move(condition), std::move(otherwise));
    }
    return value;
  }

  NodePtr or_expression() {
    NodePtr left = and_expression();
    while (is_name("or")) {
      const int line = current().line;
      next();
      NodePtr right = and_expression();
      left = make(Op::kOr, line, std::move(left), std::move(right));
    }
    return left;
  }

  NodePtr and_expression() {
    NodePtr left = not_expression();
    while (is_name("and")) {
      const int line = current().line;
      next();
      NodePtr right = not_expression();
      left = make(Op::kAnd, line, std::move(left), std::move(right));
    }
    return left;
  }

  NodePtr not_expression() {
    if (!is_name("not")) return comparison();
    const Nest nest(*this);
    const int line = current().line;
    next();
    return make(Op::kNot, line, not_expression());
  }

  NodePtr comparison() {
    NodePtr left = sum();
    NodePtr node;
    while (true) {
      const int line = current().line;
      std::string op;
      if (current().kind == TokenKind::kOperator) {
        for (const char* known : {"==", "!=", "<", "<=", ">", ">="}) {
          if (current().text == known) op = known;
        }
      }
      if (!op.empty() || is_name("in")) {
        if (op.empty()) op = "in";
        next();
      } else if (is_name("not") && peek().kind == TokenKind::kName && peek().text == "in") {
        op = "not in";
        next();
        next();
      } else {
        return node ? std::move(node) : std::move(left);
      }
      if (!node) node = make(Op::kCompare, line, std::move(left));
      node->texts.push_back(op);
      add(*node, sum());
    }
  }

  NodePtr binary(const std::string& op, int line, NodePtr left, NodePtr right) {
    NodePtr node = make(Op::kBinary, line, std::move(left), std::move(right));
    node->text = op;
    return node;
  }

  NodePtr sum() {
    NodePtr left = concatenation();
    while (is_op("+") || is_op("-")) {
      const std::string op = current().text;
      const int line = current().line;
      next();
      NodePtr right = concatenation();
      left = binary(op, line, std::move(left), std::move(right));
    }
    return left;
  }

  NodePtr concatenation() {
    const int line = current().line;
    NodePtr first = product();
    if (!is_op("~")) return first;
    NodePtr node = make(Op::kConcat, line, std::move(first));
    while (skip_op("~")) add(*node, product());
    return node;
  }

  NodePtr product() {
    NodePtr left = power();
    while (is_op("*") || is_op("/") || is_op("//") || is_op("%")) {
      const std::string op = current().text;
      const int line = current().line;
      next();
      NodePtr right = power();
      left = binary(op, line, std::move(left), std::move(right));
    }
    return left;
  }

  NodePtr power() {
    NodePtr left = unary(true);
    while (is_op("**")) {
      const int line = current().line;
      next();
      NodePtr right = unary(true);
      left = binary("**", line, std::move(left), std::move(right));
    }
    return left;
  }

  NodePtr unary(bool with_filters) {
    const Nest nest(*this);
    const int line = current().line;
    NodePtr node;
    if (skip_op("-")) {
      node = make(Op::kNegate, line, unary(false));
    } else if (skip_op("+")) {
      node = make(Op::kPlus, line, unary(false));
    } else {
      node = primary();
    }
    node = postfix(std::move(node));
    return with_filters ? filters_and_tests(std::move(node)) : std::move(node);
  }

  NodePtr constant(Value value, int line) {
    NodePtr node = make(Op::kConst, line);
    node->value = std::move(value);
    return node;
  }

  NodePtr primary() {
    const int line = current().line;
    switch (current().kind) {
      case TokenKind::kName: {
        const std::string name = expect_name();
        if (name == "true" || name == "True") return constant(Value::boolean(true), line);
        if (name == "false" || name == "False") return constant(Value::boolean(false), line);
        if (name == "none" || name == "None") return constant(Value::none(), line);
        NodePtr node = make(Op::kName, line);
        node->text = name;
        node->name = intern(name);
        return node;
      }
      case TokenKind::kString: {
        std::string text;
        while (current().kind == TokenKind::kString) {
          text += current().text;
          next();
        }
        return constant(Value::string(std::move(text)), line);
      }
      case TokenKind::kInteger:
      case TokenKind::kFloat: {
        Value value = current().value;
        next();
        return constant(std::move(value), line);
      }
      default:
        break;
    }
    if (skip_op("(")) {
      NodePtr node = tuple(true, true);
      expect_op(")");
      return node;
    }
    if (skip_op("[")) {
      NodePtr node = make(Op::kList, line);
      while (!is_op("]")) {
        add(*node, expression(true));
        if (!skip_op(",") && !is_op("]")) unexpected("',' or ']'");
      }
      next();
      return node;
    }
    if (skip_op("{")) {
      NodePtr node = make(Op::kDict, line);
      while (!is_op("}")) {
        add(*node, expression(true));
        expect_op(":");
        add(*node, expression(true));
        if (!skip_op(",") && !is_op("}")) unexpected("',' or '}'");
      }
      next();
      return node;
    }
    unexpected("an expression");
  }

  NodePtr postfix(NodePtr node) {
    while (true) {
      const int line = current().line;
      if (skip_op(".")) {
        if (current().kind == TokenKind::kInteger) {
          node = make(Op::kItem, line, std::move(node), constant(current().value, line));
          next();
        } else {
          node = make(Op::kAttribute, line, std::move(node));
          node->text = expect_name();
        }
      } else if (skip_op("[")) {
        node = subscript(std::move(node), line);
      } else if (is_op("(")) {
        node = call(std::move(node), line);
      } else {
        return node;
      }
    }
  }

  NodePtr subscript(NodePtr object, int line) {
    NodePtr parts[3];
    bool slice = false;
    size_t part = 0;
    if (!is_op(":")) parts[0] = expression(true);
    while (is_op(":")) {
      slice = true;
      next();
      if (++part > 2) unexpected("']'");
      if (!is_op(":") && !is_op("]") && !is_op(",")) parts[part] = expression(true);
    }
    if (is_op(",")) {
      if (slice) error("several slices in one subscript are not supported");
      NodePtr index = make(Op::kTuple, line, std::move(parts[0]));
      while (skip_op(",")) add(*index, expression(true));
      parts[0] = std::move(index);
    }
    expect_op("]");
    if (!slice) return make(Op::kItem, line, std::move(object), std::move(parts[0]));
    return make(Op::kSlice, line, std::move(object), std::move(parts[0]), std::move(parts[1]), std::move(parts[2]));
  }

  void call_arguments(Node& node) {
    expect_op("(");
    bool first = true;
    CallArguments& arguments = node.arguments;
    while (!is_op(")")) {
      if (!first) {
        expect_op(",");
        if (is_op(")")) break;
      }
      first = false;
      NodePtr* place = nullptr;
      if (skip_op("*")) {
        place = &arguments.star;
      } else if (skip_op("**")) {
        place = &arguments.star_star;
      } else if (current().kind == TokenKind::kName && peek().kind == TokenKind::kOperator && peek().text == "=") {
        const std::string name = expect_name();
        next();
        for (const auto& [other, value] : arguments.named) {
          if (other == name) error(fmt::format("the argument '{}' is given twice", printable(name)));
        }
        arguments.named.emplace_back(name, expression(true));
        deepen(node, *arguments.named.back().second);
        continue;
      } else {
        if (!arguments.named.empty() || arguments.star_star) error("a positional argument follows a named one");
        arguments.positional.push_back(expression(true));
        deepen(node, *arguments.positional.back());
        continue;
      }
      if (*place) error("two arguments with '*'");
      *place = expression(true);
      deepen(node, **place);
    }
    next();
  }

  NodePtr call(NodePtr callee, int line) {
    NodePtr node = make(Op::kCall, line, std::move(callee));
    call_arguments(*node);
    return node;
  }

  std::string dotted_name() {
    std::string name = expect_name();
    while (skip_op(".")) name += "." + expect_name();
    return name;
  }

  NodePtr filters(NodePtr node, bool start_inline) {
    while (is_op("|") || start_inline) {
      if (!start_inline) next();
      start_inline = false;
      const int line = current().line;
      node = make(Op::kFilter, line, std::move(node));
      node->text = dotted_name();
      if (is_op("(")) call_arguments(*node);
    }
    return node;
  }

  NodePtr filters_and_tests(NodePtr node) {
    while (true) {
      const int line = current().line;
      if (is_op("|")) {
        node = filters(std::move(node), false);
      } else if (is_name("is")) {
        node = test(std::move(node));
      } else if (is_op("(")) {
        node = call(std::move(node), line);
      } else {
        return node;
      }
    }
  }

  NodePtr test(NodePtr node) {
    const int line = current().line;
    next();
    const bool negated = skip_name("not");
    node = make(Op::kTest, line, std::move(node));
    node->text = dotted_name();
    const TokenKind kind = current().kind;
    if (is_op("(")) {
      call_arguments(*node);
    } else if (((kind == TokenKind::kName && !is_name("else") && !is_name("or") && !is_name("and")) ||
                kind == TokenKind::kString || kind == TokenKind::kInteger || kind == TokenKind::kFloat || is_op("[") ||
                is_op("{"))) {
      if (is_name("is")) error("tests cannot be chained with 'is'");
      // A name that goes on with the expression around the test is no argument.
      NodePtr argument = postfix(primary());
      deepen(*node, *argument);
      node->arguments.positional.push_back(std::move(argument));
    }
    return negated ? make(Op::kNot, line, std::move(node)) : std::move(node);
  }

  std::string name_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int nesting_ = 0;
  int loops_ = 0;
  std::vector<std::string> names_;
  std::unordered_map<std::string, int> name_ids_;
};

}  // namespace

Tree parse_template(std::string_view source, std::string_view name) { return Parser(source, name).run(); }

}  // namespace fourfold::text::jinja
