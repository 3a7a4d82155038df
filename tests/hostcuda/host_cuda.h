// A CUDA driver and a compiler for tests, without a card: what src/jit opens at run time is replaced (jit::Driver,
// jit::Nvrtc), so that everything above it runs as it stands, launchers, memory, graphs and the whole backend.
//
// Kernels run on the host executor (tests/executor), which checks every access, and in the order of their streams, as
// late as is allowed: when somebody waits. So whoever reads a result too early reads poison. Memory is host memory
// between red zones, filled with 0xff when it is allocated, and its addresses are never used again. The compiler finds
// kernels that the build has compiled with the host's compiler by their source text (generate.cpp lists them).
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

#include "executor/executor.h"
#include "jit/driver.h"

namespace fourfold::hostcuda {

struct HostCard {
  std::string name = "NVIDIA H200";
  int major = 9, minor = 0;
  int sms = 16;
  int l2_mb = 60;
  int64_t smem_per_block = 232448;
  int64_t smem_per_sm = 233472;
  uint64_t memory = uint64_t{4} << 30;
  bool one_pool = false;  // processor and card have the same memory
  executor::Options executor = {};
  // Several cards of this kind, in one space of addresses; kernels of ranks that wait for each other run when those of
  // all ranks are next on their streams, in turns.
  int devices = 1;
  bool peers = true;          // cards have access to each other
  bool peer_copies = true;    // what is copied to another card arrives
  int nccl = 0;               // version of NCCL, 22703 for 2.27.3; 0: there is none
  bool nccl_refuses = false;  // no rank can join
  bool nccl_loses = false;    // what it should bring
  bool cublaslt = false;      // there is one
  // It has nothing for products of more outputs.
  int64_t cublaslt_most = int64_t{1} << 40;
  // A rank whose kernel has waited so long for the others' runs it without them; 0: never.
  std::chrono::milliseconds lone_after{0};
};
// A workstation Blackwell card, with 99 KB for a block.
inline HostCard blackwell_card() {
  HostCard card;
  card.name = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition";
  card.major = 12;
  card.l2_mb = 128;
  card.smem_per_block = 101376;
  card.smem_per_sm = 102400;
  return card;
}
// For two ranks. Few SMs, because what waits for each other runs at once.
inline HostCard two_cards() {
  HostCard card;
  card.devices = 2;
  card.sms = 4;
  return card;
}
// An A100: no bulk copies, no programmatic launches.
inline HostCard ampere_card() {
  HostCard card;
  card.name = "NVIDIA A100-SXM4-80GB";
  card.major = 8;
  card.l2_mb = 40;
  card.smem_per_block = 166912;
  card.smem_per_sm = 167936;
  return card;
}
// What the driver says of it.
inline constexpr int kClockKhz = 1755000, kMemoryClockKhz = 3201000, kBusBits = 6144;
inline jit::DeviceInfo device_info(const HostCard& card) {
  jit::DeviceInfo info;
  info.name = card.name;
  info.major = card.major;
  info.minor = card.minor;
  info.sms = card.sms;
  info.smem_per_block = card.smem_per_block;
  info.smem_per_sm = card.smem_per_sm;
  info.l2_bytes = int64_t{card.l2_mb} << 20;
  info.clock_ghz = kClockKhz * 1e-6;
  info.host_memory = card.one_pool ? jit::HostMemory::kOnePool : jit::HostMemory::kApart;
  info.memory_tbs = 2.0 * kMemoryClockKhz * 1e3 * kBusBits / 8 * 1e-12;
  return info;
}

// Calls of the driver that can be made to fail; kSynchronize: asking whether work has ended, which it then has.
enum class Call { kAllocate, kHostAllocate, kLaunch, kCopy, kSynchronize, kCount };

inline constexpr int kOutOfMemory = 2;     // CUDA_ERROR_OUT_OF_MEMORY
inline constexpr int kLaunchFailed = 719;  // CUDA_ERROR_LAUNCH_FAILED: every later call fails, too

// What exists now.
struct Live {
  int64_t allocations = 0;
  uint64_t bytes = 0;
  int64_t host_allocations = 0, modules = 0, streams = 0, events = 0, graphs = 0, communicators = 0,
          library_objects = 0;
  bool operator==(const Live&) const = default;
};

// Installs driver and compiler in place of the machine's own, or a fresh card in place of an earlier one, of which
// nothing may be left.
void install(const HostCard& card);
Live live();
uint64_t peak_bytes();
int64_t calls(Call call);    // since install()
int64_t nccl_calls();        // its gathers, recorded or not
int64_t library_products();  // of cuBLASLt, the same
// How often it was asked for a way to take a product.
int64_t library_questions();
// The nth call from now (1: the next) fails with `result`, once; 0: none does.
void fail_call(Call call, int64_t nth, int result);
// Kernels of that rank do not come to meetings; -1: all come.
void hold_meetings_of(int rank);
// In the nth sum over ranks from now (1: the next) one bit of rank 1's result is another, one that the sums behind it
// do not round away. 0: in none.
void corrupt_sum(int64_t nth);
// From the nth launch on (1: the next) nothing ends any more: asking says so, and what waits without a limit of its own
// (freeing, above all) would wait for ever: such calls are counted, and return. 0: everything goes on.
void hang_launch(int64_t nth);
int64_t endless_waits();
// While it is held, other threads' calls that do or ask for work on the card wait.
[[nodiscard]] std::unique_lock<std::recursive_mutex> hold();

}  // namespace fourfold::hostcuda
