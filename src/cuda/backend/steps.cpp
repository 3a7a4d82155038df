// Steps: driven by the host, tokens chosen on the device.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "cuda/backend/cuda_backend.h"
#include "cuda/backend/tensors.h"
#include "kernels/step/rows_args.h"
#include "kernels/step/sample_args.h"

namespace fourfold::cuda {

// A body that is planned: its operations say what they need.
struct CudaBackend::Rehearsal : ops::StepScope {
  explicit Rehearsal(int64_t lanes_) : lanes(lanes_) {}
  int64_t lanes;
  void begin_trunk() override {}
  int64_t begin_report() override { return 0; }  // the same as for rows that tokens are chosen from
  void gather_reported(const ops::Tensor&, const ops::Tensor&) override {}
  void report(const ops::Tensor&) override {}
  void gather_logit_rows(const ops::Tensor&, const ops::Tensor&) override {}
  void choose(const ops::Tensor&) override {}
  void begin_feed() override {}
  int64_t begin_draft(int64_t) override { return lanes; }
  void gather_ends(const ops::Tensor&, const ops::Tensor&) override {}
  void draft(int64_t, const ops::Tensor&) override {}
};

std::unique_ptr<ops::Stepper> CudaBackend::make_stepper(const ops::StepLimits& limits, ops::KvCache* kv,
                                                        ops::StateCache* states, ops::StepBody body) {
  reserve({limits.rows, limits.lanes, limits.context, limits.page_size});
  planning_ = true;
  drafts_ = limits.drafts > 0;
  rank_choice_.reset();
  try {
    Rehearsal rehearsal(limits.lanes);
    const auto rehearse = [&] {
      ops::StepShape shape = {limits.rows, limits.logit_rows, limits.lanes, limits.drafts, limits.drafts > 0};
      body(shape, rehearsal);
      for (size_t list = 0; shape.feed_drafter && list < limits.draft_lists.size(); ++list) {
        shape.draft_list = static_cast<int32_t>(list) + 1;
        if (limits.draft_lists[list] > 0) body(shape, rehearsal);
      }
    };
    if (!card_->device.only_counts()) load_asked_for(rehearse);
    rehearse();
    if (options_.test_kernels && !card_->device.only_counts()) test_kernels(rehearse);
  } catch (...) {
    planning_ = false;
    throw;
  }
  planning_ = false;
  // Not page-locked: hardly any choice is the host's, and memory that nobody touches is none.
  fetched_room_ = limits.logit_rows * limits.vocabulary;
  fetched_ = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(fetched_room_));
  if (options_.wide) reserve_choices(limits);
  if (options_.wide && by_parts_) reserve_parts(limits);
  card_->stream.synchronize();

