#include "cuda/backend/ranks.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/console.h"
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
// What each rank has for the others where nothing else is asked for: of two ranks, and of more.
constexpr uint64_t kExchangeBytes = uint64_t{128} << 20, kExchangeOfMany = uint64_t{256} << 20;
// Of rows that are exchanged by words, one of so many is by flags too, where sums do not go that way.
constexpr int kWordsToFlags = 8;
// Of what goes through the host at once.
constexpr uint64_t kHostPiece = uint64_t{8} << 20;
constexpr int64_t kMostGridRows = 65535;
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

// Of an entry among those for rows of 1, 2 and 4 pieces.
int size_of(int pieces) { return pieces == 1 ? 0 : pieces == 2 ? 1 : 2; }

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
  std::string name;
};

CardRanks::CardRanks(std::shared_ptr<Card> card, const CudaOptions& options)
    : card_(std::move(card)),
      member_(options.member),
      device_(options.device),
      exchange_bytes_(options.exchange_bytes > 0 ? options.exchange_bytes
                      : count() > 2              ? kExchangeOfMany
                                                 : kExchangeBytes),
      table_(options.sums),
      over_peers_(table_.has(count(), SumWay::kWords) || table_.has(count(), SumWay::kFlags) ||
                  table_.has(count(), SumWay::kTwoShot)),
      patience_(options.patience) {
  if (count() > comm::kMostRanks) fail("{} ranks on GPUs, wanted at most {}", count(), comm::kMostRanks);
  kernels_ = card_->loader.load(reduce_source());
  if (table_.has(count(), SumWay::kTwoShot)) two_shot_ = card_->loader.load(two_shot_source());
  if (options.check_sums > 0) {
    checksum_ = card_->loader.load(checksum_source());
    checksum_place_ = cuda::Buffer(card_->device, 16, "checksum of sums");
    checksum_found_ = PinnedBuffer(card_->device, sizeof(uint64_t), "checksum of sums");
  }
  report_ = PinnedBuffer(card_->device, sizeof(uint32_t), "report of ranks that did not come", jit::kHostMapped);
  std::memset(report_.data(), 0, sizeof(uint32_t));
}

CardRanks::~CardRanks() = default;

std::string CardRanks::description() const {
  std::string way;
  if (replaced_) {
    way = fmt::format("{} ({})", (nccl_ ? nccl_ : host_)->name(),
                      shared_card_ ? "ranks share a card" : "peer memory does not work");
  } else if (over_peers_) {
    way = fmt::format("{} ({})", shared_card_ ? "memory of one card" : "peer memory", table_.text(count()));
  } else {
    way = table_.text(count());
  }
  return fmt::format("rank {} of {}, sums over {}", member_->rank(), count(), way);
}

void CardRanks::meet() { member_->meet_with(0, kPreparation); }

std::shared_ptr<cpu::StepOrder> CardRanks::order() {
  return member_->meet_with(std::make_shared<cpu::StepOrder>(), kPreparation)[0];
}

bool CardRanks::prepare(int64_t columns) {
  if (!memory_.empty() && columns <= exchange_.columns) return false;
  card_->stream.synchronize();
  allocate(columns);
  if (over_peers_ && !replaced_) {
    const std::string why = unreachable();
    if (!why.empty() && table_.asked()) fail("ranks on GPUs reach each other's memory: {}", why);
    if (!why.empty()) fall_back(why);
    // Kernels that wait for those of another rank may keep a card from starting these, whatever room there is: of four
    // ranks, or where something waits for a step's end between sums, they did.
    if (why.empty() && shared_card_ && !table_.asked() && !card_->device.only_counts()) {
      go_through_host("ranks share a card");
    }
  }
  if (card_->device.only_counts()) {
    const bool shared = shared_card_ && !table_.asked();
    if (shared || table_.has(count(), SumWay::kNccl) || table_.has(count(), SumWay::kHost)) load_gathered();
    return true;
  }
  if (table_.has(count(), SumWay::kNccl) && nccl_ == nullptr) {
    const std::string why = open_nccl();
    if (!why.empty()) fail("sums over ranks by NCCL: {}", why);
  }
  if (table_.has(count(), SumWay::kHost) && host_ == nullptr) {
    load_gathered();
    host_ = make_host_blocks(card_, member_, kHostPiece);
  }
  records_ = host_ == nullptr && (nccl_ == nullptr || nccl_->records());
  return true;
}

