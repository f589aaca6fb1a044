// Loads and stores: bounds, alignment and order of each access are checked.
#pragma once
#include <algorithm>

#include "races.h"

namespace ptx {

inline std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "%#llx", static_cast<unsigned long long>(value));
  return text;
}

inline Allocation& allocation_at(Grid& grid, uint64_t address, int size) {
  auto holds = [&](const Allocation& a) { return a.base <= address && address + size <= a.base + a.size; };
  if (grid.last < grid.allocations.size() && holds(grid.allocations[grid.last])) return grid.allocations[grid.last];
  auto behind = std::upper_bound(grid.allocations.begin(), grid.allocations.end(), address,
                                 [](uint64_t wanted, const Allocation& a) { return wanted < a.base; });
  if (behind == grid.allocations.begin() || !holds(*(behind - 1)))
    throw Fault("global access of " + std::to_string(size) + " bytes at " + hex(address) + " is outside of every tensor");
  grid.last = size_t(behind - grid.allocations.begin()) - 1;
  return grid.allocations[grid.last];
}

inline void check_alignment(uint64_t address, int size, const char* space) {
  if (address % uint64_t(size))
    throw Fault(std::string("misaligned ") + space + " access of " + std::to_string(size) + " bytes at " + hex(address));
}

inline uint8_t* global_at(Warp& warp, uint64_t address, int size, bool writes, const uint8_t* data) {
  check_alignment(address, size, "global");
  Grid& grid = warp.block.grid;
  Allocation& found = allocation_at(grid, address, size);
  auto* bytes = reinterpret_cast<uint8_t*>(address);
  if (grid.races) {
    if (found.writer.empty()) found.writer.resize(found.size), found.reader.resize(found.size);
    Marks marks{found.writer, found.reader, "global"};
    if (writes) marks.write(warp, address - found.base, size, data, bytes);
    else marks.read(warp, address - found.base, size);
  }
  return bytes;
}

inline uint8_t* shared_at(Warp& warp, int64_t address, int size, bool writes, const uint8_t* data) {
  Block& block = warp.block;
  if (address < 0 || address + size > int64_t(block.shared.size()))
    throw Fault("shared access of " + std::to_string(size) + " bytes at " + std::to_string(address) + " of " +
                std::to_string(block.shared.size()));
  check_alignment(uint64_t(address), size, "shared");
  Marks marks{block.writer, block.reader, "shared"};
  if (writes) marks.write(warp, address, size, data, block.shared.data() + address);
  else marks.read(warp, address, size);
  return block.shared.data() + address;
}

enum Space { GLOBAL, SHARED };

template <Space space>
inline uint8_t* memory_at(Warp& warp, uint64_t address, int size, bool writes, const uint8_t* data) {
  if constexpr (space == GLOBAL) return global_at(warp, address, size, writes, data);
  else return shared_at(warp, int64_t(uint32_t(address)), size, writes, data);
}

// operands: registers that are loaded, address; numbers: offset, bytes of an element, whether it is signed, bytes of
// each register that is loaded.
template <Space space>
void load(Warp& warp, const Instruction& it, Mask mask) {
  const int count = int(it.operands.size()) - 1, width = int(it.numbers[1]);
  const uint64_t* base = warp.row(it.operands.back());
  for (int lane = 0; lane < LANES; ++lane) {
    if (!on(mask, lane)) continue;
    const uint8_t* bytes = memory_at<space>(warp, base[lane] + it.numbers[0], width * count, false, nullptr);
    uint64_t values[8] = {};
    for (int i = 0; i < count; ++i) std::memcpy(&values[i], bytes + width * i, width);
    for (int i = 0; i < count; ++i) {
      uint64_t value = values[i];
      if (it.numbers[2] && width < 8) {
        const int unused = 64 - 8 * width;
        value = uint64_t(int64_t(value << unused) >> unused);
        if (it.numbers[3] < 8) value &= (1ull << (8 * it.numbers[3])) - 1;
      }
      warp.row(it.operands[i])[lane] = value;
    }
  }
}

// operands: address, registers; numbers: offset, bytes of an element.
template <Space space>
void store(Warp& warp, const Instruction& it, Mask mask) {
  const int count = int(it.operands.size()) - 1, width = int(it.numbers[1]);
  const uint64_t* base = warp.row(it.operands[0]);
  for (int lane = 0; lane < LANES; ++lane) {
    if (!on(mask, lane)) continue;
    uint8_t data[64];
    for (int i = 0; i < count; ++i) std::memcpy(data + width * i, &warp.row(it.operands[1 + i])[lane], width);
    uint8_t* bytes = memory_at<space>(warp, base[lane] + it.numbers[0], width * count, true, data);
    std::memcpy(bytes, data, width * count);
  }
}

