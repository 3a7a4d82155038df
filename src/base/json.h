// Reading JSON that nobody vouches for: configuration files, tokenizers, safetensors headers, requests.
//
// One function with limits on bytes, depth and number of values, and with errors that name the source and the byte
// where it went wrong. Objects keep the order of the text (Json is nlohmann::ordered_json).
//
// NOTE: a key lookup in an ordered object walks its members. Loop over a large object (a vocabulary, the tensors of a
// checkpoint) with items() instead of looking its keys up one by one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/json_forward.h"

namespace fourfold {

struct JsonLimits {
  size_t max_bytes = 256u << 20;
  size_t max_depth = 128;         // nested arrays and objects
  size_t max_values = 64u << 20;  // scalars, arrays and objects together
  // When false, the last of several equal keys wins and keeps the place of the first, as in Python.
  bool reject_duplicate_keys = true;
};

// Parses the whole of `text`; `name` is what an Error calls it (a file name, "the request"). Integers that do not fit
// in 64 bits become floating-point numbers; NaN, Infinity, comments and invalid UTF-8 are errors.
Json parse_json(std::string_view text, std::string_view name, const JsonLimits& limits = {});

// The same for a text in which one object has a great many members: those of the object that the root has under the key
// `under` (of the root itself where that is empty) are handed over one after the other, in the order of the text, and
// not kept. Returns the rest; that object is empty in it.
Json parse_json_members(std::string_view text, std::string_view name, std::string_view under, const JsonLimits& limits,
                        const std::function<void(std::string&& key, Json&& value)>& member);

Json parse_json_file(const std::filesystem::path& path, const JsonLimits& limits = {});

// "null", "boolean", "integer", "number", "string", "array" or "object", for error messages.
const char* json_kind(const Json& value);

}  // namespace fourfold
