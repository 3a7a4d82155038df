// Shared by the JIT's tests: a temporary directory, a hand-made cubin, and NVRTC or a visible skip.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/temporary_directory.h"
#include "jit/nvrtc.h"

namespace fourfold::jit {

// A minimal cubin with one kernel, written by hand, so that the store can be tested where no compiler is.
inline std::string hand_made_cubin(const std::string& kernel, uint32_t registers, uint32_t frame, uint64_t shared) {
  const auto put = [](std::string* out, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) *out += i < 8 ? static_cast<char>(value >> (8 * i)) : '\0';
  };
  struct Part {
    std::string name, bytes;
    uint32_t type, link;
    uint64_t size;
  };
  std::string symbols(24, '\0'), info;
  put(&symbols, 1, 4);  // name
  symbols += '\x12';    // global function
  symbols += '\0';
  put(&symbols, 2, 2);   // section
  put(&symbols, 0, 8);   // value
  put(&symbols, 64, 8);  // size
  for (const auto& [attribute, value] : {std::pair<int, uint32_t>{0x2f, registers}, {0x11, frame}}) {
    put(&info, 4, 1);
    put(&info, static_cast<uint64_t>(attribute), 1);
    put(&info, 8, 2);
    put(&info, 1, 4);  // symbol
    put(&info, value, 4);
  }
  std::string strings(1, '\0'), text_name = ".text.", shared_name = ".nv.shared.";
  strings.append(kernel).push_back('\0');
  text_name.append(kernel);
  shared_name.append(kernel);
  std::vector<Part> parts = {{"", "", 0, 0, 0},
                             {".strtab", strings, 3, 0, 0},
                             {text_name, std::string(64, 'x'), 1, 0, 0},
                             {".symtab", symbols, 2, 1, 0},
                             {".nv.info", info, 0x70000000, 3, 0},
                             {shared_name, "", 8, 0, shared}};
  std::string names(1, '\0');
  std::vector<uint64_t> name_at;
  for (const Part& p : parts) {
    name_at.push_back(names.size());
    names.append(p.name).push_back('\0');
  }
  name_at.push_back(names.size());
  names.append(".shstrtab").push_back('\0');
  parts.push_back({".shstrtab", names, 3, 0, 0});

  std::string body;
  std::string headers;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& p = parts[i];
    put(&headers, name_at[i], 4);
    put(&headers, p.type, 4);
    put(&headers, 0, 16);                // flags, address
    put(&headers, 64 + body.size(), 8);  // offset
    put(&headers, p.type == 8 ? p.size : p.bytes.size(), 8);
    put(&headers, p.link, 4);
    put(&headers, 0, 20);
    body += p.bytes;
  }
  std::string file(
      "\x7f"
      "ELF\x02\x01\x01",
      7);
  file.resize(16, '\0');
  put(&file, 2, 2);
  put(&file, 190, 2);
  put(&file, 1, 4);
  put(&file, 0, 16);                // entry, program headers
  put(&file, 64 + body.size(), 8);  // section headers
  put(&file, 0, 4);
  put(&file, 64, 2);
  put(&file, 0, 4);
  put(&file, 64, 2);
  put(&file, parts.size(), 2);
  put(&file, parts.size() - 1, 2);
  return file + body + headers;
}

// For tests that compile: skips, and says why, where no NVRTC is installed. ctest counts and names skipped tests.
#define FOURFOLD_NEEDS_NVRTC()                                                           \
  do {                                                                                   \
    std::string why;                                                                     \
    if (Nvrtc::find(&why) == nullptr) GTEST_SKIP() << "no NVRTC on this machine" << why; \
  } while (false)

}  // namespace fourfold::jit
