// Runs the program as its users do: arguments and standard input in; standard output, standard error and the exit
// status out.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/temporary_directory.h"

namespace fourfold {

namespace fs = std::filesystem;

inline std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

struct Outcome {
  int status = -1;  // exit status, or 128 + signal
  std::string out, err;
};

class Cmd : public testing::Test {
 protected:
  void SetUp() override { ::setenv("FOURFOLD_HISTORY", (dir_ / "history").c_str(), 1); }

  fs::path path(const std::string& name) const { return dir_ / name; }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
    return path(name).string();
  }

  // Runs `fourfold ARGUMENTS` (in shell syntax). Nothing here takes a minute, so that one that hangs is a failure.
  // `redirections` come after those of the standard streams to files.
  Outcome run(const std::string& arguments, const std::string& input = "", const std::string& redirections = "") const {
    const std::string in = write("stdin", input);
    const std::string command = "NO_COLOR=1 timeout 120 '" FOURFOLD_BINARY "' " + arguments + " <'" + in + "' >'" +
                                path("stdout").string() + "' 2>'" + path("stderr").string() + "' " + redirections;
    const int status = std::system(command.c_str());
    Outcome outcome;
    outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    outcome.out = read(path("stdout"));
    outcome.err = read(path("stderr"));
    return outcome;
  }
  Json run_json(const std::string& arguments, const std::string& input = "") const {
    const Outcome outcome = run(arguments, input);
    EXPECT_EQ(outcome.status, 0) << arguments << "\n" << outcome.err;
    return Json::parse(outcome.out);
  }
  // Bad input: nothing on stdout, one line on stderr that names every one of `parts`, exit status 2.
  void expect_refused(const std::string& arguments, const std::vector<std::string>& parts,
                      const std::string& input = "") const {
    const Outcome outcome = run(arguments, input);
    EXPECT_EQ(outcome.status, 2) << arguments << "\n" << outcome.err;
    EXPECT_EQ(outcome.out, "") << arguments;
    EXPECT_EQ(outcome.err.substr(0, 17), "fourfold: error: ") << arguments << "\n" << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << arguments << "\n" << outcome.err;
    for (const std::string& part : parts) {
      EXPECT_NE(outcome.err.find(part), std::string::npos) << arguments << ": no \"" << part << "\" in\n"
                                                           << outcome.err;
    }
  }

  const std::string demo_ = FOURFOLD_SOURCE_DIR "/models/demo";

 private:
  const TemporaryDirectory dir_;
};

}  // namespace fourfold
