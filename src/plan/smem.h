// The shared-memory ledger: what a kernel's map of shared memory is made of, for host and device.
//
// Each operation has a header plan/OPERATION/tile.h with a tile, its regions, and one constexpr function from the tile
// to its map, which adds regions with the functions below. The planner (host) sizes candidates with it, the launcher
// passes its total to the launch, and the kernel (device) takes every offset from it. Nobody else computes bytes.
//
// No include, so that NVRTC compiles it as it is.
#pragma once

#ifdef __CUDACC__
#define FOURFOLD_PLAN_FN __host__ __device__ constexpr
#else
#define FOURFOLD_PLAN_FN constexpr
#endif

namespace fourfold::plan {

struct Region {
  unsigned offset;
  unsigned size;    // bytes: stride * copies
  unsigned stride;  // bytes from one stage (or copy) to the next, a multiple of what add() was given
  unsigned copies;  // stages, or 1
  unsigned align;
  unsigned padding;  // bytes lost before this region to its alignment
  bool overlay;      // shares bytes that are idle when it is in use; takes none of its own
};

// Alignments. A 128-byte swizzle repeats every 8 rows, so its tiles start at 1024; a bulk copy's destination at 128
// keeps a tile's first row on one set of banks; everything else moves in 16-byte pieces.
inline constexpr unsigned kSwizzleAlign = 1024;
inline constexpr unsigned kTileAlign = 128;
inline constexpr unsigned kVectorAlign = 16;

FOURFOLD_PLAN_FN unsigned align_up(unsigned value, unsigned align) { return (value + align - 1) / align * align; }

// Regions one after the other, each at its alignment. `Id` is an operation's enumeration of them, which ends with
// kCount; those that a tile does not have keep a size of 0.
template <typename Id>
struct Ledger {
  static constexpr int kRegions = static_cast<int>(Id::kCount);

  Region regions[static_cast<unsigned>(Id::kCount)] = {};
  unsigned total = 0;    // bytes to ask for at the launch
  unsigned payload = 0;  // sum of the sizes of all regions that take bytes
  unsigned padding = 0;  // total - payload

  FOURFOLD_PLAN_FN const Region& operator[](Id id) const { return regions[static_cast<int>(id)]; }

  // `bytes` of one copy; nothing happens where they are 0.
  FOURFOLD_PLAN_FN void add(Id id, unsigned bytes, unsigned copies, unsigned align,
                            unsigned stride_align = kVectorAlign) {
    if (bytes == 0) return;
    Region& r = regions[static_cast<int>(id)];
    r.copies = copies;
    r.align = align;
    r.stride = align_up(bytes, stride_align);
    r.size = r.stride * copies;
    r.offset = align_up(end_, align);
    r.padding = r.offset - end_;
    payload += r.size;
    close(r.offset + r.size);
  }
  // From the beginning, over regions that are idle by then. What is added later stays live, so it begins behind it.
  FOURFOLD_PLAN_FN void overlay(Id id, unsigned bytes, unsigned align) {
    Region& r = regions[static_cast<int>(id)];
    r.copies = 1;
    r.align = align;
    r.stride = r.size = align_up(bytes, kVectorAlign);
    r.overlay = true;
    close(r.size > end_ ? r.size : end_);
  }

 private:
  unsigned end_ = 0;
  FOURFOLD_PLAN_FN void close(unsigned end) {
    end_ = end;
    total = align_up(end, kVectorAlign);
    padding = total - payload;
  }
};

}  // namespace fourfold::plan
