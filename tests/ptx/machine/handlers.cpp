// Which function executes which instruction, by the names that program.py gives them.
#include "convert.h"
#include "matrix.h"
#include "reals.h"

namespace ptx {

namespace {

template <class T>
void integers(Table& table, const std::string& type) {
  using U = std::make_unsigned_t<T>;
  auto name = [&](const char* base) { return base + type; };
  table[name("add.")] = two<T, T, T, [](T a, T b) { return T(U(a) + U(b)); }>;
  table[name("sub.")] = two<T, T, T, [](T a, T b) { return T(U(a) - U(b)); }>;
  table[name("mul.lo.")] = two<T, T, T, [](T a, T b) { return T(uint64_t(a) * uint64_t(b)); }>;
  table[name("mul.hi.")] = two<T, T, T, [](T a, T b) { return high_half(a, b); }>;
  table[name("mad.lo.")] = three<T, T, T, T, [](T a, T b, T c) { return T(uint64_t(a) * uint64_t(b) + uint64_t(c)); }>;
  table[name("mad.hi.")] = three<T, T, T, T, [](T a, T b, T c) { return T(U(high_half(a, b)) + U(c)); }>;
  table[name("div.")] = two<T, T, T, [](T a, T b) { return quotient(a, b); }>;
  table[name("rem.")] = two<T, T, T, [](T a, T b) { return remainder_of(a, b); }>;
  table[name("min.")] = two<T, T, T, [](T a, T b) { return std::min(a, b); }>;
  table[name("max.")] = two<T, T, T, [](T a, T b) { return std::max(a, b); }>;
  table[name("and.")] = two<T, T, T, [](T a, T b) { return T(a & b); }>;
  table[name("or.")] = two<T, T, T, [](T a, T b) { return T(a | b); }>;
  table[name("xor.")] = two<T, T, T, [](T a, T b) { return T(a ^ b); }>;
  table[name("not.")] = one<T, T, [](T a) { return T(~a); }>;
  table[name("neg.")] = one<T, T, [](T a) { return T(-U(a)); }>;
  table[name("abs.")] = one<T, T, [](T a) { return a < 0 ? T(-U(a)) : a; }>;
  table[name("shl.")] = two<T, T, uint32_t, [](T a, uint32_t b) { return shifted_left(a, b); }>;
  table[name("shr.")] = two<T, T, uint32_t, [](T a, uint32_t b) { return shifted_right(a, b); }>;
  table[name("selp.")] = three<T, T, T, uint8_t, [](T a, T b, uint8_t p) { return p & 1 ? a : b; }>;
  table[name("mov.")] = one<T, T, [](T a) { return a; }>;
}

template <class T, class Wide>
void widening(Table& table, const std::string& type) {
  table["mul.wide." + type] = two<Wide, T, T, [](T a, T b) { return Wide(Wide(a) * Wide(b)); }>;
  table["mad.wide." + type] =
      three<Wide, T, T, Wide, [](T a, T b, Wide c) { return Wide(uint64_t(Wide(a) * Wide(b)) + uint64_t(c)); }>;
}

template <class T>
void fields(Table& table, const std::string& type) {
  table["bfe." + type] = three<T, T, uint32_t, uint32_t, [](T a, uint32_t b, uint32_t c) { return extracted(a, b, c); }>;
}

template <class T>
void bits(Table& table, const std::string& type) {
  constexpr int size = 8 * sizeof(T);
  table["popc." + type] = one<uint32_t, T, [](T a) { return uint32_t(__builtin_popcountll(a)); }>;
  table["clz." + type] = one<uint32_t, T, [](T a) { return uint32_t(a ? __builtin_clzll(a) - (64 - size) : size); }>;
  table["brev." + type] = one<T, T, [](T a) {
    T result = 0;
    for (int i = 0; i < size; ++i) result |= T(a >> i & 1) << (size - 1 - i);
    return result;
  }>;
  table["bfi." + type] = [](Warp& warp, const Instruction& it, Mask mask) {
    auto field = [&](int i, int lane) { return get<uint32_t>(warp.row(it.operands[i]), lane); };
    each(mask, [&](int lane) {
      const T a = get<T>(warp.row(it.operands[1]), lane), b = get<T>(warp.row(it.operands[2]), lane);
      put<T>(warp.row(it.operands[0]), lane, inserted(a, b, field(3, lane), field(4, lane)));
    });
  };
}

template <class T, Test test>
void comparison(Table& table, const std::string& name, const std::string& type) {
  for (const char* flushing : {"", "ftz."}) {
    table["setp." + name + "." + flushing + type] = compare<T, test, 0>;
    table["setp." + name + ".and." + flushing + type] = compare<T, test, 1>;
    table["setp." + name + ".or." + flushing + type] = compare<T, test, 2>;
    table["setp." + name + ".xor." + flushing + type] = compare<T, test, 3>;
  }
}

template <class T>
void comparisons(Table& table, const std::string& type) {
  comparison<T, Test::EQ>(table, "eq", type), comparison<T, Test::NE>(table, "ne", type);
  comparison<T, Test::LT>(table, "lt", type), comparison<T, Test::LE>(table, "le", type);
  comparison<T, Test::GT>(table, "gt", type), comparison<T, Test::GE>(table, "ge", type);
  if constexpr (std::is_unsigned_v<T>) {
    comparison<T, Test::LT>(table, "lo", type), comparison<T, Test::LE>(table, "ls", type);
    comparison<T, Test::GT>(table, "hi", type), comparison<T, Test::GE>(table, "hs", type);
  }
  if constexpr (std::is_floating_point_v<T>) {
    comparison<T, Test::EQU>(table, "equ", type), comparison<T, Test::NEU>(table, "neu", type);
    comparison<T, Test::LTU>(table, "ltu", type), comparison<T, Test::LEU>(table, "leu", type);
    comparison<T, Test::GTU>(table, "gtu", type), comparison<T, Test::GEU>(table, "geu", type);
    comparison<T, Test::NUM>(table, "num", type), comparison<T, Test::NAN_>(table, "nan", type);
  }
}

template <class T, Space space>
void atomics(Table& table, const std::string& type) {
  const std::string place = space == GLOBAL ? "atom.global." : "atom.shared.";
  table[place + "add." + type] = atomic<T, ADD, space>;
  table[place + "min." + type] = atomic<T, SMALLER, space>;
  table[place + "max." + type] = atomic<T, LARGER, space>;
  table[place + "exch." + type] = atomic<T, EXCHANGE, space>;
  table[place + "cas." + type] = atomic<T, COMPARE, space>;
  if constexpr (std::is_integral_v<T>) {
    table[place + "and." + type] = atomic<T, AND, space>;
    table[place + "or." + type] = atomic<T, OR, space>;
    table[place + "xor." + type] = atomic<T, XOR, space>;
  }
}

// operands: the whole, its parts from the lowest; numbers: bits of a part.
void pack(Warp& warp, const Instruction& it, Mask mask) {
  const int size = int(it.numbers[0]);
  each(mask, [&](int lane) {
    uint64_t whole = 0;
    for (size_t i = 1; i < it.operands.size(); ++i)
      whole |= (warp.row(it.operands[i])[lane] & ((1ull << size) - 1)) << (size * (i - 1));
    warp.row(it.operands[0])[lane] = whole;
  });
}

// operands: the whole, its parts or -1; numbers: bits of a part.
void unpack(Warp& warp, const Instruction& it, Mask mask) {
  const int size = int(it.numbers[0]);
  each(mask, [&](int lane) {
    const uint64_t whole = warp.row(it.operands[0])[lane];
    for (size_t i = 1; i < it.operands.size(); ++i)
      if (it.operands[i] >= 0) warp.row(it.operands[i])[lane] = whole >> (size * (i - 1)) & ((1ull << size) - 1);
  });
}

// numbers: the table of the function.
void logic_of_three(Warp& warp, const Instruction& it, Mask mask) {
  const auto table = uint32_t(it.numbers[0]);
  each(mask, [&](int lane) {
    uint32_t in[3], out = 0;
    for (int i = 0; i < 3; ++i) in[i] = get<uint32_t>(warp.row(it.operands[1 + i]), lane);
    for (int bit = 0; bit < 32; ++bit) {
      const uint32_t index = (in[0] >> bit & 1) << 2 | (in[1] >> bit & 1) << 1 | (in[2] >> bit & 1);
      out |= (table >> index & 1) << bit;
    }
    put<uint32_t>(warp.row(it.operands[0]), lane, out);
  });
}

template <bool left, bool wraps>
void funnel(Warp& warp, const Instruction& it, Mask mask) {
  each(mask, [&](int lane) {
    const auto low = get<uint32_t>(warp.row(it.operands[1]), lane), high = get<uint32_t>(warp.row(it.operands[2]), lane);
    const auto given = get<uint32_t>(warp.row(it.operands[3]), lane);
    const uint32_t by = wraps ? given & 31 : std::min(given, 32u);
    const uint64_t both = uint64_t(high) << 32 | low;
    put<uint32_t>(warp.row(it.operands[0]), lane, left ? uint32_t((both << by) >> 32) : uint32_t(both >> by));
  });
}

void nothing(Warp&, const Instruction&, Mask) {}

void trap(Warp&, const Instruction&, Mask) { throw Fault("trap"); }

template <class Element, int K>
void warpgroups(Table& table, const std::string& types) {
  table["wgmma.k" + std::to_string(K) + "." + types] = warpgroup_mma<Element, K>;
}

Table every() {
  Table table;
  integers<uint16_t>(table, "u16"), integers<int16_t>(table, "s16");
  integers<uint32_t>(table, "u32"), integers<int32_t>(table, "s32");
  integers<uint64_t>(table, "u64"), integers<int64_t>(table, "s64");
  widening<uint16_t, uint32_t>(table, "u16"), widening<int16_t, int32_t>(table, "s16");
  widening<uint32_t, uint64_t>(table, "u32"), widening<int32_t, int64_t>(table, "s32");
  fields<uint32_t>(table, "u32"), fields<int32_t>(table, "s32");
  fields<uint64_t>(table, "u64"), fields<int64_t>(table, "s64");
  bits<uint32_t>(table, "u32"), bits<uint64_t>(table, "u64");
  reals<float, false>(table, "f32"), reals<float, true>(table, "f32"), reals<double, false>(table, "f64");
  half_numbers<uint16_t, from_f16, to_f16>(table, "f16"), half_numbers<uint32_t, from_f16, to_f16>(table, "f16x2");
  half_numbers<uint16_t, from_bf16, to_bf16>(table, "bf16"), half_numbers<uint32_t, from_bf16, to_bf16>(table, "bf16x2");
  paired<false>(table), paired<true>(table), mixed<from_f16>(table, "f16"), mixed<from_bf16>(table, "bf16");
  comparisons<uint16_t>(table, "u16"), comparisons<int16_t>(table, "s16");
  comparisons<uint32_t>(table, "u32"), comparisons<int32_t>(table, "s32");
  comparisons<uint64_t>(table, "u64"), comparisons<int64_t>(table, "s64");
  comparisons<float>(table, "f32"), comparisons<double>(table, "f64");
  atomics<uint32_t, GLOBAL>(table, "u32"), atomics<int32_t, GLOBAL>(table, "s32");
  atomics<uint64_t, GLOBAL>(table, "u64"), atomics<int64_t, GLOBAL>(table, "s64"), atomics<float, GLOBAL>(table, "f32");
  atomics<uint32_t, SHARED>(table, "u32"), atomics<int32_t, SHARED>(table, "s32"), atomics<float, SHARED>(table, "f32");
  table["and.pred"] = two<uint64_t, uint8_t, uint8_t, [](uint8_t a, uint8_t b) { return uint64_t(a & b & 1); }>;
  table["or.pred"] = two<uint64_t, uint8_t, uint8_t, [](uint8_t a, uint8_t b) { return uint64_t((a | b) & 1); }>;
  table["xor.pred"] = two<uint64_t, uint8_t, uint8_t, [](uint8_t a, uint8_t b) { return uint64_t((a ^ b) & 1); }>;
  table["not.pred"] = one<uint64_t, uint8_t, [](uint8_t a) { return uint64_t(~a & 1); }>;
  table["mov.pred"] = one<uint64_t, uint8_t, [](uint8_t a) { return uint64_t(a & 1); }>;
  table["prmt.u32"] = three<uint32_t, uint32_t, uint32_t, uint32_t,
                            [](uint32_t a, uint32_t b, uint32_t c) { return permuted(a, b, c); }>;
  table["lop3"] = logic_of_three, table["pack"] = pack, table["unpack"] = unpack, table["cvt"] = convert;
  table["shf.l.wrap.u32"] = funnel<true, true>, table["shf.r.wrap.u32"] = funnel<false, true>;
  table["shf.l.clamp.u32"] = funnel<true, false>, table["shf.r.clamp.u32"] = funnel<false, false>;
  table["ld.global"] = load<GLOBAL>, table["ld.shared"] = load<SHARED>;
  table["st.global"] = store<GLOBAL>, table["st.shared"] = store<SHARED>;
  table["cp.async"] = copy_async, table["cp.async.commit"] = commit_copies, table["cp.async.wait"] = wait_copies;
  table["shfl.up"] = shuffle<Shuffle::UP>, table["shfl.down"] = shuffle<Shuffle::DOWN>;
  table["shfl.bfly"] = shuffle<Shuffle::BUTTERFLY>, table["shfl.idx"] = shuffle<Shuffle::INDEX>;
  table["vote.ballot"] = votes<Vote::BALLOT>, table["vote.any"] = votes<Vote::ANY>, table["vote.all"] = votes<Vote::EVERY>;
  table["elect"] = elect;
  table["redux.add.s32"] = table["redux.add.u32"] = reduce<uint32_t, [](uint32_t a, uint32_t b) { return a + b; }>;
  table["redux.min.s32"] = reduce<int32_t, [](int32_t a, int32_t b) { return std::min(a, b); }>;
  table["redux.max.s32"] = reduce<int32_t, [](int32_t a, int32_t b) { return std::max(a, b); }>;
  table["redux.min.u32"] = reduce<uint32_t, [](uint32_t a, uint32_t b) { return std::min(a, b); }>;
  table["redux.max.u32"] = reduce<uint32_t, [](uint32_t a, uint32_t b) { return std::max(a, b); }>;
  table["redux.and.u32"] = reduce<uint32_t, [](uint32_t a, uint32_t b) { return a & b; }>;
  table["redux.or.u32"] = reduce<uint32_t, [](uint32_t a, uint32_t b) { return a | b; }>;
  table["redux.xor.u32"] = reduce<uint32_t, [](uint32_t a, uint32_t b) { return a ^ b; }>;
  table["ldmatrix"] = load_matrices, table["stmatrix"] = store_matrices;
  table["mma.k8.f16"] = mma<Halves, 8>, table["mma.k16.f16"] = mma<Halves, 16>;
  table["mma.k8.bf16"] = mma<Brains, 8>, table["mma.k16.bf16"] = mma<Brains, 16>;
  table["mma.k4.tf32"] = mma<Tf32, 4>, table["mma.k8.tf32"] = mma<Tf32, 8>;
  table["mma.k32.e4m3"] = mma<Q8, 32>, table["mma.k32.e5m2"] = mma<Q8Wide, 32>;
  warpgroups<Halves, 16>(table, "f16"), warpgroups<Brains, 16>(table, "bf16"), warpgroups<Tf32, 8>(table, "tf32");
  warpgroups<Q8, 32>(table, "e4m3");
  table["wgmma.commit"] = commit_products, table["wgmma.wait"] = wait_products;
  table["nothing"] = nothing, table["trap"] = trap;
  return table;
}

}  // namespace

const Table& handlers() {
  static const Table table = every();
  return table;
}

}  // namespace ptx
