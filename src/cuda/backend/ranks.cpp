#include "cuda/backend/ranks.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "base/random.h"
#include "cuda/backend/sources.h"
#include "cuda/backend/tensors.h"

namespace fourfold::cuda {
namespace {

// For what one rank may have to do and another not: loading, compiling, allocating.
constexpr std::chrono::minutes kPreparation{3};
// What is copied each way to see that copies arrive.
constexpr uint64_t kProbeBytes = 1 << 20;
// SumWay::kBySize: sums of more rows have flags.
constexpr int64_t kMostRowsByWords = 1 << 20;
// Of CTAs that wait, on a card with several ranks, all of them together: the others' kernels need room to run.
constexpr int kSharedCtas = 16;

// What rank `from` puts into the memory of rank `to`.
std::vector<uint8_t> pattern(int64_t from, int64_t to, uint64_t bytes) {
  Random random(static_cast<uint64_t>(from * comm::kMostRanks + to + 1));
  std::vector<uint8_t> out(bytes);
  for (uint64_t at = 0; at + 8 <= bytes; at += 8) {
    const uint64_t word = random.next();
    std::memcpy(out.data() + at, &word, sizeof(word));
  }
  return out;
}

}  // namespace

// What a rank has for the others. It goes with the last rank that may still write to it.
struct CardRanks::Memory {
  std::shared_ptr<Card> card;
  cuda::Buffer buffer;
  ~Memory() {
    try {
      card->device.make_current();
    } catch (const Error&) {  // then the driver has gone
    }
  }
};

struct CardRanks::Introduction {
  std::shared_ptr<Memory> memory;
  int device = 0, sms = 0;
};

CardRanks::CardRanks(std::shared_ptr<Card> card, const CudaOptions& options)
    : card_(std::move(card)),
      member_(options.member),
      device_(options.device),
      exchange_bytes_(options.exchange_bytes),
      way_(options.sums),
      patience_(options.patience) {
  if (count() > comm::kMostRanks) fail("{} ranks on GPUs, wanted at most {}", count(), comm::kMostRanks);
  kernels_ = card_->loader.load(reduce_source());
  report_ = PinnedBuffer(card_->device, sizeof(uint32_t), "report of ranks that did not come", jit::kHostMapped);
  std::memset(report_.data(), 0, sizeof(uint32_t));
}

CardRanks::~CardRanks() = default;

std::string CardRanks::description() const {
  return fmt::format("rank {} of {}, sums over {}", member_->rank(), count(),
                     shared_card_ ? "memory of one card" : "peer memory");
}

void CardRanks::meet() { member_->meet_with(0, kPreparation); }

std::shared_ptr<cpu::StepOrder> CardRanks::order() {
  return member_->meet_with(std::make_shared<cpu::StepOrder>(), kPreparation)[0];
}

bool CardRanks::prepare(int64_t columns) {
  if (!memory_.empty() && columns <= exchange_.columns) return false;
  card_->stream.synchronize();
  allocate(columns);
  const std::string wrong = found_wrong();
  const std::vector<std::string> all = member_->meet_with(wrong, kPreparation);
  for (const std::string& each : all) {
    if (!each.empty()) fail("ranks on GPUs reach each other through peer memory: {}", each);
  }
  return true;
}

void CardRanks::allocate(int64_t columns) {
  meet();  // nobody writes to what there was
  memory_.clear();
  card_->device.make_current();
  FF_ASSERT(columns > 0 && columns <= norm::kMostColumns);
  exchange_.ranks = static_cast<int>(count());
  exchange_.columns = static_cast<int>(round_up(columns, norm::kPieceColumns));
  exchange_.rows = 1;
  exchange_.rows = static_cast<int>(std::max<int64_t>(static_cast<int64_t>(exchange_bytes_) / exchange_.bytes(), 16));
  const auto rows = static_cast<uint64_t>(exchange_.rows);
  counts_ = cuda::Buffer(card_->device, (2 * rows + comm::kMostRanks) * sizeof(unsigned), "counts of sums");
  counts_.fill(card_->stream, 0);
  auto mine = std::make_shared<Memory>();
  mine->card = card_;
  mine->buffer = cuda::Buffer(card_->device, static_cast<uint64_t>(exchange_.bytes()), "parts of sums between ranks");
  mine->buffer.fill(card_->stream, 0);
  const auto words = static_cast<uint64_t>(exchange_.words_at());
  card_->device.check(card_->device.driver().call().fill_bytes(mine->buffer.address() + words, 0xff,
                                                               mine->buffer.bytes() - words, card_->stream.handle()),
                      "filling memory");
  card_->stream.synchronize();
  const std::vector<Introduction> all =
      member_->meet_with(Introduction{mine, device_, card_->device.info().sms}, kPreparation);
  int sms = card_->device.info().sms;
  shared_card_ = false;
  for (size_t i = 0; i < all.size(); ++i) {
    memory_.push_back(all[i].memory);
    sms = std::min(sms, all[i].sms);
    for (size_t j = 0; j < i; ++j) shared_card_ = shared_card_ || all[i].device == all[j].device;
  }
  sms_ = sms;
  std::string why;
  bool reached = true;
  for (size_t i = 0; i < all.size() && reached; ++i) {
    if (all[i].device == device_) continue;
    reached = card_->device.driver().enable_peer(device_, all[i].device, &why);
  }
  for (const std::string& each : member_->meet_with(why, kPreparation)) {
    if (!each.empty()) fail("ranks on GPUs reach each other's memory: {}", each);
  }
}

std::string CardRanks::found_wrong() {
  if (card_->device.only_counts()) return {};
  const int64_t rank = member_->rank();
  const uint64_t most = static_cast<uint64_t>(exchange_.part(0, 1, 0)) * 2;  // of a rank's parts in a slot
  const uint64_t bytes = std::min(kProbeBytes, most) / 16 * 16;
  const auto place = [&](int64_t memory, int slot, int64_t from) {
    return memory_[static_cast<size_t>(memory)]->buffer.address() +
           static_cast<uint64_t>(exchange_.part(slot, static_cast<int>(from), 0)) * 2;
  };
  // By stores of a kernel into the first slot, as sums do it, and by a copy into the second.
  cuda::Buffer source(card_->device, bytes, "pattern for other ranks");
  for (int64_t to = 0; to < count(); ++to) {
    if (to == rank) continue;
    source.upload(card_->stream, pattern(rank, to, bytes));
    const comm::PeerCopyArgs args = {source.as<const void>(), device_pointer<void>(place(to, 0, rank)),
                                     static_cast<long long>(bytes / 16)};
    launch(card_->stream, kernels_[kPeerCopy], {8}, Overlap::kNone, args);
    card_->device.check(card_->device.driver().call().copy_on_device(place(to, 1, rank), source.address(), bytes,
                                                                     card_->stream.handle()),
                        "copy to another rank's memory");
    card_->stream.synchronize();
  }
  meet();
  std::string wrong;
  for (int64_t from = 0; from < count(); ++from) {
    if (from == rank) continue;
    const std::vector<uint8_t> wanted = pattern(from, rank, bytes);
    for (int slot = 0; slot < comm::kSlots; ++slot) {
      std::vector<uint8_t> found(bytes);
      const uint64_t offset = place(rank, slot, from) - memory_[static_cast<size_t>(rank)]->buffer.address();
      memory_[static_cast<size_t>(rank)]->buffer.download(card_->stream, found.data(), bytes, offset);
      card_->stream.synchronize();
      if (found == wanted) continue;
      const auto at = std::mismatch(found.begin(), found.end(), wanted.begin()).first - found.begin();
      wrong = fmt::format("of {} bytes that rank {} {} into the memory of rank {} not all arrived: byte {} differs",
                          bytes, from, slot == 0 ? "stored" : "copied", rank, at);
    }
  }
  return wrong;
}

const std::vector<int>& CardRanks::columns_of(int64_t part, int64_t out) {
  std::vector<int>& first = columns_[{part, out}];
  if (first.empty()) {
    first.push_back(0);
    for (const int64_t each : member_->meet_with(part, kPreparation))
      first.push_back(first.back() + static_cast<int>(each));
    FF_ASSERT(first.back() == out);
  }
  return first;
}

comm::Peers CardRanks::peers() const {
  FF_ASSERT(!memory_.empty());
  comm::Peers peers = {};
  peers.exchange = exchange_;
  for (size_t i = 0; i < memory_.size(); ++i) peers.memory[i] = memory_[i]->buffer.as<unsigned char>();
  peers.rank = static_cast<int>(member_->rank());
  peers.early = shared_card_ ? 0 : 1;
  peers.uses = counts_.as<unsigned>();
  peers.absent = peers.uses + 2 * exchange_.rows;
  peers.report = reinterpret_cast<unsigned*>(report_.data());
  peers.patience = static_cast<unsigned long long>(patience_.count());
  return peers;
}

// No more CTAs than run at once: then each has put its rows, whatever others wait for.
unsigned CardRanks::grid(int64_t items, int ctas_of_sm) const {
  const int most = shared_card_ ? std::max(1, kSharedCtas / exchange_.ranks) : sms_ * ctas_of_sm;
  return static_cast<unsigned>(std::min<int64_t>(items, most));
}

void CardRanks::reduce(const norm::NormArgs& args, int64_t rows, Overlap overlap) {
  FF_ASSERT(args.columns <= exchange_.columns && args.delta != nullptr);
  const int pieces = norm::norm_pieces(args.columns), size = pieces == 1 ? 0 : pieces == 2 ? 1 : 2;
  const bool words = way_ == SumWay::kWords || (way_ == SumWay::kBySize && rows <= kMostRowsByWords);
  const Kernel& kernel = kernels_[static_cast<size_t>((words ? kWords1 : kReduce1) + size)];
  const int ctas = words ? comm::words_ctas(pieces) : comm::reduce_ctas(pieces);
  for (int64_t first = 0; first < rows; first += exchange_.rows) {
    comm::ReduceArgs part = {};
    part.peers = peers();
    part.norm = args;
    part.norm.residual += first * args.residual_stride;
    part.norm.delta += first * args.delta_stride;
    if (part.norm.residual_out != nullptr) part.norm.residual_out += first * args.residual_stride;
    part.norm.out += first * args.out_stride;
    part.rows = static_cast<int>(std::min<int64_t>(rows - first, exchange_.rows));
    launch(card_->stream, kernel, {grid(part.rows, ctas)}, overlap, part);
  }
}

void CardRanks::gather(const ops::Tensor& part, const ops::Tensor& out, Overlap overlap) {
  const std::vector<int>& first = columns_of(part.cols, out.cols);
  FF_ASSERT(is_float(part) && is_float(out) && part.rows == out.rows);
  const auto rank = static_cast<size_t>(member_->rank());
  FF_ASSERT(first[rank + 1] - first[rank] == part.cols);
  comm::GatherColumnsArgs args = {};
  args.peers = peers();
  args.part_stride = part.stride;
  args.out_stride = out.stride;
  int widest = 0;
  for (size_t i = 0; i < first.size(); ++i) args.first[i] = first[i];
  for (size_t i = 0; i + 1 < first.size(); ++i) widest = std::max(widest, first[i + 1] - first[i]);
  args.pieces = ceil_div(widest, comm::words_of_piece(exchange_));
  const int64_t at_once = exchange_.rows / args.pieces;
  if (at_once == 0)
    fail("logits of {} columns a rank: {} pieces, wanted at most {}", widest, args.pieces, exchange_.rows);
  for (int64_t row = 0; row < out.rows; row += at_once) {
    args.rows = static_cast<int>(std::min(at_once, out.rows - row));
    args.part = reinterpret_cast<const unsigned*>(part.f32(row));
    args.out = reinterpret_cast<unsigned*>(out.f32(row));
    launch(card_->stream, kernels_[kGatherColumns], {grid(int64_t{args.rows} * args.pieces, comm::kGatherCtas)},
           overlap, args);
  }
}

void CardRanks::check() const {
  uint32_t failed = 0;
  std::memcpy(&failed, report_.data(), sizeof(failed));
  if (failed == 0) return;
  fail("rank {} did not come to a sum within {:.1f} s", failed - 1, std::chrono::duration<double>(patience_).count());
}

}  // namespace fourfold::cuda
