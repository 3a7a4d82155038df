// How products of few rows are taken where `fourfold tune --products` has measured it: one file for a card
// (device/tuned_file.h), which backends on that card read when they are made.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "cuda/backend/sources.h"
#include "cuda/device/device.h"

namespace fourfold::cuda {

std::string ways_identity(const std::string& device, int driver_version);
// Empty: nothing was measured. An Error about one of them, which is said on stderr, makes it empty, too.
MeasuredWays load_ways(const std::filesystem::path& store, const std::string& identity, const plan::Arch& arch);
// The same for a card; null: nothing was measured, or the card only counts.
std::shared_ptr<const MeasuredWays> ways_on(const Device& device, const std::filesystem::path& store,
                                            const plan::Arch& arch);
std::filesystem::path save_ways(const std::filesystem::path& store, const std::string& identity,
                                const MeasuredWays& ways);

}  // namespace fourfold::cuda
