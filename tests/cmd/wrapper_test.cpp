// The wrapper ./fourfold, over a project of one script: it builds what changed, and says so only when something did.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "program.h"

namespace fourfold {
namespace {

class Wrapper : public Cmd {
 protected:
  void SetUp() override {
    Cmd::SetUp();
    if (std::system("command -v cmake ninja >/dev/null") != 0) GTEST_SKIP() << "no cmake or ninja";
    fs::create_directories(path("packages"));
    fs::create_directories(path("parts"));
    write("packages/apt-build.txt", "# none\n");
    fs::copy_file(FOURFOLD_SOURCE_DIR "/fourfold", path("fourfold"));
    write("parts/one", "echo one");
    write("CMakePresets.json", R"({"version": 6, "configurePresets": [{"name": "release", "generator": "Ninja",
        "binaryDir": "${sourceDir}/build/release"}]})");
    // As the real one, it looks again for files by a pattern at every start.
    write("CMakeLists.txt", R"(cmake_minimum_required(VERSION 3.25)
project(parts LANGUAGES NONE)
file(GLOB parts CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/parts/*)
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_custom_command(OUTPUT ${CMAKE_BINARY_DIR}/bin/fourfold DEPENDS ${parts}
  COMMAND cat ${parts} > ${CMAKE_BINARY_DIR}/bin/fourfold && chmod +x ${CMAKE_BINARY_DIR}/bin/fourfold)
add_custom_target(fourfold DEPENDS ${CMAKE_BINARY_DIR}/bin/fourfold)
)");
  }

  Outcome start() const {
    const std::string command = "env -u CI '" + path("fourfold").string() + "' >'" + path("stdout").string() + "' 2>'" +
                                path("stderr").string() + "'";
    Outcome outcome;
    outcome.status = WEXITSTATUS(std::system(command.c_str()));
    outcome.out = read(path("stdout"));
    outcome.err = read(path("stderr"));
    return outcome;
  }
};

TEST_F(Wrapper, SaysNothingWhenThereIsNothingToDo) {
  const Outcome first = start();
  EXPECT_EQ(first.status, 0) << first.err;
  EXPECT_EQ(first.out, "one\n");
  EXPECT_NE(first.err.find("configuring"), std::string::npos) << first.err;
  EXPECT_NE(first.err.find("building fourfold (release, 1 step)"), std::string::npos) << first.err;
  for (int i = 0; i < 2; ++i) {
    const Outcome again = start();
    EXPECT_EQ(again.out, "one\n");
    EXPECT_EQ(again.err, "");
  }
  // A file more: the pattern finds it.
  write("parts/two", "\necho two\n");
  const Outcome more = start();
  EXPECT_EQ(more.out, "one\ntwo\n");
  EXPECT_NE(more.err.find("building"), std::string::npos) << more.err;
  EXPECT_EQ(start().err, "");
}

TEST_F(Wrapper, ShowsWhyABuildFailed) {
  ASSERT_EQ(start().status, 0);
  fs::remove(path("parts/one"));
  fs::create_directory(path("parts/one"));  // cat cannot read it
  const Outcome broken = start();
  EXPECT_EQ(broken.status, 2) << broken.err;
  EXPECT_NE(broken.err.find("directory"), std::string::npos) << broken.err;
  EXPECT_NE(broken.err.find("the build failed"), std::string::npos) << broken.err;
  write("CMakeLists.txt", "cmake_minimum_required(VERSION 3.25)\nproject(parts LANGUAGES NONE)\nno_such_command()\n");
  const Outcome unconfigured = start();
  EXPECT_EQ(unconfigured.status, 2) << unconfigured.err;
  EXPECT_NE(unconfigured.err.find("no_such_command"), std::string::npos) << unconfigured.err;
}

}  // namespace
}  // namespace fourfold
