#include "model/safetensors_header.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <utility>

#include "base/check.h"
#include "base/json.h"
#include "base/plain_json.h"

namespace fourfold::model {

struct HeaderStorage {
  std::string text;
  // Of headers that were read by parse_json(): names without their escapes. A deque's elements stay where they are.
  std::deque<std::string> names;
  std::deque<std::vector<int64_t>> sizes;
};

namespace {

constexpr StoredTypeInfo kTypes[] = {{"F64", StoredType::kF64, 64},
                                     {"F32", StoredType::kF32, 32},
                                     {"BF16", StoredType::kBf16, 16},
                                     {"F16", StoredType::kF16, 16},
                                     {"F8_E4M3", StoredType::kF8E4M3, 8},
                                     {"U8", StoredType::kU8, 8},
                                     {"I8", StoredType::kI8, 8},
                                     {"I16", StoredType::kI16, 16},
                                     {"I32", StoredType::kI32, 32},
                                     {"I64", StoredType::kI64, 64},
                                     {"BOOL", StoredType::kBool, 8},
                                     {"U16", StoredType::kOther, 16},
                                     {"U32", StoredType::kOther, 32},
                                     {"U64", StoredType::kOther, 64},
                                     {"C64", StoredType::kOther, 64},
                                     {"F8_E5M2", StoredType::kOther, 8},
                                     {"F8_E8M0", StoredType::kOther, 8},
                                     {"F4", StoredType::kOther, 4},
                                     {"F6_E2M3", StoredType::kOther, 6},
                                     {"F6_E3M2", StoredType::kOther, 6},
                                     {"F8_E4M3FNUZ", StoredType::kOther, 8},
                                     {"F8_E5M2FNUZ", StoredType::kOther, 8}};

constexpr size_t kMaxRank = 16;

// What an Error calls a tensor; there are too many of them to say it beforehand.
struct Where {
  std::string_view file, name;
  std::string text() const { return fmt::format("{}: tensor '{}'", file, printable(name, 200)); }
};

// The entries of "shape" or "data_offsets".
std::vector<uint64_t> unsigned_list(const Json& value, const Where& where, const char* what, size_t limit) {
  if (!value.is_array()) fail("{}: {} is {}, wanted a list of integers", where.text(), what, json_kind(value));
  if (value.size() > limit)
    fail("{}: {} has {} entries, at most {} are accepted", where.text(), what, value.size(), limit);
  std::vector<uint64_t> numbers;
  for (const Json& entry : value) {
    if (entry.is_number_unsigned()) {
      numbers.push_back(entry.get<uint64_t>());
    } else {
      fail("{}: {} holds {}, wanted integers from 0", where.text(), what, printable(entry.dump(), 40));
    }
    if (numbers.back() > static_cast<uint64_t>(INT64_MAX)) {
      fail("{}: {} holds {}, which is beyond any file", where.text(), what, numbers.back());
    }
  }
  return numbers;
}

const StoredTypeInfo* find_type(std::string_view name) {
  for (const StoredTypeInfo& type : kTypes) {
    if (name == type.name) return &type;
  }
  return nullptr;
}

// Nothing where that does not fit in 64 bits.
std::optional<uint64_t> bits_of(const StoredTypeInfo& type, std::span<const int64_t> sizes) {
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return 0;  // the others may be anything
  auto bits = static_cast<uint64_t>(type.bits);
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(bits, static_cast<uint64_t>(size), &bits)) return std::nullopt;
  }
  return bits;
}

