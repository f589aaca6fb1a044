// cvt: from any type to any other, by way of a double or of a wide integer, both of which hold every value.
#pragma once
#include "arithmetic.h"

namespace ptx {

enum Type { U8, S8, U16, S16, U32, S32, U64, S64, H16, B16, S_32, D64, T32, Q43, Q52 };  // as in program.py: TYPES
constexpr int BITS[] = {8, 8, 16, 16, 32, 32, 64, 64, 16, 16, 32, 64, 32, 8, 8};

inline bool is_integer(int type) { return type <= S64; }
inline bool is_signed(int type) { return type % 2 == 1; }

inline const Format& format_of(int type) {
  switch (type) {
    case H16: return F16;
    case B16: return BF16;
    case S_32: return F32;
    case T32: return TF32;
    case Q43: return E4M3;
    default: return E5M2;
  }
}

inline __int128 integer_from(uint64_t bits, int type) {
  const int unused = 64 - BITS[type];
  return is_signed(type) ? __int128(int64_t(bits << unused) >> unused) : __int128(bits << unused >> unused);
}

inline double real_from(uint64_t bits, int type) {
  if (type == D64) return get<double>(&bits, 0);
  if (type == S_32 || type == T32) return double(get<float>(&bits, 0));
  return decoded(uint32_t(bits & ((1u << BITS[type]) - 1)), format_of(type));
}

inline uint64_t bits_of(double x, int type, Round mode, bool saturates) {
  if (type == D64) {
    uint64_t bits;
    std::memcpy(&bits, &x, 8);
    return bits;
  }
  return type == T32 ? uint64_t(encoded(fitted(x, TF32, mode, saturates), F32))
                     : uint64_t(encoded(fitted(x, format_of(type), mode, saturates), format_of(type)));
}

inline uint64_t integer_bits(double x, int type, Round mode) {
  const double least = is_signed(type) ? -std::ldexp(1.0, BITS[type] - 1) : 0.0;
  const double most = std::ldexp(1.0, BITS[type] - (is_signed(type) ? 1 : 0));
  if (std::isnan(x)) return BITS[type] == 64 ? 1ull << 63 : 0;
  x = rounded(x, mode);
  if (x < least) return uint64_t(int64_t(least));
  if (x >= most) return is_signed(type) ? (1ull << (BITS[type] - 1)) - 1 : ~0ull >> (64 - BITS[type]);
  return is_signed(type) ? uint64_t(int64_t(x)) : uint64_t(x);
}

inline uint64_t narrowed(uint64_t bits, int type) { return uint64_t(integer_from(bits, type)); }

struct Conversion {
  int to, from, mode;
  bool saturates, to_zero, flushes, relu;
};

inline uint64_t converted(uint64_t bits, const Conversion& c) {
  const auto mode = Round(c.mode);
  if (is_integer(c.from)) {
    const __int128 value = integer_from(bits, c.from);
    if (is_integer(c.to)) {
      if (!c.saturates) return narrowed(uint64_t(value), c.to);
      const __int128 one = 1, most = (one << (BITS[c.to] - is_signed(c.to))) - 1, least = is_signed(c.to) ? -most - 1 : 0;
      return uint64_t(std::clamp(value, least, most));
    }
    if (BITS[c.from] == 64 && c.to == S_32 && mode == Round::NEAREST) {  // a double would round it a first time
      const float near = is_signed(c.from) ? float(int64_t(value)) : float(uint64_t(value));
      uint32_t single;
      std::memcpy(&single, &near, 4);
      return single;
    }
    return bits_of(double(value), c.to, mode, c.saturates);
  }
  double x = real_from(bits, c.from);
  if (c.flushes && c.from == S_32) x = flushed(float(x));
  if (is_integer(c.to)) return integer_bits(x, c.to, mode);
  if (c.to_zero) x = std::isnan(x) ? 0.0 : std::clamp(x, 0.0, 1.0);
  if (c.relu) x = x > 0 ? x : 0.0;
  uint64_t result = bits_of(x, c.to, mode, c.saturates);
  if (c.flushes && c.to == S_32) {
    const float flat = flushed(get<float>(&result, 0));
    put<float>(&result, 0, flat);
  }
  return result;
}

// numbers: a Conversion with an eighth for conversions to whole numbers within a type of reals, and the width of the
// result's register. operands: result, a[, b]: of two the first becomes the upper half.
inline void convert(Warp& warp, const Instruction& it, Mask mask) {
  const auto& n = it.numbers;
  const Conversion c{int(n[0]), int(n[1]), int(n[2]), n[3] != 0, n[4] != 0, n[5] != 0, n[6] != 0};
  const bool whole = n[7] != 0;
  const int width = int(n[8]), count = int(n[9]), step = BITS[c.to], own = BITS[c.from];
  const uint64_t limit = width == 64 ? ~0ull : (1ull << width) - 1, part = step == 64 ? ~0ull : (1ull << step) - 1;
  each(mask, [&](int lane) {
    auto value = [&](uint64_t bits) {
      if (!whole) return converted(bits, c);
      double x = rounded(real_from(bits, c.from), Round(c.mode));
      return bits_of(x, c.to, Round::NEAREST, false);
    };
    const uint64_t a = warp.row(it.operands[1])[lane];
    uint64_t result;
    if (count == 1) {
      result = value(a) & limit;
    } else if (it.operands.size() == 3) {
      result = (value(a) & part) << step | (value(warp.row(it.operands[2])[lane]) & part);
    } else {
      result = (value(a >> own) & part) << step | (value(a & ((1ull << own) - 1)) & part);
    }
    warp.row(it.operands[0])[lane] = result;
  });
}

}  // namespace ptx
