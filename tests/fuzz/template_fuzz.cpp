// A template, and behind the first zero byte a conversation (or a fixed one): compile and render within small limits.
// Nothing but Error may be thrown.
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "text/chat_template.h"
#include "text/unicode.h"

namespace {

constexpr std::string_view kConversation = R"({"messages": [{"role": "system", "content": "S"},
  {"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "<think>r</think>b",
   "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": [1.5, null, true]}}}]},
  {"role": "tool", "content": "t"}], "tools": [{"type": "function", "function": {"name": "f"}}],
  "add_generation_prompt": true, "n": 3, "bos_token": "<s>", "eos_token": "</s>"})";

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fourfold;
  using namespace fourfold::text;
  const std::string_view all(reinterpret_cast<const char*>(data), size);
  const size_t cut = all.find('\0');
  try {
    const auto chat = ChatTemplate::from_source(all.substr(0, cut), "fuzz");
    const std::string_view conversation = cut == std::string_view::npos ? kConversation : all.substr(cut + 1);
    jinja::Limits limits;
    limits.max_steps = 200000;
    limits.max_memory = 16 << 20;
    limits.max_output = 1 << 20;
    const std::string out =
        chat.render(ChatRequest::from_json(parse_json(conversation, "fuzz"), "fuzz"), limits, std::time_t{0});
    if (!is_valid_utf8(out)) __builtin_trap();
  } catch (const Error&) {
  }
  return 0;
}
