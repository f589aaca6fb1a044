// Instructions in which the lanes of a warp see each other.
#pragma once
#include "arithmetic.h"

namespace ptx {

enum class Shuffle { UP, DOWN, BUTTERFLY, INDEX };

inline void check_members(const Instruction& it, Warp& warp, Mask mask, int operand) {
  each(mask, [&](int lane) {
    const auto members = get<uint32_t>(warp.row(it.operands[operand]), lane);
    if ((members & warp.live) != mask) throw Fault("lanes that should take part are elsewhere");
  });
}

// operands: the value, a predicate or -1, a, b, c, members.
template <Shuffle way>
void shuffle(Warp& warp, const Instruction& it, Mask mask) {
  check_members(it, warp, mask, 5);
  uint64_t before[LANES];
  std::copy_n(warp.row(it.operands[2]), LANES, before);
  each(mask, [&](int lane) {
    const auto by = get<uint32_t>(warp.row(it.operands[3]), lane) & 31;
    const auto limits = get<uint32_t>(warp.row(it.operands[4]), lane);
    const uint32_t clamp = limits & 31, segment = limits >> 8 & 31;
    const uint32_t most = (lane & segment) | (clamp & ~segment), least = lane & segment;
    int64_t from = lane;
    bool inside = true;
    if (way == Shuffle::UP) from = int64_t(lane) - by, inside = from >= int64_t(most);
    if (way == Shuffle::DOWN) from = lane + by, inside = from <= int64_t(most);
    if (way == Shuffle::BUTTERFLY) from = lane ^ by, inside = from <= int64_t(most);
    if (way == Shuffle::INDEX) from = least | (by & ~segment), inside = from <= int64_t(most);
    if (!inside) from = lane;
    if (!on(mask, int(from))) throw Fault("a shuffle from a lane that does not take part");
    put<uint32_t>(warp.row(it.operands[0]), lane, uint32_t(before[from]));
    if (it.operands[1] >= 0) warp.row(it.operands[1])[lane] = inside;
  });
}

template <class T, auto f>
void reduce(Warp& warp, const Instruction& it, Mask mask) {
  check_members(it, warp, mask, 2);
  T total{};
  bool first = true;
  each(mask, [&](int lane) {
    const T value = get<T>(warp.row(it.operands[1]), lane);
    total = first ? value : T(f(total, value));
    first = false;
  });
  each(mask, [&](int lane) { put<T>(warp.row(it.operands[0]), lane, total); });
}

enum class Vote { BALLOT, ANY, EVERY };

// operands: the result, a predicate, members; numbers: whether the predicate is negated.
template <Vote vote>
void votes(Warp& warp, const Instruction& it, Mask mask) {
  check_members(it, warp, mask, 2);
  uint32_t ballot = 0;
  each(mask, [&](int lane) {
    const bool is = (warp.row(it.operands[1])[lane] & 1) != uint64_t(it.numbers[0]);
    ballot |= uint32_t(is) << lane;
  });
  const uint64_t result = vote == Vote::BALLOT ? ballot : vote == Vote::ANY ? ballot != 0 : ballot == mask;
  each(mask, [&](int lane) { warp.row(it.operands[0])[lane] = result; });
}

// operands: lane or -1, predicate, members.
inline void elect(Warp& warp, const Instruction& it, Mask mask) {
  const int chosen = __builtin_ctz(mask);
  each(mask, [&](int lane) {
    if (it.operands[0] >= 0) warp.row(it.operands[0])[lane] = uint64_t(chosen);
    warp.row(it.operands[1])[lane] = lane == chosen;
  });
}

}  // namespace ptx
