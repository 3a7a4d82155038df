#include "measure/links.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/check.h"
#include "measure/ceilings.h"

namespace fourfold::measure {
namespace {

constexpr uint64_t kBytes = uint64_t{256} << 20;
constexpr int kCopies = 4;  // of a measurement
constexpr int kRounds = 3;

struct End {
  explicit End(int device)
      : card(device),
        stream(card),
        start(card),
        stop(card),
        from(card, kBytes, "what is copied to another card"),
        to(card, kBytes, "what another card copies here") {
    from.fill(stream, 1);
    stream.synchronize();
  }
  void copy_to(const End& other) {
    card.make_current();
    start.record(stream);
    for (int i = 0; i < kCopies; ++i) {
      card.check(card.driver().call().copy_on_device(other.to.address(), from.address(), kBytes, stream.handle()),
                 "copy to another card's memory");
    }
    stop.record(stream);
  }
  double rate() {
    card.make_current();
    return static_cast<double>(kBytes) * kCopies / cuda::Event::microseconds(start, stop) * 1e6;
  }
  ~End() {
    try {
      card.make_current();
    } catch (const Error&) {  // then the driver has gone
    }
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;

  cuda::Device card;
  cuda::Stream stream;
  cuda::Event start, stop;
  cuda::Buffer from, to;
};

}  // namespace

LinkRate measure_link(int a, int b) {
  FF_ASSERT(a != b);
  End first(a);
  End second(b);
  std::string why;
  if (!first.card.driver().enable_peer(a, b, &why) || !first.card.driver().enable_peer(b, a, &why)) fail("{}", why);
  LinkRate best;
  for (int round = 0; round < kRounds; ++round) {
    first.copy_to(second);
    best.one_way = std::max(best.one_way, first.rate());
  }
  for (int round = 0; round < kRounds; ++round) {
    first.copy_to(second);
    second.copy_to(first);
    best.each_of_both = std::max(best.each_of_both, std::min(first.rate(), second.rate()));
  }
  return best;
}

}  // namespace fourfold::measure