  cpu::HostStepParts parts;
  if (options_.wide) {
    parts.choose_later = [this](const ops::Tensor& logits, std::span<const cpu::RowChoice> rows) {
      const HostSpan span("launch of the choice");
      return choose_later(logits, rows);
    };
    parts.collect = [this](std::span<cpu::Chosen> chosen, std::span<std::string> errors) {
      const HostSpan span("wait for tokens");
      collect(chosen, errors);
    };
    if (rounds_ahead() && limits.drafts > 0) keep_lanes(limits, parts);
    parts.collectable = [this] {
      const int result = query(choices_[collected_ % choices_.size()]);
      if (result != jit::kNotReady) card_->device.check(result, "waiting for the device");
      return result != jit::kNotReady;
    };
  }
  graphs_.clear();
  parts.bind = [this](const ops::Batch& batch, cpu::StepPart part, std::span<const cpu::CarriedRow> carried) {
    const HostSpan span("tables of a part");
    begin_part(batch, part, carried);
  };
  // How many rows these are is not in the part's key.
  parts.bind_logits = [this](std::span<const ops::LogitRows>) { end_part(); };
  parts.end = [this](bool failed) {
    const HostSpan span("end of a part");
    failed ? abandon_part() : end_part();
    if (!failed) check_sums();
  };
  parts.prepared = [this] { return graphs_.take_fresh(); };
  parts.copy_page = [kv](int32_t from, int32_t to) {
    if (kv != nullptr) kv->copy_page(from, to);
  };
  if (drafts_ && states != nullptr && states->shape().layers > 0) {
    parts.put_off_rows = put_off_rows();
    parts.make_states = [this, states](std::span<const cpu::PutOffState> made) {
      make_states(static_cast<const CardStateCache&>(*states), made);
    };
  }
  parts.gather = [this](const ops::Tensor& x, std::span<const int32_t> rows, const ops::Tensor& out) {
    gather_rows(x, rows, out);
  };
  parts.fetch = [this](const ops::Tensor& logits) {
    const HostSpan span("logits to the host");
    end_part();
    gather_open();
    const int64_t count = logits.rows * logits.cols;
    FF_ASSERT(is_float(logits) && logits.stride == logits.cols && count <= fetched_room_);
    card_->device.check(card_->device.driver().call().copy_to_host(fetched_.get(), address_of(logits.data),
                                                                   static_cast<uint64_t>(count) * sizeof(float),
                                                                   card_->stream.handle()),
                        "copy from the device");
    card_->stream.synchronize();
    settle();
    ops::Tensor host = logits;
    host.data = fetched_.get();
    return host;
  };
  card_->device.set_deadline(options_.step_deadline);
  parts.body = [body = std::move(body)](const ops::StepShape& shape, ops::StepScope& scope) {
    const HostSpan span("body of a step");
    body(shape, scope);
  };
  parts.begin_thread = [this] { card_->device.make_current(); };
  parts.pool = &pool_;
  if (ranks_ != nullptr) {
    parts.order = ranks_->order();
    parts.first = ranks_->rank() == 0;
  }
  return cpu::make_host_stepper(limits, std::move(parts));
}

void CudaBackend::reserve_choices(const ops::StepLimits& limits) {
  const auto rows = static_cast<uint64_t>(limits.logit_rows);
  choice_rows_ = limits.logit_rows;
  sample_bytes_ = ChoiceTables::most_bytes(limits.logit_rows, limits.lanes, limits.vocabulary);
  sample_uploads_.prepare(sample_bytes_);
  carry_uploads_.prepare(static_cast<uint64_t>(limits.lanes) * (sizeof(step::CarriedToken) + 8 * sizeof(int)));
  {
    const MemoryScope scope(card_->device, MemoryKind::kTables);
    counts_ = cuda::Buffer(card_->device, static_cast<uint64_t>(limits.lanes * limits.vocabulary) * sizeof(int),
                           "counts of tokens");
  }
  // Of rows that have several CTAs.
  const uint64_t split = std::min(rows, static_cast<uint64_t>(sms_));
  sample_states_ = cuda::Buffer(card_->device, split * sizeof(step::SampleState), "choices of tokens");
  sample_states_.fill(card_->stream, 0);
  const uint64_t results = rows * (1 + 2 * (1 + step::kMostLogprobs)) * sizeof(int);
  for (Choices& choices : choices_) {
    {
      const MemoryScope scope(card_->device, MemoryKind::kTables);
      choices.tokens = cuda::Buffer(card_->device, rows * sizeof(int), "chosen tokens");
    }
    choices.results = PinnedBuffer(card_->device, results, "chosen tokens");
    choices.there = std::make_unique<Event>(card_->device);
  }
  chosen_ = collected_ = 0;
}

void CudaBackend::reserve_parts(const ops::StepLimits& limits) {
  rank_choice_ = std::make_unique<RankChoice>(card_->device, card_->stream, loaded(rank_sample_source()),
                                              ranks_->rank(), ranks_->count(), limits.logit_rows, limits.vocabulary);
  for (const int64_t words : rank_choice_->exchanged()) ranks_->columns_of(words, ranks_->count() * words);
}

