// Every rule of the safetensors format that a hostile or damaged file can break.
#include "model/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <optional>
#include <thread>

#include "base/random.h"
#include "checkpoint_util.h"
#include "model/safetensors_header.h"

namespace fourfold::model {
namespace {

std::string file_of(const std::string& header, size_t data_bytes, std::optional<uint64_t> length = {}) {
  std::string bytes(8, '\0');
  const uint64_t value = length.value_or(header.size());
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(value >> (8 * i) & 0xff);
  return bytes + header + std::string(data_bytes, 'x');
}

SafetensorsHeader parse(const std::string& bytes) {
  return parse_safetensors_header(std::as_bytes(std::span(bytes.data(), bytes.size())), bytes.size(),
                                  "bad.safetensors");
}

TEST(Safetensors, ReadsAFileAsTheFormatDescribesIt) {
  const auto header = parse(file_of(
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[6,14]},)"
      R"("a":{"dtype":"BF16","shape":[1,3],"data_offsets":[0,6]},"empty":{"dtype":"I64","shape":[0,5],"data_offsets":[6,6]},)"
      R"("scalar":{"dtype":"F8_E4M3","shape":[],"data_offsets":[14,15]}}   )",
      15));
  ASSERT_EQ(header.tensors.size(), 4u);
  EXPECT_EQ(header.tensors[0].name, "a");
  EXPECT_EQ(header.tensors[0].shape, (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(header.tensors[0].type, StoredType::kBf16);
  EXPECT_EQ(header.tensors[0].offset, header.data_begin);
  EXPECT_EQ(header.tensors[1].name, "empty");
  EXPECT_EQ(header.tensors[1].elements(), 0);
  EXPECT_EQ(header.tensors[2].name, "b");
  EXPECT_EQ(header.tensors[2].bytes, 8u);
  EXPECT_EQ(header.tensors[3].elements(), 1);
  EXPECT_EQ(header.metadata.at(0).second, "pt");
}

// Reads a header in both ways (HeaderText) and compares what comes of it. Whether it is plain.
bool compare_ways(const std::string& bytes) {
  HeaderPlace place;
  try {
    place = header_place(std::string_view(bytes).substr(0, 8), bytes.size(), bytes.size(), "bad.safetensors");
  } catch (const Error&) {
    return false;
  }
  HeaderText text(bytes.substr(8, place.length), place, "bad.safetensors");
  for (size_t i = text.pieces(); i-- > 0;) text.parse(i);
  std::optional<SafetensorsHeader> plain, whole;
  std::string plain_error, error;
  try {
    plain = text.plain();
    if (!plain) return false;
  } catch (const Error& failure) {
    plain_error = failure.what();
  }
  try {
    whole = text.by_json();
  } catch (const Error& failure) {
    error = failure.what();
  }
  EXPECT_EQ(plain_error, error);
  EXPECT_EQ(plain.has_value(), whole.has_value());
  if (!plain || !whole) return true;
  EXPECT_EQ(plain->metadata, whole->metadata);
  EXPECT_EQ(plain->data_begin, whole->data_begin);
  EXPECT_EQ(plain->tensors.size(), whole->tensors.size());
  for (size_t i = 0; i < std::min(plain->tensors.size(), whole->tensors.size()); ++i) {
    const StoredTensor &a = plain->tensors[i], &b = whole->tensors[i];
    EXPECT_TRUE(a.name == b.name && a.type == b.type && std::string_view(a.type_name) == b.type_name &&
                a.shape.list() == b.shape.list() && a.offset == b.offset && a.bytes == b.bytes)
        << a.name << ", " << b.name;
  }
  return true;
}

// Of `count` tensors of eight bytes each. `space` stands wherever white space may, `name` is what they are called.
std::string many_tensors(int count, const std::string& space, const std::function<std::string(int)>& name) {
  std::string header = "{" + space + "\"__metadata__\":{\"format\"" + space + ":\"pt\"}";
  for (int i = 0; i < count; ++i) {
    header += fmt::format(R"(,{}"{}":{}{{"shape":[{}1,{}2],"dtype":{}"F32","data_offsets":[{},{}{}]}}{})", space,
                          name(i), space, space, space, space, 8 * i, space, 8 * i + 8, space);
  }
  return file_of(header + "}" + space, static_cast<size_t>(8 * count));
}
std::string usual_name(int i) {
  return fmt::format("model.layers.{}.mlp.experts.{}.gate_proj.weight", i / 256, i % 256);
}

// Several pieces, which threads read.
constexpr int kMany = 12000;

TEST(Safetensors, HeadersOfManyTensorsAreReadInPieces) {
  for (const char* space : {"", " ", "\n\t"}) {
    const std::string bytes = many_tensors(kMany, space, usual_name);
    EXPECT_TRUE(compare_ways(bytes));
    const auto header = parse(bytes);
    ASSERT_EQ(header.tensors.size(), static_cast<size_t>(kMany));
    EXPECT_EQ(header.tensors.back().name, usual_name(kMany - 1));
    EXPECT_EQ(header.tensors.back().shape, (std::vector<int64_t>{1, 2}));
    EXPECT_EQ(header.metadata.at(0).second, "pt");
  }
  // Where a piece would begin may be within a name; an escape is another way to write one.
  const auto odd = [](int i) { return "}," + usual_name(i) + "},"; };
  EXPECT_FALSE(compare_ways(many_tensors(kMany, "", odd)));
  EXPECT_EQ(parse(many_tensors(kMany, "", odd)).tensors.at(kMany / 2).name, odd(kMany / 2));
  const auto escaped = [](int i) { return i == kMany / 2 ? "\\u0061" : usual_name(i); };
  EXPECT_FALSE(compare_ways(many_tensors(kMany, "", escaped)));
  EXPECT_EQ(parse(many_tensors(kMany, "", escaped)).tensors.at(kMany / 2).name, "a");
}

TEST(Safetensors, WhatIsWrongInOneOfManyPiecesIsSaid) {
  const std::string good = many_tensors(kMany, "", usual_name);
  const auto with = [&](const std::string& old, const std::string& now) {
    std::string bytes = good;
    const size_t at = bytes.find(old);
    EXPECT_NE(at, std::string::npos) << old;
    bytes.replace(at, old.size(), now);
    const uint64_t length = bytes.size() - 8 - 8 * kMany;
    for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(length >> (8 * i) & 0xff);
    compare_ways(bytes);
    return [bytes] { parse(bytes); };
  };
  const std::string last = usual_name(kMany - 1), first = usual_name(3);
  expect_error(with(last, first), {fmt::format("the key '{}' twice", first)});
  expect_error(with(fmt::format("[{},{}]}}}}", 8 * kMany - 8, 8 * kMany),
                    fmt::format("[{},{}]}}}}", 8 * kMany - 9, 8 * kMany - 1)),
               {last, "overlaps tensor"});
  expect_error(
      with(fmt::format("[{},{}]}}}}", 8 * kMany - 8, 8 * kMany), fmt::format("[{},{}]}}", 8 * kMany - 8, 8 * kMany)),
      {"it ends after"});
  expect_error(with("\"" + usual_name(kMany / 2) + "\"", "\"__metadata__\""), {"__metadata__' twice"});
  expect_error(
      with(fmt::format("[{},{}]}}}}", 8 * kMany - 8, 8 * kMany), fmt::format("[{},0{}]}}}}", 8 * kMany - 8, 8 * kMany)),
      {"not valid JSON"});
}

struct Bad {
  const char* label;
  std::string bytes;
  std::vector<std::string> message;
};

std::string one(const std::string& entry) { return "{\"w\":" + entry + "}"; }

std::vector<Bad> bad_files() {
  const std::string good = R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  return {
      {"empty", "", {"0 bytes", "wanted a safetensors file"}},
      {"seven_bytes", "1234567", {"7 bytes"}},
      {"huge_length", file_of("{}", 0, ~0ull), {"header length 18446744073709551615", "at most 100000000"}},
      {"over_the_limit", file_of("{}", 0, 100000001), {"100000001", "at most 100000000"}},
      {"beyond_the_file", file_of("{}", 10, 13), {"header length 13", "truncated"}},
      {"no_header", file_of("", 0), {"does not begin with '{'"}},
      {"array_header", file_of("[]", 0), {"does not begin with '{'"}},
      {"space_before", file_of(" {}", 0), {"does not begin with '{'"}},
      {"not_json", file_of("{\"a\":", 0), {"header", "not valid JSON"}},
      {"trailing_text", file_of("{} x", 0), {"not valid JSON"}},
      {"bad_utf8", file_of("{\"a\xff\":" + good + "}", 8), {"not valid JSON"}},
      {"deep", file_of("{\"a\":" + std::string(5000, '[') + std::string(5000, ']') + "}", 0), {"nested deeper than"}},
      {"duplicate_tensor", file_of("{\"w\":" + good + ",\"w\":" + good + "}", 8), {"the key 'w' twice"}},
      {"duplicate_key",
       file_of(one(R"({"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]})"), 8),
       {"the key 'dtype' twice"}},
      {"entry_not_object", file_of(one("[1]"), 8), {"tensor 'w'", "entry is array"}},
      {"empty_name", file_of("{\"\":" + good + "}", 8), {"empty name"}},
      {"no_dtype", file_of(one(R"({"shape":[2],"data_offsets":[0,8]})"), 8), {"tensor 'w'", "dtype is missing"}},
      {"no_shape", file_of(one(R"({"dtype":"F32","data_offsets":[0,8]})"), 8), {"shape is missing"}},
      {"no_offsets", file_of(one(R"({"dtype":"F32","shape":[2]})"), 8), {"data_offsets is missing"}},
      {"unknown_key",
       file_of(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8],"strides":[1]})"), 8),
       {"unknown key 'strides'"}},
      {"dtype_number", file_of(one(R"({"dtype":32,"shape":[2],"data_offsets":[0,8]})"), 8), {"dtype is integer"}},
      {"dtype_unknown",
       file_of(one(R"({"dtype":"F31","shape":[2],"data_offsets":[0,8]})"), 8),
       {"tensor 'w'", "unknown dtype 'F31'"}},
      {"shape_string", file_of(one(R"({"dtype":"F32","shape":"2","data_offsets":[0,8]})"), 8), {"shape is string"}},
      {"shape_negative", file_of(one(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})"), 8), {"shape holds -2"}},
      {"shape_fraction", file_of(one(R"({"dtype":"F32","shape":[2.5],"data_offsets":[0,8]})"), 8), {"shape holds 2.5"}},
      {"shape_exponent", file_of(one(R"({"dtype":"F32","shape":[2e0],"data_offsets":[0,8]})"), 8), {"shape holds 2.0"}},
      {"shape_huge",
       file_of(one(R"({"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]})"), 8),
       {"18446744073709551615", "beyond any file"}},
      {"shape_beyond_64_bits",
       file_of(one(R"({"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,8]})"), 8),
       {"shape holds"}},
      {"product_overflow",
       file_of(one(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]})"), 8),
       {"does not fit in 64 bits"}},
      {"product_wraps_to_size",
       file_of(one(R"({"dtype":"U8","shape":[9223372036854775807,2,5],"data_offsets":[0,8]})"), 8),
       {"does not fit in 64 bits"}},
      {"many_dimensions",
       file_of(one(R"({"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,8],"data_offsets":[0,8]})"), 8),
       {"17 entries"}},
      {"offsets_three", file_of(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4,8]})"), 8), {"3 entries"}},
      {"offsets_one", file_of(one(R"({"dtype":"F32","shape":[2],"data_offsets":[8]})"), 8), {"1 entries, wanted 2"}},
      {"offsets_negative",
       file_of(one(R"({"dtype":"F32","shape":[2],"data_offsets":[-8,0]})"), 8),
       {"data_offsets holds -8"}},
      {"offsets_reversed",
       file_of(one(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})"), 8),
       {"end before they begin"}},
      {"offsets_beyond",
       file_of(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})"), 7),
       {"tensor 'w'", "reach beyond the data (7 bytes)", "truncated"}},
      {"size_differs",
       file_of(one(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})"), 8),
       {"hold 8 bytes", "shape [3] of F32 needs 12"}},
      {"half_a_byte", file_of(one(R"({"dtype":"F4","shape":[3],"data_offsets":[0,2]})"), 2), {"whole number of bytes"}},
      {"half_a_byte_left_out",
       file_of(one(R"({"dtype":"F4","shape":[3],"data_offsets":[0,1]})"), 1),
       {"whole number of bytes"}},
      {"overlap",
       file_of(
           R"({"v":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},"w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
           8),
       {"tensor 'w' overlaps tensor 'v'"}},
      {"overlap_of_one_byte",
       file_of(
           R"({"v":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[5],"data_offsets":[3,8]}})",
           8),
       {"tensor 'w' overlaps tensor 'v'"}},
      {"overlap_of_one_byte_in_the_middle",
       file_of(
           R"({"u":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"v":{"dtype":"F32","shape":[1],"data_offsets":[2,6]},)"
           R"("w":{"dtype":"BF16","shape":[2],"data_offsets":[5,9]}})",
           9),
       {"tensor 'w' overlaps tensor 'v'"}},
      {"hole_of_one_byte_at_the_start",
       file_of(one(R"({"dtype":"U8","shape":[4],"data_offsets":[1,5]})"), 5),
       {"1 bytes before tensor 'w'"}},
      {"same_place",
       file_of(
           R"({"v":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})",
           8),
       {"overlaps"}},
      {"hole",
       file_of(
           R"({"v":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
           8),
       {"1 bytes before tensor 'w' belong to no tensor"}},
      {"hole_at_the_start",
       file_of(one(R"({"dtype":"U8","shape":[4],"data_offsets":[4,8]})"), 8),
       {"4 bytes before tensor 'w'"}},
      {"trailing_bytes", file_of(one(good), 9), {"1 bytes at the end"}},
      {"data_without_tensors", file_of("{}", 3), {"3 bytes at the end"}},
      {"metadata_list", file_of(R"({"__metadata__":[]})", 0), {"__metadata__ is array"}},
      {"metadata_number", file_of(R"({"__metadata__":{"a":1}})", 0), {"__metadata__ 'a' is integer, wanted a string"}},
  };
}

