// Reading one matrix of a checkpoint: which tensors it is made of, their shapes, and the scales.
#include <algorithm>
#include <array>
#include <cfloat>
#include <charconv>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/math.h"
#include "model/checkpoint.h"
#include "nvfp4/block_scales.h"
#include "nvfp4/number.h"

namespace fourfold::model {
namespace {

using ops::Format;
using ops::MatrixSource;

constexpr int64_t kFp8Block = 128;
constexpr int64_t kScaleBlock = 16;  // elements per NVFP4 block scale

// No bit of `mask` is set in any byte.
bool all_clear(const uint8_t* data, size_t count, uint8_t mask) {
  uint8_t any = 0;
  for (size_t i = 0; i < count; ++i) any = static_cast<uint8_t>(any | (data[i] & mask));
  return any == 0;
}

struct ExpertModule {
  std::string container;  // "layers.3.mlp.experts."
  int64_t expert = 0;
  std::string projection;  // gate_proj, up_proj, down_proj
};

std::optional<ExpertModule> expert_module(std::string_view module) {
  constexpr std::string_view kKey = ".experts.";
  const size_t at = module.find(kKey);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view rest = module.substr(at + kKey.size());
  ExpertModule result;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), result.expert);
  if (error != std::errc() || end == rest.data() + rest.size() || *end != '.') return std::nullopt;
  result.container = std::string(module.substr(0, at + kKey.size()));
  result.projection = std::string(end + 1, rest.data() + rest.size());
  return result;
}

}  // namespace

class Checkpoint::Reader {
 public:
  Reader(Checkpoint& checkpoint, std::string_view module, int64_t rows, int64_t columns)
      : checkpoint_(checkpoint), module_(module), rows_(rows), columns_(columns) {
    place_.base = module_;
    place_.expert_rows = rows;
  }

  // What a matrix that cannot be read is made of has its place in the model all the same: it is not reported again as
  // tensors that nobody takes.
  void claim() {
    for (Item* item : {weight_, packed_}) {
      if (item != nullptr) item->used = true;
    }
    for (const Parameter parameter : kBesideWeight) {
      if (Item* item = find(parameter)) item->used = true;
    }
  }

  Stored peek() {
    need_weight();
    Stored result;
    result.shared = place_.stacked;
    Item& weight = packed_ != nullptr ? *packed_ : *weight_;
    weight.used = true;
    switch (checkpoint_.stored(weight).type) {
      case StoredType::kF32:
        result.format = Format::kF32;
        break;
      case StoredType::kF16:
        result.format = Format::kF16;
        break;
      case StoredType::kF8E4M3:
        result.format = Format::kFp8;
        break;
      case StoredType::kU8:
        result.format = Format::kNvfp4;
        break;
      default:
        result.format = Format::kBf16;
    }
    result.tensors.push_back(&checkpoint_.stored(weight));
    for (const Parameter parameter : kBesideWeight) {
      if (Item* item = find(parameter)) {
        item->used = true;
        result.tensors.push_back(&checkpoint_.stored(*item));
        result.input_scale = result.input_scale || parameter_name(parameter).starts_with("input_");
      }
    }
    return result;
  }

  MatrixSource read() {
    need_weight();
    source_.name = module_;
    source_.rows = rows_;
    source_.columns = columns_;
    if (packed_ != nullptr && weight_ != nullptr) {
      fail("{}: {} exists beside it, wanted one of them", checkpoint_.describe(*packed_),
           checkpoint_.stored(*weight_).name);
    }
    if (packed_ != nullptr) {
      read_nvfp4(*packed_, /*inverse=*/true);
    } else {
      const StoredTensor& stored = checkpoint_.stored(*weight_);
      switch (stored.type) {
        case StoredType::kU8:
          read_nvfp4(*weight_, /*inverse=*/false);
          break;
        case StoredType::kF8E4M3:
          read_fp8();
          break;
        case StoredType::kF32:
          read_plain(Format::kF32, 4);
          break;
        case StoredType::kBf16:
          read_plain(Format::kBf16, 2);
          break;
        case StoredType::kF16:
          read_plain(Format::kF16, 2);
          break;
        default:
          fail("{}: dtype is {}, wanted BF16, F16, F32, F8_E4M3 or U8 (NVFP4)", checkpoint_.describe(*weight_),
               stored.type_name);
      }
    }
    check_stored_shape();
    for (size_t i = 0; i < consumed_count_; ++i) consumed_[i]->used = true;
    return std::move(source_);
  }

