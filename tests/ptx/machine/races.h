// Who touched a byte last, and whether that was ordered before what touches it now.
//
// A tag is (block + 1, warp, barriers passed). Two warps of a block are ordered by a barrier between them, two blocks
// only by an atomic that one announces by and the other has heard. What is written again as it was is no race: layouts
// that hold a value in several warps write it from each.
#pragma once
#include "machine.h"

namespace ptx {

constexpr uint64_t MANY_BLOCKS = ~0ull;
constexpr uint64_t MANY_WARPS = 0xFF;

inline uint64_t tag_of(const Warp& warp, uint64_t number) {
  return uint64_t(warp.block.number + 1) << 40 | number << 32 | warp.block.epoch;
}

inline uint64_t block_of(uint64_t tag) { return tag >> 40; }
inline uint64_t warp_of(uint64_t tag) { return tag >> 32 & 0xFF; }
inline uint32_t epoch_of(uint64_t tag) { return uint32_t(tag); }

inline bool ordered(const Warp& warp, uint64_t tag) {
  if (tag == 0) return true;
  const Block& block = warp.block;
  if (tag == MANY_BLOCKS) return false;
  if (block_of(tag) == block.number + 1)
    return warp_of(tag) == uint64_t(warp.number) || epoch_of(tag) != block.epoch;
  const auto& heard = block.grid.heard[block.number];
  return !heard.empty() && heard[block_of(tag) - 1];
}

inline uint64_t with_reader(const Warp& warp, uint64_t before) {
  const uint64_t own = tag_of(warp, warp.number);
  if (before == 0) return own;
  if (before == MANY_BLOCKS || block_of(before) != block_of(own)) return ordered(warp, before) ? own : MANY_BLOCKS;
  if (epoch_of(before) != warp.block.epoch || warp_of(before) == uint64_t(warp.number)) return own;
  return tag_of(warp, MANY_WARPS);
}

struct Marks {
  std::vector<uint64_t>&writer, &reader;
  const char* space;

  void read(const Warp& warp, uint64_t at, int size) {
    if (!warp.block.grid.races) return;
    for (uint64_t byte = at; byte < at + size; ++byte) {
      if (!ordered(warp, writer[byte])) fault(warp, "reads", "wrote", writer[byte]);
      reader[byte] = with_reader(warp, reader[byte]);
    }
  }

  void write(const Warp& warp, uint64_t at, int size, const uint8_t* now, const uint8_t* then) {
    if (!warp.block.grid.races) return;
    for (uint64_t byte = at; byte < at + size; ++byte, ++now, ++then) {
      if (*now != *then) {
        if (!ordered(warp, writer[byte])) fault(warp, "writes", "wrote", writer[byte]);
        if (!ordered(warp, reader[byte])) fault(warp, "writes", "read", reader[byte]);
      }
      writer[byte] = tag_of(warp, warp.number);
    }
  }

  [[noreturn]] void fault(const Warp& warp, const char* does, const char* did, uint64_t other) {
    const bool same = other != MANY_BLOCKS && block_of(other) == warp.block.number + 1;
    throw Fault(std::string("race in ") + space + " memory: it " + does + " what another " + (same ? "warp" : "block") +
                " " + did + ", and nothing orders them");
  }
};

}  // namespace ptx