TEST(Safetensors, EveryBrokenRuleIsAnErrorThatSaysWhich) {
  for (const Bad& bad : bad_files()) {
    SCOPED_TRACE(bad.label);
    std::vector<std::string> message = bad.message;
    message.push_back("bad.safetensors");
    expect_error([&] { parse(bad.bytes); }, message);
    compare_ways(bad.bytes);
  }
}

TEST(Safetensors, HugeEmptyShapesAreNoOverflow) {
  const auto header = parse(
      file_of(one(R"({"dtype":"F32","shape":[4611686018427387904,4611686018427387904,0],"data_offsets":[0,0]})"), 0));
  EXPECT_EQ(header.tensors.at(0).elements(), 0);
}

TEST(Safetensors, MissingFilesAndOtherThingsInTheirPlace) {
  const TemporaryDirectory directory;
  expect_error([&] { SafetensorsFile file(directory / "none.safetensors"); }, {"none.safetensors", "No such file"});
  std::filesystem::create_directory(directory / "folder.safetensors");
  expect_error([&] { SafetensorsFile file(directory / "folder.safetensors"); }, {"not a regular file"});
}

TEST(Safetensors, TruncationsAndBitFlipsNeverCrash) {
  const TemporaryDirectory directory;
  generate_checkpoint(directory / "c", small_options(GeneratedFormat::kCtMixed));
  std::string bytes = read_file(directory / "c/model.safetensors");
  const auto whole = parse(bytes);
  bytes.resize(whole.data_begin + 4000);
  Random random(5);
  int errors = 0;
  for (int trial = 0; trial < 300; ++trial) {
    std::string changed = bytes.substr(0, trial % 3 == 0 ? random.below(bytes.size()) : bytes.size());
    for (uint64_t flips = random.below(4) + 1; flips > 0 && !changed.empty(); --flips) {
      changed[random.below(std::min<uint64_t>(changed.size(), whole.data_begin))] ^=
          static_cast<char>(1u << random.below(8));
    }
    compare_ways(changed);
    try {
      // The size of the whole file, so that a flip in a name or number is not drowned by "truncated".
      const auto header = parse_safetensors_header(
          std::as_bytes(std::span(changed.data(), changed.size())),
          trial % 2 == 0 ? changed.size() : whole.tensors.back().offset + whole.tensors.back().bytes, "changed");
      for (const StoredTensor& tensor : header.tensors) ASSERT_LE(tensor.bytes, 1u << 30);
    } catch (const Error&) {
      ++errors;
    }
  }
  EXPECT_GT(errors, 200);
}