 private:
  static constexpr std::array kBesideWeight = {
      Parameter::kWeightScale, Parameter::kWeightScale2,     Parameter::kWeightScaleInv, Parameter::kWeightGlobalScale,
      Parameter::kInputScale,  Parameter::kInputGlobalScale, Parameter::kWeightShape};

  void need_weight() {
    if (locate()) return;
    fail("{}: {} is missing, wanted [{}, {}]", checkpoint_.directory_.string(),
         checkpoint_.describe(module_ + ".weight"), rows_, columns_);
  }

  Item* find(Parameter parameter) {
    if (parameter == Parameter::kItself) return checkpoint_.find(place_.base);
    if (Item* item = checkpoint_.item(known_, parameter)) return item;
    if (!place_.stacked) return nullptr;
    // Parameters of a module of all experts: gate_up_proj_weight_scale.
    return checkpoint_.find(fmt::format("{}_{}", place_.base, parameter_name(parameter)));
  }

  void consume(Item& item) {
    FF_ASSERT(consumed_count_ < consumed_.size());
    consumed_[consumed_count_++] = &item;
  }

  bool found() {
    known_ = checkpoint_.names_.find(place_.base);
    packed_ = find(Parameter::kWeightPacked);
    weight_ = find(Parameter::kWeight);
    if (weight_ == nullptr && packed_ == nullptr && place_.stacked) weight_ = find(Parameter::kItself);
    return packed_ != nullptr || weight_ != nullptr;
  }

  bool locate() {
    if (found()) return true;
    const std::optional<ExpertModule> expert = expert_module(module_);
    if (!expert) return false;
    place_.stacked = true;
    place_.experts = checkpoint_.config_.experts;
    place_.expert = expert->expert;
    FF_ASSERT(place_.expert < place_.experts);
    place_.base = expert->container + expert->projection;
    if (found()) return true;
    if (expert->projection == "down_proj") return false;
    place_.base = expert->container + "gate_up_proj";
    place_.expert_rows = 2 * rows_;
    place_.first_row = expert->projection == "up_proj" ? rows_ : 0;
    return found();
  }

  // A tensor of `expert_rows` x `columns` for each expert; the bytes from row `first_row` of our expert on.
  const std::byte* rows_of(Item& item, int64_t expert_rows, int64_t first_row, int64_t columns, int64_t element_bytes) {
    const StoredTensor& stored = checkpoint_.stored(item);
    const std::array<int64_t, 3> all = {place_.experts, expert_rows, columns};
    const std::array<int64_t, 2> one_behind_the_other = {place_.experts * expert_rows, columns};
    std::span<const int64_t> wanted = all;
    if (!place_.stacked) wanted = wanted.subspan(1);
    if (stored.shape != wanted && !(place_.stacked && stored.shape == one_behind_the_other)) {
      fail("{}: shape is {}, wanted [{}]", checkpoint_.describe(item), stored.shape_text(), fmt::join(wanted, ", "));
    }
    consume(item);
    return checkpoint_.bytes(item).data() + (place_.expert * expert_rows + first_row) * columns * element_bytes;
  }

  void populate(const Item& item, const void* data, size_t bytes) {
    if (!checkpoint_.populate_ || !checkpoint_.in_place_) return;
    checkpoint_.shards_[item.shard].populate({static_cast<const std::byte*>(data), bytes});
  }

