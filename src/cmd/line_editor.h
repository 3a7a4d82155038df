// Lines that a person types: with editing and a history at a terminal, plain elsewhere.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

namespace fourfold::cmd {

class LineEditor {
 public:
  // Edits where standard input and standard error are a terminal that can move its cursor. `history` is the file that
  // lines are added to, and read from at the start; a file that cannot be read or written is left alone.
  explicit LineEditor(const std::filesystem::path& history);
  ~LineEditor();
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  enum class Input { kLine, kEnd, kInterrupted };
  // The next line, without its newline. One that ends in a backslash goes on in the next one. Ctrl-C is kInterrupted,
  // but where something was typed it only throws that away.
  Input read(std::string& line);

 private:
  class Edited;
  class Plain;
  std::unique_ptr<Edited> edited_;
  std::unique_ptr<Plain> plain_;
};

// FOURFOLD_HISTORY, or fourfold/history in the user's cache; empty where there is no home.
std::filesystem::path history_file();

}  // namespace fourfold::cmd
