// Steps of a model on a card whose operations are measured: a token for each of so many sequences, or a prompt.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "chat/model_directory.h"
#include "cmd/model_options.h"
#include "model/model.h"

namespace fourfold::cmd {

inline constexpr int64_t kMostCardSequences = 256;  // steps of more rows are a prompt

class CardSteps {
 public:
  // Sequences are `context` positions long before a step. Caches for the largest of these steps.
  CardSteps(model::Model& model, const std::vector<int64_t>& rows, int64_t context);

  static bool is_prompt(int64_t rows) { return rows > kMostCardSequences; }
  // Calls `run` with the step's batch. A prompt begins at position 0.
  void with_batch(int64_t rows, const std::function<void(const ops::Batch&)>& run) const;
  void take(int64_t rows);
  std::optional<ops::OperationTimes> time(int64_t rows);

 private:
  model::Model& model_;
  int64_t context_;
  size_t pages_each_;
  std::vector<int32_t> pages_;
  model::Caches caches_;
};

// A checkpoint's directory, or so many layers of a shape in a mix of formats, on GPU `device`, for steps of up to
// `most_rows` rows.
struct CardModel {
  std::string model, mix;
  int64_t layers = 12;
  int device = 0, threads = 0;
  bool is_directory() const;
  DummyArgs dummy() const;
  chat::LoadedModel load(int64_t most_rows) const;
};

}  // namespace fourfold::cmd
