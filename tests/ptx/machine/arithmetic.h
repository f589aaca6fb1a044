// One instruction over the lanes of a warp.
#pragma once
#include <algorithm>
#include <type_traits>

#include "numbers.h"

namespace ptx {

template <class Body>
inline void each(Mask mask, Body body) {
  if (mask == ALL) {
    for (int lane = 0; lane < LANES; ++lane) body(lane);
    return;
  }
  for (int lane = 0; lane < LANES; ++lane)
    if (on(mask, lane)) body(lane);
}

template <class Out, class T, auto f>
void one(Warp& warp, const Instruction& it, Mask mask) {
  uint64_t* out = warp.row(it.operands[0]);
  const uint64_t* a = warp.row(it.operands[1]);
  each(mask, [&](int lane) { put<Out>(out, lane, Out(f(get<T>(a, lane)))); });
}

template <class Out, class A, class B, auto f>
void two(Warp& warp, const Instruction& it, Mask mask) {
  uint64_t* out = warp.row(it.operands[0]);
  const uint64_t *a = warp.row(it.operands[1]), *b = warp.row(it.operands[2]);
  each(mask, [&](int lane) { put<Out>(out, lane, Out(f(get<A>(a, lane), get<B>(b, lane)))); });
}

template <class Out, class A, class B, class C, auto f>
void three(Warp& warp, const Instruction& it, Mask mask) {
  uint64_t* out = warp.row(it.operands[0]);
  const uint64_t *a = warp.row(it.operands[1]), *b = warp.row(it.operands[2]), *c = warp.row(it.operands[3]);
  each(mask, [&](int lane) {
    put<Out>(out, lane, Out(f(get<A>(a, lane), get<B>(b, lane), get<C>(c, lane))));
  });
}

// Halves are stored as bits: a pair of them in one register, or one.
template <class Halves, float (*up)(uint16_t), uint16_t (*down)(double), auto f>
void halves_of(Warp& warp, const Instruction& it, Mask mask) {
  constexpr int count = sizeof(Halves) / 2;
  const int num_inputs = int(it.operands.size()) - 1;
  each(mask, [&](int lane) {
    Halves in[3] = {}, result = 0;
    for (int i = 0; i < num_inputs; ++i) in[i] = get<Halves>(warp.row(it.operands[1 + i]), lane);
    for (int half = 0; half < count; ++half) {
      double x[3];
      for (int i = 0; i < num_inputs; ++i) x[i] = up(uint16_t(in[i] >> (16 * half)));
      result |= Halves(Halves(down(f(x[0], x[1], x[2]))) << (16 * half));
    }
    put<Halves>(warp.row(it.operands[0]), lane, result);
  });
}

enum class Test { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_ };

template <class T, Test test>
bool holds(T a, T b) {
  bool unordered = false;
  if constexpr (std::is_floating_point_v<T>) unordered = std::isnan(a) || std::isnan(b);
  switch (test) {
    case Test::EQ: return a == b;
    case Test::NE: return !unordered && a != b;
    case Test::LT: return a < b;
    case Test::LE: return a <= b;
    case Test::GT: return a > b;
    case Test::GE: return a >= b;
    case Test::EQU: return unordered || a == b;
    case Test::NEU: return unordered || a != b;
    case Test::LTU: return unordered || a < b;
    case Test::LEU: return unordered || a <= b;
    case Test::GTU: return unordered || a > b;
    case Test::GEU: return unordered || a >= b;
    case Test::NUM: return !unordered;
    case Test::NAN_: return unordered;
  }
  return false;
}

// operands: the predicate, its opposite or -1, a, b[, a predicate that it is joined with].
template <class T, Test test, int joined>
void compare(Warp& warp, const Instruction& it, Mask mask) {
  const uint64_t *a = warp.row(it.operands[2]), *b = warp.row(it.operands[3]);
  each(mask, [&](int lane) {
    const bool plain = holds<T, test>(get<T>(a, lane), get<T>(b, lane));
    bool value = plain, opposite = !plain;
    if constexpr (joined != 0) {
      const bool c = warp.row(it.operands[4])[lane] & 1;
      auto join = [&](bool x) { return joined == 1 ? (x && c) : joined == 2 ? (x || c) : x != c; };
      value = join(plain), opposite = join(!plain);
    }
    warp.row(it.operands[0])[lane] = value;
    if (it.operands[1] >= 0) warp.row(it.operands[1])[lane] = opposite;
  });
}

template <class T>
T quotient(T a, T b) {
  if (b == 0) return T(~T(0));
  if constexpr (std::is_signed_v<T>)
    if (b == -1) return T(-std::make_unsigned_t<T>(a));
  return a / b;
}

template <class T>
T remainder_of(T a, T b) {
  if (b == 0) return a;
  if constexpr (std::is_signed_v<T>)
    if (b == -1) return 0;
  return a % b;
}

template <class T>
T high_half(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return T((Wide(a) * Wide(b)) >> (8 * sizeof(T)));
}

template <class T>
T shifted_left(T a, uint32_t by) {
  return by >= 8 * sizeof(T) ? T(0) : T(a << by);
}

template <class T>
T shifted_right(T a, uint32_t by) {
  constexpr uint32_t bits = 8 * sizeof(T);
  if (by >= bits) return std::is_signed_v<T> && a < 0 ? T(-1) : T(0);
  return T(a >> by);
}

template <class T>
T extracted(T a, uint32_t start, uint32_t length) {
  start &= 0xFF, length &= 0xFF;
  constexpr uint32_t bits = 8 * sizeof(T);
  if (length == 0) return 0;
  using Unsigned = std::make_unsigned_t<T>;
  const bool sign = std::is_signed_v<T> && (Unsigned(a) >> std::min(start + length - 1, bits - 1) & 1);
  Unsigned field = start >= bits ? 0 : Unsigned(Unsigned(a) >> start);
  if (length >= bits) return start == 0 ? a : T(sign ? field | ~(Unsigned(~Unsigned(0)) >> std::min(start, bits - 1)) : field);
  field &= (Unsigned(1) << length) - 1;
  if (sign) field |= ~((Unsigned(1) << length) - 1);
  return T(field);
}

template <class T>
T inserted(T a, T b, uint32_t start, uint32_t length) {
  start &= 0xFF, length &= 0xFF;
  constexpr uint32_t bits = 8 * sizeof(T);
  if (start >= bits || length == 0) return b;
  const T mask = T((length >= bits ? ~T(0) : (T(1) << length) - 1) << start);
  return T((b & ~mask) | ((a << start) & mask));
}

inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 0xF;
    uint32_t byte = bytes >> (8 * (nibble & 7)) & 0xFF;
    if (nibble & 8) byte = byte & 0x80 ? 0xFF : 0;
    result |= byte << (8 * i);
  }
  return result;
}

}  // namespace ptx
