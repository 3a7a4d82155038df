// The CUDA backend without a card, on the host driver: whole models against the CPU reference, in pieces of every kind.
// tests/cuda/backend_test.cpp runs the same on a card.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <numeric>

#include "base/math.h"
#include "chat/chat_text.h"
#include "cpu/backend.h"
#include "cuda/device/build.h"
#include "cuda/device/device.h"
#include "hostcuda/testing.h"
#include "model/checkpoint.h"
#include "model/model.h"
#include "model/random_weights.h"
#include "nvfp4/number.h"
#include "ranks/threads.h"

namespace fourfold::hostcuda {
namespace {

constexpr int64_t kPage = 16;

std::filesystem::path demo() { return std::filesystem::path(FOURFOLD_SOURCE_DIR) / "models" / "demo"; }

// The demo model; or, for experts in another format than its own, half of its layers with random weights, and as many
// experts as a token chooses, so that no rounding changes the choice.
std::shared_ptr<model::Model> load(std::shared_ptr<ops::Backend> backend, int64_t rows, ops::Format experts) {
  model::Checkpoint checkpoint(demo());
  model::ModelOptions options;
  options.max_step_tokens = rows;
  options.max_logit_rows = rows;
  if (experts == ops::Format::kNvfp4) return model::load_model(checkpoint, std::move(backend), options);
  model::ModelConfig config = checkpoint.config();
  model::set_layers(config, 4);
  config.experts = config.top_k;
  if (experts == ops::Format::kFp8) {  // no whole blocks
    config.moe_intermediate = 77;
    config.shared_intermediate = 45;
  }
  const auto weights = model::make_random_weights(config, 5, [&](model::WeightKind kind) {
    return kind == model::WeightKind::kRoutedExpert ? experts : model::default_format(kind);
  });
  return model::load_model(*weights, std::move(backend), options);
}

std::shared_ptr<model::Model> load(const model::BackendFactory& backends, const model::RankOptions& ranks) {
  model::Checkpoint checkpoint(demo());
  model::ModelOptions options;
  options.max_step_tokens = options.max_logit_rows = 64;
  return model::load_model(checkpoint, backends, ranks, options);
}

std::shared_ptr<model::Model> reference(ops::Format experts) {
  cpu::CpuOptions options;
  options.isa = cpu::Isa::kReference;
  return load(cpu::make_backend(options), 128, experts);
}

// Conversations of the kind that the model was made for. Among tokens at random it has experts that are chosen by less
// than bf16 tells apart.
std::vector<int32_t> text_of(size_t sequence, size_t length) {
  static const chat::ChatText text(demo(), model::Checkpoint(demo()).config());
  std::ifstream file(demo() / "eval" / "recall.jsonl");
  std::string line;
  for (size_t i = 0; i < 4 * sequence; ++i) std::getline(file, line);
  std::vector<int32_t> tokens;
  while (tokens.size() < length && std::getline(file, line)) {
    chat::Conversation conversation;
    conversation.messages = Json::parse(line).at("messages");
    conversation.variables["enable_thinking"] = false;
    const std::vector<int32_t> more = text.prompt(conversation).tokens;
    tokens.insert(tokens.end(), more.begin(), more.end());
  }
  tokens.resize(length);
  return tokens;
}

// A step: rows of each sequence.
using Step = std::vector<int>;

// Logits of every row of some sequences, computed in these steps. The first step has at least as many sequences as any
// other one.
std::vector<float> logits_of(model::Model& model, const std::vector<Step>& steps,
                             const model::LayerObserver& observer = {}) {
  const size_t count = steps.front().size();
  std::vector<std::vector<int32_t>> pages(count), texts(count);
  std::vector<int32_t> positions(count, 0);
  int32_t next_page = 0;
  for (size_t i = 0; i < count; ++i) {
    int64_t length = 0;
    for (const Step& step : steps) length += step[i];
    texts[i] = text_of(i, static_cast<size_t>(length));
    for (int64_t p = 0; p < ceil_div(length, kPage); ++p) pages[i].push_back(next_page++);
    std::reverse(pages[i].begin(), pages[i].end());
  }
  model::Caches caches = model.make_caches(next_page, kPage, static_cast<int64_t>(count));
  std::vector<float> all;
  for (const Step& step : steps) {
    std::vector<int32_t> tokens, rows;
    std::vector<ops::Sequence> sequences;
    for (size_t i = 0; i < count; ++i) {
      if (step[i] == 0) continue;
      ops::Sequence s;
      s.first = static_cast<int32_t>(tokens.size());
      s.count = step[i];
      s.position = positions[i];
      s.state_in = static_cast<int32_t>(i);
      s.pages = pages[i];
      sequences.push_back(s);
      tokens.insert(tokens.end(), texts[i].begin() + positions[i], texts[i].begin() + positions[i] + step[i]);
      positions[i] += step[i];
    }
    rows.resize(tokens.size());
    std::iota(rows.begin(), rows.end(), 0);
    model.forward({tokens, sequences, rows}, caches, observer);
    const size_t at = all.size();
    all.resize(at + tokens.size() * static_cast<size_t>(model.config().vocabulary));
    model.backend().read(model.logits(), std::span(all).subspan(at));
  }
  return all;
}

struct Difference {
  double mean_kl = 0;
  int64_t other_choices = 0;  // though the gap was over 0.05
};

Difference compare(const std::vector<float>& got, const std::vector<float>& want, size_t vocabulary) {
  Difference d;
  const size_t rows = want.size() / vocabulary;
  for (size_t t = 0; t < rows; ++t) {
    const float *p = &want[t * vocabulary], *q = &got[t * vocabulary];
    const auto log_sum = [&](const float* x) {
      const double most = *std::max_element(x, x + vocabulary);
      double sum = 0;
      for (size_t i = 0; i < vocabulary; ++i) sum += std::exp(x[i] - most);
      return most + std::log(sum);
    };
    const double zp = log_sum(p), zq = log_sum(q);
    double kl = 0;
    for (size_t i = 0; i < vocabulary; ++i) kl += std::exp(p[i] - zp) * ((p[i] - zp) - (q[i] - zq));
    d.mean_kl += (std::isfinite(kl) ? kl : 1e9) / static_cast<double>(rows);
    std::vector<float> sorted(p, p + vocabulary);
    std::nth_element(sorted.begin(), sorted.begin() + 1, sorted.end(), std::greater<>());
    const auto first = std::max_element(p, p + vocabulary);
    if (*first - sorted[1] > 0.05f && first - p != std::max_element(q, q + vocabulary) - q) ++d.other_choices;
  }
  return d;
}

struct Case {
  const char* name;
  std::vector<Step> steps;
  bool overlap = true;
  bool fp8 = false;
  bool wide = true;
  bool again = false;  // a second run has the same bits
  HostCard card = {};
  const char* emulate = "";  // a card whose kernels run on this one
  int64_t rows = 128;        // of a step, at most
  ops::Format experts = ops::Format::kNvfp4;
  int64_t library_rows = 0;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// Fills the store with what the model is listed to need: the number of kernels in it.
size_t warm(const Case& c) {
  cuda::CudaOptions options;
  options.fp8_cache = c.fp8;
  options.library_rows = c.library_rows;
  const auto list = cuda::make_counting_backend(
      options, *c.emulate != 0 ? cuda::info_of(plan::find_gpu(c.emulate)) : device_info(c.card), uint64_t{1} << 40);
  {
    const auto model = load(list, c.rows, c.experts);
    model::Caches caches = model->make_caches(1, kPage, 1);
    model->make_stepper({.lanes = 1,
                         .rows = c.rows,
                         .logit_rows = 1,
                         .context = kPage,
                         .page_size = kPage,
                         .vocabulary = model->config().vocabulary},
                        caches);
  }
  cuda::CompileOptions compile = {device_info(c.card).arch(), {}};
  if (*c.emulate != 0) compile.definitions.emplace_back("FOURFOLD_EMULATE_FP4_MMA");
  std::vector<jit::KernelRequest> requests;
  for (const cuda::ListedKernel& kernel : cuda::kernels_of(*list, {}, c.rows))
    requests.push_back(cuda::request_of(kernel.source, compile));
  jit::KernelStore store(kernel_store());
  jit::build(store, requests, {.threads = 1, .progress = false});
  return store.keys().size();
}

class HostModel : public testing::TestWithParam<Case> {};

TEST_P(HostModel, HasTheReferencesLogits) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  const Case& c = GetParam();
  const std::vector<float> want = logits_of(*reference(c.experts), c.steps);
  HostCard card = c.card;
  card.executor.seed = 3;
  card.executor.delivery = c.overlap ? executor::Delivery::kLate : executor::Delivery::kAtOnce;
  install(card);
  const size_t listed = warm(c);
  {
    cuda::CudaOptions options = cuda_options(c.overlap, c.fp8, c.wide);
    options.emulate = c.emulate;
    const auto model = load(cuda::make_backend(options), c.rows, c.experts);
    const std::vector<float> got = logits_of(*model, c.steps);
    const Difference d = compare(got, want, static_cast<size_t>(model->config().vocabulary));
    RecordProperty("mean_kl", fmt::format("{:.2e}", d.mean_kl));
    std::printf("mean KL %.2e, %ld launches\n", d.mean_kl, static_cast<long>(calls(Call::kLaunch)));
    // Random weights amplify what is rounded.
    EXPECT_LT(d.mean_kl, c.fp8 || c.experts != ops::Format::kNvfp4 ? 1e-3 : 1e-4);
    EXPECT_EQ(d.other_choices, 0);
    if (c.again) {
      EXPECT_EQ(got, logits_of(*model, c.steps)) << "two runs have other bits";
    }
  }
  EXPECT_EQ(live(), Live{});
  EXPECT_EQ(jit::KernelStore(kernel_store()).keys().size(), listed) << "the list lacks kernels that were run";
}

INSTANTIATE_TEST_SUITE_P(
    Pieces, HostModel,
    testing::Values(
        Case{.name = "Tokens", .steps = {{3}, {1}, {1}}, .again = true},                 //
        Case{.name = "OneByOne", .steps = {{5}, {1}}, .overlap = false, .wide = false},  //
        Case{.name = "Chunks", .steps = {{33, 0}, {70, 1}, {17, 1}}},                    //
        Case{.name = "Mixed", .steps = {{20, 1, 3, 0}, {1, 18, 2, 1}}, .again = true},   //
        Case{.name = "Fp8Cache", .steps = {{19, 2}, {1, 17}, {1, 3}}, .fp8 = true},      //
        // The kernels of other architectures: mma.sync, other tiles, no bulk copies on the first one.
        Case{.name = "Ampere", .steps = {{20, 3}, {1, 17}}, .card = ampere_card(), .rows = 32},
        Case{.name = "EmulatedBlackwell", .steps = {{20, 3}, {1, 17}}, .emulate = "rtx-pro-6000", .rows = 32},
        Case{.name = "EmulatedBlackwellFp8Cache",
             .steps = {{19, 2}, {1, 1}},
             .fp8 = true,
             .emulate = "rtx-pro-6000",
             .rows = 32},
        Case{.name = "Bf16Experts", .steps = {{19, 2}, {1, 1}}, .experts = ops::Format::kBf16},
        Case{.name = "Fp8Experts", .steps = {{19, 2}, {1, 1}}, .experts = ops::Format::kFp8}),
    [](const auto& parameter) { return parameter.param.name; });

// cuBLASLt takes some products and has nothing for the others, which our kernels take: it is asked once for each size,
// and one of them is named.
TEST(HostLibrary, TakesTheProductsThatItHas) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  const Case c = {.name = "Library", .steps = {{33}}, .library_rows = 30};
  const std::vector<float> want = logits_of(*reference(c.experts), c.steps);
  HostCard card;
  card.executor.seed = 3;
  card.cublaslt = true;
  card.cublaslt_most = 256;
  install(card);
  const size_t listed = warm(c);
  {
    cuda::CudaOptions options = cuda_options(true, false, true);
    options.library_rows = c.library_rows;
    const auto model = load(cuda::make_backend(options), c.rows, c.experts);
    testing::internal::CaptureStderr();
    const std::vector<float> got = logits_of(*model, c.steps);
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find("cuBLASLt has nothing for 1024 x 256 with 33 rows"), std::string::npos) << said;
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
    const int64_t taken = library_products(), sizes = library_questions();
    EXPECT_GT(taken, 0);
    const Difference d = compare(got, want, static_cast<size_t>(model->config().vocabulary));
    EXPECT_LT(d.mean_kl, 1e-4);
    EXPECT_EQ(d.other_choices, 0);