// A copy lands when it is issued or when it is waited for: both are allowed, so chance decides.
inline void land(Warp& warp, Copy& copy) {
  uint8_t data[16] = {};
  if (copy.num_read) std::memcpy(data, global_at(warp, copy.from, copy.num_read, false, nullptr), copy.num_read);
  std::memcpy(shared_at(warp, copy.to, copy.size, true, data), data, copy.size);
  copy.landed = true;
}

// operands: to, from, bytes that are read; numbers: offsets of both, size.
inline void copy_async(Warp& warp, const Instruction& it, Mask mask) {
  const bool early = warp.block.grid.random() & 1;
  for (int lane = 0; lane < LANES; ++lane) {
    if (!on(mask, lane)) continue;
    const uint64_t to = uint32_t(warp.row(it.operands[0])[lane] + it.numbers[0]);
    Copy copy{int64_t(to), warp.row(it.operands[1])[lane] + it.numbers[1], int(it.numbers[2]),
              get<int32_t>(warp.row(it.operands[2]), lane), false};
    if (copy.num_read != 0 && copy.num_read != copy.size) throw Fault("a copy of a part of its bytes");
    if (early) land(warp, copy);
    else if (copy.num_read) global_at(warp, copy.from, copy.num_read, false, nullptr);
    warp.open_copies.push_back(copy);
  }
}

inline void commit_copies(Warp& warp, const Instruction&, Mask) {
  warp.copy_groups.push_back(std::move(warp.open_copies));
  warp.open_copies.clear();
}

// numbers: groups that may stay in flight.
inline void wait_copies(Warp& warp, const Instruction& it, Mask) {
  if (it.numbers[1]) commit_copies(warp, it, 0);
  while (int64_t(warp.copy_groups.size()) > it.numbers[0]) {
    for (Copy& copy : warp.copy_groups.front())
      if (!copy.landed) land(warp, copy);
    warp.copy_groups.pop_front();
  }
}

enum Change { ADD, SMALLER, LARGER, EXCHANGE, AND, OR, XOR, COMPARE };

template <class T, Change change>
T changed(T old, T value, T other) {
  if constexpr (change == ADD) return old + value;
  else if constexpr (change == SMALLER) return std::min(old, value);
  else if constexpr (change == LARGER) return std::max(old, value);
  else if constexpr (change == EXCHANGE) return value;
  else if constexpr (change == AND) return old & value;
  else if constexpr (change == OR) return old | value;
  else if constexpr (change == XOR) return old ^ value;
  else return old == value ? other : old;
}

// operands: the old value or -1, address, value[, other value]; numbers: offset, whether it announces and hears.
template <class T, Change change, Space space>
void atomic(Warp& warp, const Instruction& it, Mask mask) {
  Grid& grid = warp.block.grid;
  const uint64_t* base = warp.row(it.operands[1]);
  for (int lane = 0; lane < LANES; ++lane) {
    if (!on(mask, lane)) continue;
    const uint64_t address = base[lane] + it.numbers[0];
    check_alignment(address, sizeof(T), "atomic");
    uint8_t* bytes;
    if constexpr (space == GLOBAL) {
      allocation_at(grid, address, sizeof(T));
      bytes = reinterpret_cast<uint8_t*>(address);
    } else {
      const int64_t at = uint32_t(address);
      if (at + int64_t(sizeof(T)) > int64_t(warp.block.shared.size())) throw Fault("atomic outside of shared memory");
      bytes = warp.block.shared.data() + at;
    }
    if (it.numbers[1]) {
      auto& heard = grid.heard[warp.block.number];
      heard.resize(size_t(grid.size[0]) * grid.size[1] * grid.size[2]);
      for (uint32_t block : grid.announced[address]) heard[block] = true;
      grid.announced[address].push_back(warp.block.number);
    }
    T old;
    std::memcpy(&old, bytes, sizeof(T));
    const T value = get<T>(warp.row(it.operands[2]), lane);
    const T other = it.operands.size() > 3 ? get<T>(warp.row(it.operands[3]), lane) : T();
    const T next = changed<T, change>(old, value, other);
    std::memcpy(bytes, &next, sizeof(T));
    if (it.operands[0] >= 0) put<T>(warp.row(it.operands[0]), lane, old);
  }
}

}  // namespace ptx
