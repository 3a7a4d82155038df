// Requests sent to an engine, and when their tokens came back: what `bench engine` and `bench model` measure.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cmd/arguments.h"
#include "engine/engine.h"
#include "model/model.h"

namespace fourfold::cmd {

// A model that several may hold: the benchmark drives it alone while no engine step is under way, and hands it to one
// engine after the other.
std::unique_ptr<model::Model> share_model(std::shared_ptr<model::Model> model);

struct RequestTimes {
  double submitted = 0;  // seconds since the load began
  std::vector<double> tokens;
  engine::Event end;
};

struct LoadFigures {
  std::vector<RequestTimes> requests;
  double seconds = 0;  // from the first submission to the last event
  engine::EngineStats before, after;

  int64_t output_tokens() const;
  int64_t prompt_tokens() const;
  std::vector<double> first_token_seconds() const;
  std::vector<double> between_tokens_seconds() const;
  // Tokens behind the first ones over the time from the first token to the last, of all requests: what a sequence gets
  // once its prompt is done. 0 when no answer has two tokens.
  double decode_tokens_per_s() const;
};

// Sends every request: at most `concurrency` at a time, or, where `arrivals` is not empty, each at its time in seconds.
// `progress` is called with the number of requests that are done. An Error when a request fails; ends early on Ctrl-C.
LoadFigures run_load(engine::Engine& engine, std::vector<engine::Request> requests, int64_t concurrency,
                     std::span<const double> arrivals, const std::function<void(int64_t)>& progress);

struct Percentiles {
  double p50 = 0, p90 = 0, p99 = 0;
};
Percentiles percentiles(std::vector<double> values);

// Drafts of a load: tokens a verifying step chose beyond one, and by position how often a draft was accepted.
struct DraftFigures {
  double accepted_per_step = 0;
  std::vector<double> by_position;
};
DraftFigures draft_figures(const engine::EngineStats& before, const engine::EngineStats& after);

// "0" .. "5" or "auto", as --draft takes it.
int32_t parse_drafts(const std::string& text);
// "auto", "all" or a number, as --draft-tokens takes it.
int64_t parse_draft_tokens(const std::string& text);
void add_draft_tokens_option(Command& command, std::string& text);

}  // namespace fourfold::cmd
