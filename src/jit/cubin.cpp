#include "jit/cubin.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "base/check.h"

namespace fourfold::jit {
namespace {

constexpr uint64_t kMaxBytes = 64ull << 20, kMaxSections = 4096, kMaxSymbols = 65536;
constexpr uint16_t kMachineCuda = 190;
constexpr uint32_t kSectionSymbols = 2, kSectionNoBits = 8;
constexpr int kSymbolFunction = 2;
// .nv.info: [format u8][attribute u8] then a u16 value, or for format 4 a u16 size and that many bytes.
constexpr uint8_t kFormatSized = 4, kAttributeRegisters = 0x2f, kAttributeFrame = 0x11;
constexpr int64_t kReservedShared = 1024;

class Reader {
 public:
  Reader(std::string_view bytes, std::string_view what) : bytes_(bytes), what_(what) {}

  std::string_view slice(uint64_t offset, uint64_t size, const char* part) const {
    if (offset > bytes_.size() || size > bytes_.size() - offset) {
      fail("{}: {} at {} with {} bytes, the file has {}", what_, part, offset, size, bytes_.size());
    }
    return bytes_.substr(offset, size);
  }
  template <typename T>
  static T at(std::string_view bytes, size_t offset) {
    T value;  // callers have checked the size
    std::memcpy(&value, bytes.data() + offset, sizeof(T));
    return value;
  }
  std::string_view text(std::string_view table, uint64_t offset, const char* part) const {
    if (offset >= table.size()) fail("{}: {} name at {}, the string table has {}", what_, part, offset, table.size());
    const std::string_view rest = table.substr(offset);
    const size_t end = rest.find('\0');
    if (end == std::string_view::npos) fail("{}: {} name without an end", what_, part);
    return rest.substr(0, end);
  }

 private:
  std::string_view bytes_, what_;
};

struct Section {
  std::string_view name, bytes;
  uint32_t type, link;
  uint64_t size;
};

struct Use {
  int registers = 0;
  int64_t frame = 0;
};

}  // namespace

std::vector<KernelUse> read_cubin(std::string_view bytes, std::string_view what) {
  if (bytes.size() > kMaxBytes) fail("{}: {} bytes, at most {} are accepted", what, bytes.size(), kMaxBytes);
  const Reader reader(bytes, what);
  const std::string_view header = reader.slice(0, 64, "ELF header");
  if (header.substr(0, 6) != std::string_view("\x7f"
                                              "ELF\x02\x01",
                                              6))
    fail("{}: not a little-endian ELF64 file", what);
  const auto machine = Reader::at<uint16_t>(header, 18);
  if (machine != kMachineCuda) fail("{}: ELF machine {}, wanted {} (CUDA)", what, machine, kMachineCuda);
  const auto section_offset = Reader::at<uint64_t>(header, 40);
  const auto entry_size = Reader::at<uint16_t>(header, 58), count = Reader::at<uint16_t>(header, 60),
             names_index = Reader::at<uint16_t>(header, 62);
  if (entry_size != 64) fail("{}: section headers of {} bytes, wanted 64", what, entry_size);
  if (count == 0 || count > kMaxSections) fail("{}: {} sections, wanted 1 to {}", what, count, kMaxSections);
  if (names_index >= count) fail("{}: section names in section {} of {}", what, names_index, count);
  const std::string_view table = reader.slice(section_offset, uint64_t{count} * 64, "section headers");

  const auto section_bytes = [&](size_t i) {
    const std::string_view h = table.substr(i * 64, 64);
    if (Reader::at<uint32_t>(h, 4) == kSectionNoBits) return std::string_view();
    return reader.slice(Reader::at<uint64_t>(h, 24), Reader::at<uint64_t>(h, 32), "section");
  };
  const std::string_view names = section_bytes(names_index);
  std::vector<Section> sections(count);
  for (size_t i = 0; i < count; ++i) {
    const std::string_view h = table.substr(i * 64, 64);
    sections[i] = {reader.text(names, Reader::at<uint32_t>(h, 0), "section"), section_bytes(i),
                   Reader::at<uint32_t>(h, 4), Reader::at<uint32_t>(h, 40), Reader::at<uint64_t>(h, 32)};
  }

  // Registers and frames by symbol index.
  std::map<uint32_t, Use> uses;
  for (const Section& s : sections) {
    if (s.name != ".nv.info") continue;
    size_t at = 0;
    while (s.bytes.size() - at >= 4) {
      const auto format = Reader::at<uint8_t>(s.bytes, at), attribute = Reader::at<uint8_t>(s.bytes, at + 1);
      const auto size = Reader::at<uint16_t>(s.bytes, at + 2);
      at += 4;
      if (format != kFormatSized) continue;
      if (size > s.bytes.size() - at) fail("{}: attribute of {} bytes at the end of .nv.info", what, size);
      if (size == 8) {
        const auto symbol = Reader::at<uint32_t>(s.bytes, at), value = Reader::at<uint32_t>(s.bytes, at + 4);
        if (attribute == kAttributeRegisters)
          uses[symbol].registers = static_cast<int>(std::min<uint32_t>(value, 4096));
        if (attribute == kAttributeFrame) uses[symbol].frame = value;
      }
      at += size;
    }
  }

  std::vector<KernelUse> kernels;
  for (const Section& s : sections) {
    if (s.type != kSectionSymbols) continue;
    if (s.link >= count) fail("{}: symbol names in section {} of {}", what, s.link, count);
    const std::string_view strings = sections[s.link].bytes;
    if (s.bytes.size() / 24 > kMaxSymbols) fail("{}: more than {} symbols", what, kMaxSymbols);
    for (size_t i = 0; (i + 1) * 24 <= s.bytes.size(); ++i) {
      const std::string_view entry = s.bytes.substr(i * 24, 24);
      const int type = Reader::at<uint8_t>(entry, 4) & 15, binding = Reader::at<uint8_t>(entry, 4) >> 4;
      const auto index = Reader::at<uint16_t>(entry, 6);
      if (type != kSymbolFunction || binding == 0 || index == 0 || index >= count) continue;
      KernelUse kernel;
      kernel.name = reader.text(strings, Reader::at<uint32_t>(entry, 0), "symbol");
      if (sections[index].name != ".text." + kernel.name) continue;  // a device function inside another's section
      kernel.code_bytes = static_cast<int64_t>(std::min<uint64_t>(Reader::at<uint64_t>(entry, 16), kMaxBytes));
      if (const auto found = uses.find(static_cast<uint32_t>(i)); found != uses.end()) {
        kernel.registers = found->second.registers;
        kernel.stack_bytes = found->second.frame;
      }
      for (const Section& shared : sections) {
        if (shared.name == ".nv.shared." + kernel.name) {
          kernel.shared_bytes = static_cast<int64_t>(std::min<uint64_t>(shared.size, kMaxBytes));
          if (kernel.shared_bytes >= kReservedShared) kernel.shared_bytes -= kReservedShared;
        }
      }
      kernels.push_back(std::move(kernel));
    }
  }
  std::sort(kernels.begin(), kernels.end(), [](const KernelUse& a, const KernelUse& b) { return a.name < b.name; });
  return kernels;
}

}  // namespace fourfold::jit