bool CudaBackend::choose_later(const ops::Tensor& logits, std::span<const cpu::RowChoice> rows) {
  FF_ASSERT(is_float(logits) && logits.stride == logits.cols && chosen_ - collected_ < choices_.size());
  if (!asked_.lay_out(rows, logits.cols, logits.rows, choice_rows_) || asked_.bytes() > sample_bytes_) return false;
  Choices& choices = choices_[chosen_ % choices_.size()];
  choices.defined.clear();
  choices.logprobs.clear();
  for (const step::SampleRow& s : asked_.samples()) choices.defined.push_back(s.defined);
  for (const cpu::RowChoice& row : rows) choices.logprobs.push_back(row.choice.params.logprobs);
  const bool reports = asked_.asks_for_logprobs();
  const bool open = open_gather_.out.data != nullptr && open_gather_.out.data == logits.data;
  const bool few = static_cast<int64_t>(rows.size()) <= options_.gathered_rows && (!asked_.drawn().empty() || reports);
  const bool by_parts = rank_choice_ != nullptr && open && !few && asked_.can_go_by_parts();
  if (!rows.empty()) {
    asked_.write(sample_uploads_.prepare(asked_.bytes()));
    copies_.add(sample_uploads_.take(asked_.bytes()));
    const DeviceAddress samples = asked_.samples_at(sample_uploads_.place());
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].lane >= 0) lanes_.sample(rows[i].lane, static_cast<int>(i), samples);
    }
  }
  const ops::Tensor own = open ? open_gather_.part : logits;
  end_part();
  flush_tables();
  if (!by_parts) gather_open();
  open_gather_ = {};
  if (!rows.empty()) {
    const auto count = static_cast<int>(rows.size());
    if (works_ != nullptr) {
      note_work("choice of tokens", {4.0 * count * static_cast<double>(logits.cols), 0},
                {.kind = plan::step::Kind::kSample, .rows = count, .inputs = logits.cols});
    }
    const DeviceAddress tables = sample_uploads_.place();
    step::SampleArgs args = {};
    args.logits = const_cast<float*>(logits.f32());
    args.stride = logits.stride;
    args.rows = count;
    asked_.point(args, tables);
    args.counts = counts_.as<int>();
    args.counts_stride = logits.cols;
    args.drafts = device_pointer<const int>(tables_.tokens);
    args.states = sample_states_.as<step::SampleState>();
    args.tokens = choices.tokens.as<int>();
    args.told = reinterpret_cast<int*>(choices.results.data());
    args.logprob_tokens = reports ? args.told + count : nullptr;
    args.logprobs = reports ? reinterpret_cast<float*>(args.told + count * (2 + step::kMostLogprobs)) : nullptr;
    std::fill_n(args.told, count, step::kNotTold);
    begin_counts(rows);
    if (asked_.counted_lanes() > 0) {
      step::CountArgs counted = asked_.counted(tables);
      counted.counts = counts_.as<int>();
      counted.counts_stride = args.counts_stride;
      counted.chosen = choices_[(chosen_ + choices_.size() - 1) % choices_.size()].tokens.as<int>();
      launch(card_->stream, (*sample_)[kSampleCount],
             {static_cast<unsigned>(ceil_div(counted.count, step::kCountThreads))}, overlap_, counted);
    }
    if (by_parts) {
      const auto exchange = [this](const ops::Tensor& part, const ops::Tensor& all) {
        ranks_->gather(part, all, overlap_);
      };
      rank_choice_->choose(args, own.f32() - logits.f32(), own.cols,
                           {asked_.samples(), asked_.drawn(), device_pointer<const int>(asked_.drawn_at(tables)),
                            asked_.reported(), device_pointer<const int>(asked_.reported_at(tables))},
                           exchange, overlap_);
    } else {
      choose_rows(args, logits.cols);
      args.rows = static_cast<int>(asked_.reports().size());
      args.samples = device_pointer<const step::SampleRow>(asked_.reports_at(tables));
      if (args.rows > 0) choose_rows(args, logits.cols);
    }
  }
  // An event would keep the next step's tables from being asked for early. What is written beside tokens may come later
  // than they do, and ranks write tokens twice.
  choices.told = !rows.empty() && !by_parts && !reports;
  if (!choices.told) choices.there->record(card_->stream);
  for (size_t i = 0; i < choices.taken.size(); ++i) choices.taken[i] = uploads()[i]->taken();
  choices.part = graphs_.begun();
  ++chosen_;
  if (rounds_ahead() && drafting_) lanes_.drafted(choices.tokens.as<int>());
  return true;
}

