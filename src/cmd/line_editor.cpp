#include "cmd/line_editor.h"

#include <fcntl.h>
#include <histedit.h>
#include <langinfo.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cwchar>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/check.h"
#include "base/console.h"
#include "base/env.h"
#include "base/file.h"
#include "base/interrupt.h"

namespace fourfold::cmd {
namespace {

constexpr size_t kMaxLine = 16u << 20;
constexpr int kHistoryLines = 1000;
constexpr uint64_t kHistoryBytes = 4u << 20;  // beyond it the oldest lines go
constexpr const char* kPrompt = "> ";
constexpr const char* kContinued = ". ";

bool can_edit() {
  const char* terminal = std::getenv("TERM");
  return ::isatty(STDIN_FILENO) != 0 && ::isatty(STDERR_FILENO) != 0 && terminal != nullptr && *terminal != '\0' &&
         std::string_view(terminal) != "dumb";
}

// Whether the line goes on in the next one; the backslash that says so becomes the newline.
bool continues(std::string& line) {
  if (line.empty() || line.back() != '\\') return false;
  line.back() = '\n';
  return true;
}

}  // namespace

// ---- plain

// Read with read(2): the streams of the library keep what they have read, and poll() does not see it.
class LineEditor::Plain {
 public:
  Input read(std::string& line) {
    line.clear();
    for (;;) {
      const size_t newline = pending_.find('\n');
      if (newline != std::string::npos) {
        line += pending_.substr(0, newline);
        pending_.erase(0, newline + 1);
        if (continues(line)) continue;
        return Input::kLine;
      }
      if (!wait_for_input(STDIN_FILENO)) return Input::kInterrupted;
      char buffer[4096];
      const ssize_t count = ::read(STDIN_FILENO, buffer, sizeof buffer);
      if (count > 0) {
        pending_.append(buffer, static_cast<size_t>(count));
        if (pending_.size() + line.size() > kMaxLine) fail("standard input: a line of more than {} bytes", kMaxLine);
      } else if (count == 0 || errno != EINTR) {
        if (pending_.empty() && line.empty()) return Input::kEnd;
        line += pending_;
        pending_.clear();
        return Input::kLine;
      }
    }
  }

 private:
  std::string pending_;
};

// ---- edited

class LineEditor::Edited {
 public:
  explicit Edited(const std::filesystem::path& history) : file_(history) {
    // Characters are those of the locale; without one they are UTF-8 all the same.
    std::setlocale(LC_CTYPE, "");
    if (std::strcmp(::nl_langinfo(CODESET), "UTF-8") != 0) std::setlocale(LC_CTYPE, "C.UTF-8");
    history_ = ::history_init();
    editor_ = ::el_init("fourfold", stdin, stderr, stderr);
    if (history_ == nullptr || editor_ == nullptr) fail("the terminal cannot be used for editing");
    HistEvent event;
    ::history(history_, &event, H_SETSIZE, kHistoryLines);
    ::history(history_, &event, H_SETUNIQUE, 1);
    ::el_set(editor_, EL_CLIENTDATA, this);
    ::el_set(editor_, EL_EDITOR, "emacs");
    ::el_set(editor_, EL_SIGNAL, 0);  // Ctrl-C is ours
    ::el_set(editor_, EL_PROMPT, &prompt);
    ::el_set(editor_, EL_HIST, ::history, history_);
    ::el_set(editor_, EL_GETCFN, &read_character);
    ::el_set(editor_, EL_BIND, "^R", "em-inc-search-prev", nullptr);
    ::el_source(editor_, nullptr);  // .editrc
    load();
  }
  ~Edited() {
    if (editor_ != nullptr) ::el_end(editor_);
    if (history_ != nullptr) ::history_end(history_);
    if (keys_ != STDIN_FILENO) ::close(keys_);
  }

  Input read(std::string& line) {
    line.clear();
    for (;;) {
      ::el_resize(editor_);
      prompt_ = line.empty() ? kPrompt : kContinued;
      int count = 0;
      stop_ = Stop::kNone;
      const char* typed = ::el_gets(editor_, &count);
      if (typed == nullptr || count <= 0) {
        if (stop_ == Stop::kNone && !line.empty()) return Input::kLine;  // Ctrl-D behind a backslash
        if (stop_ == Stop::kNone) return Input::kEnd;
        eprint("\n");
        if (stop_ == Stop::kInterrupted && line.empty()) return Input::kInterrupted;
        line.clear();
        clear_interrupt();
        continue;
      }
      std::string_view text(typed, static_cast<size_t>(count));
      while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.remove_suffix(1);
      remember(std::string(text));
      line += text;
      if (line.size() > kMaxLine) fail("a line of more than {} bytes", kMaxLine);
      if (!continues(line)) return Input::kLine;
    }
  }

