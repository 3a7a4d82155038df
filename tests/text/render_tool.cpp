// render_tool TEMPLATE.jinja CASES.jsonl: renders each case {"r": request, ...} and writes one line of JSON for each:
// {"o": text} or {"e": error}. For comparing with transformers on templates and conversations that are not recorded.
#include <cstdio>
#include <fstream>
#include <iostream>

#include "text/chat_template.h"

int main(int argc, char** argv) {
  using namespace fourfold;
  using namespace fourfold::text;
  if (argc != 3) {
    std::fprintf(stderr, "usage: render_tool TEMPLATE.jinja CASES.jsonl\n");
    return 2;
  }
  try {
    const ChatTemplate chat = ChatTemplate::from_file(argv[1]);
    std::ifstream file(argv[2]);
    for (std::string line; std::getline(file, line);) {
      Json out;
      try {
        out["o"] = chat.render(ChatRequest::from_json(parse_json(line, "case")["r"], "case"));
      } catch (const Error& error) {
        out["e"] = error.what();
      }
      std::cout << out.dump() << '\n';
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "fourfold: error: %s\n", error.what());
    return 2;
  }
}
