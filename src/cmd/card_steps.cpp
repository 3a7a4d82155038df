#include "cmd/card_steps.h"

#include <algorithm>
#include <filesystem>
#include <numeric>

#include "base/math.h"

namespace fourfold::cmd {
namespace {

constexpr int64_t kPage = 64;

}  // namespace

CardSteps::CardSteps(model::Model& model, const std::vector<int64_t>& rows, int64_t context)
    : model_(model), context_(context), pages_each_(static_cast<size_t>(ceil_div(context + 1, kPage))) {
  int64_t pages = 1, sequences = 1;
  for (const int64_t count : rows) {
    if (!is_prompt(count)) sequences = std::max(sequences, count);
    pages = std::max(pages, is_prompt(count) ? ceil_div(count, kPage) : count * static_cast<int64_t>(pages_each_));
  }
  pages_.resize(static_cast<size_t>(pages));
  std::iota(pages_.begin(), pages_.end(), 0);
  caches_ = model.make_caches(pages, kPage, sequences);
}

void CardSteps::with_batch(int64_t rows, const std::function<void(const ops::Batch&)>& run) const {
  const auto vocabulary = static_cast<int32_t>(model_.config().vocabulary);
  std::vector<int32_t> tokens(static_cast<size_t>(rows));
  for (size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<int32_t>(i * 7919 % static_cast<size_t>(vocabulary));
  std::vector<ops::Sequence> sequences;
  std::vector<int32_t> logit_rows;
  if (is_prompt(rows)) {
    ops::Sequence& sequence = sequences.emplace_back();
    sequence.count = static_cast<int32_t>(rows);
    sequence.pages = pages_;
    logit_rows = {sequence.count - 1};
  }
  for (size_t i = 0; sequences.size() < tokens.size() && !is_prompt(rows); ++i) {
    ops::Sequence& sequence = sequences.emplace_back();
    sequence.first = sequence.state_in = static_cast<int32_t>(i);
    sequence.count = 1;
    sequence.position = static_cast<int32_t>(context_);
    sequence.pages = std::span(pages_).subspan(i * pages_each_, pages_each_);
    logit_rows.push_back(static_cast<int32_t>(i));
  }
  run({tokens, sequences, logit_rows});
}

void CardSteps::take(int64_t rows) {
  with_batch(rows, [&](const ops::Batch& batch) { model_.forward(batch, caches_); });
}

std::optional<ops::OperationTimes> CardSteps::time(int64_t rows) {
  std::optional<ops::OperationTimes> times;
  with_batch(rows, [&](const ops::Batch& batch) { times = model_.time_forward(batch, caches_); });
  return times;
}

bool CardModel::is_directory() const {
  std::error_code error;
  return std::filesystem::is_directory(model, error);
}

DummyArgs CardModel::dummy() const {
  DummyArgs args;
  args.shape = model;
  args.mix = mix;
  args.layers = layers;
  return args;
}

chat::LoadedModel CardModel::load(int64_t most_rows) const {
  BackendArgs backend;
  backend.device = fmt::format("cuda:{}", device);
  backend.threads = threads;
  model::ModelOptions options;
  options.max_step_tokens = most_rows;
  options.max_logit_rows = std::min(most_rows, kMostCardSequences);
  return is_directory() ? load_checkpoint(model, backend, std::move(options))
                        : load_dummy(dummy(), backend, std::move(options));
}

}  // namespace fourfold::cmd