 private:
  enum class Stop { kNone, kInterrupted, kCleared };

  static Edited& self(EditLine* editor) {
    void* data = nullptr;
    ::el_get(editor, EL_CLIENTDATA, &data);
    return *static_cast<Edited*>(data);
  }
  static char* prompt(EditLine* editor) { return const_cast<char*>(self(editor).prompt_); }

  // One character of the terminal: 1, 0 at the end, -1 after a Ctrl-C.
  static int read_character(EditLine* editor, wchar_t* character) {
    Edited& edited = self(editor);
    std::mbstate_t state{};
    for (;;) {
      if (!wait_for_input(edited.keys_)) {
        const LineInfo* line = ::el_line(editor);
        edited.stop_ = line->lastchar > line->buffer ? Stop::kCleared : Stop::kInterrupted;
        return -1;
      }
      char byte = 0;
      const ssize_t count = ::read(edited.keys_, &byte, 1);
      if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (count <= 0) return 0;
      const size_t size = std::mbrtowc(character, &byte, 1, &state);
      if (size == static_cast<size_t>(-2)) continue;  // the character has more bytes
      if (size == static_cast<size_t>(-1)) {
        *character = L'\uFFFD';
        return 1;
      }
      if (size == 0) *character = L'\0';
      return 1;
    }
  }

  void load() {
    std::string text;
    try {
      if (file_.empty() || !file_exists(file_)) return;
      text = read_file(file_, 4 * kHistoryBytes);
    } catch (const Error&) {
      return;
    }
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find('\n', begin), text.size());
      add(text.substr(begin, end - begin));
      begin = end + 1;
    }
    if (text.size() <= kHistoryBytes) return;
    try {
      const size_t cut = text.find('\n', text.size() - kHistoryBytes / 2);
      write_file_atomically(file_, cut == std::string::npos ? "" : text.substr(cut + 1));
      ::chmod(file_.c_str(), 0600);
    } catch (const Error&) {
    }
  }

  void add(const std::string& line) {
    if (line.find_first_not_of(" \t") == std::string::npos) return;
    HistEvent event;
    ::history(history_, &event, H_ENTER, line.c_str());
  }

  void remember(const std::string& line) {
    add(line);
    if (file_.empty() || line.find_first_not_of(" \t") == std::string::npos) return;
    std::error_code error;
    std::filesystem::create_directories(file_.parent_path(), error);
    const int fd = ::open(file_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return;
    const std::string text = line + '\n';
    // In one piece, so that two chats may share the file.
    [[maybe_unused]] const ssize_t written = ::write(fd, text.data(), text.size());
    ::close(fd);
  }

  // The terminal once more, so that reading never waits and nobody else's reading changes: Ctrl-C takes back the keys
  // that a wait was told of. Where it cannot be opened, standard input as it is.
  static int open_keys() {
    const int fd = ::open("/proc/self/fd/0", O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    return fd < 0 ? STDIN_FILENO : fd;
  }

  const int keys_ = open_keys();
  std::filesystem::path file_;
  History* history_ = nullptr;
  EditLine* editor_ = nullptr;
  const char* prompt_ = kPrompt;
  Stop stop_ = Stop::kNone;
};

// ---- either

LineEditor::LineEditor(const std::filesystem::path& history) {
  if (can_edit()) {
    edited_ = std::make_unique<Edited>(history);
  } else {
    plain_ = std::make_unique<Plain>();
  }
}

LineEditor::~LineEditor() = default;

LineEditor::Input LineEditor::read(std::string& line) {
  if (edited_ != nullptr) return edited_->read(line);
  eprint("{}", kPrompt);
  return plain_->read(line);
}

std::filesystem::path history_file() {
  if (const auto file = env("FOURFOLD_HISTORY")) return *file;
  if (const auto cache = env("XDG_CACHE_HOME")) return std::filesystem::path(*cache) / "fourfold/history";
  if (const auto home = env("HOME")) return std::filesystem::path(*home) / ".cache/fourfold/history";
  return {};
}

}  // namespace fourfold::cmd
