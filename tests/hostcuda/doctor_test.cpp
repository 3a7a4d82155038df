// What the doctor finds out of links between cards, on the host driver.
#include <gtest/gtest.h>

#include "doctor/collect.h"
#include "doctor/finding.h"
#include "hostcuda/testing.h"

namespace fourfold::hostcuda {
namespace {

std::string level_of(const Json& probe, const std::string& id) {
  for (const doctor::Finding& finding : doctor::judge({{"probes", {{"gpu", probe}}}, {"gpu", Json::object()}})) {
    if (finding.id == id) return doctor::level_name(finding.level);
  }
  return "";
}

TEST(HostDoctor, LinksAreMeasuredBothWays) {
  HostCard card = two_cards();
  card.memory = uint64_t{256} << 20;  // too little for what is measured of one card
  for (const bool peers : {true, false}) {
    for (const bool copies : {true, false}) {
      if (!peers && !copies) continue;
      SCOPED_TRACE(fmt::format("peers {}, copies {}", peers, copies));
      card.peers = peers;
      card.peer_copies = copies;
      install(card);
      const Json probe = doctor::gpu_probe();
      ASSERT_EQ(probe.at("devices").size(), 2u);
      ASSERT_EQ(probe.at("peers").size(), 2u);
      for (const Json& way : probe.at("peers")) {
        EXPECT_EQ(way.at("from").get<int>() + way.at("to").get<int>(), 1);
        EXPECT_EQ(way.at("direct"), peers);
        EXPECT_GT(way.at("gb_per_s").get<double>(), 0);
        EXPECT_EQ(way.at("wrong_bytes").get<int64_t>() > 0, !copies);
      }
      EXPECT_EQ(level_of(probe, "gpu.links"), peers && copies ? "good" : "");
      EXPECT_EQ(level_of(probe, "gpu.peer-access"), peers ? "" : "warning");
      EXPECT_EQ(level_of(probe, "gpu.peer-copy"), copies ? "" : "error");
      EXPECT_EQ(live(), Live{});
    }
  }
}

}  // namespace
}  // namespace fourfold::hostcuda
