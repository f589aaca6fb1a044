// Numbers of few bits, as doubles and back. A double holds each of them exactly, and any product of two.
#pragma once
#include <cmath>
#include <limits>

#include "machine.h"

namespace ptx {

enum class Round { NEAREST, ZERO, DOWN, UP, AWAY };

struct Format {
  int precision;   // bits of the significand, the leading one included
  int least;       // exponent of the smallest normal number
  double largest;
  bool infinite;   // whether it has infinities
  int fraction_bits, exponent_bits;
};

constexpr Format F32{24, -126, 3.4028234663852886e38, true, 23, 8};
constexpr Format TF32{11, -126, 3.4011621342146535e38, true, 23, 8};
constexpr Format F16{11, -14, 65504.0, true, 10, 5};
constexpr Format BF16{8, -126, 3.3895313892515355e38, true, 7, 8};
constexpr Format E4M3{4, -6, 448.0, false, 3, 4};
constexpr Format E5M2{3, -14, 57344.0, true, 2, 5};

inline double rounded(double x, Round mode) {
  switch (mode) {
    case Round::NEAREST: return std::nearbyint(x);
    case Round::ZERO: return std::trunc(x);
    case Round::DOWN: return std::floor(x);
    case Round::UP: return std::ceil(x);
    case Round::AWAY: return std::round(x);
  }
  return x;
}

// The number of a format that a value is rounded to; beyond its largest one, that or infinity.
inline double fitted(double x, const Format& f, Round mode, bool saturates) {
  if (x == 0 || std::isnan(x)) return x;
  if (std::isinf(x)) return saturates ? std::copysign(f.largest, x) : x;
  int exponent;
  std::frexp(x, &exponent);
  const int step = std::max(exponent - 1, f.least) - (f.precision - 1);
  const double near = std::ldexp(rounded(std::ldexp(x, -step), mode), step);
  if (std::fabs(near) <= f.largest) return near;
  const bool stays = saturates || mode == Round::ZERO || (mode == Round::DOWN && x > 0) || (mode == Round::UP && x < 0);
  if (stays) return std::copysign(f.largest, x);
  return f.infinite ? std::copysign(INFINITY, x) : NAN;
}

// The bits of a number that the format has.
inline uint32_t encoded(double x, const Format& f) {
  const uint32_t sign = std::signbit(x) ? 1u << (f.fraction_bits + f.exponent_bits) : 0;
  const uint32_t most = (1u << f.exponent_bits) - 1;
  if (std::isnan(x)) return (most << f.fraction_bits) | ((1u << f.fraction_bits) - 1);
  if (std::isinf(x)) return sign | most << f.fraction_bits;
  if (x == 0) return sign;
  int exponent;
  std::frexp(x, &exponent);
  const int above = std::max(exponent - 1, f.least);
  const auto significand = uint32_t(std::ldexp(std::fabs(x), f.fraction_bits - above));
  const uint32_t one = 1u << f.fraction_bits;
  if (significand < one) return sign | significand;
  return sign | uint32_t(above - f.least + 1) << f.fraction_bits | (significand - one);
}

inline double decoded(uint32_t bits, const Format& f) {
  const uint32_t one = 1u << f.fraction_bits, most = (1u << f.exponent_bits) - 1;
  const uint32_t fraction = bits & (one - 1), exponent = bits >> f.fraction_bits & most;
  const bool negative = bits >> (f.fraction_bits + f.exponent_bits) & 1;
  double x;
  if (exponent == most && f.infinite) x = fraction ? NAN : INFINITY;
  else if (exponent == most && fraction == one - 1) x = NAN;  // formats without infinities have one NaN
  else if (exponent == 0) x = std::ldexp(double(fraction), f.least - f.fraction_bits);
  else x = std::ldexp(double(one + fraction), int(exponent) - 1 + f.least - f.fraction_bits);
  return negative ? -x : x;
}

inline float from_bf16(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

inline const float* halves() {
  static const std::vector<float> table = [] {
    std::vector<float> all(1 << 16);
    for (uint32_t bits = 0; bits < all.size(); ++bits) all[bits] = float(decoded(bits, F16));
    return all;
  }();
  return table.data();
}

inline float from_f16(uint16_t bits) { return halves()[bits]; }

inline uint16_t to_bf16(double x) {
  const float near = float(x);
  if (double(near) != x) return uint16_t(encoded(fitted(x, BF16, Round::NEAREST, false), BF16));
  uint32_t bits;
  std::memcpy(&bits, &near, 4);
  if (std::isnan(near)) return 0x7FFF;
  return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline uint16_t to_f16(double x) { return uint16_t(encoded(fitted(x, F16, Round::NEAREST, false), F16)); }

inline float flushed(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

}  // namespace ptx