TEST(SafetensorsWriter, WritesWhatTheReaderReadsFromSeveralThreads) {
  const TemporaryDirectory directory;
  Random random(1);
  std::vector<TensorPlan> plans = {{"codes", StoredType::kU8, {3, 5}},
                                   {"half", StoredType::kBf16, {7}},
                                   {"scalar", StoredType::kF32, {}},
                                   {"name \"with\" \\ and \u00e9", StoredType::kF64, {2}},
                                   {"none", StoredType::kF32, {0}}};
  std::vector<std::string> contents;
  for (const TensorPlan& plan : plans) {
    std::string content(plan.bytes(), '\0');
    for (char& byte : content) byte = static_cast<char>(random.next());
    contents.push_back(content);
  }
  {
    SafetensorsWriter writer(directory / "x.safetensors", plans, {{"format", "pt"}, {"k", "v"}});
    std::vector<std::thread> threads;
    for (size_t i = 0; i < plans.size(); ++i) {
      threads.emplace_back([&, i] {
        // Back to front, one byte at a time.
        for (size_t at = contents[i].size(); at-- > 0;)
          writer.write(i, std::as_bytes(std::span(&contents[i][at], 1)), at);
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_FALSE(std::filesystem::exists(directory / "x.safetensors")) << "not before finish()";
    writer.finish();
  }
  const SafetensorsFile file(directory / "x.safetensors");
  ASSERT_EQ(file.tensors().size(), plans.size());
  EXPECT_EQ(file.metadata().size(), 2u);
  for (const StoredTensor& tensor : file.tensors()) {
    const size_t i = static_cast<size_t>(
        std::find_if(plans.begin(), plans.end(), [&](const TensorPlan& plan) { return plan.name == tensor.name; }) -
        plans.begin());
    ASSERT_LT(i, plans.size());
    EXPECT_EQ(tensor.type, plans[i].type);
    EXPECT_EQ(tensor.shape, plans[i].shape);
    const auto data = file.data(tensor);
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(data.data()), data.size()), contents[i]);
    if (tensor.type == StoredType::kF64) {
      EXPECT_EQ(tensor.offset % 8, 0u) << "wide types come first";
    }
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory.path()), {}), 1) << "no temporary file stays";
}

TEST(SafetensorsWriter, LeavesNothingBehindWhenItIsNotFinished) {
  const TemporaryDirectory directory;
  { SafetensorsWriter writer(directory / "x.safetensors", {{"a", StoredType::kF32, {4}}}, {}); }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(SafetensorsWriter, CutsShards) {
  std::vector<TensorPlan> plans;
  for (int64_t size : {50, 60, 10, 200, 5, 5}) plans.push_back({"t", StoredType::kU8, {size}});
  EXPECT_EQ(cut_shards(plans, 120), (std::vector<size_t>{3, 4, 6}));
  EXPECT_EQ(cut_shards(plans, 1000), (std::vector<size_t>{6}));
  EXPECT_EQ(cut_evenly(plans, 1), (std::vector<size_t>{6}));
  EXPECT_EQ(cut_evenly(plans, 3).back(), 6u);
  EXPECT_LE(cut_evenly(plans, 3).size(), 3u);
  EXPECT_EQ(shard_name(0, 1), "model.safetensors");
  EXPECT_EQ(shard_name(1, 12), "model-00002-of-00012.safetensors");
}

}  // namespace
}  // namespace fourfold::model
