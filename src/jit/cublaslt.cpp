#include "jit/cublaslt.h"

#include <utility>

#include "base/env.h"
#include "jit/opened.h"

namespace fourfold::jit {
namespace {

namespace fs = std::filesystem;

OpenedOnce<CublasLt>& opened() {
  static OpenedOnce<CublasLt> one;
  return one;
}

CublasLt::Functions functions_of(const SharedLibrary& library) {
  CublasLt::Functions call = {};
  library.load("cublasLtGetStatusString", &call.status_string);
  library.load("cublasLtCreate", &call.create);
  library.load("cublasLtDestroy", &call.destroy);
  library.load("cublasLtMatmulDescCreate", &call.desc_create);
  library.load("cublasLtMatmulDescDestroy", &call.desc_destroy);
  library.load("cublasLtMatmulDescSetAttribute", &call.desc_set);
  library.load("cublasLtMatrixLayoutCreate", &call.layout_create);
  library.load("cublasLtMatrixLayoutDestroy", &call.layout_destroy);
  library.load("cublasLtMatmulPreferenceCreate", &call.preference_create);
  library.load("cublasLtMatmulPreferenceDestroy", &call.preference_destroy);
  library.load("cublasLtMatmulPreferenceSetAttribute", &call.preference_set);
  library.load("cublasLtMatmulAlgoGetHeuristic", &call.heuristic);
  library.load("cublasLtMatmul", &call.matmul);
  return call;
}

}  // namespace

std::vector<fs::path> cublaslt_candidates() {
  if (const auto file = env("FOURFOLD_CUBLASLT")) return {*file};  // asked for by name: nothing else will do
  std::vector<fs::path> list = {"libcublasLt.so.13", "libcublasLt.so.12"};
  const auto add = [&](const fs::path& folder) {
    std::error_code ignored;
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
      if (fs::exists(folder / name, ignored)) list.push_back(folder / name);
    }
  };
  for (const fs::path& folder : toolkit_folders(env("CUDA_HOME").value_or("/usr/local/cuda"))) add(folder);
  for (const fs::path& site : site_packages()) {
    add(site / "nvidia" / "cublas" / "lib");
    add(site / "nvidia" / "cu13" / "lib");
  }
  return list;
}

CublasLt::CublasLt(std::shared_ptr<const Functions> functions, std::optional<SharedLibrary> library)
    : library_(std::move(library)), call_(std::move(functions)) {}

const CublasLt* CublasLt::find(std::string* why) {
  return opened().find(
      cublaslt_candidates,
      [](SharedLibrary library) {
        auto functions = std::make_shared<const Functions>(functions_of(library));
        return std::unique_ptr<const CublasLt>(new CublasLt(std::move(functions), std::move(library)));
      },
      why);
}

void CublasLt::substitute(std::shared_ptr<const Functions> functions) {
  opened().substitute(
      std::unique_ptr<const CublasLt>(functions == nullptr ? nullptr : new CublasLt(std::move(functions))));
}

void CublasLt::check(int status, const char* what) const {
  if (status != 0) fail("{}: {}", what, call_->status_string(status));
}

}  // namespace fourfold::jit