    EXPECT_EQ(got, logits_of(*model, c.steps)) << "two runs have other bits";
    EXPECT_EQ(library_products(), 2 * taken);
    EXPECT_EQ(library_questions(), sizes);
  }
  EXPECT_EQ(live(), Live{});
  EXPECT_EQ(jit::KernelStore(kernel_store()).keys().size(), listed) << "the list lacks kernels that were run";
}

// ---- ranks

struct RankCase {
  const char* name;
  std::vector<Step> steps;
  bool by_expert = false;
  bool one_card = false;
  int ranks = 2;
  const char* sums = "";  // asked for; empty: not
  int sms = 4;            // with 16 a product has a CTA for each row tile, and takes the router along
};

void PrintTo(const RankCase& c, std::ostream* out) { *out << c.name; }

class HostRanks : public testing::TestWithParam<RankCase> {};

TEST_P(HostRanks, HaveTheReferencesLogits) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  const RankCase& c = GetParam();
  const std::vector<float> want = logits_of(*reference(ops::Format::kNvfp4), c.steps);
  HostCard card = two_cards();
  card.devices = c.ranks;
  card.sms = c.sms;
  card.executor.seed = 5;
  install(card);
  {
    cuda::CudaOptions options = cuda_options();
    if (*c.sums != 0) options.sums = cuda::SumTable::parse(c.sums);
    const model::BackendFactory backends = rank_backends(c.one_card, 100000, options);
    const auto model = load(backends, {.ranks = c.ranks, .by_expert = c.by_expert});
    const Difference d = compare(logits_of(*model, c.steps), want, static_cast<size_t>(model->config().vocabulary));
    std::printf("mean KL %.2e, %ld launches\n", d.mean_kl, static_cast<long>(calls(Call::kLaunch)));
    EXPECT_LT(d.mean_kl, 1e-4);
    EXPECT_EQ(d.other_choices, 0);
  }
  EXPECT_EQ(live(), Live{});
}