StoredTensor parse_entry(HeaderStorage& storage, std::string&& given, const Json& entry, uint64_t data_begin,
                         uint64_t data_bytes, std::string_view file) {
  const std::string& name = storage.names.emplace_back(std::move(given));
  const Where where = {file, name};
  if (name.empty()) fail("{}: a tensor has an empty name", file);
  if (!entry.is_object()) fail("{}: entry is {}, wanted an object", where.text(), json_kind(entry));
  const Json *dtype = nullptr, *shape = nullptr, *offsets = nullptr;
  for (const auto& [key, value] : entry.items()) {
    if (key == "dtype") {
      dtype = &value;
    } else if (key == "shape") {
      shape = &value;
    } else if (key == "data_offsets") {
      offsets = &value;
    } else {
      fail("{}: unknown key '{}', wanted dtype, shape and data_offsets", where.text(), printable(key));
    }
  }
  if (dtype == nullptr) fail("{}: dtype is missing", where.text());
  if (shape == nullptr) fail("{}: shape is missing", where.text());
  if (offsets == nullptr) fail("{}: data_offsets is missing", where.text());

  StoredTensor tensor;
  tensor.name = name;
  if (!dtype->is_string()) fail("{}: dtype is {}, wanted a string", where.text(), json_kind(*dtype));
  const StoredTypeInfo* const type = find_type(dtype->get_ref<const std::string&>());
  if (type == nullptr) fail("{}: unknown dtype '{}'", where.text(), printable(dtype->get_ref<const std::string&>()));
  tensor.type = type->type;
  tensor.type_name = type->name;

  std::vector<int64_t>& sizes = storage.sizes.emplace_back();
  for (uint64_t size : unsigned_list(*shape, where, "shape", kMaxRank)) sizes.push_back(static_cast<int64_t>(size));
  tensor.shape = Dimensions(sizes);
  const std::optional<uint64_t> size_bits = bits_of(*type, sizes);
  if (!size_bits) fail("{}: shape {} does not fit in 64 bits", where.text(), tensor.shape_text());
  if (*size_bits % 8 != 0)
    fail("{}: shape {} of {} is not a whole number of bytes", where.text(), tensor.shape_text(), tensor.type_name);

  const std::vector<uint64_t> range = unsigned_list(*offsets, where, "data_offsets", 2);
  if (range.size() != 2) fail("{}: data_offsets has {} entries, wanted 2", where.text(), range.size());
  if (range[0] > range[1]) fail("{}: data_offsets [{}, {}] end before they begin", where.text(), range[0], range[1]);
  if (range[1] > data_bytes) {
    fail("{}: data_offsets [{}, {}] reach beyond the data ({} bytes): the file is truncated or the header wrong",
         where.text(), range[0], range[1], data_bytes);
  }
  tensor.bytes = range[1] - range[0];
  tensor.offset = data_begin + range[0];
  if (tensor.bytes != *size_bits / 8) {
    fail("{}: data_offsets hold {} bytes, but shape {} of {} needs {}", where.text(), tensor.bytes, tensor.shape_text(),
         tensor.type_name, *size_bits / 8);
  }
  return tensor;
}

// The order in which a header gives its tensors: that of their data. Empty tensors come before the one that begins at
// the same byte.
bool in_order(const StoredTensor& a, const StoredTensor& b) {
  return a.offset != b.offset ? a.offset < b.offset : a.bytes != b.bytes ? a.bytes < b.bytes : a.name < b.name;
}

// Brings the tensors in order; the data must be tiled exactly.
void check_tiling(SafetensorsHeader& header, uint64_t file_bytes, std::string_view name) {
  if (!std::is_sorted(header.tensors.begin(), header.tensors.end(), in_order)) {
    std::sort(header.tensors.begin(), header.tensors.end(), in_order);
  }
  uint64_t position = header.data_begin;
  const StoredTensor* previous = nullptr;
  for (const StoredTensor& tensor : header.tensors) {
    if (tensor.offset < position) {
      fail("{}: tensor '{}' overlaps tensor '{}'", name, printable(tensor.name, 200), printable(previous->name, 200));
    }
    if (tensor.offset > position) {
      fail("{}: {} bytes before tensor '{}' belong to no tensor", name, tensor.offset - position,
           printable(tensor.name, 200));
    }
    position = tensor.offset + tensor.bytes;
    previous = &tensor;
  }
  if (position != file_bytes) {
    fail("{}: {} bytes at the end of the file belong to no tensor", name, file_bytes - position);
  }
}

constexpr size_t kPieceBytes = size_t{512} << 10;
constexpr size_t kMostMetadata = 64;  // that are compared with each other

// Whether no two of the names are the same; `hashes` are theirs.
bool all_differ(const std::vector<StoredTensor>& tensors, const std::vector<size_t>& hashes) {
  size_t places = 16;
  while (places < 2 * tensors.size()) places *= 2;
  std::vector<uint32_t> taken(places);  // a tensor's number from 1
  for (size_t i = 0; i < tensors.size(); ++i) {
    size_t at = hashes[i] & (places - 1);
    for (; taken[at] != 0; at = (at + 1) & (places - 1)) {
      const size_t other = taken[at] - 1;
      if (hashes[other] == hashes[i] && tensors[other].name == tensors[i].name) return false;
    }
    taken[at] = static_cast<uint32_t>(i + 1);
  }
  return true;
}

}  // namespace

std::span<const StoredTypeInfo> stored_types() { return kTypes; }

HeaderPlace header_place(std::string_view first, uint64_t file_bytes, uint64_t available, std::string_view name) {
  if (file_bytes < 8 || first.size() < 8) {
    fail("{}: {} bytes, wanted a safetensors file (8 bytes of header length first)", name, file_bytes);
  }
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i)
    length = length << 8 | static_cast<uint64_t>(static_cast<unsigned char>(first[static_cast<size_t>(i)]));
  if (length > kMaxSafetensorsHeader) {
    fail("{}: header length {} (first 8 bytes), at most {} is accepted; is this a safetensors file?", name, length,
         kMaxSafetensorsHeader);
  }
  if (length > file_bytes - 8 || length > available - 8) {
    fail("{}: header length {}, but the file has only {} bytes: it is truncated", name, length, file_bytes);
  }
  return {length, file_bytes};
}

