#include "cuda/backend/measured_ways.h"

#include <array>
#include <utility>

#include "base/check.h"
#include "base/json.h"
#include "cuda/device/tuned_file.h"

namespace fourfold::cuda {
namespace {

constexpr int kVersion = 1;

constexpr std::array<std::pair<const char*, int RowsWay::*>, 6> kFields = {{{"strip_warps", &RowsWay::strip_warps},
                                                                            {"teams", &RowsWay::teams},
                                                                            {"slots", &RowsWay::slots},
                                                                            {"ctas", &RowsWay::ctas},
                                                                            {"norm_pieces", &RowsWay::norm_pieces},
                                                                            {"slots_of_16", &RowsWay::slots_of_16}}};

}  // namespace

std::string ways_identity(const std::string& device, int driver_version) {
  return Json{{"version", kVersion},
              {"products", true},
              {"device", device},
              {"driver", driver_version},
              {"sources", sources_hash()}}
      .dump();
}

MeasuredWays load_ways(const std::filesystem::path& store, const std::string& identity, const plan::Arch& arch) {
  MeasuredWays ways;
  const bool there = load_tuned(store, identity, [&](const Json& json, const std::filesystem::path& path) {
    const auto list = json.find("matrices");
    if (list == json.end() || !list->is_array()) fail("{}: wanted matrices", path.string());
    for (const Json& row : *list) {
      const auto number = [&](const char* field) {
        const auto it = row.find(field);
        if (!row.is_object() || it == row.end() || !it->is_number_integer()) {
          fail("{}: {} of a matrix is missing or no integer", path.string(), field);
        }
        return it->get<int64_t>();
      };
      const MatrixShape shape = {static_cast<int>(number("formats")), number("rows"), number("columns")};
      RowsWay way = {};
      way.formats = shape.formats;
      for (const auto& [name, field] : kFields) way.*field = static_cast<int>(number(name));
      if (way.strip_warps * way.teams != 8 || way.ctas < 1 || !way_fits(arch, way, shape.columns)) {
        fail("{}: the way of {} x {} does not fit {}", path.string(), shape.rows, shape.columns, arch.name);
      }
      ways[shape] = way;
    }
  });
  return there ? ways : MeasuredWays{};
}

std::shared_ptr<const MeasuredWays> ways_on(const Device& device, const std::filesystem::path& store,
                                            const plan::Arch& arch) {
  if (device.only_counts()) return nullptr;
  const MeasuredWays ways = load_ways(store, ways_identity(device.info().name, device.driver().version()), arch);
  return ways.empty() ? nullptr : std::make_shared<const MeasuredWays>(ways);
}

std::filesystem::path save_ways(const std::filesystem::path& store, const std::string& identity,
                                const MeasuredWays& ways) {
  Json list = Json::array();
  for (const auto& [shape, way] : ways) {
    Json row = {{"formats", shape.formats}, {"rows", shape.rows}, {"columns", shape.columns}};
    for (const auto& [name, field] : kFields) row[name] = way.*field;
    list.push_back(std::move(row));
  }
  return save_tuned(store, identity, {{"matrices", std::move(list)}});
}

}  // namespace fourfold::cuda