void CudaBackend::choose_rows(step::SampleArgs args, int64_t vocabulary) {
  // Several CTAs of a row wait for each other, and those of another rank on the card could have their room.
  const bool alone = ranks_ == nullptr || !ranks_->shares_card();
  args.splits = alone ? step::sample_splits(static_cast<int>(vocabulary), args.rows, sms_) : 1;
  FF_ASSERT(args.splits == 1 || static_cast<uint64_t>(args.rows) * sizeof(step::SampleState) <= sample_states_.bytes());
  launch(card_->stream, (*sample_)[kSampleTokens],
         {static_cast<unsigned>(args.splits), static_cast<unsigned>(args.rows)}, overlap_, args);
}

// Once for each request with penalties, and again where it was preempted.
void CudaBackend::begin_counts(std::span<const cpu::RowChoice> rows) {
  for (const cpu::RowChoice& row : rows) {
    if (!row.counted.begins) continue;
    const std::span<const int32_t> counts = row.choice.counts;
    counts_.upload(card_->stream, counts.data(), counts.size_bytes(),
                   static_cast<uint64_t>(row.counted.lane) * counts.size_bytes());
    card_->stream.end_overlap();
  }
}

void CudaBackend::keep_lanes(const ops::StepLimits& limits, cpu::HostStepParts& parts) {
  lanes_.reserve(limits.lanes, limits.logit_rows, loaded(lanes_source()).front(), counts_, limits.vocabulary);
  parts.move_lanes = [this](std::span<const cpu::MovedLane> lanes) {
    const Choices& choices = choices_[(chosen_ - 1) % choices_.size()];
    lanes_.move(lanes, tables_, choices.tokens.as<int>());
  };
  parts.carry_lanes = [this](std::span<const cpu::CarriedLane> lanes) {
    lanes_.carry(lanes, tables_);
    send_tables();
  };
  parts.gather_ends = [this](const ops::Tensor& x, std::span<const int32_t> lanes, const ops::Tensor& out) {
    // Row 0 of each stands in until the lanes are known.
    const std::vector<int32_t> rows(static_cast<size_t>(out.rows), 0);
    row_uploads_.prepare(rows.size() * sizeof(rows[0]));
    lanes_.gather_ends(lanes, out.rows, row_uploads_.place());
    gather_rows(x, rows, out);
  };
}

void CudaBackend::gather_open() {
  if (open_gather_.out.data == nullptr) return;
  const OpenGather open = std::exchange(open_gather_, {});
  ranks_->gather(open.part, open.out, overlap_);
}

int CudaBackend::query(const Choices& choices) const {
  const jit::Driver::Functions& call = card_->device.driver().call();
  if (!choices.told) return call.event_query(choices.there->handle());
  const auto* told = reinterpret_cast<const int*>(choices.results.data());
  const bool all = std::all_of(told, told + choices.defined.size(), [](const int& token) {
    return std::atomic_ref<int>(const_cast<int&>(token)).load(std::memory_order_acquire) != step::kNotTold;
  });
  return all ? 0 : call.stream_query(card_->stream.handle());
}

