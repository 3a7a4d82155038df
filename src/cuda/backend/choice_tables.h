// The tables of a step's choices (kernels/step/sample_args.h): how each row's token is chosen, and what that points to.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/step/host_stepper.h"
#include "cuda/device/device.h"
#include "kernels/step/sample_args.h"

namespace fourfold::cuda {

class ChoiceTables {
 public:
  // Of logits of so many columns, of which `computed` rows are what they are and those behind them, up to `room`, may
  // be written. False: there are too few of these for rows that are adjusted beside their log-probabilities.
  bool lay_out(std::span<const cpu::RowChoice> rows, int64_t vocabulary, int64_t computed, int64_t room);
  // At most, for so many rows of logits and lanes: masks for every row; lists of biases and banned tokens beyond what
  // else there is room for are the host's.
  static uint64_t most_bytes(int64_t rows, int64_t lanes, int64_t vocabulary);

  uint64_t bytes() const { return bytes_; }
  void write(uint8_t* to) const;
  // Where write() has them on the device.
  void point(step::SampleArgs& args, DeviceAddress tables) const;
  step::CountArgs counted(DeviceAddress tables) const;
  DeviceAddress samples_at(DeviceAddress tables) const { return tables + samples_.at; }
  DeviceAddress reports_at(DeviceAddress tables) const { return tables + reports_.at; }
  DeviceAddress drawn_at(DeviceAddress tables) const { return tables + drawn_.at; }
  DeviceAddress reported_at(DeviceAddress tables) const { return tables + reported_.at; }

  const std::vector<step::SampleRow>& samples() const { return samples_.values; }
  // Of rows that are adjusted, once they have their tokens: another launch.
  const std::vector<step::SampleRow>& reports() const { return reports_.values; }
  // Among samples().
  const std::vector<int>& drawn() const { return drawn_.values; }
  const std::vector<int>& reported() const { return reported_.values; }
  int counted_lanes() const { return static_cast<int>(lanes_.values.size()); }
  bool asks_for_logprobs() const { return !reported_.values.empty() || !reports_.values.empty(); }
  // Ranks can choose from columns of their own: that way has no tokens that are given, and no second launch.
  bool can_go_by_parts() const { return !given_ && reports_.values.empty(); }

 private:
  template <typename T>
  struct Table {
    std::vector<T> values;
    uint64_t at = 0;
  };
  template <typename Tables, typename F>
  static void for_tables(Tables& tables, F&& fn);
  step::SampleRow row_of(const cpu::RowChoice& row, int64_t vocabulary);

  Table<step::SampleRow> samples_, reports_;
  Table<step::Bias> biases_;
  Table<int> banned_, drawn_, reported_, counted_;
  Table<uint32_t> masks_;
  Table<step::CountedLane> lanes_;
  int64_t mask_words_ = 0;
  uint64_t bytes_ = 0;
  bool given_ = false;
};

}  // namespace fourfold::cuda
