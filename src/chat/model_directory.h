// Model directories: finding one, loading it, and how long a context it is given.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/check.h"
#include "model/model.h"
#include "model/ranked.h"
#include "ops/ops.h"

namespace fourfold::chat {

// FOURFOLD_MODEL, or the demo model: beside the executable's data (../share/fourfold/models/demo) or in the source tree
// that it was built in. An Error says where it looked.
std::filesystem::path default_model_directory();

// The last component of a directory's name, for people and as the name under which a model is served.
std::string model_name(const std::filesystem::path& directory);

// What a backend is wanted for: so many bytes of weights; and, where the model is split, the rank. Where the model
// cannot be loaded on what was made, and is not split, another one is asked for, with the Error that says why.
struct BackendRequest {
  uint64_t weight_bytes = 0;
  const Error* refused = nullptr;
  std::shared_ptr<ranks::Member> member;
};
// Makes the backend once it is known that there is something to load on it; asked for another one, perhaps null: then
// the Error stands.
using BackendFactory = std::function<std::shared_ptr<ops::Backend>(const BackendRequest& request)>;

struct LoadedModel {
  std::unique_ptr<model::Model> model;
  std::string name;           // model_name()
  uint64_t weight_bytes = 0;  // as stored, what is not loaded included
  double seconds = 0;
};

// Takes the weights of a checkpoint directory into the memory of the backend, which is made once it is known that there
// is something to load on it, or of one for each rank. options.progress is called as layers are done; what it throws
// ends the loading.
LoadedModel load_model(const std::filesystem::path& directory, const BackendFactory& make_backend,
                       model::ModelOptions options, const model::RankOptions& ranks = {});

// Tokens of context: what is asked for, or (0) kDefaultContext and no more than the model has positions. An Error where
// more are asked for than there are: contexts are never cut silently. `option` is what the Error calls it.
inline constexpr int64_t kDefaultContext = 8192;
int64_t choose_context(int64_t asked, int64_t max_positions, std::string_view option = "--context");

}  // namespace fourfold::chat