void CudaBackend::collect(std::span<cpu::Chosen> chosen, std::span<std::string> errors) {
  FF_ASSERT(collected_ < chosen_);
  const Choices& choices = choices_[collected_++ % choices_.size()];
  FF_ASSERT(chosen.size() == choices.defined.size());
  card_->device.wait([&] { return query(choices); }, "tokens were waited for");
  if (ranks_ != nullptr) ranks_->check();
  graphs_.ended(choices.part);
  for (size_t i = 0; i < choices.taken.size(); ++i) uploads()[i]->settled(choices.taken[i]);
  constexpr size_t kEach = 1 + step::kMostLogprobs;
  const size_t count = chosen.size();
  const auto* tokens = reinterpret_cast<const int*>(choices.results.data());
  const auto* logprobs = reinterpret_cast<const float*>(tokens + count * (1 + kEach));
  for (size_t i = 0; i < count; ++i) {
    chosen[i].token = tokens[i];
    chosen[i].logprobs.clear();
    // A card that only counts has run nothing.
    if (tokens[i] == step::kNotTold && !card_->device.only_counts()) {
      errors[i] = "the choice of tokens ended without one";
    }
    if (tokens[i] == step::kNotFinite) errors[i] = "a logit of the model is not finite, wanted finite numbers";
    if (tokens[i] == step::kAllMasked) {
      errors[i] = fmt::format("no token may be chosen: all {} defined tokens are masked", choices.defined[i]);
    }
    if (choices.logprobs[i] < 0 || tokens[i] < 0) continue;
    for (size_t k = 0; k < 1 + static_cast<size_t>(std::min(choices.logprobs[i], choices.defined[i])); ++k) {
      chosen[i].logprobs.push_back({tokens[count + i * kEach + k], logprobs[i * kEach + k]});
    }
  }
}

void CudaBackend::end_part() {
  settle_waiting();
  drop_routed();
  FF_ASSERT(shadowed_ == nullptr);
  graphs_.end([this] { flush_tables(); });
}

void CudaBackend::abandon_part() {
  waiting_.out = nullptr;
  waiting_sum_.rows = {};
  waiting_share_ = {};
  routed_ = {};
  routing_dirty_ = routing_sums_.bytes() > 0;
  shadowed_ = nullptr;
  copies_.drop();
  lanes_.drop();
  graphs_.abandon();
}

void CudaBackend::begin_part(const ops::Batch& batch, cpu::StepPart part, std::span<const cpu::CarriedRow> carried) {
  end_part();
  if (std::exchange(routing_dirty_, false)) routing_sums_.fill(card_->stream, 0);
  open_gather_ = {};  // nobody asked for them
  build_tables(batch);
  stepping_ = true;
  drafting_ = part == cpu::StepPart::kFirstDraft || part == cpu::StepPart::kDraft;
  if (part == cpu::StepPart::kFirstDraft) lanes_.begin_passes();
  carry(carried);
  if (PartGraphs::Key key = tables_.shape();
      options_.graphs && !key.empty() && (ranks_ == nullptr || ranks_->records())) {
    key.push_back(static_cast<int64_t>(part));
    key.push_back(static_cast<int64_t>(batch.logit_rows.size()));
    key.push_back(batch.draft_list);
    // What is recorded may not wait for room in these.
    row_uploads_.prepare(static_cast<uint64_t>(limits_.rows) * sizeof(int));
    graphs_.begin(key);
  }
  send_tables();
}