// What lies between two commas behind entries.
struct HeaderText::Piece {
  size_t begin = 0;  // in the text
  // What parse() makes of it.
  bool plain = false, closed = false;                 // closed: the text ends behind the last entry
  size_t end = 0;                                     // behind the comma of the last entry
  std::vector<StoredTensor> tensors;                  // names are set, sizes are not
  std::vector<size_t> hashes;                         // of their names
  std::vector<std::pair<uint32_t, uint32_t>> shapes;  // of each: where in `sizes`, and how many
  std::vector<int64_t> sizes;
  int metadata_objects = 0;
  std::vector<std::pair<std::string, std::string>> metadata;
};

HeaderText::HeaderText(std::string text, const HeaderPlace& place, std::string name)
    : name_(std::move(name)), place_(place), storage_(std::make_shared<HeaderStorage>()) {
  storage_->text = std::move(text);
  const std::string& all = storage_->text;
  if (all.empty() || all.front() != '{') return;  // finish() says it
  pieces_.emplace_back().begin = 1;
  for (size_t at = kPieceBytes; at < all.size(); at += kPieceBytes) {
    // This may be within a string, or the end of something else than an entry. Then the piece before this one ends
    // elsewhere, which finish() sees.
    const size_t brace = all.find("},", at);
    if (brace == std::string::npos) break;
    pieces_.emplace_back().begin = brace + 2;
    at = std::max(at, brace);
  }
}
HeaderText::~HeaderText() = default;
HeaderText::HeaderText(HeaderText&&) noexcept = default;
HeaderText& HeaderText::operator=(HeaderText&&) noexcept = default;

size_t HeaderText::pieces() const { return pieces_.size(); }

void HeaderText::parse(size_t number) {
  Piece& piece = pieces_[number];
  piece.plain = parse_entries(piece, number + 1 < pieces_.size() ? pieces_[number + 1].begin : SIZE_MAX);
}

bool HeaderText::parse_entries(Piece& piece, size_t limit) const {
  const std::string_view text = storage_->text;
  const uint64_t data_begin = 8 + place_.length, data_bytes = place_.file_bytes - data_begin;
  PlainJson json(text, piece.begin);
  const size_t expected = (std::min(limit, text.size()) - std::min(piece.begin, text.size())) / 128 + 1;
  piece.tensors.reserve(expected);
  piece.hashes.reserve(expected);
  piece.shapes.reserve(expected);
  while (json.at() < limit) {
    std::string_view name, key;
    if (!json.string(&name) || !json.next(':') || !json.next('{')) return false;
    if (name == "__metadata__") {
      ++piece.metadata_objects;
      while (!json.next('}')) {
        std::string_view value;
        if (piece.metadata.size() == kMostMetadata) return false;
        if (!piece.metadata.empty() && !json.next(',')) return false;
        if (!json.string(&key) || !json.next(':') || !json.string(&value)) return false;
        piece.metadata.emplace_back(key, value);
      }
    } else {
      if (name.empty()) return false;
      StoredTensor tensor;
      tensor.name = name;
      const StoredTypeInfo* type = nullptr;
      uint64_t range[2] = {0, 0};
      bool shaped = false, placed = false;
      const size_t first = piece.sizes.size();
      for (int i = 0; i < 3; ++i) {
        if (i > 0 && !json.next(',')) return false;
        if (!json.string(&key) || !json.next(':')) return false;
        if (key == "dtype" && type == nullptr) {
          std::string_view value;
          if (!json.string(&value)) return false;
          type = find_type(value);
          if (type == nullptr) return false;
        } else if (key == "shape" && !shaped) {
          shaped = true;
          if (!json.next('[')) return false;
          while (!json.next(']')) {
            uint64_t size = 0;
            const size_t count = piece.sizes.size() - first;
            if (count == kMaxRank || (count > 0 && !json.next(',')) || !json.number(&size)) return false;
            piece.sizes.push_back(static_cast<int64_t>(size));
          }
        } else if (key == "data_offsets" && !placed) {
          placed = true;
          if (!json.next('[') || !json.number(&range[0]) || !json.next(',') || !json.number(&range[1]) ||
              !json.next(']')) {
            return false;
          }
        } else {
          return false;
        }
      }
      if (!json.next('}')) return false;
      const std::span<const int64_t> sizes = std::span<const int64_t>(piece.sizes).subspan(first);
      const std::optional<uint64_t> bits = bits_of(*type, sizes);
      if (!bits || *bits % 8 != 0 || range[0] > range[1] || range[1] > data_bytes || range[1] - range[0] != *bits / 8) {
        return false;
      }
      tensor.type = type->type;
      tensor.type_name = type->name;
      tensor.offset = data_begin + range[0];
      tensor.bytes = range[1] - range[0];
      piece.tensors.push_back(tensor);
      piece.hashes.push_back(std::hash<std::string_view>()(name));
      piece.shapes.emplace_back(static_cast<uint32_t>(first), static_cast<uint32_t>(sizes.size()));
    }
    piece.end = json.at();
    if (json.next(',')) {
      piece.end = json.at();
      continue;
    }
    piece.closed = json.next('}') && json.end();
    return piece.closed;
  }
  return true;
}

