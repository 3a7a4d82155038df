#include "cmd/model_options.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <optional>
#include <vector>

#include "base/check.h"
#include "base/console.h"
#include "base/env.h"
#include "base/interrupt.h"
#include "base/progress.h"
#include "base/threads.h"
#include "cmd/arguments.h"
#include "cpu/ceilings.h"
#include "cuda/backend/backend.h"
#include "model/checkpoint.h"
#include "model/inventory.h"
#include "model/random_weights.h"
#include "plan/step/step.h"
#include "predict/step.h"

namespace fourfold::cmd {
namespace {

// The progress bar of a model's loading.
class LoadingBar {
 public:
  void attach(model::ModelOptions& options) {
    options.progress = [this](int64_t done, int64_t total) {
      if (!progress_) progress_ = std::make_unique<Progress>("loading", static_cast<uint64_t>(total), "layers");
      progress_->set(static_cast<uint64_t>(done));
      throw_if_interrupted();
    };
  }
  ~LoadingBar() {
    if (progress_) progress_->finish();
  }

 private:
  std::unique_ptr<Progress> progress_;
};

}  // namespace

void add_backend_options(Command& command, BackendArgs& args) {
  command.add_option("--device", args.device,
                     "auto, cpu, cuda or cuda:N (default: FOURFOLD_DEVICE, or auto: a GPU that holds the model)");
  command.add_option("--emulate", args.emulate,
                     "Run the kernels of this card (as plan --gpu names it) on the GPU: a check, no measurement");
  command.add_flag(
      "--no-self-test", args.no_self_test,
      "Believe the GPU's kernels: by default each is tested before the first step, and a wrong one replaced");
  command.add_option("--threads", args.threads, "Compute threads (default: FOURFOLD_THREADS, or all processors)")
      .range(1, 1024);
  command.add_option("--isa", args.isa, "Instruction set: " + cpu::family_isa_names() + " (default: the best)");
  command.add_option("--activations", args.activations, "bf16 (weight-only) or nvfp4 (W4A4 numerics)")
      .one_of({"bf16", "nvfp4"});
  command
      .add_option("--kv-cache-dtype", args.kv_cache,
                  "Keys and values: auto, on a CPU float16, on a GPU bf16 or fp8 (e4m3, scale 1)")
      .one_of({"auto", "float16", "bf16", "fp8"});
  command
      .add_option(
          "--tensor-parallel-size", args.ranks,
          "Ranks that the model is split over, each with a part of every layer: --device cuda has a GPU for each, or "
          "one for all; on a CPU they share the threads")
      .range(1, ranks::kMostRanks)
      .show_default();
  command.add_flag("--enable-expert-parallel", args.by_expert, "Ranks have whole experts instead of a part of each");
  command.need("--enable-expert-parallel", "--tensor-parallel-size");
  command
      .add_option(
          "--check-sums", args.check_sums,
          "Ranks compare a checksum of their sums after every so many steps (0: never); where they differ every "
          "request ends with an error")
      .range(0, 1 << 20)
      .show_default();
  command.need("--check-sums", "--tensor-parallel-size");
}

cpu::Isa chosen_isa(const BackendArgs& args) {
  if (!args.isa.empty()) return cpu::parse_isa(args.isa);
  if (const auto name = env("FOURFOLD_ISA")) return cpu::parse_isa(*name);
  return cpu::best_isa();
}

int chosen_threads(const BackendArgs& args) { return args.threads > 0 ? args.threads : ThreadPool::default_threads(); }

std::string device_name(const BackendArgs& args) {
  return !args.device.empty() ? args.device : env("FOURFOLD_DEVICE").value_or("auto");
}

// Of a rank where --device is cuda: one card each, or all the only one.
static int device_of_rank(const BackendArgs& args, int64_t rank) {
  const int devices = cuda::device_count();
  if (args.ranks <= 1 || devices == 1) return 0;
  if (devices > 0 && devices < args.ranks) {
    fail("--tensor-parallel-size {}: {} GPUs, wanted one for each rank, or --device cuda:N for all of them", args.ranks,
         devices);
  }
  return static_cast<int>(rank);
}

std::optional<int> chosen_device(const BackendArgs& args, uint64_t weight_bytes, int64_t rank) {
  const std::string name = device_name(args);
  if (name == "cpu") return std::nullopt;
  if (name == "auto") {
    // What only the CPU has was asked for, or several ranks, whose cards are named.
    if (!args.isa.empty() || args.activations == "nvfp4" || weight_bytes == 0 || args.ranks > 1) return std::nullopt;
    return cuda::refusal_of(0, weight_bytes).empty() ? std::optional(0) : std::nullopt;
  }
  int index = 0;
  if (name.starts_with("cuda:")) {
    const char* end = name.data() + name.size();
    const auto [rest, error] = std::from_chars(name.data() + 5, end, index);
    if (error != std::errc() || rest != end) index = -1;
  } else {
    index = name == "cuda" ? device_of_rank(args, rank) : -1;
  }
  if (index < 0) fail("--device {}: wanted auto, cpu, cuda or cuda:N", name);
  if (args.activations == "nvfp4") fail("--device {}: --activations nvfp4 runs on the CPU only", name);
  return index;
}

cuda::SumTable sum_table() {
  const auto sums = env("FOURFOLD_SUMS");
  if (!sums) return {};
  try {
    return cuda::SumTable::parse(*sums);
  } catch (const Error& error) {
    fail("FOURFOLD_SUMS={}", error.what());
  }
}

int64_t library_rows() {
  const auto products = env("FOURFOLD_PRODUCTS");
  if (!products || *products == "own") return 0;
  if (*products == "library") return 4096;  // at 2,048 rows it is slower, at 8,192 faster (docs/kernels/products.md)
  const std::string_view prefix = "library:";
  int64_t rows = 0;
  const char* end = products->data() + products->size();
  if (products->starts_with(prefix)) {
    const auto [stop, error] = std::from_chars(products->data() + prefix.size(), end, rows);
    if (error == std::errc() && stop == end && rows > 16) return rows;
  }
  fail("FOURFOLD_PRODUCTS={}: wanted own, library, or library:N with more than 16 rows", *products);
}

cuda::CudaOptions cuda_options(const BackendArgs& args, int device) {
  cuda::CudaOptions options;
  options.device = device;
  options.threads = args.threads;
  if (args.kv_cache == "float16") fail("--kv-cache-dtype float16: a GPU has bf16 and fp8");
  options.fp8_cache = args.kv_cache == "fp8";
  options.emulate = args.emulate;
  options.sums = sum_table();
  if (const auto choice = env("FOURFOLD_CHOICE")) {
    if (*choice != "parts" && *choice != "gathered") fail("FOURFOLD_CHOICE={}: wanted gathered or parts", *choice);
    options.choose_by_parts = *choice == "parts";
  }
  options.library_rows = library_rows();
  if (const auto rounds = env("FOURFOLD_ROUNDS")) {
    if (*rounds != "ahead" && *rounds != "waiting") fail("FOURFOLD_ROUNDS={}: wanted ahead or waiting", *rounds);
    options.rounds_ahead = *rounds == "ahead";
  }
  if (args.no_self_test) options.self_test = options.test_kernels = false;
  return options;
}

namespace {

std::shared_ptr<ops::Backend> make_backend(const BackendArgs& args, uint64_t weight_bytes,
                                           const std::shared_ptr<ranks::Member>& member) {
  const int64_t rank = member == nullptr ? 0 : member->rank(), ranks = member == nullptr ? 1 : member->ranks();
  const int64_t all_threads = chosen_threads(args);
  const auto threads =
      static_cast<int>(std::max<int64_t>(1, all_threads * (rank + 1) / ranks - all_threads * rank / ranks));
  if (const std::optional<int> device = chosen_device(args, weight_bytes, rank)) {
    cuda::CudaOptions options = cuda_options(args, *device);
    options.member = member;
    options.check_sums = args.check_sums;
    if (ranks > 1) options.threads = threads;
    try {
      return cuda::make_backend(options);
    } catch (const Error& error) {
      fail("--device {}: {}", device_name(args), error.what());
    }
  }
  if (!args.emulate.empty()) fail("--emulate {}: the model runs on the CPU, wanted --device cuda", args.emulate);
  if (args.kv_cache != "auto" && args.kv_cache != "float16") {
    fail("--kv-cache-dtype {}: a CPU has float16; wanted that, auto, or --device cuda", args.kv_cache);
  }
  cpu::CpuOptions options;
  options.isa = chosen_isa(args);
  options.threads = ranks > 1 ? threads : args.threads;
  options.member = member;
  options.check_sums = args.check_sums;
  options.nvfp4_activations = args.activations == "nvfp4";
  return cpu::make_backend(options);
}

}  // namespace

model::BackendFactory rank_backends(const BackendArgs& args, uint64_t weight_bytes) {
  return [args, weight_bytes](const std::shared_ptr<ranks::Member>& member) {
    return make_backend(args, weight_bytes, member);
  };
}

model::RankOptions rank_options(const BackendArgs& args) { return {.ranks = args.ranks, .by_expert = args.by_expert}; }

void add_sampling_options(Command& command, chat::SamplingChoice& sampling) {
  command.add_option("--temperature", sampling.temperature, "0 is greedy").real_range(0, 10);
  command.add_option("--top-k", sampling.top_k, "Keep the k most probable tokens (0: all)").range(0, 1 << 24);
  command.add_option("--top-p", sampling.top_p, "Keep the most probable tokens up to this probability, (0, 1]")
      .real_range(0, 1);
  command.add_option("--min-p", sampling.min_p, "Drop tokens below this share of the most probable one, [0, 1)")
      .real_range(0, 1);
  command
      .add_option("--repetition-penalty", sampling.repetition_penalty, "Of tokens that came before, above 0; 1: none")
      .real_range(0, 10);
  command.add_option("--presence-penalty", sampling.presence_penalty, "Of tokens that the answer has")
      .real_range(-10, 10);
  command.add_option("--frequency-penalty", sampling.frequency_penalty, "The same, for each time").real_range(-10, 10);
}

void add_dummy_options(Command& command, DummyArgs& args) {
  command.add_option("--dummy", args.shape, "Random weights of a published shape: 35B-A3B, 122B-A10B, 397B-A17B, 27B");
  command.add_option("--layers", args.layers, "With --dummy: number of layers").range(1, model::kMaxLayers);
  command.add_option("--vocab", args.vocabulary, "With --dummy: rows of the vocabulary")
      .range(2, model::kMaxVocabulary);
  command.add_option("--mix", args.mix, "With --dummy: formats of the weights: " + plan::step::mix_names());
  command.need("--mix", "--dummy");
  command.need("--layers", "--dummy");
  command.need("--vocab", "--dummy");
}

model::FormatOf dummy_formats(const DummyArgs& args) {
  return args.mix.empty() ? model::FormatOf(model::default_format)
                          : predict::formats_of(plan::step::find_mix(args.mix));
}

model::ModelConfig dummy_config(const DummyArgs& args, bool mtp) {
  model::ModelConfig config = model::shape_config(args.shape);
  config.mtp_layers = mtp ? 1 : 0;
  if (args.layers > 0) model::set_layers(config, args.layers);
  if (args.vocabulary > 0) config.vocabulary = args.vocabulary;
  config.eos_tokens.clear();  // random tokens have no end
  return config;
}

uint64_t dummy_bytes(const DummyArgs& args, bool mtp) {
  const model::FormatOf formats = dummy_formats(args);
  uint64_t bytes = 0;
  for (const model::WeightSpec& spec : model::weight_specs(dummy_config(args, mtp))) {
    const auto elements = static_cast<uint64_t>(spec.elements());
    const ops::Format format = spec.is_vector ? ops::Format::kBf16 : model::random_format(formats, spec);
    bytes += format == ops::Format::kNvfp4 ? elements * 9 / 16 : format == ops::Format::kFp8 ? elements : elements * 2;
  }
  return bytes;
}

void check_activations(const BackendArgs& args, const std::filesystem::path& directory) {
  if (args.activations != "nvfp4") return;
  model::Checkpoint checkpoint(directory);
  int64_t matrices = 0, quantized = 0;
  for (const model::WeightSpec& spec : model::weight_specs(checkpoint.config())) {
    if (spec.is_vector || spec.mtp || spec.kind == model::WeightKind::kEmbedding) continue;
    const model::Checkpoint::Stored stored = checkpoint.stored_matrix(spec.name, spec.rows, spec.columns);
    ++matrices;
    if (stored.format == ops::Format::kNvfp4 && stored.input_scale) ++quantized;
  }
  if (quantized == 0) {
    fail(
        "--activations nvfp4: none of the {} matrices of {} is NVFP4 with an activation scale, wanted --activations "
        "bf16",
        matrices, directory.string());
  }
  eprint("--activations nvfp4 applies to {} of {} matrices, those with an activation scale\n", quantized, matrices);
}

chat::LoadedModel load_checkpoint(const std::filesystem::path& directory, const BackendArgs& backend,
                                  model::ModelOptions options) {
  check_activations(backend, directory);
  LoadingBar bar;
  bar.attach(options);
  return chat::load_model(directory, backend_factory(backend), std::move(options), rank_options(backend));
}

chat::BackendFactory backend_factory(const BackendArgs& args) {
  return [args](const chat::BackendRequest& request) -> std::shared_ptr<ops::Backend> {
    if (request.refused == nullptr) return make_backend(args, request.weight_bytes, request.member);
    if (device_name(args) != "auto" || !chosen_device(args, request.weight_bytes, 0)) return nullptr;
    warn(fmt::format("the GPU cannot run this model, it runs on the CPU ({})", request.refused->what()));
    BackendArgs on_cpu = args;
    on_cpu.device = "cpu";
    return make_backend(on_cpu, 0, nullptr);
  };
}

chat::LoadedModel load_dummy(const DummyArgs& dummy, const BackendArgs& backend, model::ModelOptions options) {
  if (backend.activations == "nvfp4") {
    fail("--activations nvfp4: random weights have no activation scales, wanted --activations bf16");
  }
  const auto begin = std::chrono::steady_clock::now();
  const model::ModelConfig config = dummy_config(dummy, options.mtp);
  const model::FormatOf formats = dummy_formats(dummy);
  const auto source = model::make_random_weights(config, 1, formats);
  chat::LoadedModel loaded;
  loaded.weight_bytes = dummy_bytes(dummy, options.mtp);
  loaded.name = fmt::format("{} ({} layers, vocabulary {}, random weights{})", dummy.shape, config.layers,
                            config.vocabulary, dummy.mix.empty() ? "" : ", mix " + dummy.mix);
  LoadingBar bar;
  bar.attach(options);
  loaded.model = model::load_model(*source, rank_backends(backend), rank_options(backend), std::move(options));
  loaded.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return loaded;
}

CostOfDecode::CostOfDecode(const model::Model& model, int64_t max_context) {
  base_ = model.cost(1, 0, 1).bytes;
  slope_ =
      (model.cost(1, max_context - 1, 1).bytes - base_) / static_cast<double>(std::max<int64_t>(max_context - 1, 1));
}

bool fits_in_cache(const chat::LoadedModel& loaded) {
  return loaded.weight_bytes <
         2 * static_cast<uint64_t>(std::max(cpu::last_level_cache_bytes(), cpu::kUnknownCacheBytes));
}

}  // namespace fourfold::cmd