INSTANTIATE_TEST_SUITE_P(
    All, HostRanks,
    testing::Values(RankCase{.name = "Chunks", .steps = {{33, 2}, {1, 1}}},                           //
                    RankCase{.name = "WholeExperts", .steps = {{17, 1}, {1, 1}}, .by_expert = true},  //
                    RankCase{.name = "OneCard", .steps = {{5}, {1}}, .one_card = true},
                    RankCase{
                        .name = "OneCardRouted", .steps = {{5}, {1}}, .one_card = true, .sums = "words", .sms = 16},
                    RankCase{.name = "FourCards", .steps = {{5}, {1}}, .ranks = 4}),
    [](const auto& parameter) { return parameter.param.name; });

TEST(HostRanksMeet, SumsMayBeAlone) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  constexpr int64_t kHidden = 256, kRows = 2;
  install(two_cards());
  const auto group = std::make_shared<ranks::Group>(2);
  ranks::Threads threads(group);
  std::vector<std::vector<float>> sums(2);
  std::vector<int> refused(2);  // each rank writes its own
  threads.run([&](int64_t rank) {
    const auto backend = rank_backends()(std::make_shared<ranks::Member>(group, rank));
    const auto delta = backend->allocate(kRows * kHidden * 2), out = backend->allocate(kRows * kHidden * 2);
    const ops::Tensor of_rank = backend->tensor(*delta, kRows, kHidden), sum = backend->tensor(*out, kRows, kHidden);
    std::vector<float> read(kRows * kHidden);
    backend->read(of_rank, read);                    // what memory begins with has been written
    for (int64_t i = 0; i < kRows * kHidden; ++i) {  // this card's memory is the host's
      static_cast<uint16_t*>(of_rank.data)[i] = nvfp4::float_to_bf16(static_cast<float>((rank + 1) * (i % 64)));
    }
    const bool done = backend->all_reduce(of_rank, sum);
    backend->read(sum, read);
    const auto at = static_cast<size_t>(rank);
    if (done) sums[at] = read;
    // More rows than have a CTA each at the same time.
    const auto many = backend->allocate(1000 * kHidden * 2);
    refused[at] =
        backend->all_reduce(backend->tensor(*many, 1000, kHidden), backend->tensor(*many, 1000, kHidden)) ? 0 : 1;
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    ASSERT_EQ(sums[rank].size(), static_cast<size_t>(kRows * kHidden));
    for (size_t i = 0; i < sums[rank].size(); ++i) ASSERT_EQ(sums[rank][i], static_cast<float>(3 * (i % 64)));
    EXPECT_EQ(refused[rank], 1);
  }
  EXPECT_EQ(live(), Live{});
}

