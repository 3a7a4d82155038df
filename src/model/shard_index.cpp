#include "model/shard_index.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/json.h"
#include "base/plain_json.h"

namespace fourfold::model {
namespace {

constexpr size_t kPieceBytes = size_t{512} << 10;
constexpr size_t kMostBefore = size_t{1} << 20;  // of the text, before "weight_map"

bool plain_shard_name(std::string_view name) {
  return !name.empty() && name.find_first_of("/\\") == std::string_view::npos && name.front() != '.' &&
         name.find('\0') == std::string_view::npos && name.ends_with(".safetensors");
}

// Sorts the files, of which there is at least one, and has entries mean their new places.
void sort_files(ShardIndex& index) {
  std::vector<uint32_t> order(index.files.size()), place(index.files.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return index.files[a] < index.files[b]; });
  std::vector<std::string> sorted;
  for (uint32_t i = 0; i < order.size(); ++i) {
    place[order[i]] = i;
    sorted.push_back(std::move(index.files[order[i]]));
  }
  index.files = std::move(sorted);
  for (auto& part : index.entries) {
    for (ShardIndex::Entry& entry : part) entry.file = place[entry.file];
  }
}

std::optional<double> total_size_of(const Json& json) {
  const auto metadata = json.find("metadata");
  if (metadata == json.end() || !metadata->is_object()) return std::nullopt;
  const auto total = metadata->find("total_size");
  if (total == metadata->end() || !total->is_number()) return std::nullopt;
  return total->get<double>();
}

}  // namespace

// What lies between two commas behind entries.
struct IndexText::Piece {
  size_t begin = 0;  // in the text
  // What parse() makes of it.
  bool plain = false, closed = false;  // closed: the object ends behind the last entry
  size_t end = 0;                      // behind the comma of the last entry, or the brace
  std::vector<ShardIndex::Entry> entries;
  std::vector<std::string_view> files;  // that entries mean
};

IndexText::IndexText(std::string text, std::string name)
    : name_(std::move(name)), text_(std::make_shared<const std::string>(std::move(text))) {
  find_entries();
}
IndexText::~IndexText() = default;
IndexText::IndexText(IndexText&&) noexcept = default;
IndexText& IndexText::operator=(IndexText&&) noexcept = default;

// Cuts the members of "weight_map" of the outermost object into pieces; none where that cannot be found this way.
void IndexText::find_entries() {
  const std::string_view text = *text_;
  const size_t key = text.substr(0, kMostBefore).find("\"weight_map\"");
  // With escapes a quotation mark need not be the end of a string.
  if (key == std::string_view::npos || text.substr(0, key).find('\\') != std::string_view::npos) return;
  bool in_string = false;
  int depth = 0;
  for (const char c : text.substr(0, key)) {
    if (c == '"') in_string = !in_string;
    if (in_string) continue;
    depth += c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
  }
  if (in_string || depth != 1) return;
  PlainJson json(text, key);
  std::string_view name;
  if (!json.string(&name) || !json.next(':') || !json.next('{')) return;
  brace_ = json.at() - 1;
  pieces_.emplace_back().begin = json.at();
  for (size_t at = json.at() + kPieceBytes; at < text.size(); at += kPieceBytes) {
    const size_t comma = text.find("\",", at);  // it may be any comma: plain() sees whether it is one behind an entry
    if (comma == std::string_view::npos) break;
    pieces_.emplace_back().begin = comma + 2;
    at = std::max(at, comma);
  }
}

size_t IndexText::pieces() const { return pieces_.size(); }

void IndexText::parse(size_t number) {
  Piece& piece = pieces_[number];
  piece.plain = parse_entries(piece, number + 1 < pieces_.size() ? pieces_[number + 1].begin : SIZE_MAX);
}