void CardRanks::fall_back(const std::string& why) {
  const std::string no_nccl = open_nccl();
  if (no_nccl.empty()) {
    replaced_ = SumWay::kNccl;
    if (member_->rank() != 0) return;
    eprint("fourfold: warning: {}; sums over ranks go through {}, slower than peer memory for small ones\n", why,
           nccl_->name());
  } else {
    go_through_host(fmt::format("{} ({})", why, no_nccl));
  }
}

void CardRanks::go_through_host(const std::string& why) {
  load_gathered();
  host_ = make_host_blocks(card_, member_, kHostPiece);
  replaced_ = SumWay::kHost;
  if (member_->rank() != 0) return;
  eprint(
      "fourfold: warning: {}; sums over ranks go through {}, which is slow: every sum waits for the host, and steps "
      "are not recorded as graphs\n",
      why, host_->name());
}

std::string CardRanks::open_nccl() {
  std::string why;
  nccl_ = make_nccl_blocks(card_, member_, &why);
  if (nccl_ == nullptr) return why;
  load_gathered();
  // Believed as peer memory is: each rank's pattern has come to all.
  const uint64_t bytes = std::min(kProbeBytes, gathered_bytes() / static_cast<uint64_t>(count())) / 16 * 16;
  const int64_t rank = member_->rank();
  std::string wrong;
  try {
    cuda::Buffer source(card_->device, bytes, "pattern for other ranks");
    source.upload(card_->stream, pattern(rank, rank, bytes));
    const Memory& mine = *memory_[static_cast<size_t>(rank)];
    bring(nccl_.get(), source.address(), bytes);
    std::vector<uint8_t> found(bytes * static_cast<uint64_t>(count()));
    mine.buffer.download(card_->stream, found.data(), found.size(), 0);
    card_->stream.synchronize();
    for (int64_t from = 0; from < count() && wrong.empty(); ++from) {
      const std::vector<uint8_t> wanted = pattern(from, from, bytes);
      if (std::equal(wanted.begin(), wanted.end(), found.begin() + from * static_cast<int64_t>(bytes))) continue;
      wrong = fmt::format("of {} bytes that {} sent by {} to {} not all arrived", bytes, card_of(from), nccl_->name(),
                          card_of(rank));
    }
  } catch (const Error& error) {
    wrong = error.what();
  }
  for (const std::string& each : member_->meet_with(wrong, kPreparation)) {
    if (each.empty()) continue;
    nccl_.reset();
    return each;
  }
  return "";
}

void CardRanks::load_gathered() {
  if (gathered_.empty()) gathered_ = card_->loader.load(gathered_source());
}

std::string CardRanks::card_of(int64_t rank) const { return names_[static_cast<size_t>(rank)]; }

