// Arithmetic of singles, doubles and halves, and the names it has.
#pragma once
#include "arithmetic.h"

namespace ptx {

template <class T, bool ftz>
T level(T x) {
  if constexpr (ftz && std::is_same_v<T, float>) return flushed(x);
  else return x;
}

// What arithmetic of singles yields where there is no number: always the same bits.
template <class T>
T canonical(T x) {
  if constexpr (std::is_same_v<T, float>)
    if (std::isnan(x)) return __builtin_bit_cast(float, 0x7FFFFFFFu);
  return x;
}

template <class T>
T least(T a, T b) {
  if (a == 0 && b == 0) return std::signbit(a) ? a : b;
  return std::fmin(a, b);
}

template <class T>
T most(T a, T b) {
  if (a == 0 && b == 0) return std::signbit(a) ? b : a;
  return std::fmax(a, b);
}

template <class T, bool ftz, auto f>
void real_one(Warp& warp, const Instruction& it, Mask mask) {
  one<T, T, [](T a) { return level<T, ftz>(f(level<T, ftz>(a))); }>(warp, it, mask);
}

template <class T, bool ftz, auto f>
void real_two(Warp& warp, const Instruction& it, Mask mask) {
  two<T, T, T, [](T a, T b) { return canonical(level<T, ftz>(f(level<T, ftz>(a), level<T, ftz>(b)))); }>(warp, it, mask);
}

template <class T, bool ftz, auto f>
void real_three(Warp& warp, const Instruction& it, Mask mask) {
  three<T, T, T, T, [](T a, T b, T c) {
    return canonical(level<T, ftz>(f(level<T, ftz>(a), level<T, ftz>(b), level<T, ftz>(c))));
  }>(warp, it, mask);
}

template <class T, bool ftz>
void reals(Table& table, const std::string& type) {
  auto name = [&](const char* base) { return base + std::string(ftz ? "ftz." : "") + type; };
  table[name("add.")] = real_two<T, ftz, [](T a, T b) { return a + b; }>;
  table[name("sub.")] = real_two<T, ftz, [](T a, T b) { return a - b; }>;
  table[name("mul.")] = real_two<T, ftz, [](T a, T b) { return a * b; }>;
  table[name("div.")] = real_two<T, ftz, [](T a, T b) { return a / b; }>;
  table[name("div.full.")] = table[name("div.approx.")] = table[name("div.")];
  table[name("min.")] = real_two<T, ftz, [](T a, T b) { return least(a, b); }>;
  table[name("max.")] = real_two<T, ftz, [](T a, T b) { return most(a, b); }>;
  table[name("min.NaN.")] = real_two<T, ftz, [](T a, T b) { return std::isnan(a) || std::isnan(b) ? T(NAN) : least(a, b); }>;
  table[name("max.NaN.")] = real_two<T, ftz, [](T a, T b) { return std::isnan(a) || std::isnan(b) ? T(NAN) : most(a, b); }>;
  table[name("min3.")] = real_three<T, ftz, [](T a, T b, T c) { return least(least(a, b), c); }>;
  table[name("max3.")] = real_three<T, ftz, [](T a, T b, T c) { return most(most(a, b), c); }>;
  table[name("copysign.")] = real_two<T, false, [](T a, T b) { return std::copysign(b, a); }>;
  table[name("neg.")] = real_one<T, ftz, [](T a) { return -a; }>;
  table[name("abs.")] = real_one<T, ftz, [](T a) { return std::fabs(a); }>;
  for (const char* exact : {"", "approx."}) {
    auto way = [&](const char* base) { return std::string(base) + exact + (ftz ? "ftz." : "") + type; };
    table[way("rcp.")] = real_one<T, ftz, [](T a) { return 1 / a; }>;
    table[way("sqrt.")] = real_one<T, ftz, [](T a) { return std::sqrt(a); }>;
    table[way("rsqrt.")] = real_one<T, ftz, [](T a) { return T(1 / std::sqrt(double(a))); }>;
    table[way("ex2.")] = real_one<T, ftz, [](T a) { return T(std::exp2(double(a))); }>;
    table[way("lg2.")] = real_one<T, ftz, [](T a) { return T(std::log2(double(a))); }>;
    table[way("sin.")] = real_one<T, ftz, [](T a) { return T(std::sin(double(a))); }>;
    table[way("cos.")] = real_one<T, ftz, [](T a) { return T(std::cos(double(a))); }>;
    table[way("tanh.")] = real_one<T, ftz, [](T a) { return T(std::tanh(double(a))); }>;
  }
  table[name("fma.")] = table[name("mad.")] = real_three<T, ftz, [](T a, T b, T c) { return std::fma(a, b, c); }>;
  table[name("selp.")] = three<T, T, T, uint8_t, [](T a, T b, uint8_t p) { return p & 1 ? a : b; }>;
  table[name("mov.")] = one<uint64_t, uint64_t, [](uint64_t a) { return a; }>;
}

template <class Pair, float (*up)(uint16_t), uint16_t (*down)(double)>
void half_numbers(Table& table, const std::string& type) {
  auto name = [&](const char* base) { return base + type; };
  table[name("add.")] = halves_of<Pair, up, down, [](double a, double b, double) { return a + b; }>;
  table[name("sub.")] = halves_of<Pair, up, down, [](double a, double b, double) { return a - b; }>;
  table[name("mul.")] = halves_of<Pair, up, down, [](double a, double b, double) { return a * b; }>;
  table[name("fma.")] = halves_of<Pair, up, down, [](double a, double b, double c) { return a * b + c; }>;
  table[name("min.")] = halves_of<Pair, up, down, [](double a, double b, double) { return least(a, b); }>;
  table[name("max.")] = halves_of<Pair, up, down, [](double a, double b, double) { return most(a, b); }>;
  table[name("min.NaN.")] = halves_of<Pair, up, down, [](double a, double b, double) {
    return std::isnan(a) || std::isnan(b) ? double(NAN) : least(a, b);
  }>;
  table[name("max.NaN.")] = halves_of<Pair, up, down, [](double a, double b, double) {
    return std::isnan(a) || std::isnan(b) ? double(NAN) : most(a, b);
  }>;
  table[name("neg.")] = halves_of<Pair, up, down, [](double a, double, double) { return -a; }>;
  table[name("abs.")] = halves_of<Pair, up, down, [](double a, double, double) { return std::fabs(a); }>;
  table[name("ex2.approx.")] = halves_of<Pair, up, down, [](double a, double, double) { return std::exp2(a); }>;
  table[name("tanh.approx.")] = halves_of<Pair, up, down, [](double a, double, double) { return std::tanh(a); }>;
}

// Two singles in one register.
template <bool ftz, auto f>
void pairs(Warp& warp, const Instruction& it, Mask mask) {
  const int num_inputs = int(it.operands.size()) - 1;
  each(mask, [&](int lane) {
    float in[3][2] = {}, out[2];
    for (int i = 0; i < num_inputs; ++i) std::memcpy(in[i], &warp.row(it.operands[1 + i])[lane], 8);
    for (int half = 0; half < 2; ++half) {
      for (auto& x : in) x[half] = level<float, ftz>(x[half]);
      out[half] = canonical(level<float, ftz>(f(in[0][half], in[1][half], in[2][half])));
    }
    std::memcpy(&warp.row(it.operands[0])[lane], out, 8);
  });
}

template <bool ftz>
void paired(Table& table) {
  const std::string type = ftz ? ".ftz.f32x2" : ".f32x2";
  table["add" + type] = pairs<ftz, [](float a, float b, float) { return a + b; }>;
  table["sub" + type] = pairs<ftz, [](float a, float b, float) { return a - b; }>;
  table["mul" + type] = pairs<ftz, [](float a, float b, float) { return a * b; }>;
  table["fma" + type] = pairs<ftz, [](float a, float b, float c) { return std::fma(a, b, c); }>;
}

// Halves that become singles on the way: the last operand is a single already.
template <float (*up)(uint16_t)>
void mixed(Table& table, const std::string& type) {
  table["add.f32." + type] = two<float, uint16_t, float, [](uint16_t a, float b) { return canonical(up(a) + b); }>;
  table["sub.f32." + type] = two<float, uint16_t, float, [](uint16_t a, float b) { return canonical(up(a) - b); }>;
  table["fma.f32." + type] = three<float, uint16_t, uint16_t, float, [](uint16_t a, uint16_t b, float c) {
    return canonical(std::fma(up(a), up(b), c));
  }>;
}

}  // namespace ptx