TEST(HostRanksMeet, SumsAreTimedOnAllRanksAtOnce) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  constexpr int64_t kHidden = 256;
  install(two_cards());
  const auto group = std::make_shared<ranks::Group>(2);
  ranks::Threads threads(group);
  std::vector<std::optional<ops::OperationTimes>> times(2);
  threads.run([&](int64_t rank) {
    const auto backend = rank_backends()(std::make_shared<ranks::Member>(group, rank));
    const auto residual = backend->allocate(kHidden * 4), delta = backend->allocate(kHidden * 2),
               out = backend->allocate(kHidden * 2);
    const ops::Vector weight = backend->load_vector(std::vector<float>(kHidden, 1.0f));
    const std::vector<int32_t> tokens = {0}, pages = {0};
    ops::Sequence sequence;
    sequence.count = 1;
    sequence.pages = pages;
    times[static_cast<size_t>(rank)] = backend->time_operations([&] {
      backend->begin_step({tokens, std::span(&sequence, 1), {}});
      for (int i = 0; i < 2; ++i) {
        backend->reduce_add_rms_norm(ops::Backend::floats(*residual, 1, kHidden), backend->tensor(*delta, 1, kHidden),
                                     weight, 1e-6f, backend->tensor(*out, 1, kHidden), ops::Residual::kWhole);
      }
    });
  });
  for (const auto& each : times) {
    ASSERT_TRUE(each.has_value());
    ASSERT_EQ(each->operations.size(), 1u);
    EXPECT_EQ(each->operations[0].name, "sum over ranks");
    EXPECT_EQ(each->operations[0].count, 2);
    EXPECT_GT(each->operations[0].microseconds, 0);
  }
  EXPECT_EQ(live(), Live{});
}

