// Products of matrices by a whole warp (mma) or by four (wgmma), and the loads and stores of their fragments.
#pragma once
#include "lanes.h"
#include "memory.h"

namespace ptx {

inline void whole_warp(Mask mask, const char* name) {
  if (mask != ALL) throw Fault(std::string(name) + " without all lanes of its warp");
}

// operands: registers, address; numbers: offset, matrices, whether they are transposed.
inline void load_matrices(Warp& warp, const Instruction& it, Mask mask) {
  whole_warp(mask, "ldmatrix");
  const uint64_t* base = warp.row(it.operands.back());
  for (int matrix = 0; matrix < it.numbers[1]; ++matrix) {
    uint16_t rows[8][8];
    for (int row = 0; row < 8; ++row) {
      const auto at = int64_t(uint32_t(base[8 * matrix + row] + it.numbers[0]));
      std::memcpy(rows[row], shared_at(warp, at, 16, false, nullptr), 16);
    }
    for (int lane = 0; lane < LANES; ++lane) {
      const int g = lane >> 2, q = 2 * (lane & 3);
      const uint32_t low = it.numbers[2] ? rows[q][g] : rows[g][q], high = it.numbers[2] ? rows[q + 1][g] : rows[g][q + 1];
      warp.row(it.operands[matrix])[lane] = low | high << 16;
    }
  }
}

// operands: address, registers; numbers as above.
inline void store_matrices(Warp& warp, const Instruction& it, Mask mask) {
  whole_warp(mask, "stmatrix");
  const uint64_t* base = warp.row(it.operands[0]);
  for (int matrix = 0; matrix < it.numbers[1]; ++matrix) {
    uint16_t rows[8][8];
    for (int lane = 0; lane < LANES; ++lane) {
      const int g = lane >> 2, q = 2 * (lane & 3);
      const auto pair = get<uint32_t>(warp.row(it.operands[1 + matrix]), lane);
      (it.numbers[2] ? rows[q][g] : rows[g][q]) = uint16_t(pair);
      (it.numbers[2] ? rows[q + 1][g] : rows[g][q + 1]) = uint16_t(pair >> 16);
    }
    for (int row = 0; row < 8; ++row) {
      const auto at = int64_t(uint32_t(base[8 * matrix + row] + it.numbers[0]));
      uint8_t data[16];
      std::memcpy(data, rows[row], 16);
      std::memcpy(shared_at(warp, at, 16, true, data), data, 16);
    }
  }
}

struct Halves { using Bits = uint16_t; static float up(uint16_t x) { return from_f16(x); } };
struct Brains { using Bits = uint16_t; static float up(uint16_t x) { return from_bf16(x); } };
struct Tf32 {
  using Bits = uint32_t;
  static float up(uint32_t x) {
    x &= ~0x1FFFu;  // the tensor core does not read the lower bits
    float y;
    std::memcpy(&y, &x, 4);
    return y;
  }
};
struct Q8 { using Bits = uint8_t; static float up(uint8_t x) { return float(decoded(x, E4M3)); } };
struct Q8Wide { using Bits = uint8_t; static float up(uint8_t x) { return float(decoded(x, E5M2)); } };

// C += A B of 16 rows: the products of an instruction are summed at once, and added to C with one rounding, as tensor
// cores do. So the order of K within an instruction is no matter, and which instruction an element is in is one.
template <int K, int N>
void add_products(const float (&a)[16][K], const float (&b)[K][N], float (&c)[16][N], int columns) {
  for (int row = 0; row < 16; ++row) {
    double sums[N] = {};
    for (int k = 0; k < K; ++k)
      for (int column = 0; column < columns; ++column) sums[column] += double(a[row][k]) * b[k][column];
    for (int column = 0; column < columns; ++column) c[row][column] = float(c[row][column] + sums[column]);
  }
}

// mma m16n8k: fragments by lane, `PER` elements to a register. C += A B. operands: D4, A, B, C4 with A of 4 registers
// (2 where K is 4 elements of 32 bits or 8 of 16) and B of half as many.
template <class Element, int K>
void mma(Warp& warp, const Instruction& it, Mask mask) {
  whole_warp(mask, "mma");
  constexpr int PER = 4 / int(sizeof(typename Element::Bits)), COLUMNS = 4 * PER, NUM_B = K / COLUMNS, NUM_A = 2 * NUM_B;
  static thread_local float a[16][K], b[K][8], c[16][8];
  auto element = [](uint32_t word, int i) {
    typename Element::Bits bits;
    std::memcpy(&bits, reinterpret_cast<const char*>(&word) + i * sizeof(bits), sizeof(bits));
    return Element::up(bits);
  };
  for (int lane = 0; lane < LANES; ++lane) {
    const int g = lane >> 2, q = lane & 3;
    for (int r = 0; r < NUM_A; ++r) {
      const auto word = get<uint32_t>(warp.row(it.operands[4 + r]), lane);
      for (int i = 0; i < PER; ++i) a[g + 8 * (r & 1)][PER * q + COLUMNS * (r >> 1) + i] = element(word, i);
    }
    for (int r = 0; r < NUM_B; ++r) {
      const auto word = get<uint32_t>(warp.row(it.operands[4 + NUM_A + r]), lane);
      for (int i = 0; i < PER; ++i) b[PER * q + COLUMNS * r + i][g] = element(word, i);
    }
    for (int r = 0; r < 4; ++r)
      c[g + 8 * (r >> 1)][2 * q + (r & 1)] = get<float>(warp.row(it.operands[4 + NUM_A + NUM_B + r]), lane);
  }
  add_products<K>(a, b, c, 8);
  for (int lane = 0; lane < LANES; ++lane) {
    const int g = lane >> 2, q = lane & 3;
    for (int r = 0; r < 4; ++r) put<float>(warp.row(it.operands[r]), lane, c[g + 8 * (r >> 1)][2 * q + (r & 1)]);
  }
}

// A matrix in shared memory by its descriptor (PTX ISA, "Matrix Descriptor Format"): where each element lies.
struct Described {
  int64_t start, leading, stride, pitch;
  uint64_t swizzle;