// Into the tables of a step.
void CudaBackend::carry(std::span<const cpu::CarriedRow> carried) {
  if (carried.empty()) return;
  FF_ASSERT(chosen_ > collected_);
  std::vector<step::CarriedToken> rows;
  std::vector<int> stops;
  for (const cpu::CarriedRow& c : carried) {
    rows.push_back({c.row, c.choice, tables_.place_of(c.row), static_cast<int>(stops.size()),
                    static_cast<int>(c.stop_tokens.size())});
    stops.insert(stops.end(), c.stop_tokens.begin(), c.stop_tokens.end());
  }
  const size_t row_bytes = rows.size() * sizeof(rows[0]), stop_bytes = stops.size() * sizeof(int);
  uint8_t* to = carry_uploads_.prepare(row_bytes + stop_bytes);
  std::memcpy(to, rows.data(), row_bytes);
  if (stop_bytes > 0) std::memcpy(to + row_bytes, stops.data(), stop_bytes);
  const auto* at = static_cast<const uint8_t*>(carry_uploads_.take(row_bytes + stop_bytes).from);
  copies_.carry({reinterpret_cast<const step::CarriedToken*>(at), static_cast<int>(rows.size()),
                 reinterpret_cast<const int*>(at + row_bytes),
                 choices_[(chosen_ - 1) % choices_.size()].tokens.as<int>(), device_pointer<int>(tables_.tokens),
                 device_pointer<SequenceRows>(tables_.sequences)});
}

std::optional<ops::OperationTimes> CudaBackend::time_operations(const std::function<void()>& forward) {
  if (ranks_ != nullptr && !ranks_->records()) return std::nullopt;
  ops::OperationTimes times;
  with_timer(forward, [&](OpTimer& timer, const std::function<void()>& run) { times = timer.measure(run); });
  return times;
}

double CudaBackend::time_step(const std::function<void()>& forward, int rounds, int replays) {
  double us = 0;
  with_timer(forward, [&](OpTimer& timer, const std::function<void()>& run) { us = timer.step(run, rounds, replays); });
  return us;
}

void CudaBackend::take_ways(const MeasuredWays& ways) {
  card_->stream.synchronize();
  graphs_.clear();
  products_.clear();
  choosing_.clear();
  routing_.clear();
  arch_.measured = std::make_shared<const MeasuredWays>(ways);
}

void CudaBackend::load_kernels(const std::vector<RowsWay>& ways) {
  std::vector<plan::KernelSource> sources;
  for (RowsWay way : ways) {
    sources.push_back(rows_source(arch_, way));
    if (!chooses(way.formats)) continue;
    way.norm_pieces = 0;
    sources.push_back(choosing_source(arch_, way));
  }
  for (const auto& entry : routing_) {
    for (RowsWay way : ways) {
      way.norm_pieces = 0;
      const int route = routing_columns(way, most_routed());
      if (way.formats == entry.first.first.formats && route > 0) sources.push_back(routing_source(arch_, way, route));
    }
  }
  card_->loader.load(sources);
}

CardTimeline CudaBackend::timeline(const std::function<void()>& forward) {
  CardTimeline timeline;
  with_timer(forward, [&](OpTimer& timer, const std::function<void()>& run) { timeline = timer.timeline(run); });
  return timeline;
}

void CudaBackend::with_timer(const std::function<void()>& forward,
                             const std::function<void(OpTimer& timer, const std::function<void()>& run)>& measure) {
  const DeadlineScope many_steps(card_->device, kDeviceDeadline);
  forward();  // everything is loaded and there is room for it
  drop_routed();
  if (ranks_ != nullptr && !ranks_->records()) fail("times on the card: {} cannot be recorded", ranks_->description());
  settle_waiting();
  card_->stream.synchronize();
  OpTimer timer(*card_);
  timer_ = &timer;
  try {
    measure(timer, [&] {
      forward();
      settle_waiting();
      drop_routed();
      FF_ASSERT(shadowed_ == nullptr);
    });
    timer_ = nullptr;
    if (routing_sums_.bytes() > 0) routing_sums_.fill(card_->stream, 0);  // what was timed alone has left some
    settle();
  } catch (...) {
    timer_ = nullptr;
    abandon_part();
    throw;
  }
}