// Every way of summing gives the same bits, with a shared expert's share in the sum or added before, also what takes
// the place of peer memory that does not work, which is said; and where somebody looks at residuals, in two shots as by
// words.
TEST(HostRanksMeet, EveryWayHasTheSameLogits) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  struct WayCase {
    const char* sums;  // asked for; empty: not
    bool peers = true, copies = true;
    int nccl = 0;
    bool nccl_refuses = false, nccl_loses = false;
    const char *way, *warning = "";
  };
  const model::ModelConfig config = one_layer_of_each_kind();
  const auto weights = model::make_random_weights(config, 1, experts_in_bf16);
  const std::vector<Step> steps = {{5}, {1}};
  std::vector<float> want, want_residuals;
  std::vector<int64_t> launches;
  for (const WayCase& c : {
           WayCase{.sums = "", .nccl = 22703, .way = "peer memory (words, two-shot from 2 MB)"},
           WayCase{.sums = "flags", .way = "peer memory (flags)"},
           WayCase{.sums = "words,two-shot:1K", .way = "peer memory (words, two-shot from 1 KB)"},
           WayCase{.sums = "host", .peers = false, .way = "sums over host"},
           WayCase{.sums = "", .peers = false, .nccl = 22703, .way = "NCCL 2.27.3", .warning = "no peer access"},
           WayCase{.sums = "", .copies = false, .way = "host memory", .warning = "not all arrived"},
           WayCase{.sums = "",
           .peers = false,
           .nccl = 22703,
           .nccl_refuses = true,
           .way = "host memory",
           .warning = "ncclCommInitRank"},
           WayCase{.sums = "",
           .peers = false,
           .nccl = 22703,
           .nccl_loses = true,
           .way = "host memory",
           .warning = "sent by NCCL 2.27.3"},
       }) {
    HostCard card = two_cards();
    card.peers = c.peers;
    card.peer_copies = c.copies;
    card.nccl = c.nccl;
    card.nccl_refuses = c.nccl_refuses;
    card.nccl_loses = c.nccl_loses;
    install(card);
    cuda::CudaOptions options = cuda_options();
    if (*c.sums != 0) options.sums = cuda::SumTable::parse(c.sums);
    testing::internal::CaptureStderr();
    {
      model::ModelOptions limits;
      limits.max_step_tokens = limits.max_logit_rows = 64;
      const auto model = model::load_model(*weights, rank_backends(false, 100000, options), {.ranks = 2}, limits);
      const std::vector<float> logits = logits_of(*model, steps);
      if (want.empty()) want = logits;
      EXPECT_TRUE(logits == want) << c.way;
      launches.push_back(calls(Call::kLaunch));
      if (launches.size() == 1 || std::string(c.sums).find("two-shot") != std::string::npos) {
        std::vector<float> residuals;
        logits_of(*model, steps, [&](int64_t, const ops::Tensor& residual) {
          const size_t at = residuals.size();
          residuals.resize(at + static_cast<size_t>(residual.rows * residual.cols));
          model->backend().read(residual, std::span(residuals).subspan(at));
        });
        if (want_residuals.empty()) want_residuals = residuals;
        EXPECT_EQ(residuals.size(), 6 * 2 * static_cast<size_t>(config.hidden));
        EXPECT_TRUE(residuals == want_residuals) << c.way;
      }
      EXPECT_NE(model->backend().description().find(c.way), std::string::npos) << model->backend().description();
    }
    const std::string warned = testing::internal::GetCapturedStderr();
    EXPECT_NE(warned.find(c.warning), std::string::npos) << warned;
    EXPECT_EQ(warned.empty(), *c.warning == 0) << warned;
    if (*c.warning != 0) {
      EXPECT_NE(warned.find("GPU 0 (NVIDIA H200)"), std::string::npos) << warned;
      EXPECT_NE(warned.find("GPU 1 (NVIDIA H200)"), std::string::npos) << warned;
    }
    EXPECT_EQ(nccl_calls() > 0, std::string(c.way).find("NCCL") != std::string::npos || c.nccl_loses);
    EXPECT_EQ(live(), Live{}) << c.way;
  }
  EXPECT_EQ(launches[1] - launches[0], config.layers * 2 * static_cast<int64_t>(steps.size()))
      << "by words sums take the share along";
}

