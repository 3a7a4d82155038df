#include "jit/nccl.h"

#include <utility>

#include "base/env.h"
#include "jit/opened.h"

namespace fourfold::jit {
namespace {

OpenedOnce<Nccl>& opened() {
  static OpenedOnce<Nccl> one;
  return one;
}

Nccl::Functions functions_of(const SharedLibrary& library) {
  Nccl::Functions call = {};
  library.load("ncclGetVersion", &call.get_version);
  library.load("ncclGetUniqueId", &call.get_unique_id);
  library.load("ncclCommInitRank", &call.init_rank);
  library.load("ncclCommDestroy", &call.destroy);
  library.load("ncclCommAbort", &call.abort);
  library.load("ncclAllGather", &call.all_gather);
  library.load("ncclAllReduce", &call.all_reduce);
  library.load("ncclGetErrorString", &call.error_string);
  return call;
}

}  // namespace

std::vector<std::filesystem::path> nccl_candidates() {
  if (const auto file = env("FOURFOLD_NCCL")) return {*file};  // asked for by name: nothing else will do
  std::vector<std::filesystem::path> list = {"libnccl.so.2"};
  for (const auto& site : site_packages()) {
    std::error_code ignored;
    const auto file = site / "nvidia" / "nccl" / "lib" / "libnccl.so.2";
    if (std::filesystem::exists(file, ignored)) list.push_back(file);
  }
  return list;
}

Nccl::Nccl(std::shared_ptr<const Functions> functions, std::optional<SharedLibrary> library)
    : library_(std::move(library)), call_(std::move(functions)) {
  check(call_->get_version(&version_), "ncclGetVersion");
}

const Nccl* Nccl::find(std::string* why) {
  return opened().find(
      nccl_candidates,
      [](SharedLibrary library) {
        auto functions = std::make_shared<const Functions>(functions_of(library));
        return std::unique_ptr<const Nccl>(new Nccl(std::move(functions), std::move(library)));
      },
      why);
}

void Nccl::substitute(std::shared_ptr<const Functions> functions) {
  opened().substitute(std::unique_ptr<const Nccl>(functions == nullptr ? nullptr : new Nccl(std::move(functions))));
}

std::string Nccl::version() const {
  return fmt::format("{}.{}.{}", version_ / 10000, version_ / 100 % 100, version_ % 100);
}

void Nccl::check(int result, const char* what) const {
  if (result != 0) fail("{}: {}", what, call_->error_string(result));
}

}  // namespace fourfold::jit