bool IndexText::parse_entries(Piece& piece, size_t limit) const {
  const std::string_view text = *text_;
  PlainJson json(text, piece.begin);
  piece.entries.reserve((std::min(limit, text.size()) - piece.begin) / 64 + 1);
  std::unordered_map<std::string_view, uint32_t> numbers;
  std::string_view before;  // the file of the entry before
  uint32_t number = 0;
  while (json.at() < limit) {
    std::string_view tensor, file;
    if (!json.string(&tensor) || !json.next(':') || !json.string(&file)) return false;
    if (file != before || piece.files.empty()) {
      if (!plain_shard_name(file)) return false;
      const auto [place, added] = numbers.try_emplace(file, static_cast<uint32_t>(piece.files.size()));
      if (added) piece.files.push_back(file);
      number = place->second;
      before = file;
    }
    piece.entries.push_back({tensor, number});
    piece.closed = !json.next(',');
    if (piece.closed && !json.next('}')) return false;
    piece.end = json.at();
    if (piece.closed) return true;
  }
  return true;
}

std::optional<ShardIndex> IndexText::plain() {
  if (pieces_.empty()) return std::nullopt;
  ShardIndex index;
  index.plain = true;
  index.owner = text_;
  std::unordered_map<std::string_view, uint32_t> numbers;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    Piece& piece = pieces_[i];
    const bool last = i + 1 == pieces_.size();
    // What is behind "weight_map" may have been cut, too: then the object ends before the last piece.
    if (!piece.plain || (!last && !piece.closed && piece.end != pieces_[i + 1].begin) || (last && !piece.closed)) {
      return std::nullopt;
    }
    std::vector<uint32_t> renamed;
    for (const std::string_view file : piece.files) {
      const auto [place, added] = numbers.try_emplace(file, static_cast<uint32_t>(index.files.size()));
      if (added) index.files.emplace_back(file);
      renamed.push_back(place->second);
    }
    for (ShardIndex::Entry& entry : piece.entries) entry.file = renamed[entry.file];
    index.entries.push_back(std::move(piece.entries));
    if (!piece.closed) continue;
    // The rest, with an object that is empty in the place of this one.
    try {
      const std::string rest = text_->substr(0, brace_) + "{}" + text_->substr(piece.end);
      const Json json = parse_json(rest, name_);
      const auto map = json.is_object() ? json.find("weight_map") : json.end();
      if (!json.is_object() || map == json.end() || !map->is_object() || !map->empty()) return std::nullopt;
      index.total_size = total_size_of(json);
    } catch (const Error&) {
      return std::nullopt;
    }
    sort_files(index);
    return index;
  }
  return std::nullopt;
}

ShardIndex IndexText::by_json() const {
  ShardIndex index;
  index.entries.emplace_back();
  const auto names = std::make_shared<std::deque<std::string>>();  // which stay where they are
  index.owner = names;
  std::map<std::string, size_t, std::less<>> numbers;  // in the order of their first tensor
  const JsonLimits limits;
  const Json json = parse_json_members(*text_, name_, "weight_map", limits, [&](std::string&& tensor, Json&& file) {
    if (!file.is_string() || !plain_shard_name(file.get_ref<const std::string&>())) {
      fail("{}: tensor '{}' is in {}, wanted the name of a .safetensors file in the same directory", name_,
           printable(tensor, 200), printable(file.dump(-1, ' ', false, Json::error_handler_t::replace), 100));
    }
    const auto& name = file.get_ref<const std::string&>();
    const auto [place, added] = numbers.try_emplace(name, numbers.size());
    if (added) index.files.push_back(name);
    index.entries.back().push_back({names->emplace_back(std::move(tensor)), static_cast<uint32_t>(place->second)});
  });
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (!json.is_object() || map == json.end() || !map->is_object()) {
    fail("{}: weight_map is missing, wanted an object from tensor to file name", name_);
  }
  if (numbers.empty()) fail("{}: weight_map is empty", name_);
  sort_files(index);
  index.total_size = total_size_of(json);
  return index;
}

ShardIndex IndexText::finish() {
  if (std::optional<ShardIndex> index = plain()) return std::move(*index);
  return by_json();
}

}  // namespace fourfold::model