std::vector<plan::step::Work> CudaBackend::works(const std::function<void()>& run) {
  FF_ASSERT(card_->device.only_counts() && works_ == nullptr);
  std::vector<plan::step::Work> works;
  card_->device.set_launch_note([&works](const Kernel& kernel, const Grid& grid, bool early) {
    plan::step::Launch launch = {kernel.name, int64_t{grid.x} * grid.y * grid.z, kernel.threads, kernel.smem_bytes,
                                 early};
    // Tables go ahead of an operation that has begun and asks for some of its own.
    if (works.empty() || kernel.name.find("copy_tables") != std::string::npos) {
      const bool begun = !works.empty() && works.back().launches.empty();
      works.insert(works.end() - (begun ? 1 : 0), {"tables", 0, 0, {}, {}, {std::move(launch)}});
      return;
    }
    works.back().launches.push_back(std::move(launch));
  });
  works_ = &works;
  const auto end = [this] {
    works_ = nullptr;
    card_->device.set_launch_note({});
  };
  try {
    run();
  } catch (...) {
    end();
    throw;
  }
  end();
  std::erase_if(works, [](const plan::step::Work& work) { return work.launches.empty(); });
  return works;
}

namespace {

// By the name of its source.
std::string operation_of(const std::string& name) {
  constexpr std::pair<const char*, const char*> kOperations[] = {
      {"step_rows", "sums, gates, the router's choice, repacking of weights"},
      {"norm", "norms, embeddings, rows picked out"},
      {"sample", "choice of tokens"},
      {"lanes", "lanes that the card moves on"},
      {"reduce", "sums and columns over ranks"},
      {"two_shot", "sums and columns over ranks"},
      {"gathered", "sums and columns over ranks"},
      {"checksum", "checks of sums over ranks"},
      {"wide_", "products of 17 rows and more"},
      {"dense_", "products of 17 rows and more"},
      {"unpack", "weights for cuBLASLt"},
      {"rows_", "products of 1 to 16 rows"},
      {"routed_rows", "norm and the router's choice"},
      {"attention_", "attention of few rows, keys and values appended"},
      {"prefill_", "attention over whole pieces"},
      {"delta_", "delta rule"},
      {"experts_", "experts that are not NVFP4"}};
  for (const auto& [begin, operation] : kOperations) {
    if (name.starts_with(begin)) return operation;
  }
  return "experts";
}

}  // namespace

std::vector<ListedKernel> CudaBackend::kernels(const std::set<std::string>& refused, int64_t most_rows) const {
  std::vector<ListedKernel> all;
  std::set<std::string> seen;
  const auto add = [&](const plan::KernelSource& source) {
    if (seen.insert(source.name).second) all.push_back({source, operation_of(source.name)});
  };
  for (const plan::KernelSource& source : card_->loader.counted()) add(source);
  for (const auto& entry : experts_) {
    for (const plan::KernelSource& source :
         layer_sources(entry.second.kernels->problem(), card_->loader.card(), refused, most_rows)) {
      add(source);
    }
  }
  return all;
}

void CudaBackend::note_work(std::string_view name, const ops::Cost& cost, const plan::step::Extent& extent) {
  plan::step::Work& work =
      works_->emplace_back(plan::step::Work{std::string(name), cost.bytes, cost.flops, extent, {}, {}});
  if (extent.experts == nullptr) return;
  work.experts = *extent.experts;
  work.experts->tokens = extent.rows;
  work.extent.experts = nullptr;
}

void CudaBackend::settle() {
  for (Uploads* each : uploads()) each->settled();
  if (ranks_ != nullptr) ranks_->check();
}

