// Every recorded case of tests/text/data/template_cases.jsonl (made by tools/goldens_text/make_templates.py): the text
// that transformers renders, or the fact that it refuses.
#include <gtest/gtest.h>

#include <map>
#include <sstream>

#include "base/file.h"
#include "base/json.h"
#include "text/chat_template.h"

namespace fourfold::text {
namespace {

TEST(ChatTemplateGolden, EqualToTransformers) {
  const auto data = std::filesystem::path(FOURFOLD_SOURCE_DIR) / "tests/text/data";
  std::map<std::string, ChatTemplate> templates;
  for (const auto& entry : std::filesystem::directory_iterator(data / "templates")) {
    templates.emplace(entry.path().stem().string(), ChatTemplate::from_file(entry.path()));
  }
  std::istringstream lines(read_file(data / "template_cases.jsonl"));
  size_t rendered = 0, refused = 0, wrong = 0;
  for (std::string line; std::getline(lines, line) && wrong < 10;) {
    const Json json = parse_json(line, "case");
    const ChatTemplate& chat = templates.at(json["t"].get<std::string>());
    std::string out, error;
    try {
      out = chat.render(ChatRequest::from_json(json["r"], "case"));
    } catch (const Error& caught) {
      error = caught.what();
    }
    const bool wanted = json.contains("o");
    (wanted ? rendered : refused)++;
    EXPECT_EQ(error.empty(), wanted) << json["t"] << ": " << error << "\n" << json.value("e", "") << "\n" << json["r"];
    if (wanted && error.empty()) {
      EXPECT_EQ(out, json["o"].get<std::string>()) << json["t"] << "\n" << json["r"];
    }
    wrong += error.empty() != wanted || (wanted && out != json["o"].get<std::string>());
  }
  EXPECT_GE(rendered, 300u);
  EXPECT_GE(refused, 20u);
  EXPECT_EQ(wrong, 0u);
}

}  // namespace
}  // namespace fourfold::text
