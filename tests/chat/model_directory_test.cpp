// Finding and loading model directories.
#include "chat/model_directory.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "base/check.h"
#include "cpu/backend.h"

namespace fourfold::chat {
namespace {

const char* const kDemo = FOURFOLD_SOURCE_DIR "/models/demo";

TEST(ModelDirectory, IsTheDemoUnlessTheEnvironmentNamesOne) {
  ::unsetenv("FOURFOLD_MODEL");
  EXPECT_TRUE(std::filesystem::equivalent(default_model_directory(), kDemo));
  ::setenv("FOURFOLD_MODEL", "/some/model", 1);
  EXPECT_EQ(default_model_directory(), "/some/model");
  ::unsetenv("FOURFOLD_MODEL");
}

TEST(ModelDirectory, Names) {
  for (const char* path : {"/a/b", "/a/b/", "/a/b/.", "/a/c/../b/"}) EXPECT_EQ(model_name(path), "b") << path;
  EXPECT_EQ(model_name("."), std::filesystem::current_path().filename());
}

TEST(ModelDirectory, LoadsOnTheBackendThatIsGiven) {
  int made = 0;
  int64_t done = 0, total = 0;
  const auto factory = [&](const BackendRequest& request) {
    EXPECT_GT(request.weight_bytes, 0u);
    EXPECT_EQ(request.refused, nullptr);
    ++made;
    return cpu::make_backend({});
  };
  model::ModelOptions options;
  options.max_step_tokens = 4;
  options.max_logit_rows = 1;
  options.progress = [&](int64_t loaded, int64_t all) {
    EXPECT_GE(loaded, done);
    done = loaded;
    total = all;
  };
  const LoadedModel loaded = load_model(kDemo, factory, options);
  EXPECT_EQ(loaded.name, "demo");
  EXPECT_EQ(loaded.model->options().max_step_tokens, 4);
  EXPECT_EQ(made, 1);
  EXPECT_GT(total, 0);
  EXPECT_EQ(done, total);
  // No backend is made for a directory without a model.
  EXPECT_THROW(load_model("/nonexistent", factory, options), Error);
  EXPECT_EQ(made, 1);
}

TEST(ModelDirectory, AnotherBackendMayTakeWhatTheFirstRefused) {
  std::string refusals;
  bool another = false;
  const auto factory = [&](const BackendRequest& request) -> std::shared_ptr<ops::Backend> {
    if (request.refused != nullptr) refusals += request.refused->what();
    if (request.refused != nullptr && !another) return nullptr;
    return cpu::make_backend({});
  };
  model::ModelOptions options;
  options.max_step_tokens = 4;
  options.max_logit_rows = 1;
  bool failed = false;
  options.progress = [&](int64_t done, int64_t) {
    if (done == 3 && !std::exchange(failed, true)) fail("no kernel for layer 3");
  };
  EXPECT_THROW(load_model(kDemo, factory, options), Error);
  EXPECT_EQ(refusals, "no kernel for layer 3");
  failed = false;
  another = true;
  EXPECT_NE(load_model(kDemo, factory, options).model, nullptr);
}

TEST(ModelDirectory, ContextsAreRefusedAndNeverCut) {
  EXPECT_EQ(choose_context(0, 4096), 4096);
  EXPECT_EQ(choose_context(0, 262144), kDefaultContext);
  EXPECT_EQ(choose_context(4096, 4096), 4096);
  try {
    choose_context(4097, 4096, "--max-model-len");
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "--max-model-len is 4097, the model has 4096 positions");
  }
}

}  // namespace
}  // namespace fourfold::chat