  explicit Described(uint64_t d) {
    start = int64_t(d & 0x3FFF) << 4, leading = int64_t(d >> 16 & 0x3FFF) << 4, stride = int64_t(d >> 32 & 0x3FFF) << 4;
    const int mode = int(d >> 62);
    constexpr int64_t PITCH[] = {16, 128, 64, 32};
    constexpr uint64_t MASK[] = {0, 7, 3, 1};
    pitch = PITCH[mode], swizzle = MASK[mode];
  }

  int64_t swizzled(int64_t at) const { return at ^ int64_t((uint64_t(at) >> 7 & swizzle) << 4); }

  int64_t by_rows(int row, int column, int size) const {  // K runs along the memory
    const int64_t within = swizzle ? int64_t(size) * column
                                   : column / (16 / size) * leading + column % (16 / size) * size;
    return swizzled(start + row / 8 * stride + row % 8 * pitch + within);
  }

  int64_t by_columns(int k, int column, int size) const {  // M or N runs along the memory
    const int64_t per = pitch / size;
    return swizzled(start + column / per * leading + k / 8 * stride + k % 8 * pitch + column % per * size);
  }
};

// wgmma.m64nNk: the part of one warp, 16 rows of 64. operands: D, A (4 registers or a descriptor), descriptor of B,
// predicate of whether D is added to; numbers: N, whether A is in registers, whether A, B are transposed.
template <class Element, int K>
void warpgroup_mma(Warp& warp, const Instruction& it, Mask mask) {
  using Bits = typename Element::Bits;
  whole_warp(mask, "wgmma");
  const int n = int(it.numbers[0]), num_d = n / 2;
  const bool in_registers = it.numbers[1];
  Product used;
  auto fetch = [&](int64_t at) {
    const uint8_t* bytes = shared_at(warp, at, sizeof(Bits), false, nullptr);
    Bits bits;
    std::memcpy(&bits, bytes, sizeof bits);
    used.addresses.push_back(at);
    used.bytes.insert(used.bytes.end(), bytes, bytes + sizeof bits);
    return Element::up(bits);
  };
  static thread_local float a[16][K], b[K][256], c[16][256];
  if (in_registers) {
    constexpr int PER = 4 / int(sizeof(Bits)), COLUMNS = 4 * PER;
    for (int lane = 0; lane < LANES; ++lane)
      for (int r = 0; r < 4; ++r) {
        const auto word = get<uint32_t>(warp.row(it.operands[num_d + r]), lane);
        for (int i = 0; i < PER; ++i) {
          Bits bits;
          std::memcpy(&bits, reinterpret_cast<const char*>(&word) + i * sizeof bits, sizeof bits);
          a[(lane >> 2) + 8 * (r & 1)][PER * (lane & 3) + COLUMNS * (r >> 1) + i] = Element::up(bits);
        }
      }
  } else {
    const Described matrix(warp.row(it.operands[num_d])[0]);
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < K; ++k) {
        const int all = row + 16 * (warp.number % 4);
        a[row][k] = fetch(it.numbers[2] ? matrix.by_columns(k, all, sizeof(Bits)) : matrix.by_rows(all, k, sizeof(Bits)));
      }
  }
  const int behind = num_d + (in_registers ? 4 : 1);
  const Described matrix(warp.row(it.operands[behind])[0]);
  for (int k = 0; k < K; ++k)
    for (int column = 0; column < n; ++column)
      b[k][column] = fetch(it.numbers[3] ? matrix.by_columns(k, column, sizeof(Bits)) : matrix.by_rows(column, k, sizeof(Bits)));
  const bool adds = warp.row(it.operands[behind + 1])[0] & 1;
  auto place = [&](auto body) {
    for (int lane = 0; lane < LANES; ++lane)
      for (int r = 0; r < num_d; ++r)
        body(c[(lane >> 2) + 8 * (r >> 1 & 1)][8 * (r >> 2) + 2 * (lane & 3) + (r & 1)], warp.row(it.operands[r]), lane);
  };
  place([&](float& value, uint64_t* row, int lane) { value = adds ? get<float>(row, lane) : 0.0f; });
  add_products<K>(a, b, c, n);
  place([&](float value, uint64_t* row, int lane) { put<float>(row, lane, value); });
  warp.open_products.push_back(std::move(used));
}

inline void commit_products(Warp& warp, const Instruction&, Mask) {
  warp.product_groups.push_back(std::move(warp.open_products));
  warp.open_products.clear();
}

// numbers: groups that may stay in flight. Until here the tensor core may read its operands.
inline void wait_products(Warp& warp, const Instruction& it, Mask) {
  while (int64_t(warp.product_groups.size()) > it.numbers[0]) {
    for (const Product& product : warp.product_groups.front()) {
      const size_t width = product.addresses.empty() ? 0 : product.bytes.size() / product.addresses.size();
      for (size_t i = 0; i < product.addresses.size(); ++i)
        if (std::memcmp(warp.block.shared.data() + product.addresses[i], product.bytes.data() + i * width, width))
          throw Fault("shared memory changed under a wgmma in flight");
    }
    warp.product_groups.pop_front();
  }
}

}  // namespace ptx