void CardRanks::allocate(int64_t columns) {
  meet();  // nobody writes to what there was
  memory_.clear();
  card_->device.make_current();
  FF_ASSERT(columns > 0 && columns <= norm::kMostColumns);
  exchange_.ranks = static_cast<int>(count());
  exchange_.columns = static_cast<int>(round_up(columns, norm::kPieceColumns));
  // Sums through memory of this rank's own use that of rows with flags, where others are by words.
  const bool flags =
      table_.has(count(), SumWay::kFlags) || table_.has(count(), SumWay::kNccl) || table_.has(count(), SumWay::kHost);
  const int of_flags = flags ? 1 : kWordsToFlags;
  exchange_.rows = of_flags;
  exchange_.flag_rows = 1;
  const int64_t times = static_cast<int64_t>(exchange_bytes_) / exchange_.bytes();
  exchange_.flag_rows = static_cast<int>(std::max<int64_t>(times, 16));
  exchange_.rows = exchange_.flag_rows * of_flags;
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
      member_->meet_with(Introduction{mine, device_, card_->device.info().sms,
                                      fmt::format("GPU {} ({})", device_, card_->device.info().name)},
                         kPreparation);
  devices_.clear();
  names_.clear();
  int sms = card_->device.info().sms;
  shared_card_ = false;
  for (size_t i = 0; i < all.size(); ++i) {
    memory_.push_back(all[i].memory);
    devices_.push_back(all[i].device);
    names_.push_back(all[i].name);
    sms = std::min(sms, all[i].sms);
    for (size_t j = 0; j < i; ++j) shared_card_ = shared_card_ || all[i].device == all[j].device;
  }
  sms_ = sms;
}

std::string CardRanks::unreachable() {
  std::string wrong;
  for (size_t i = 0; i < devices_.size() && wrong.empty(); ++i) {
    if (devices_[i] == device_) continue;
    std::string why;
    if (!card_->device.driver().enable_peer(device_, devices_[i], &why)) {
      wrong = fmt::format("{} does not reach the memory of {}: {}", card_of(member_->rank()),
                          card_of(static_cast<int64_t>(i)), why);
    }
  }
  const auto first = [&] {
    for (const std::string& each : member_->meet_with(wrong, kPreparation)) {
      if (!each.empty()) return each;
    }
    return std::string();
  };
  if (const std::string found = first(); !found.empty()) return found;
  wrong = found_wrong();
  return first();
}

