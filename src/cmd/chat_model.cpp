#include "cmd/chat_model.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <span>
#include <system_error>
#include <vector>

#include "base/check.h"
#include "base/env.h"
#include "base/interrupt.h"
#include "base/math.h"
#include "base/progress.h"
#include "base/threads.h"
#include "cmd/arguments.h"
#include "cpu/ceilings.h"
#include "model/checkpoint.h"
#include "model/random_weights.h"

namespace fourfold::cmd {
namespace {

Loaded load(model::WeightSource& source, std::string name, const BackendArgs& backend, model::ModelOptions options) {
  const auto begin = std::chrono::steady_clock::now();
  Loaded loaded;
  loaded.name = std::move(name);
  {
    std::unique_ptr<Progress> progress;
    options.progress = [&](int64_t done, int64_t total) {
      if (!progress) progress = std::make_unique<Progress>("loading", static_cast<uint64_t>(total), "layers");
      progress->set(static_cast<uint64_t>(done));
      throw_if_interrupted();
    };
    loaded.model = model::load_model(source, make_backend(backend), std::move(options));
    if (progress) progress->finish();
  }
  loaded.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return loaded;
}

}  // namespace

void add_backend_options(Command& command, BackendArgs& args) {
  command.add_option("--threads", args.threads, "Compute threads (default: FOURFOLD_THREADS, or all processors)")
      .range(1, 1024);
  command.add_option("--isa", args.isa,
                     "Instruction set: reference, avx2, avx512, avx512bf16, amx (default: the best)");
  command.add_option("--activations", args.activations, "bf16 (weight-only) or nvfp4 (W4A4 numerics)")
      .one_of({"bf16", "nvfp4"});
}

cpu::Isa chosen_isa(const BackendArgs& args) {
  if (!args.isa.empty()) return cpu::parse_isa(args.isa);
  if (const auto name = env("FOURFOLD_ISA")) return cpu::parse_isa(*name);
  return cpu::best_isa();
}

int chosen_threads(const BackendArgs& args) { return args.threads > 0 ? args.threads : ThreadPool::default_threads(); }

std::shared_ptr<ops::Backend> make_backend(const BackendArgs& args) {
  cpu::CpuOptions options;
  options.isa = chosen_isa(args);
  options.threads = args.threads;
  options.nvfp4_activations = args.activations == "nvfp4";
  return cpu::make_backend(options);
}

void add_dummy_options(Command& command, DummyArgs& args) {
  command.add_option("--dummy", args.shape, "Random weights of a published shape: 35B-A3B, 122B-A10B, 397B-A17B, 27B");
  command.add_option("--layers", args.layers, "With --dummy: number of layers").range(1, 1024);
  command.add_option("--vocab", args.vocabulary, "With --dummy: rows of the vocabulary").range(2, 1 << 24);
}

model::ModelConfig dummy_config(const DummyArgs& args) {
  model::ModelConfig config = model::shape_config(args.shape);
  config.mtp_layers = 0;
  if (args.layers > 0) model::set_layers(config, args.layers);
  if (args.vocabulary > 0) config.vocabulary = args.vocabulary;
  config.eos_tokens.clear();  // random tokens have no end
  return config;
}

std::filesystem::path default_model_directory() {
  if (const auto directory = env("FOURFOLD_MODEL")) return *directory;
  std::error_code error;
  const std::filesystem::path executable = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) {
    // PREFIX/bin/fourfold, or build/PRESET/bin/fourfold in the source tree.
    std::filesystem::path root = executable.parent_path();
    for (int level = 0; level < 4 && root.has_relative_path(); ++level) {
      root = root.parent_path();
      for (const char* place : {"share/fourfold/models/demo", "models/demo"}) {
        if (std::filesystem::is_regular_file(root / place / "config.json", error)) return root / place;
      }
    }
  }
  fail(
      "the demo model is neither in ../share/fourfold/models/demo beside {} nor in models/demo of the source tree; "
      "name a checkpoint directory or set FOURFOLD_MODEL",
      executable.empty() ? "the executable" : executable.string());
}

Loaded load_checkpoint(const std::filesystem::path& directory, const BackendArgs& backend,
                       model::ModelOptions options) {
  model::Checkpoint checkpoint(directory);
  std::filesystem::path name = directory.filename().empty() ? directory.parent_path() : directory;
  return load(checkpoint, name.filename().string(), backend, std::move(options));
}

Loaded load_dummy(const DummyArgs& dummy, const BackendArgs& backend, model::ModelOptions options) {
  const model::ModelConfig config = dummy_config(dummy);
  const auto source = model::make_random_weights(config, 1);
  return load(
      *source,
      fmt::format("{} ({} layers, vocabulary {}, random weights)", dummy.shape, config.layers, config.vocabulary),
      backend, std::move(options));
}

CostOfDecode::CostOfDecode(const model::Model& model, int64_t max_context) {
  base_ = model.cost(1, 0, 1).bytes;
  slope_ =
      (model.cost(1, max_context - 1, 1).bytes - base_) / static_cast<double>(std::max<int64_t>(max_context - 1, 1));
}

double quick_read_bandwidth(int threads) {
  using Clock = std::chrono::steady_clock;
  const auto seconds_since = [](Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  const std::span<const cpu::ReadLoop> loops = cpu::read_loops(cpu::best_isa());
  ThreadPool pool(threads);
  // Larger than the last-level cache, if that much memory can be had in a tenth of a second: on some virtual machines
  // the first touch of a page is what takes the time.
  constexpr size_t kStep = size_t{2} << 20;
  const auto cache = static_cast<size_t>(cpu::last_level_cache_bytes());
  const size_t wanted = std::clamp<size_t>(2 * cache, size_t{128} << 20, size_t{512} << 20);
  const size_t piece = ceil_div(static_cast<int64_t>(wanted / static_cast<size_t>(pool.size())), kStep) * kStep;
  const size_t reserved = piece * static_cast<size_t>(pool.size());
  void* memory = ::mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("measuring the memory bandwidth: no {} bytes of memory", reserved);
  ::madvise(memory, reserved, MADV_HUGEPAGE);
  std::vector<size_t> touched(static_cast<size_t>(pool.size()));
  const auto start = Clock::now();
  pool.run([&](int thread) {  // each thread touches its own piece first, so that its pages lie close to it
    auto* mine = static_cast<char*>(memory) + static_cast<size_t>(thread) * piece;
    size_t done = 0;
    while (done < piece && (done < 4 * kStep || seconds_since(start) < 0.1)) {
      for (size_t i = 0; i < kStep; i += 4096) mine[done + i] = static_cast<char>(i >> 12);
      done += kStep;
    }
    touched[static_cast<size_t>(thread)] = done;
  });
  const size_t bytes = std::accumulate(touched.begin(), touched.end(), size_t{0});
  std::atomic<float> sink{0};
  double best = 0;
  for (int repeat = 0; repeat < 4 && (repeat == 0 || seconds_since(start) < 0.2); ++repeat) {
    const cpu::ReadLoop read = loops[static_cast<size_t>(repeat) % loops.size()];
    const auto begin = Clock::now();
    pool.run([&](int thread) {
      const char* mine = static_cast<const char*>(memory) + static_cast<size_t>(thread) * piece;
      sink.store(read(mine, static_cast<int64_t>(touched[static_cast<size_t>(thread)])), std::memory_order_relaxed);
    });
    best = std::max(best, static_cast<double>(bytes) / seconds_since(begin));
  }
  ::munmap(memory, reserved);
  return best;
}

}  // namespace fourfold::cmd
