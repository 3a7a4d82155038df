// The house is as DESIGN.md says: its table of folders, the folders, what CMake lets a folder link and what a folder
// includes agree, and no file is longer than a reader bears.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "base/file.h"

namespace fourfold {
namespace {

namespace fs = std::filesystem;

const fs::path kRoot = FOURFOLD_SOURCE_DIR;

std::vector<std::string> lines_of(const fs::path& path) {
  std::vector<std::string> lines(1);
  for (const char c : read_file(path)) {
    if (c == '\n') {
      lines.emplace_back();
    } else {
      lines.back() += c;
    }
  }
  if (lines.back().empty()) lines.pop_back();
  return lines;
}

std::vector<std::vector<std::string>> matches(const std::string& text, const std::string& pattern) {
  std::vector<std::vector<std::string>> found;
  const std::regex expression(pattern);
  for (std::sregex_iterator it(text.begin(), text.end(), expression), end; it != end; ++it) {
    found.emplace_back();
    for (size_t i = 0; i < it->size(); ++i) found.back().push_back((*it)[i].str());
  }
  return found;
}

// A row of the table: folders, with all that those may use in turn, and single headers ("plan/OPERATION/tile.h": of any
// operation).
struct Row {
  std::set<std::string> named, folders;
  std::vector<std::regex> headers;
  bool everything = false;

  bool allows(const std::string& header) const {
    return everything || folders.contains(header.substr(0, header.find('/'))) ||
           std::any_of(headers.begin(), headers.end(),
                       [&](const std::regex& r) { return std::regex_match(header, r); });
  }
};

std::map<std::string, Row> table() {
  std::map<std::string, Row> rows;
  std::vector<std::string> order;
  for (const std::string& line : lines_of(kRoot / "DESIGN.md")) {
    const auto row = matches(line, R"(^\| `src/(\w+)` \|.*\| ?([^|]*)\|$)");
    if (row.empty()) continue;
    const std::string folder = row[0][1];
    order.push_back(folder);
    for (const auto& word : matches(row[0][2], R"([\w./]+)")) {
      if (word[0] == "everything") {
        rows[folder].everything = true;
      } else if (word[0].find('/') != std::string::npos) {
        std::string pattern = word[0];
        if (const size_t at = pattern.find("OPERATION"); at != std::string::npos) pattern.replace(at, 9, "\\w+");
        rows[folder].headers.emplace_back(pattern);
      } else {
        rows[folder].named.insert(word[0]);
      }
    }
    rows[folder].folders = rows[folder].named;
    rows[folder].folders.insert(folder);
  }
  for (const std::string& folder : order) {  // each stands below what it uses
    const std::set<std::string> named = rows[folder].named;
    for (const std::string& other : named) rows[folder].folders.merge(std::set(rows[other].folders));
  }
  return rows;
}

std::vector<fs::path> sources_under(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string extension = entry.path().extension();
    if (extension == ".h" || extension == ".cpp" || extension == ".cuh" || extension == ".cu" || extension == ".py") {
      files.push_back(entry.path());
    }
  }
  return files;
}

TEST(House, EveryFolderHasARowAndEveryRowAFolder) {
  std::set<std::string> folders, rows;
  for (const auto& entry : fs::directory_iterator(kRoot / "src")) {
    if (entry.is_directory()) folders.insert(entry.path().filename());
  }
  for (const auto& [folder, row] : table()) {
    rows.insert(folder);
    for (const std::string& other : row.named) EXPECT_TRUE(folders.contains(other)) << folder << " may use " << other;
  }
  EXPECT_EQ(folders, rows);
  EXPECT_GE(rows.size(), 15u);
}

TEST(House, FoldersIncludeWhatTheTableAllows) {
  const auto rows = table();
  size_t includes = 0;
  for (const auto& [folder, row] : rows) {
    for (const fs::path& file : sources_under(kRoot / "src" / folder)) {
      for (const std::string& line : lines_of(file)) {
        if (!line.starts_with("#include \"")) continue;
        const std::string header = line.substr(10, line.find('"', 10) - 10);
        if (!rows.contains(header.substr(0, header.find('/')))) continue;
        EXPECT_TRUE(row.allows(header)) << file.string() << " includes " << header;
        ++includes;
      }
    }
  }
  EXPECT_GT(includes, 500u);
}

TEST(House, FoldersLinkWhatTheTableAllows) {
  size_t links = 0;
  for (const auto& [folder, row] : table()) {
    const fs::path file = kRoot / "src" / folder / "CMakeLists.txt";
    if (!fs::exists(file)) continue;  // device code is no library
    for (const auto& library : matches(read_file(file), R"(fourfold::(\w+))")) {
      EXPECT_TRUE(row.allows(library[1])) << file.string() << " links " << library[1];
      ++links;
    }
  }
  EXPECT_GT(links, 20u);
}

TEST(House, NoFileIsLongerThan800Lines) {
  for (const char* folder : {"src", "tests", "tools"}) {
    for (const fs::path& file : sources_under(kRoot / folder)) {
      const std::vector<std::string> lines = lines_of(file);
      if (!lines.empty() && lines.front().find("Written by tools/") != std::string::npos) continue;
      EXPECT_LE(lines.size(), 800u) << file.string();
    }
  }
}

}  // namespace
}  // namespace fourfold