void CudaBackend::read(const ops::Tensor& x, std::span<float> out) {
  FF_ASSERT(static_cast<int64_t>(out.size()) == x.rows * x.cols);
  if (x.rows == 0) return;
  card_->device.make_current();  // a model of several ranks is read by whoever asks
  settle_waiting();
  if (graphs_.recording() || graphs_.replaying()) end_part();
  const auto row = static_cast<size_t>(x.stride * x.element_bytes());
  const size_t bytes = static_cast<size_t>(x.rows - 1) * row + static_cast<size_t>(x.cols * x.element_bytes());
  std::vector<uint8_t> host(bytes);
  card_->device.check(
      card_->device.driver().call().copy_to_host(
          host.data(), address_of(x.data == shadowed_ ? shadow_.as<void>() : x.data), bytes, card_->stream.handle()),
      "copy from the device");
  card_->stream.synchronize();
  settle();
  for (int64_t t = 0; t < x.rows; ++t) {
    const uint8_t* from = host.data() + static_cast<size_t>(t) * row;
    float* to = out.data() + t * x.cols;
    if (is_float(x)) {
      std::memcpy(to, from, static_cast<size_t>(x.cols) * sizeof(float));
      continue;
    }
    for (int64_t i = 0; i < x.cols; ++i) {
      uint16_t bits = 0;
      std::memcpy(&bits, from + i * 2, sizeof(bits));
      to[i] = nvfp4::bf16_to_float(bits);
    }
  }
}

std::shared_ptr<ops::Backend> make_backend(const CudaOptions& options) {
  return std::make_shared<CudaBackend>(options);
}

int device_count() {
  const jit::Driver* driver = jit::Driver::find(nullptr);
  return driver == nullptr ? 0 : driver->device_count();
}

const uint64_t kLoadingBytes = WeightFeed::kBlocks * WeightFeed::kBlockBytes + WeightFeed::kStatusBytes;

std::shared_ptr<ops::Backend> make_counting_backend(const CudaOptions& options, const jit::DeviceInfo& info,
                                                    uint64_t memory_bytes) {
  CudaOptions counting = options;
  counting.threads = 1;
  counting.self_test = false;
  return std::make_shared<CudaBackend>(
      counting, std::make_shared<Card>(info, memory_bytes,
                                       options.store.empty() ? jit::default_store_directory() : options.store));
}

std::vector<plan::step::Work> works_of(ops::Backend& counting, const std::function<void()>& run) {
  return dynamic_cast<CudaBackend&>(counting).works(run);
}

std::vector<ListedKernel> kernels_of(const ops::Backend& counting, const std::set<std::string>& refused,
                                     int64_t most_rows) {
  return dynamic_cast<const CudaBackend&>(counting).kernels(refused, most_rows);
}

MemoryCounts memory_of(const ops::Backend& backend) { return device_of(backend).ledger().counts(); }

const Device& device_of(const ops::Backend& backend) { return dynamic_cast<const CudaBackend&>(backend).device(); }

CardMemory card_memory(int device) {
  const Device opened(device);
  return {opened.info(), opened.memory(), device};
}

std::string refusal_of(int device, uint64_t weight_bytes) {
  std::string why;
  const jit::Driver* driver = jit::Driver::find(&why);
  if (driver == nullptr) return "no CUDA device" + why;
  if (jit::Nvrtc::find(&why) == nullptr) return "no NVRTC" + why;
  if (device >= driver->device_count()) return fmt::format("no CUDA device {}", device);
  const jit::DeviceInfo info = driver->device(device);
  if (!plan::knows_arch(info.arch())) return fmt::format("no kernels for {} ({})", info.name, info.arch());
  const Device opened(device);
  const DeviceMemory memory = opened.memory();
  constexpr uint64_t kBeside = uint64_t{3} << 30;  // caches, activations, kernels
  if (weight_bytes + weight_bytes / 16 + kBeside > memory.free) {
    return fmt::format("{:.1f} GB of weights, {:.1f} GB free on {}", static_cast<double>(weight_bytes) / 1e9,
                       static_cast<double>(memory.free) / 1e9, info.name);
  }
  return "";
}

}  // namespace fourfold::cuda
