// A library that is opened once in a process, at its first use, or that a test has put in its place.
#pragma once

#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "jit/library.h"

namespace fourfold::jit {

template <typename Library>
class OpenedOnce {
 public:
  // `make` gives the library of the first of candidates() that loads, or throws an Error that says what it lacks.
  // Null: there is none; *why then says what was tried.
  template <typename Candidates, typename Make>
  const Library* find(const Candidates& candidates, const Make& make, std::string* why) {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(tried_, true)) {
      std::optional<SharedLibrary> library = SharedLibrary::open(candidates(), &why_);
      if (library) {
        try {
          library_ = make(std::move(*library));
        } catch (const Error& error) {
          why_ = error.what();
        }
      }
    }
    if (why != nullptr) *why = why_;
    return library_.get();
  }
  // Null: the machine is to have none.
  void substitute(std::unique_ptr<const Library> library) {
    const std::lock_guard lock(mutex_);
    tried_ = true;
    why_ = library == nullptr ? "none" : "";
    library_ = std::move(library);
  }

 private:
  std::mutex mutex_;
  bool tried_ = false;
  std::unique_ptr<const Library> library_;
  std::string why_;
};

}  // namespace fourfold::jit