std::string CardRanks::found_wrong() {
  if (card_->device.only_counts()) return {};
  const int64_t rank = member_->rank();
  const uint64_t most = static_cast<uint64_t>(exchange_.flag_part(0, 1, 0)) * 2;  // of a rank's parts in a slot
  const uint64_t bytes = std::min(kProbeBytes, most) / 16 * 16;
  const auto place = [&](int64_t memory, int slot, int64_t from) {
    return memory_[static_cast<size_t>(memory)]->buffer.address() +
           static_cast<uint64_t>(exchange_.flag_part(slot, static_cast<int>(from), 0)) * 2;
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
      wrong = fmt::format("of {} bytes that {} {} into the memory of {} not all arrived: byte {} differs", bytes,
                          card_of(from), slot == 0 ? "stored" : "copied", card_of(rank), at);
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

double CardRanks::column_bytes(int64_t rows, int64_t columns) const {
  const auto n = static_cast<double>(count());
  return way_of_rows(rows, columns) == SumWay::kTwoShot ? 8 + 4 / n : 10 + 2 * n;
}

void CardRanks::reduce(const norm::NormArgs& args, const moe::RowSum& sum, int64_t rows, ops::Residual left,
                       Overlap overlap) {
  FF_ASSERT(args.columns <= exchange_.columns && args.delta != nullptr);
  const SumWay way = way_of_rows(rows, args.columns);
  FF_ASSERT(args.share.x == nullptr || way == SumWay::kWords || way == SumWay::kTwoShot);
  FF_ASSERT(!sum.there() || (sum.groups != nullptr && takes_groups(rows, args.columns, left)));
  if (way == SumWay::kNccl || way == SumWay::kHost) {
    return reduce_gathered(way == SumWay::kNccl ? nccl_.get() : host_.get(), args, rows);
  }
  const int pieces = norm::norm_pieces(args.columns), size = size_of(pieces);
  const bool share = args.share.x != nullptr;
  const bool each = a_cta_each(way, rows, args.columns);
  const ReduceEntry words = each ? (share ? kEachShare1 : kEach1) : share ? kWordsShare1 : kWords1;
  const TwoShotEntry two_shot = sum.there()                     ? (share ? kTwoShotGroupsShare1 : kTwoShotGroups1)
                                : left == ops::Residual::kWhole ? (share ? kTwoShotWholeShare1 : kTwoShotWhole1)
                                                                : (share ? kTwoShotShare1 : kTwoShot1);
  const Kernel& kernel = way == SumWay::kTwoShot
                             ? two_shot_[static_cast<size_t>(two_shot + size)]
                             : kernels_[static_cast<size_t>((way == SumWay::kWords ? words : kReduce1) + size)];
  const int ctas = way == SumWay::kFlags ? comm::reduce_ctas(pieces) : comm::words_ctas(pieces, share || sum.there());
  // An owner has the same rows in every sum.
  const int64_t at_once = way == SumWay::kFlags     ? exchange_.flag_rows
                          : way == SumWay::kTwoShot ? exchange_.rows / exchange_.ranks * exchange_.ranks
                                                    : exchange_.rows;
  for (int64_t first = 0; first < rows; first += at_once) {
    comm::ReduceArgs part = {};
    part.peers = peers();
    part.norm = args;
    part.norm.residual += first * args.residual_stride;
    part.norm.delta += first * args.delta_stride;
    if (share) part.norm.share.x += first * args.share.stride;
    if (args.share.logits != nullptr) part.norm.share.logits += first * args.share.logits_stride;
    if (part.norm.residual_out != nullptr) part.norm.residual_out += first * args.residual_stride;
    part.norm.out += first * args.out_stride;
    part.rows = static_cast<int>(std::min(rows - first, at_once));
    if (sum.there()) part.sum = sum.from(first);
    unsigned blocks = grid(part.rows, ctas);
    // A CTA's rows, every so-manieth, have all owners in turns.
    while (way == SumWay::kTwoShot && blocks < static_cast<unsigned>(part.rows) && std::gcd(blocks, count()) > 1) {
      --blocks;
    }
    launch(card_->stream, kernel, {blocks}, overlap, part);
  }
}

// A CTA for each row, where all have room.
bool CardRanks::a_cta_each(SumWay way, int64_t rows, int64_t columns) const {
  const int pieces = norm::norm_pieces(static_cast<int>(columns));
  return way == SumWay::kWords && (pieces == 1 || pieces == 2) && grid(rows, 1) == rows;
}

bool CardRanks::reduces_alone(int64_t rows, int64_t columns) const {
  return a_cta_each(way_of_rows(rows, columns), rows, columns);
}

void CardRanks::reduce_alone(const norm::NormArgs& args, int64_t rows, Overlap overlap) {
  comm::ReduceArgs whole = {};
  whole.peers = peers();
  whole.norm = args;
  whole.rows = static_cast<int>(rows);
  launch(card_->stream, kernels_[static_cast<size_t>(kEachAlone1 + size_of(norm::norm_pieces(args.columns)))],
         {static_cast<unsigned>(rows)}, overlap, whole);
}

bool CardRanks::may_route(int64_t columns, int64_t router_columns) const {
  return table_.has(count(), SumWay::kWords) && norm::norm_pieces(static_cast<int>(columns)) <= 2 &&
         comm::routes_with_sum(static_cast<int>(router_columns), static_cast<int>(columns));
}

bool CardRanks::routes(int64_t rows, int64_t columns, int64_t router_columns) const {
  return !memory_.empty() && may_route(columns, router_columns) && 2 * rows <= exchange_.rows &&
         a_cta_each(way_of_rows(rows, columns), rows, columns);
}

void CardRanks::reduce_routed(const gemm::RoutedArgs& args, int64_t rows, Overlap overlap) {
  const comm::ReduceRoutedArgs whole = {peers(), args, static_cast<int>(rows)};
  launch(card_->stream, kernels_[static_cast<size_t>(kEachRouted1 + size_of(norm::norm_pieces(args.norm.columns)))],
         {static_cast<unsigned>(rows)}, overlap, whole);
}

// Of this rank's memory, where blocks come together: all of it, unless words are exchanged in some.
uint64_t CardRanks::gathered_bytes() const {
  const bool words = over_peers_ && !replaced_;
  return static_cast<uint64_t>(words ? exchange_.flag_parts_bytes() : exchange_.bytes());
}

// Blocks of all ranks into this one's memory, one behind the other.
void CardRanks::bring(RankBlocks* blocks, DeviceAddress from, uint64_t bytes) {
  const Memory& mine = *memory_[static_cast<size_t>(member_->rank())];
  FF_ASSERT(bytes % 16 == 0 && bytes * static_cast<uint64_t>(count()) <= mine.buffer.bytes());
  if (blocks != nullptr) blocks->all_gather(from, mine.buffer.address(), bytes);  // null: a card that only counts
}

void CardRanks::copy_columns(const void* from, int64_t from_stride, void* to, int64_t to_stride, int64_t words,
                             int64_t rows) {
  const comm::CopyColumnsArgs args = {static_cast<const unsigned*>(from), static_cast<unsigned*>(to), from_stride,
                                      to_stride, static_cast<int>(words)};
  const auto ctas = std::min<int64_t>(ceil_div(words, int64_t{4} * comm::kGatherThreads), 64);
  launch(card_->stream, gathered_[kCopyColumns], {static_cast<unsigned>(ctas), static_cast<unsigned>(rows)},
         Overlap::kNone, args);
}

void CardRanks::reduce_gathered(RankBlocks* blocks, const norm::NormArgs& args, int64_t rows) {
  const Memory& mine = *memory_[static_cast<size_t>(member_->rank())];
  const Kernel& kernel = gathered_[static_cast<size_t>(kGathered1 + size_of(norm::norm_pieces(args.columns)))];
  // The ranks' blocks, and behind them this rank's where its rows lie apart.
  const auto row_bytes = static_cast<uint64_t>(args.columns) * 2;
  const auto room = static_cast<int64_t>(gathered_bytes() / (row_bytes * static_cast<uint64_t>(count() + 1)));
  const int64_t at_once = std::min(room, kMostGridRows);
  const DeviceAddress packed =
      mine.buffer.address() + static_cast<uint64_t>(at_once) * row_bytes * static_cast<uint64_t>(count());
  for (int64_t first = 0; first < rows; first += at_once) {
    comm::GatheredArgs part = {};
    part.norm = args;
    part.norm.residual += first * args.residual_stride;
    if (part.norm.residual_out != nullptr) part.norm.residual_out += first * args.residual_stride;
    part.norm.out += first * args.out_stride;
    part.ranks = exchange_.ranks;
    part.rows = static_cast<int>(std::min(rows - first, at_once));
    part.parts = mine.buffer.as<const unsigned short>();
    const auto* delta = args.delta + first * args.delta_stride;
    auto from = static_cast<DeviceAddress>(reinterpret_cast<uintptr_t>(delta));
    if (args.delta_stride != args.columns && part.rows > 1) {
      FF_ASSERT(args.delta_stride % 2 == 0);
      copy_columns(delta, args.delta_stride / 2, device_pointer<void>(packed), args.columns / 2, args.columns / 2,
                   part.rows);
      from = packed;
    }
    bring(blocks, from, static_cast<uint64_t>(part.rows) * static_cast<uint64_t>(args.columns) * 2);
    launch(card_->stream, kernel, {static_cast<unsigned>(part.rows)}, Overlap::kNone, part);
  }
}

void CardRanks::gather_blocks(RankBlocks* blocks, const ops::Tensor& part, const ops::Tensor& out,
                              const std::vector<int>& first) {
  int64_t widest = 0;
  for (size_t i = 0; i + 1 < first.size(); ++i) widest = std::max<int64_t>(widest, first[i + 1] - first[i]);
  widest = round_up(widest, 4);
  const Memory& mine = *memory_[static_cast<size_t>(member_->rank())];
  auto* brought = mine.buffer.as<unsigned>();
  const auto room = static_cast<int64_t>(gathered_bytes()) / (widest * 4 * (count() + 1));
  const int64_t at_once = std::min(room, kMostGridRows);
  if (at_once == 0) fail("logits of {} columns a rank: no room to gather a row", widest);
  void* packed = mine.buffer.as<unsigned char>() + at_once * widest * 4 * count();
  for (int64_t row = 0; row < out.rows; row += at_once) {
    const int64_t rows = std::min(at_once, out.rows - row);
    copy_columns(part.f32(row), part.stride, packed, widest, part.cols, rows);
    bring(blocks, static_cast<DeviceAddress>(reinterpret_cast<uintptr_t>(packed)),
          static_cast<uint64_t>(rows * widest * 4));
    for (size_t rank = 0; rank + 1 < first.size(); ++rank) {
      copy_columns(brought + static_cast<int64_t>(rank) * rows * widest, widest, out.f32(row) + first[rank], out.stride,
                   first[rank + 1] - first[rank], rows);
    }
  }
}

void CardRanks::gather(const ops::Tensor& part, const ops::Tensor& out, Overlap overlap) {
  const std::vector<int>& first = columns_of(part.cols, out.cols);
  FF_ASSERT(is_float(part) && is_float(out) && part.rows == out.rows);
  const auto rank = static_cast<size_t>(member_->rank());
  FF_ASSERT(first[rank + 1] - first[rank] == part.cols);
  if (!over_peers_ || replaced_) return gather_blocks(nccl_ ? nccl_.get() : host_.get(), part, out, first);
  comm::GatherColumnsArgs args = {};
  args.peers = peers();
  args.part_stride = part.stride;
  args.out_stride = out.stride;
  int widest = 0;
  for (size_t i = 0; i < first.size(); ++i) args.first[i] = first[i];
  for (size_t i = 0; i + 1 < first.size(); ++i) widest = std::max(widest, first[i + 1] - first[i]);
  args.pieces = ceil_div(widest, comm::words_of_piece(exchange_));
  const int64_t at_once = exchange_.flag_rows / args.pieces;
  if (at_once == 0)
    fail("logits of {} columns a rank: {} pieces, wanted at most {}", widest, args.pieces, exchange_.flag_rows);
  for (int64_t row = 0; row < out.rows; row += at_once) {
    args.rows = static_cast<int>(std::min(at_once, out.rows - row));
    args.part = reinterpret_cast<const unsigned*>(part.f32(row));
    args.out = reinterpret_cast<unsigned*>(out.f32(row));
    launch(card_->stream, kernels_[kGatherColumns], {grid(int64_t{args.rows} * args.pieces, comm::kGatherCtas)},
           overlap, args);
  }
}

uint64_t CardRanks::checksum(const ops::Tensor& sum, int64_t rows) {
  FF_ASSERT(is_float(sum) && rows <= sum.rows);
  checksum_place_.fill(card_->stream, 0);
  comm::ChecksumArgs args = {};
  args.words = reinterpret_cast<const unsigned*>(sum.f32());
  args.stride = sum.stride;
  args.columns = static_cast<int>(sum.cols);
  args.sum = checksum_place_.as<unsigned long long>();
  if (rows > 0) launch(card_->stream, checksum_[0], {static_cast<unsigned>(rows)}, Overlap::kNone, args);
  // To page-locked memory, so that the copy does not wait within the driver.
  checksum_place_.download(card_->stream, checksum_found_.data(), sizeof(uint64_t));
  card_->stream.synchronize();
  uint64_t found = 0;
  std::memcpy(&found, checksum_found_.data(), sizeof(found));
  check();
  return found;
}

void CardRanks::check() const {
  uint32_t failed = 0;
  std::memcpy(&failed, report_.data(), sizeof(failed));
  if (failed == 0) return;
  fail("rank {} did not come to a sum within {:.1f} s", failed - 1, std::chrono::duration<double>(patience_).count());
}

}  // namespace fourfold::cuda