std::optional<SafetensorsHeader> HeaderText::plain() {
  if (pieces_.empty()) return std::nullopt;
  size_t count = 0;
  int metadata_objects = 0;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const Piece& piece = pieces_[i];
    const bool last = i + 1 == pieces_.size();
    // Each begins where the one before it has ended: so all of the text was read as if by one.
    if (!piece.plain || piece.closed != last || (!last && piece.end != pieces_[i + 1].begin)) return std::nullopt;
    count += piece.tensors.size();
    metadata_objects += piece.metadata_objects;
  }
  if (metadata_objects > 1) return std::nullopt;
  SafetensorsHeader header;
  header.data_begin = 8 + place_.length;
  header.storage = storage_;
  header.tensors.reserve(count);
  std::vector<size_t> hashes;
  hashes.reserve(count);
  for (Piece& piece : pieces_) {
    hashes.insert(hashes.end(), piece.hashes.begin(), piece.hashes.end());
    const std::span<const int64_t> sizes = storage_->sizes.emplace_back(std::move(piece.sizes));
    for (size_t i = 0; i < piece.tensors.size(); ++i) {
      StoredTensor& tensor = header.tensors.emplace_back(piece.tensors[i]);
      tensor.shape = Dimensions(sizes.subspan(piece.shapes[i].first, piece.shapes[i].second));
    }
    if (piece.metadata_objects > 0) header.metadata = std::move(piece.metadata);
  }
  if (!all_differ(header.tensors, hashes)) return std::nullopt;
  for (size_t i = 0; i < header.metadata.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (header.metadata[i].first == header.metadata[j].first) return std::nullopt;
    }
  }
  check_tiling(header, place_.file_bytes, name_);
  return header;
}

SafetensorsHeader HeaderText::by_json() const {
  const std::string_view text = storage_->text;
  if (text.empty() || text.front() != '{') fail("{}: the header does not begin with '{{'", name_);

  JsonLimits limits;
  limits.max_bytes = kMaxSafetensorsHeader;
  limits.max_depth = 8;
  SafetensorsHeader header;
  header.data_begin = 8 + place_.length;
  const auto storage = std::make_shared<HeaderStorage>();
  header.storage = storage;
  const uint64_t data_bytes = place_.file_bytes - header.data_begin;
  parse_json_members(text, fmt::format("{}: header", name_), {}, limits, [&](std::string&& key, Json&& value) {
    if (key != "__metadata__") {
      header.tensors.push_back(parse_entry(*storage, std::move(key), value, header.data_begin, data_bytes, name_));
      return;
    }
    if (!value.is_object()) fail("{}: __metadata__ is {}, wanted an object", name_, json_kind(value));
    for (const auto& [entry, content] : value.items()) {
      if (!content.is_string()) {
        fail("{}: __metadata__ '{}' is {}, wanted a string", name_, printable(entry), json_kind(content));
      }
      header.metadata.emplace_back(entry, content.get<std::string>());
    }
  });
  check_tiling(header, place_.file_bytes, name_);
  return header;
}

SafetensorsHeader HeaderText::finish() {
  if (std::optional<SafetensorsHeader> header = plain()) return std::move(*header);
  return by_json();
}

HeaderText header_of(const MappedFile& file) {
  const std::string name = file.path().string();
  const uint64_t bytes = file.bytes().size();
  const FilePlace from = file_place(file.bytes().data());
  std::string first(std::min<uint64_t>(bytes, 8), '\0');
  if (!first.empty()) from.file->read(0, first.data(), first.size());
  const HeaderPlace place = header_place(first, bytes, bytes, name);
  // Read, not looked at through the mapping, which would take a page fault for every few pages.
  std::string text(place.length, '\0');
  from.file->read(8, text.data(), text.size());
  return {std::move(text), place, name};
}

}  // namespace fourfold::model
