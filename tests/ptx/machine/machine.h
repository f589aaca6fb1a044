// A machine that executes PTX: threads in warps of 32 lanes, blocks of warps, a grid of blocks. One block runs after
// the other; within a block each warp runs until a barrier, in random order. Registers hold 64 bits of each lane.
#pragma once
#include <cstdint>
#include <cstring>
#include <deque>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptx {

constexpr int LANES = 32;
using Mask = uint32_t;
constexpr Mask ALL = 0xFFFFFFFFu;

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Warp;
struct Instruction;
using Handler = void (*)(Warp&, const Instruction&, Mask);

enum class Kind { Run, Branch, Exit, Barrier };

struct Instruction {
  Kind kind = Kind::Run;
  Handler run = nullptr;
  int guard = -1;        // register of the predicate it depends on
  bool negated = false;  // of the guard
  int target = -1;       // of a branch
  std::vector<int> operands;  // registers; constants are registers too
  std::vector<int64_t> numbers;
};

// Host memory that a kernel may touch.
struct Allocation {
  uint64_t base, size;
  std::vector<uint64_t> writer, reader;  // by byte: who touched it last (see races.h); empty where races are not looked for
};

struct Copy {  // of one lane: cp.async
  int64_t to;
  uint64_t from;
  int size, num_read;
  bool landed;
};

struct Product {  // wgmma in flight: the shared memory that it may still read, and what that held when it was issued
  std::vector<int64_t> addresses;
  std::vector<uint8_t> bytes;
};

struct Grid;

struct Block {
  Grid& grid;
  uint32_t index[3];
  uint32_t number;
  std::vector<uint8_t> shared;
  std::vector<uint64_t> writer, reader;
  uint32_t epoch = 1;  // barriers passed
};

struct Warp {
  Block& block;
  int number;
  std::vector<uint64_t> registers;
  Mask live = ALL;
  uint32_t at[LANES] = {};  // where each lane is, while they are not at one place
  uint32_t pc = 0;
  bool together = true;
  std::vector<Copy> open_copies;
  std::deque<std::vector<Copy>> copy_groups;
  std::vector<Product> open_products;
  std::deque<std::vector<Product>> product_groups;

  uint64_t* row(int index) { return registers.data() + size_t(index) * LANES; }
};

struct Program {
  std::vector<Instruction> instructions;
  int num_registers = 0, num_threads = 0;
  int special = 0;  // first of the registers tid.x, laneid, ctaid.x y z, nctaid.x y z, warpid, ntid.x
  int parameters = 0, num_parameters = 0;
  std::vector<std::pair<int, uint64_t>> constants;
};

struct Grid {
  const Program& program;
  uint32_t size[3];
  std::vector<Allocation> allocations;  // by base
  size_t last = 0;                      // where the last access was
  std::vector<uint64_t> parameters;
  uint64_t num_shared = 0;
  bool races = true;
  uint64_t most_steps = 0, steps = 0;
  std::mt19937_64 random;
  // Blocks that have announced something at an address (atom.release), and whom each block has heard.
  std::unordered_map<uint64_t, std::vector<uint32_t>> announced;
  std::vector<std::vector<bool>> heard;

  void run();
};

using Table = std::unordered_map<std::string, Handler>;

const Table& handlers();

inline bool on(Mask mask, int lane) { return mask >> lane & 1; }

template <class T>
inline T get(const uint64_t* row, int lane) {
  T value;
  std::memcpy(&value, row + lane, sizeof(T));
  return value;
}

template <class T>
inline void put(uint64_t* row, int lane, T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  row[lane] = bits;
}

}  // namespace ptx
