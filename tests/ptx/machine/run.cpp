// Runs a grid, and the C functions that machine.py calls.
#include <memory>
#include <numeric>
#include <sstream>

#include "memory.h"

namespace ptx {

namespace {

constexpr int NUM_SPECIAL = 10;
constexpr uint64_t UNSET = 0x7FF7A5A57FA5A5A5ull;  // what a register or shared memory holds before it is written: NaN

struct At {
  Warp& warp;
  uint32_t pc;
};

void preset(Warp& warp) {
  const Program& program = warp.block.grid.program;
  Block& block = warp.block;
  std::fill(warp.registers.begin(), warp.registers.end(), UNSET);
  auto fill = [&](int index, uint64_t value) { std::fill_n(warp.row(index), LANES, value); };
  for (auto [index, value] : program.constants) fill(index, value);
  for (int i = 0; i < program.num_parameters; ++i) fill(program.parameters + i, block.grid.parameters[i]);
  const int s = program.special;
  for (int lane = 0; lane < LANES; ++lane) {
    const int thread = warp.number * LANES + lane;
    warp.row(s)[lane] = uint64_t(thread);
    warp.row(s + 1)[lane] = uint64_t(lane);
    if (thread >= program.num_threads) warp.live &= ~(1u << lane);
  }
  for (int axis = 0; axis < 3; ++axis) fill(s + 2 + axis, block.index[axis]), fill(s + 5 + axis, block.grid.size[axis]);
  fill(s + 8, uint64_t(warp.number));
  fill(s + 9, uint64_t(program.num_threads));
}

// The lanes that go on next: those that are furthest behind, which brings all together again.
Mask next_lanes(Warp& warp) {
  if (warp.together) return warp.live;
  uint32_t least = ~0u;
  for (int lane = 0; lane < LANES; ++lane)
    if (on(warp.live, lane)) least = std::min(least, warp.at[lane]);
  Mask mask = 0;
  for (int lane = 0; lane < LANES; ++lane)
    if (on(warp.live, lane) && warp.at[lane] == least) mask |= 1u << lane;
  warp.pc = least;
  if (mask == warp.live) warp.together = true;
  return mask;
}

void move(Warp& warp, Mask mask, uint32_t to) {
  if (warp.together) {
    warp.pc = to;
    return;
  }
  for (int lane = 0; lane < LANES; ++lane)
    if (on(mask, lane)) warp.at[lane] = to;
}

void part_ways(Warp& warp) {
  if (!warp.together) return;
  std::fill_n(warp.at, LANES, warp.pc);
  warp.together = false;
}

// Until a barrier, or the end; returns whether it is at a barrier.
bool run_warp(Warp& warp) {
  Grid& grid = warp.block.grid;
  const auto& instructions = grid.program.instructions;
  while (warp.live) {
    const Mask mask = next_lanes(warp);
    const uint32_t pc = warp.pc;
    const Instruction& it = instructions[pc];
    if (++grid.steps > grid.most_steps) throw Fault("more steps than a kernel may take: it does not end");
    Mask taken = mask;
    if (it.guard >= 0) {
      const uint64_t* guard = warp.row(it.guard);
      Mask set = 0;
      for (int lane = 0; lane < LANES; ++lane) set |= Mask(guard[lane] & 1) << lane;
      taken &= it.negated ? ~set : set;
    }
    switch (it.kind) {
      case Kind::Run:
        if (taken) it.run(warp, it, taken);
        move(warp, mask, pc + 1);
        break;
      case Kind::Branch:
        if (taken != 0 && taken != mask) part_ways(warp);
        if (warp.together) {
          warp.pc = taken ? uint32_t(it.target) : pc + 1;
        } else {
          move(warp, mask & ~taken, pc + 1);
          move(warp, taken, uint32_t(it.target));
        }
        break;
      case Kind::Exit:
        if (taken != mask) part_ways(warp);
        move(warp, mask & ~taken, pc + 1);
        warp.live &= ~taken;
        break;
      case Kind::Barrier:
        if (mask != warp.live || taken != mask) throw Fault("a barrier that a part of a warp reaches");
        move(warp, mask, pc + 1);
        return true;
    }
  }
  return false;
}

void run_block(Block& block, int num_warps) {
  std::vector<std::unique_ptr<Warp>> warps;
  for (int number = 0; number < num_warps; ++number) {
    auto warp = std::make_unique<Warp>(Warp{block, number, std::vector<uint64_t>(size_t(block.grid.program.num_registers) * LANES)});
    preset(*warp);
    warps.push_back(std::move(warp));
  }
  std::vector<int> order(num_warps);
  std::iota(order.begin(), order.end(), 0);
  while (true) {
    std::shuffle(order.begin(), order.end(), block.grid.random);
    int num_waiting = 0, num_live = 0;
    for (int index : order) {
      Warp& warp = *warps[index];
      if (!warp.live) continue;
      uint32_t where = 0;
      try {
        num_waiting += run_warp(warp);
      } catch (const Fault& fault) {
        where = warp.pc;
        throw Fault(std::string(fault.what()) + "\n" + std::to_string(where) + "\nblock " + std::to_string(block.number) +
                    ", warp " + std::to_string(index));
      }
      num_live += warp.live != 0;
    }
    if (num_live == 0) return;
    (void)num_waiting;
    ++block.epoch;
  }
}

}  // namespace

void Grid::run() {
  const uint32_t num_blocks = size[0] * size[1] * size[2];
  heard.assign(num_blocks, {});
  std::vector<uint32_t> order(num_blocks);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), random);
  const int num_warps = (program.num_threads + LANES - 1) / LANES;
  for (uint32_t number : order) {
    Block block{*this, {number % size[0], number / size[0] % size[1], number / size[0] / size[1]}, number};
    block.shared.resize(num_shared);
    for (size_t i = 0; i < block.shared.size(); ++i) block.shared[i] = uint8_t(UNSET >> (8 * (i % 8)));
    block.writer.resize(num_shared), block.reader.resize(num_shared);
    run_block(block, num_warps);
  }
}

}  // namespace ptx

