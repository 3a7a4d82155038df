// Prompts whose log-probabilities are asked for: logits of a group of their rows at a time, however many a step has.
#include <algorithm>

#include "base/check.h"
#include "cpu/step/stepping.h"

namespace fourfold::cpu::stepping {
namespace {

constexpr int64_t kRowBlock = 64;

}  // namespace

int64_t HostStepper::begin_report() {
  Run& run = *run_;
  if (run.reports == run.reported.size()) {
    if (run.reports_known < run.reports) take_reports(collect());
    return 0;
  }
  if (run.reports == 0) {  // what is chosen of it is collected in the order of steps
    settle();
    rebase(run);
  }
  // A few rows more than what a product's blocks are multiples of would be another block.
  const int64_t room = limits_.logit_rows < kRowBlock ? limits_.logit_rows : limits_.logit_rows / kRowBlock * kRowBlock;
  const size_t count = std::min(run.reported.size() - run.reports, static_cast<size_t>(room));
  bind_reported(std::span(run.reported).subspan(run.reports, count));
  run.reports += count;
  return static_cast<int64_t>(count);
}

void HostStepper::bind_reported(std::span<const Reported> reported) {
  reported_rows_.clear();
  reported_of_.clear();
  for (size_t i = 0; i < reported.size(); ++i) {
    const Entry& entry = run_->entries[reported[i].entry];
    reported_rows_.push_back(entry.first + reported[i].row);
    if (i == 0 || reported[i].entry != reported[i - 1].entry) reported_of_.push_back({0, entry.count});
    ++reported_of_.back().rows;
  }
  parts_.bind_logits(reported_of_);
}

void HostStepper::gather_reported(const Tensor& x, const Tensor& out) { parts_.gather(x, reported_rows_, out); }

// The token that follows a row, of which the i-th row of logits is.
RowChoice HostStepper::report_of(const Reported& reported, int64_t row) const {
  static const std::vector<ops::SamplingParams> kReports = [] {
    std::vector<ops::SamplingParams> all(ops::kMaxLogprobs + 1);
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].temperature = 0;
      all[i].logprobs = static_cast<int32_t>(i);
    }
    return all;
  }();
  const Entry& entry = run_->entries[reported.entry];
  const Step::Work& work = run_->step->work[entry.work];
  const std::span<const int32_t> tokens = run_->step->tokens_of(work);
  const auto after = static_cast<size_t>(reported.row) + 1;
  return {row,
          {.params = kReports.at(static_cast<size_t>(work.plan.prompt_logprobs)),
           .defined_tokens = entry.lane->request.defined_tokens,
           .given = after < tokens.size() ? tokens[after] : work.plan.next}};
}

void HostStepper::report(const Tensor& logits) {
  Run& run = *run_;
  const size_t count = reported_rows_.size(), first = run.reports - count;
  report_choices_.clear();
  for (size_t i = 0; i < count; ++i)
    report_choices_.push_back(report_of(run.reported[first + i], static_cast<int64_t>(i)));
  const bool later = parts_.choose_later && parts_.choose_later(logits, report_choices_);
  if (later) uncollected_.push_back(count);
  // While the backend is at this group.
  if (run.reports_known < first) take_reports(collect());
  if (later) return;
  report_on_host(parts_.fetch(logits));
  take_reports(std::span(chosen_).first(count));
}

// Of the next group.
void HostStepper::take_reports(std::span<Chosen> chosen) {
  Run& run = *run_;
  for (size_t i = 0; i < chosen.size(); ++i) {
    const Entry& entry = run.entries[run.reported[run.reports_known++].entry];
    LaneOutcome& outcome = run.step->outcomes[entry.work];
    if (entry.lane->ended) continue;
    if (errors_[i].empty()) {
      outcome.prompt_logprobs.push_back(std::move(chosen[i].logprobs));
      continue;
    }
    outcome.error = errors_[i];
    entry.lane->ended = true;
  }
}

// Rows side by side.
void HostStepper::report_on_host(const Tensor& logits) {
  for_entries(report_choices_.size(), [&](size_t i, Sampler& sampler) {
    errors_[i].clear();
    try {
      chosen_[i] = sampler.choose({logits.f32(static_cast<int64_t>(i)), static_cast<size_t>(logits.cols)},
                                  report_choices_[i].choice);
    } catch (const Error& error) {
      errors_[i] = error.what();
    }
  });
}

}  // namespace fourfold::cpu::stepping
