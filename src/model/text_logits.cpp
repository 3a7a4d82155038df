#include "model/text_logits.h"

#include <algorithm>
#include <numeric>

#include "base/math.h"

namespace fourfold::model {

TextLogits compute_text_logits(Model& model, std::span<const int32_t> tokens, const TextLogitsOptions& options) {
  const ModelConfig& config = model.config();
  const auto count = static_cast<int64_t>(tokens.size());
  constexpr int64_t kPageSize = 64;
  const int64_t pages = ceil_div(count, kPageSize);
  std::vector<int32_t> page_table(static_cast<size_t>(pages));
  std::iota(page_table.begin(), page_table.end(), 0);
  Caches caches = model.make_caches(pages, kPageSize, 1);

  const auto size = [](int64_t value) { return static_cast<size_t>(value); };
  TextLogits result;
  result.logits.resize(size(count * config.vocabulary));
  result.hidden.resize(options.hidden ? size(config.layers) : 0);
  for (auto& layer : result.hidden) layer.resize(size(count * config.hidden));
  result.mtp_logits.resize(options.mtp ? size((count - 1) * config.vocabulary) : 0);
  for (int64_t begin = 0; begin < count; begin += options.chunk) {
    const int64_t rows = std::min(options.chunk, count - begin);
    ops::Sequence sequence;
    sequence.count = static_cast<int32_t>(rows);
    sequence.position = static_cast<int32_t>(begin);
    sequence.pages = page_table;
    std::vector<int32_t> logit_rows(size(rows));
    std::iota(logit_rows.begin(), logit_rows.end(), 0);
    ops::Batch batch{tokens.subspan(size(begin), size(rows)), std::span(&sequence, 1), logit_rows};
    model.forward(batch, caches, [&](int64_t layer, const ops::Tensor& residual) {
      if (!options.hidden) return;
      model.backend().read(
          residual,
          std::span(result.hidden[size(layer)]).subspan(size(begin * config.hidden), size(rows * config.hidden)));
    });
    const auto rows_of = [&](std::vector<float>& all, int64_t n) {
      return std::span(all).subspan(size(begin * config.vocabulary), size(n * config.vocabulary));
    };
    model.backend().read(model.logits(), rows_of(result.logits, rows));
    // Row t pairs the hidden state of position t with token t + 1; the last token of the text has no successor.
    const int64_t pairs = options.mtp ? std::min(rows, count - 1 - begin) : 0;
    if (pairs > 0) {
      sequence.count = static_cast<int32_t>(pairs);
      batch.tokens = tokens.subspan(size(begin + 1), size(pairs));
      batch.logit_rows = std::span(logit_rows).first(size(pairs));
      model.forward_mtp(batch, model.hidden().slice_rows(0, pairs), caches);
      model.backend().read(model.mtp_logits(), rows_of(result.mtp_logits, pairs));
    }
    if (options.progress) options.progress(begin + rows);
  }
  return result;
}

}  // namespace fourfold::model