// What was asked for and does not work is an error.
TEST(HostRanksMeet, AWayThatWasAskedForIsNotReplaced) {
  if (!executor::Device::checks_plain_accesses()) GTEST_SKIP() << "sanitizers see the kernels' accesses here";
  for (const auto& [sums, peers, cause] : {std::tuple{"words", false, "no peer access"},
                                           {"two-shot", true, "not all arrived"},
                                           {"nccl", true, "no NCCL"}}) {
    HostCard card = two_cards();
    card.peers = peers;
    card.peer_copies = false;
    install(card);
    cuda::CudaOptions options = cuda_options();
    options.sums = cuda::SumTable::parse(sums);
    try {
      logits_of(*load(rank_backends(false, 100000, options), {.ranks = 2}), {{1}});
      FAIL() << "nobody noticed";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(cause), std::string::npos) << error.what();
    }
    EXPECT_EQ(live(), Live{});
  }
}

TEST(SumWays, AreChosenBySize) {
  using cuda::SumTable;
  using cuda::SumWay;
  const SumTable measured;
  EXPECT_FALSE(measured.asked());
  EXPECT_EQ(measured.text(2), "words, two-shot from 2 MB");
  EXPECT_EQ(measured.text(4), "words, two-shot from 512 KB");
  const SumTable table = SumTable::parse("words,two-shot:4M,nccl:64M");
  EXPECT_TRUE(table.asked());
  EXPECT_EQ(table.way(4, (4 << 20) - 1), SumWay::kWords);
  EXPECT_EQ(table.way(4, 4 << 20), SumWay::kTwoShot);
  EXPECT_EQ(table.way(4, 65 << 20), SumWay::kNccl);
  EXPECT_TRUE(table.has(4, SumWay::kNccl));
  EXPECT_FALSE(table.has(4, SumWay::kHost));
  EXPECT_EQ(table.text(4), "words, two-shot from 4 MB, nccl from 64 MB");
  for (const char* bad : {"", "word", "words:4M", "words,nccl", "words,nccl:4M,host:4M", "words,nccl:4G",
                          "words,nccl:0", "words,", "words,nccl:99999999999999999999"}) {
    EXPECT_THROW(SumTable::parse(bad), Error) << bad;
  }
}

}  // namespace
}  // namespace fourfold::hostcuda
