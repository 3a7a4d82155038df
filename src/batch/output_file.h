// The answers of a batch: one JSON object a line, in OpenAI's form, in the order in which they were there.
//
//   {"id": "batch_req_7", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}},
//    "error": null}
//
// The id has the number of the request's line. A program that is ended in the middle of a line leaves it behind; it is
// cut off again, and its request is one that has no answer yet.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>

namespace fourfold::batch {

class OutputFile {
 public:
  // Opens or makes it, reads what is in it, and holds it alone. An Error where it has anything else in it than answers
  // of a batch, or another program writes it.
  explicit OutputFile(std::string path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  // Whether line `number` has its answer already. An Error where that answer is for another custom_id.
  bool has(int64_t number, const std::optional<std::string>& custom_id) const;
  int64_t answers() const { return static_cast<int64_t>(answered_.size()); }
  int64_t failures() const { return failures_; }  // of all of them: those with an error, or a status other than 200

  // Adds the answer to a line. `body` is JSON without a line end.
  void add_response(int64_t number, const std::string& custom_id, int status, const std::string& request_id,
                    const std::string& body);
  void add_error(int64_t number, const std::optional<std::string>& custom_id, const std::string& message);
  // What was written is on the disk.
  void sync();

 private:
  void load();
  void take(const std::string& line, int64_t place);
  void append(int64_t number, const std::optional<std::string>& custom_id, const std::string& line, bool failure);

  std::string path_;
  int fd_ = -1;
  std::unordered_map<int64_t, uint64_t> answered_;  // line number to the checksum of its custom_id
  int64_t failures_ = 0;
  std::chrono::steady_clock::time_point synced_ = std::chrono::steady_clock::now();
};

}  // namespace fourfold::batch