namespace {

std::string message;

template <class Body>
bool told(Body body) {
  try {
    body();
    return true;
  } catch (const std::exception& error) {
    message = error.what();
    return false;
  }
}

}  // namespace

extern "C" {

const char* ptx_message() { return message.c_str(); }

// One line an instruction: kind, name, guard, negated, target, operands, numbers. None where a name is unknown.
void* ptx_program(const char* text, int num_registers, int num_threads, int special, int parameters, int num_parameters) {
  auto program = std::make_unique<ptx::Program>();
  program->num_registers = num_registers, program->num_threads = num_threads, program->special = special;
  program->parameters = parameters, program->num_parameters = num_parameters;
  const bool done = told([&] {
    std::istringstream lines(text);
    std::string line;
    while (std::getline(lines, line)) {
      std::istringstream in(line);
      std::string kind, name;
      in >> kind;
      if (kind == "constant") {
        int index;
        uint64_t value;
        in >> index >> value;
        program->constants.emplace_back(index, value);
        continue;
      }
      ptx::Instruction it;
      int count;
      in >> name >> it.guard >> it.negated >> it.target >> count;
      it.operands.resize(count);
      for (int& operand : it.operands) in >> operand;
      in >> count;
      it.numbers.resize(count);
      for (int64_t& number : it.numbers) in >> number;
      it.kind = kind == "branch" ? ptx::Kind::Branch : kind == "exit" ? ptx::Kind::Exit
                : kind == "barrier" ? ptx::Kind::Barrier : ptx::Kind::Run;
      if (it.kind == ptx::Kind::Run) {
        auto found = ptx::handlers().find(name);
        if (found == ptx::handlers().end()) throw ptx::Fault("no instruction " + name);
        it.run = found->second;
      }
      program->instructions.push_back(std::move(it));
    }
  });
  return done ? program.release() : nullptr;
}

void ptx_free(void* program) { delete static_cast<ptx::Program*>(program); }

// Returns whether it ran to its end; else `ptx_message` has a line of what is wrong, the instruction's number, where.
bool ptx_launch(void* program, const uint32_t* size, const uint64_t* parameters, const uint64_t* bases,
                const uint64_t* sizes, int num_allocations, uint64_t num_shared, bool races, uint64_t seed,
                uint64_t most_steps, uint64_t* steps) {
  return told([&] {
    const auto& own = *static_cast<ptx::Program*>(program);
    ptx::Grid grid{own, {size[0], size[1], size[2]}};
    for (int i = 0; i < num_allocations; ++i) grid.allocations.push_back({bases[i], sizes[i], {}, {}});
    grid.parameters.assign(parameters, parameters + own.num_parameters);
    grid.num_shared = num_shared, grid.races = races, grid.most_steps = most_steps;
    grid.random.seed(seed);
    try {
      grid.run();
    } catch (...) {
      *steps = grid.steps;
      throw;
    }
    *steps = grid.steps;
  });
}
}
