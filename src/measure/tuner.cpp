#include "measure/tuner.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "base/check.h"

namespace fourfold::measure {
namespace {

// The ways to cut the tokens: a form of rows, and so many in a block. Tiles of one cut are compatible().
using Cut = std::pair<plan::moe::RowForm, int>;
Cut cut_of(const plan::moe::Candidate& c) { return {plan::moe::row_form(c.tile), c.tile.tokens}; }

// The fastest predicted candidates of one cut, but not many of a kind: the ranking is full of near twins.
std::vector<const plan::moe::Ranked*> best_of(const plan::moe::GemmPlan& gemm, Cut cut, int count) {
  std::vector<const plan::moe::Ranked*> list;
  std::map<std::tuple<plan::moe::Family, int, int, int>, int> kinds;
  for (const plan::moe::Ranked& r : gemm.ranked) {
    const plan::moe::TileConfig& t = r.candidate.tile;
    if (!r.implemented || cut_of(r.candidate) != cut) continue;
    if (++kinds[{t.family, t.n, t.warps, r.candidate.ctas_per_sm}] > 1 && static_cast<int>(list.size()) * 2 > count) {
      continue;
    }
    list.push_back(&r);
    if (static_cast<int>(list.size()) == count) break;
  }
  return list;
}

// Cuts by the time of their best pair, fastest first.
std::vector<Cut> cuts_of(const plan::moe::LayerPlan& layer) {
  std::map<Cut, double> up, total;
  for (const plan::moe::Ranked& r : layer.gate_up.ranked) {
    if (r.implemented) up.emplace(cut_of(r.candidate), r.prediction.total_us);
  }
  for (const plan::moe::Ranked& r : layer.down.ranked) {
    const auto it = up.find(cut_of(r.candidate));
    if (r.implemented && it != up.end()) total.emplace(it->first, it->second + r.prediction.total_us);
  }
  std::vector<std::pair<double, Cut>> order;
  for (const auto& [cut, us] : total) order.emplace_back(us, cut);
  std::sort(order.begin(), order.end());
  std::vector<Cut> cuts;
  for (const auto& [us, cut] : order) cuts.push_back(cut);
  return cuts;
}

}  // namespace

const Measured& TunedCase::best() const {
  return *std::min_element(measured.begin(), measured.end(), [](auto& a, auto& b) { return a.us < b.us; });
}

std::vector<std::pair<plan::moe::Pass, plan::moe::Candidate>> Tuner::Work::candidates() const {
  std::vector<std::pair<plan::moe::Pass, plan::moe::Candidate>> list;
  for (const Group& group : groups) {
    for (const plan::moe::Ranked* r : group.ups) list.emplace_back(plan::moe::Pass::kGateUp, r->candidate);
    for (const plan::moe::Ranked* r : group.downs) list.emplace_back(plan::moe::Pass::kDown, r->candidate);
  }
  return list;
}

std::unique_ptr<Tuner::Work> Tuner::collect(int64_t tokens) const {
  auto work = std::make_unique<Work>();
  work->tokens = tokens;
  plan::moe::Problem p = kernels_.problem();
  p.tokens = tokens;
  work->layer = plan::moe::plan_layer(p, kernels_.loader().card(), {.only_implemented = true, .explain = false});
  // Half of the effort in the best cut, the rest in the next three, and in the best one of W4A16 or W4A4 if all four
  // are of the other.
  int count = top_;
  std::set<plan::moe::ActivationFormat> formats;
  for (const Cut& cut : cuts_of(work->layer)) {
    std::vector<const plan::moe::Ranked*> ups = best_of(work->layer.gate_up, cut, count);
    const bool fresh = formats.insert(plan::moe::activations_of(ups.front()->candidate.tile)).second;
    if (work->groups.size() >= 4 && !fresh) continue;
    work->groups.push_back({std::move(ups), best_of(work->layer.down, cut, count)});
    count = std::max(2, top_ / 2);
  }
  return work;
}

TunedCase Tuner::measure(const Work& work) {
  TunedCase c;
  c.tokens = work.tokens;
  bench_.prepare(work.tokens, routing_);
  const auto try_pair = [&](const plan::moe::Candidate& up, const plan::moe::Candidate& down) {
    const std::string name = plan::moe::to_string(up) + " | " + plan::moe::to_string(down);
    const auto known = std::find_if(c.measured.begin(), c.measured.end(), [&](const Measured& m) {
      return plan::moe::to_string(m.gate_up) + " | " + plan::moe::to_string(m.down) == name;
    });
    if (known != c.measured.end()) return known->us;
    const auto pair = kernels_.pair(up, down, work.tokens);
    if (!pair) return 1e30;
    Measured m{up, down, 0, bench_.time(*pair, replays_)};
    plan::moe::LayerPlan layer = work.layer;
    if (plan::moe::choose_by_name(&layer, plan::moe::to_string(up), plan::moe::to_string(down)))
      m.predicted_us = layer.predicted_us;
    c.measured.push_back(m);
    return m.us;
  };
  try_pair(work.layer.gate_up.chosen.candidate, work.layer.down.chosen.candidate);
  for (const Work::Group& group : work.groups) {
    if (group.ups.empty() || group.downs.empty()) continue;
    // Each gate-up beside the first down, then each down beside the best gate-up.
    const plan::moe::Ranked* best = group.ups.front();
    double best_us = 1e30;
    for (const plan::moe::Ranked* up : group.ups) {
      const double us = try_pair(up->candidate, group.downs.front()->candidate);
      if (us < best_us) best_us = us, best = up;
    }
    for (const plan::moe::Ranked* down : group.downs) try_pair(best->candidate, down->candidate);
  }
  if (c.measured.empty()) fail("{} tokens: every kernel failed its self-test", work.tokens);
  return c;
}

}  // namespace fourfold::measure