  // Elements must be aligned for the backends; a file may place them anywhere.
  const void* aligned(const std::byte* data, int64_t bytes, int64_t element_bytes, const Item& item) {
    populate(item, data, static_cast<size_t>(bytes));
    if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(element_bytes) == 0) return data;
    auto copy = std::make_shared<std::vector<uint32_t>>(static_cast<size_t>(ceil_div(bytes, 4)));
    std::memcpy(copy->data(), data, static_cast<size_t>(bytes));
    source_.owner = copy;
    return copy->data();
  }

  void reject(std::initializer_list<Parameter> parameters, const Item& weight, const char* format) {
    for (const Parameter parameter : parameters) {
      if (const Item* item = find(parameter)) {
        fail("{}: it does not belong to {} of dtype {} (taken as {})", checkpoint_.describe(*item),
             checkpoint_.stored(weight).name, checkpoint_.stored(weight).type_name, format);
      }
    }
  }

  Item& need(Parameter parameter, const Item& weight, const char* format) {
    Item* item = find(parameter);
    if (item == nullptr) {
      fail("{}: {} is missing, {} of dtype {} needs it ({})", checkpoint_.directory_.string(),
           checkpoint_.describe(fmt::format("{}.{}", place_.base, parameter_name(parameter))),
           checkpoint_.stored(weight).name, checkpoint_.stored(weight).type_name, format);
    }
    return *item;
  }

  float element(const Item& item, int64_t index) {
    const StoredTensor& stored = checkpoint_.stored(item);
    const std::byte* data = checkpoint_.bytes(item).data();
    uint16_t half = 0;
    float value = 0;
    switch (stored.type) {
      case StoredType::kF32:
        std::memcpy(&value, data + 4 * index, 4);
        return value;
      case StoredType::kBf16:
        std::memcpy(&half, data + 2 * index, 2);
        return nvfp4::bf16_to_float(half);
      case StoredType::kF16:
        std::memcpy(&half, data + 2 * index, 2);
        return nvfp4::f16_to_float(half);
      default:
        fail("{}: dtype is {}, wanted F32, BF16 or F16", checkpoint_.describe(item), stored.type_name);
    }
  }

  // A scalar: one for the tensor, or one for each expert (gate and up of an expert may have one each).
  float scalar(Item& item) {
    const StoredTensor& stored = checkpoint_.stored(item);
    const int64_t count = stored.elements();
    int64_t index = 0;
    const bool both = place_.expert_rows == 2 * rows_;
    if (place_.stacked && count == place_.experts && count != 1) {
      index = place_.expert;
    } else if (place_.stacked && both && count == 2 * place_.experts) {
      index = 2 * place_.expert + (place_.first_row > 0 ? 1 : 0);
    } else if (count != 1) {
      fail("{}: shape is {}, wanted {}", checkpoint_.describe(item), stored.shape_text(),
           place_.stacked ? fmt::format("a scalar or [{}]", place_.experts) : std::string("a scalar"));
    }
    consume(item);
    return element(item, index);
  }

  void read_plain(Format format, int64_t element_bytes) {
    reject({Parameter::kWeightScale, Parameter::kWeightScale2, Parameter::kWeightScaleInv,
            Parameter::kWeightGlobalScale, Parameter::kInputGlobalScale},
           *weight_, "unquantised");
    source_.format = format;
    const std::byte* data = rows_of(*weight_, place_.expert_rows, place_.first_row, columns_, element_bytes);
    source_.data = aligned(data, rows_ * columns_ * element_bytes, element_bytes, *weight_);
    // Exporters leave this behind for modules they decided not to quantise; it means nothing then.
    if (Item* item = find(Parameter::kInputScale)) consume(*item);
  }

  void read_nvfp4(Item& weight, bool inverse) {
    const char* format = inverse ? "compressed-tensors NVFP4" : "modelopt NVFP4";
    if (columns_ % kScaleBlock != 0) {
      fail("{}: {} columns, NVFP4 needs a multiple of {}", checkpoint_.describe(weight), columns_, kScaleBlock);
    }
    const StoredTensor& stored = checkpoint_.stored(weight);
    if (stored.type != StoredType::kU8) {
      fail("{}: dtype is {}, wanted U8 (two e2m1 codes in a byte)", checkpoint_.describe(weight), stored.type_name);
    }
    Item& block = need(Parameter::kWeightScale, weight, format);
    if (checkpoint_.stored(block).type != StoredType::kF8E4M3) {
      fail("{}: dtype is {}, wanted F8_E4M3 (NVFP4 block scales)", checkpoint_.describe(block),
           checkpoint_.stored(block).type_name);
    }
    Item& global = need(inverse ? Parameter::kWeightGlobalScale : Parameter::kWeightScale2, weight, format);
    if (inverse) {
      reject({Parameter::kWeightScale2, Parameter::kWeightScaleInv, Parameter::kInputScale}, weight, format);
    } else {
      reject({Parameter::kWeightGlobalScale, Parameter::kWeightScaleInv, Parameter::kInputGlobalScale}, weight, format);
    }

    source_.format = Format::kNvfp4;
    source_.data = rows_of(weight, place_.expert_rows, place_.first_row, columns_ / 2, 1);
    source_.block_scales = reinterpret_cast<const uint8_t*>(
        rows_of(block, place_.expert_rows, place_.first_row, columns_ / kScaleBlock, 1));
    const auto code_bytes = static_cast<size_t>(rows_ * columns_ / 2);
    const auto scale_count = static_cast<size_t>(rows_ * columns_ / kScaleBlock);
    populate(weight, source_.data, code_bytes);
    populate(block, source_.block_scales, scale_count);
    check_block_scales(block, scale_count);

    const float given = scalar(global);
    const float scale = inverse ? 1.0f / given : given;
    if (given > 0.0f && nvfp4::is_finite(given) && scale > 0.0f && nvfp4::is_finite(scale)) {
      // With it the largest element, 6 x 448, must be a number.
      if (!nvfp4::is_finite(scale * 2688.0f)) {
        fail("{}: the scale is {}, wanted one whose elements are finite", checkpoint_.describe(global), given);
      }
      source_.tensor_scale = scale;
    } else if (all_clear(static_cast<const uint8_t*>(source_.data), code_bytes, 0x77) ||
               all_clear(source_.block_scales, scale_count, 0x7f)) {
      source_.tensor_scale = 1.0f;  // a dead expert: zero times anything usable is zero
      ++checkpoint_.dead_;
    } else {
      fail("{}: the scale is {}, wanted a positive finite number (the codes are not all zero)",
           checkpoint_.describe(global), given);
    }
    if (Item* item = find(inverse ? Parameter::kInputGlobalScale : Parameter::kInputScale))
      read_input_scale(*item, inverse);
  }

  void check_block_scales(const Item& block, size_t count) {
    if (!checkpoint_.in_place_ || !nvfp4::has_bad_scale(source_.block_scales, count)) return;
    const auto columns = static_cast<size_t>(columns_ / kScaleBlock);
    for (size_t i = 0; i < count; ++i) {
      const uint8_t code = source_.block_scales[i];
      if (code < 0x7f) continue;
      fail("{}: block scale at row {}, block {} is {} (0x{:02x}), wanted a number from 0 to 448",
           checkpoint_.describe(block) + (place_.stacked ? fmt::format(" (expert {})", place_.expert) : ""),
           i / columns, i % columns, nvfp4::e4m3_is_nan(code) ? "NaN" : "negative", code);
    }
  }

  void read_input_scale(Item& item, bool inverse) {
    const float given = scalar(item);
    const float scale = inverse ? 1.0f / given : given;
    const auto usable = [](float x) { return nvfp4::is_finite(x) && x >= FLT_MIN; };
    if (usable(given) && usable(scale) && usable(1.0f / scale)) {
      source_.input_scale = scale;
    } else {
      ++checkpoint_.bad_input_scales_;
    }
  }

  void read_fp8() {
    reject({Parameter::kWeightScale2, Parameter::kWeightGlobalScale}, *weight_, "FP8");
    source_.format = Format::kFp8;
    source_.data = rows_of(*weight_, place_.expert_rows, place_.first_row, columns_, 1);
    populate(*weight_, source_.data, static_cast<size_t>(rows_ * columns_));
    Item* inverse = find(Parameter::kWeightScaleInv);
    Item* plain = find(Parameter::kWeightScale);
    if (inverse != nullptr && plain != nullptr) {
      fail("{}: {} exists beside it, wanted one of them", checkpoint_.describe(*inverse),
           checkpoint_.stored(*plain).name);
    }
    Item& scales = inverse != nullptr ? *inverse : need(Parameter::kWeightScale, *weight_, "FP8");
    read_grid(scales, inverse != nullptr);
    for (const Parameter parameter : {Parameter::kInputScale, Parameter::kInputGlobalScale}) {
      if (Item* item = find(parameter)) consume(*item);
    }
  }

  // Works out from its shape what a scale tensor means, and copies the part that is ours to fp32.
  void read_grid(Item& item, bool blocks_only) {
    const StoredTensor& stored = checkpoint_.stored(item);
    const int64_t expert_rows = place_.expert_rows, experts = place_.experts;
    std::vector<int64_t> shape = stored.shape.list();
    if (place_.stacked && shape.size() > 1 && shape[0] == experts) {
      shape.erase(shape.begin());  // [E, ...]
      if (stored.elements() == experts) shape.clear();
    } else if (place_.stacked && !shape.empty() && shape[0] == experts * expert_rows) {
      shape[0] = expert_rows;  // [E x rows, ...]
    } else if (place_.stacked && shape == std::vector<int64_t>{experts}) {
      shape.clear();
    }
    const bool shared = place_.stacked && stored.elements() == 1;
    const int64_t block_rows = ceil_div(expert_rows, kFp8Block), block_columns = ceil_div(columns_, kFp8Block);
    const bool one = std::all_of(shape.begin(), shape.end(), [](int64_t dimension) { return dimension == 1; });
    int64_t first = 0, count_rows = 0, count_columns = 1;
    if (shape == std::vector<int64_t>{block_rows, block_columns} &&
        (blocks_only || (!one && shape[0] != expert_rows))) {
      if (place_.first_row % kFp8Block != 0) {
        fail("{}: up_proj begins at row {}, inside a block of {} rows", checkpoint_.describe(item), place_.first_row,
             kFp8Block);
      }
      source_.scale_rows = kFp8Block;
      source_.scale_columns = kFp8Block;
      count_rows = ceil_div(rows_, kFp8Block);
      count_columns = block_columns;
      first = (place_.expert * block_rows + place_.first_row / kFp8Block) * block_columns;
    } else if (one && !blocks_only) {
      source_.scale_rows = rows_;
      source_.scale_columns = columns_;
      count_rows = 1;
      first = shared ? 0 : place_.expert;
    } else if (!blocks_only &&
               (shape == std::vector<int64_t>{expert_rows} || shape == std::vector<int64_t>{expert_rows, 1})) {
      source_.scale_rows = 1;
      source_.scale_columns = columns_;
      count_rows = rows_;
      first = place_.expert * expert_rows + place_.first_row;
    } else {
      fail("{}: shape is {} for a weight [{}, {}], wanted {}[{}, {}] (blocks of 128 x 128)", checkpoint_.describe(item),
           stored.shape_text(), expert_rows, columns_,
           blocks_only ? "" : fmt::format("a scalar, [{}], [{}, 1] or ", expert_rows, expert_rows), block_rows,
           block_columns);
    }
    consume(item);
    auto grid = std::make_shared<std::vector<float>>(static_cast<size_t>(count_rows * count_columns));
    for (int64_t i = 0; i < count_rows * count_columns; ++i) {
      const float scale = element(item, first + i);
      if (!nvfp4::is_finite(scale) || scale < 0.0f || (scale == 0.0f && !zero_cell(i, count_columns))) {
        fail("{}: scale {} is {}, wanted a positive finite number (the elements are not all zero)",
             checkpoint_.describe(item), first + i, scale);
      }
      if (!nvfp4::is_finite(scale * 448.0f)) {
        fail("{}: scale {} is {}, wanted one whose elements are finite", checkpoint_.describe(item), first + i, scale);
      }
      (*grid)[static_cast<size_t>(i)] = scale;
    }
    source_.grid_scales = grid->data();
    source_.owner = std::move(grid);
  }

  // Whether the FP8 elements under grid cell `cell` are all zero.
  bool zero_cell(int64_t cell, int64_t grid_columns) {
    const int64_t row = cell / grid_columns * source_.scale_rows, column = cell % grid_columns * source_.scale_columns;
    const int64_t width = std::min(source_.scale_columns, columns_ - column);
    for (int64_t r = row; r < std::min(row + source_.scale_rows, rows_); ++r) {
      const auto* codes = static_cast<const uint8_t*>(source_.data) + r * columns_ + column;
      if (!all_clear(codes, static_cast<size_t>(width), 0x7f)) return false;
    }
    return true;
  }

  // compressed-tensors may note the shape before packing.
  void check_stored_shape() {
    Item* item = find(Parameter::kWeightShape);
    if (item == nullptr || place_.stacked) return;
    const StoredTensor& stored = checkpoint_.stored(*item);
    int64_t shape[2] = {0, 0};
    if (stored.elements() == 2 && (stored.type == StoredType::kI64 || stored.type == StoredType::kI32)) {
      const std::byte* data = checkpoint_.bytes(*item).data();
      for (int i = 0; i < 2; ++i) {
        int32_t narrow = 0;
        if (stored.type == StoredType::kI64) {
          std::memcpy(&shape[i], data + 8 * i, 8);
        } else {
          std::memcpy(&narrow, data + 4 * i, 4);
          shape[i] = narrow;
        }
      }
    }
    if (shape[0] != rows_ || shape[1] != columns_) {
      fail("{}: it says [{}, {}], wanted [{}, {}]", checkpoint_.describe(*item), shape[0], shape[1], rows_, columns_);
    }
    consume(*item);
  }

  Checkpoint& checkpoint_;
  std::string module_;
  int64_t rows_, columns_;
  Place place_;
  Item* weight_ = nullptr;
  Item* packed_ = nullptr;
  const NameTable::Module* known_ = nullptr;  // of place_.base
  std::array<Item*, 8> consumed_ = {};
  size_t consumed_count_ = 0;
  MatrixSource source_;
};

MatrixSource Checkpoint::matrix(std::string_view module, int64_t rows, int64_t columns) {
  // A tied head is the embedding; a copy of it in the file is not read.
  if (module == "lm_head" && config_.tied_head) module = "embed_tokens";
  Reader reader(*this, module, rows, columns);
  try {
    return reader.read();
  } catch (const Error&) {
    reader.claim();
    throw;
  }
}

Checkpoint::Stored Checkpoint::stored_matrix(std::string_view module, int64_t rows, int64_t columns) {
  return Reader(*this, module, rows, columns).peek();
}

}  // namespace fourfold::model
