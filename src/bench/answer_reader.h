// What a stream of an OpenAI-compatible server delivered, and when.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace fourfold::bench {

// One request as its client saw it. Times are seconds from the begin of the load, -1 where there is none.
struct RequestRecord {
  double start = 0, end = -1;
  double first = -1;           // of anything the model wrote, reasoning included
  double first_content = -1;   // of what is neither reasoning nor a tool call
  std::vector<double> pieces;  // of each piece of the stream that had text
  int64_t prompt_tokens = -1, output_tokens = -1, cached_tokens = -1, reasoning_tokens = -1;  // as the server says
  int64_t bytes = 0;                                                                          // of delivered text
  std::string finish;
  std::string error;  // empty: the answer is whole

  bool good() const { return error.empty(); }
  // Tokens of a whole answer: the server's count, or else the pieces; an answer that is not whole has none.
  int64_t delivered() const;
};

// Reads server-sent events of /v1/chat/completions and /v1/completions from the bytes of a body, in any cut.
class AnswerReader {
 public:
  explicit AnswerReader(RequestRecord& record) : record_(record) {}

  // Bytes that came at `time`.
  void feed(std::string_view bytes, double time);
  // The stream has ended: notes in the record what is missing.
  void finish();

 private:
  void line(std::string_view line, double time);
  void event(std::string_view data, double time);
  void usage(const Json& usage);
  bool like_before(std::string_view data, double time);
  void learn(std::string_view data, const Json& choice, size_t content, size_t other);
  void piece(size_t content, size_t other, double time);

  RequestRecord& record_;
  std::string line_;
  bool done_ = false;
  // The last event that was text and nothing else, around its text.
  std::string before_, after_;
};

}  // namespace fourfold::bench
