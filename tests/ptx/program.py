"""A PTX kernel as a program of the machine: a line for each instruction, its operands as numbers of registers.

Constants, parameters and special registers are registers that the machine sets before it starts. Instructions
have the names of machine/handlers.cpp; an unknown instruction is refused by its text, never skipped.
"""

import re
from collections.abc import Callable, Sequence

from tests.ptx.names import bits_of, machine_name, parts_of, program_line, space_of
from tests.ptx.statements import PtxError, Register, Statement, Text, read

SPECIAL = ("%tid.x", "%laneid", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%warpid")
SPECIAL += ("%ntid.x",)
FIXED = {"%tid.y": 0, "%tid.z": 0, "%ntid.y": 1, "%ntid.z": 1, "%cluster_ctarank": 0, "%cluster_ctaid.x": 0}
TYPES = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64", "tf32", "e4m3", "e5m2")
"""In the order of machine/convert.h."""
_ROUNDING = {"rn": 0, "rz": 1, "rm": 2, "rp": 3, "rna": 4, "rni": 0, "rzi": 1, "rmi": 2, "rpi": 3}
_HINTS = {"volatile", "relaxed", "weak", "gpu", "sys", "cta", "nc", "ca", "cg", "cs", "cv", "lu", "wb", "wt", "noftz"}
_ORDERED = {"acquire", "release", "acq_rel"}
_INPUTS = {
    1: "neg abs not popc clz brev rcp sqrt rsqrt ex2 lg2 sin cos tanh",
    2: "add sub mul div rem min max and or xor shl shr copysign",
    3: "mad fma bfe prmt shf",
    4: "bfi",
}
_NUM_INPUTS = {name: count for count, names in _INPUTS.items() for name in names.split()}
_CHANGES = ("add", "min", "max", "exch", "cas", "and", "or", "xor")
_NOTHING = {"membar", "fence", "nanosleep", "griddepcontrol", "prefetch", "createpolicy", "setmaxnreg"}


class Program:
    """A kernel that `Machine` can load.

    Args:
        ptx: a module of one kernel.
        without: numbers of instructions that are left out, as mutations of a kernel.

    Raises:
        PtxError: the machine does not know an instruction; names it.
    """

    def __init__(self, ptx: str, without: Sequence[int] = ()) -> None:
        self._text = read(ptx)
        self._num_registers = self._text.num_registers
        self.special = self._take(len(SPECIAL))
        self.parameters = self._take(len(self._text.parameters))
        self._constants: dict[int, int] = {}
        self._addresses: dict[int, list[int]] = {}
        """Parameters by the register that holds their address: one, or two and the predicate that selects the first."""
        lines = []
        for number, statement in enumerate(self._text.statements):
            lines.append(self._line(statement) if number not in without else program_line("run", "nothing"))
        lines.append(program_line("exit", "-"))
        lines += [f"constant {index} {bits}" for bits, index in self._constants.items()]
        self.lines = "\n".join(lines)

    @property
    def text(self) -> Text:
        """Text that the program was made from."""
        return self._text

    @property
    def num_registers(self) -> int:
        """All of them."""
        return self._num_registers

    def _take(self, count: int) -> int:
        first = self._num_registers
        self._num_registers += count
        return first

    def _line(self, it: Statement) -> str:
        guard = -1 if it.guard is None else self._register(it, it.guard).index
        base = it.opcode[0]
        if base in ("ret", "exit"):
            return program_line("exit", "-", guard, it.negated)
        if base == "bra":
            if it.operands[0] not in self._text.labels:
                raise PtxError(f"no label {it.operands[0]}")
            return program_line("branch", "-", guard, it.negated, self._text.labels[it.operands[0]])
        if base in ("bar", "barrier") and it.opcode[1:2] != ("warp",):
            if it.opcode[1] != "sync" or it.operands not in (("0",), ("0", str(self._text.num_threads))):
                raise PtxError(f"unknown: {it.text}")
            return program_line("barrier", "-", guard, it.negated)
        name, operands, numbers = self._instruction(it)
        return program_line("run", name, guard, it.negated, -1, operands, numbers)

    def _instruction(self, it: Statement) -> tuple[str, list[int], list[int]]:
        base = it.opcode[0]
        if base in _NOTHING or (base in ("bar", "barrier") and it.opcode[1] == "warp"):
            return "nothing", [], []
        special: dict[str, Callable[[Statement], tuple[str, list[int], list[int]]]] = {
            "ld": self._load,
            "st": self._store,
            "mov": self._move,
            "cvt": self._convert,
            "cvta": lambda it: ("mov.u64", [self._out(it, 0), self._in(it, 1, 64)], []),
            "setp": self._compare,
            "selp": self._select,
            "cp": self._copy,
            "atom": self._atomic,
            "red": self._atomic,
            "shfl": self._shuffle,
            "vote": self._vote,
            "elect": lambda it: ("elect", [*self._both(it), self._in(it, 1, 32)], []),
            "redux": lambda it: (machine_name("redux", it.opcode[2:]), [self._out(it, 0), *self._ins(it, 1, 32)], []),
            "lop3": lambda it: ("lop3", [self._out(it, 0), *self._ins(it, 1, 32)[:3]], [int(it.operands[4], 0)]),
            "ldmatrix": self._matrices,
            "stmatrix": self._matrices,
            "mma": self._product,
            "wgmma": self._warpgroup_product,
            "trap": lambda it: ("trap", [], []),
        }
        return special[base](it) if base in special else self._plain(it)

    def _plain(self, it: Statement) -> tuple[str, list[int], list[int]]:
        """Arithmetic: a result and up to four operands of one type, but for those named here."""
        base, *middle, kind = it.opcode
        middle = [part for part in middle if part not in ("rn", "uni", *_HINTS)]
        if base in ("min", "max") and len(it.operands) == 4:
            base = f"{base}3"
        elif _NUM_INPUTS.get(base) != len(it.operands) - 1:
            raise PtxError(f"unknown: {it.text}")
        width = bits_of(kind)
        widths = [width] * (len(it.operands) - 1)
        if base in ("shl", "shr"):
            widths[1] = 32
        if base in ("bfe", "bfi"):
            widths[-2:] = [32, 32]
        if base == "shf":
            widths = [32] * 3
        if middle[-1:] == ["f32"]:  # of halves, with a single as the last operand
            widths[-1] = 32
        if "wide" in middle and base == "mad":
            widths[2] = 2 * width
        operands = [self._value(it, text, size) for text, size in zip(it.operands[1:], widths, strict=True)]
        return machine_name(base, [*middle, kind]), [self._out(it, 0), *operands], []

    def _move(self, it: Statement) -> tuple[str, list[int], list[int]]:
        width = bits_of(it.opcode[-1])
        to, source = it.operands
        if source.startswith("{"):
            parts = parts_of(source)
            size = width // len(parts)
            return "pack", [self._out(it, 0), *(self._value(it, part, size) for part in parts)], [size]
        if to.startswith("{"):
            parts = parts_of(to)
            outs = [-1 if part == "_" else self._register(it, part).index for part in parts]
            return "unpack", [self._value(it, source, width), *outs], [width // len(parts)]
        if source in self._text.parameters:
            self._addresses[self._out(it, 0)] = [self.parameters + self._text.parameters.index(source)]
            return "nothing", [], []
        name = "mov.pred" if it.opcode[-1] == "pred" else f"mov.u{width}"
        return name, [self._out(it, 0), self._value(it, source, width)], []

    def _select(self, it: Statement) -> tuple[str, list[int], list[int]]:
        width = bits_of(it.opcode[-1])
        places = [self._address_in(it, text) for text in it.operands[1:3]]
        if all(len(place) == 1 for place in places):
            self._addresses[self._out(it, 0)] = [*places[0], *places[1], self._value(it, it.operands[3], 8)]
            return "nothing", [], []
        values = [self._value(it, text, width) for text in it.operands[1:3]]
        return f"selp.u{width}", [self._out(it, 0), *values, self._value(it, it.operands[3], 8)], []

    def _compare(self, it: Statement) -> tuple[str, list[int], list[int]]:
        width = bits_of(it.opcode[-1])
        operands = [*self._both(it), *(self._value(it, text, width) for text in it.operands[1:3])]
        operands += [self._value(it, text, 8) for text in it.operands[3:]]
        return machine_name("setp", it.opcode[1:]), operands, []

    def _convert(self, it: Statement) -> tuple[str, list[int], list[int]]:
        *flags, to, source = it.opcode[1:]
        count = 2 if to.endswith("x2") else 1
        kinds = [TYPES.index(kind.removesuffix("x2")) for kind in (to, source)]
        modes = [flag for flag in flags if flag in _ROUNDING]
        known = {"sat", "satfinite", "ftz", "relu", *_ROUNDING}
        if len(modes) > 1 or not known.issuperset(flags):
            raise PtxError(f"unknown: {it.text}")
        reals = [kind >= TYPES.index("f16") for kind in kinds]
        whole = bool(modes) and modes[0].endswith("i") and all(reals)
        to_zero = "sat" in flags and reals[0]
        saturates = "satfinite" in flags or ("sat" in flags and not reals[0])
        numbers = [*kinds, _ROUNDING[modes[0]] if modes else 0, saturates, to_zero, "ftz" in flags, "relu" in flags]
        register = self._register(it, it.operands[0])
        width = bits_of(source) if count == 1 or not source.endswith("x2") else 8 * {"e": 2, "f": 4, "b": 4}[source[0]]
        operands = [register.index, *(self._value(it, text, width) for text in it.operands[1:])]
        return "cvt", operands, [int(number) for number in (*numbers, whole, register.width, count)]

    def _load(self, it: Statement) -> tuple[str, list[int], list[int]]:
        space, kind = space_of(it), it.opcode[-1]
        outs = [self._register(it, text) for text in parts_of(it.operands[0])]
        if space == "param":
            name = it.operands[1].strip("[] ")
            selected = self._address_in(it, name)
            if (name not in self._text.parameters and not selected) or len(outs) > 1:
                raise PtxError(f"unknown: {it.text}")
            source = selected or [self.parameters + self._text.parameters.index(name)]
            return f"{'selp' if len(source) > 1 else 'mov'}.u{bits_of(kind)}", [outs[0].index, *source], []
        base, offset = self._address(it, it.operands[1], space)
        numbers = [offset, bits_of(kind) // 8, kind[0] == "s", outs[0].width // 8]
        return f"ld.{space}", [*(out.index for out in outs), base], [int(number) for number in numbers]

    def _store(self, it: Statement) -> tuple[str, list[int], list[int]]:
        space, width = space_of(it), bits_of(it.opcode[-1])
        base, offset = self._address(it, it.operands[0], space)
        values = [self._value(it, text, width) for text in parts_of(it.operands[1])]
        return f"st.{space}", [base, *values], [offset, width // 8]

    def _copy(self, it: Statement) -> tuple[str, list[int], list[int]]:
        if it.opcode[:2] != ("cp", "async") or "bulk" in it.opcode or "mbarrier" in it.opcode:
            raise PtxError(f"unknown: {it.text}")
        if "commit_group" in it.opcode:
            return "cp.async.commit", [], []
        if "wait_group" in it.opcode:
            return "cp.async.wait", [], [int(it.operands[0], 0), 0]
        if "wait_all" in it.opcode:
            return "cp.async.wait", [], [0, 1]
        to, to_offset = self._address(it, it.operands[0], "shared")
        source, offset = self._address(it, it.operands[1], "global")
        size = int(it.operands[2], 0)
        read_bytes = self._value(it, it.operands[3], 32) if it.operands[3:] else self._constant(size)
        return "cp.async", [to, source, read_bytes], [to_offset, offset, size]

    def _atomic(self, it: Statement) -> tuple[str, list[int], list[int]]:
        space, kind = space_of(it), it.opcode[-1]
        change = next(
            (part for part in it.opcode if part in ("add", "min", "max", "exch", "cas", "and", "or", "xor")), "?"
        )
        given = it.operands if it.opcode[0] == "atom" else ("_", *it.operands)
        base, offset = self._address(it, given[1], space)
        out = -1 if given[0] == "_" else self._register(it, given[0]).index
        values = [self._value(it, text, bits_of(kind)) for text in given[2:]]
        ordered = int(bool(_ORDERED.intersection(it.opcode)))
        return machine_name("atom", [space, change, kind]), [out, base, *values], [offset, ordered]

    def _shuffle(self, it: Statement) -> tuple[str, list[int], list[int]]:
        return f"shfl.{it.opcode[2]}", [*self._both(it), *self._ins(it, 1, 32)], []

    def _vote(self, it: Statement) -> tuple[str, list[int], list[int]]:
        predicate = it.operands[1]
        operands = [self._out(it, 0), self._value(it, predicate.lstrip("!"), 8), self._value(it, it.operands[2], 32)]
        return f"vote.{it.opcode[2]}", operands, [int(predicate.startswith("!"))]

    def _matrices(self, it: Statement) -> tuple[str, list[int], list[int]]:
        base = it.opcode[0]
        if "m8n8" not in it.opcode or it.opcode[-1] != "b16":
            raise PtxError(f"unknown: {it.text}")
        count = next(int(part[1:]) for part in it.opcode if part in ("x1", "x2", "x4"))
        at, registers = (1, 0) if base == "ldmatrix" else (0, 1)
        address, offset = self._address(it, it.operands[at], "shared")
        own = [self._register(it, text).index for text in parts_of(it.operands[registers])]
        operands = [*own, address] if base == "ldmatrix" else [address, *own]
        return base, operands, [offset, count, int("trans" in it.opcode)]

    def _product(self, it: Statement) -> tuple[str, list[int], list[int]]:
        shape = re.fullmatch(r"m16n8k(\d+)", it.opcode[3])
        types = it.opcode[6:]
        if shape is None or it.opcode[4:6] != ("row", "col") or types[0] != "f32" or types[1] != types[2]:
            raise PtxError(f"unknown: {it.text}")
        operands = [self._value(it, text, 32) for group in it.operands for text in parts_of(group)]
        return f"mma.k{shape[1]}.{types[1]}", operands, []

    def _warpgroup_product(self, it: Statement) -> tuple[str, list[int], list[int]]:
        if it.opcode[1] == "fence":
            return "nothing", [], []
        if it.opcode[1] == "commit_group":
            return "wgmma.commit", [], []
        if it.opcode[1] == "wait_group":
            return "wgmma.wait", [], [int(it.operands[0])]
        shape = re.fullmatch(r"m64n(\d+)k(\d+)", it.opcode[4])
        result, a, b, adds, *scales = it.operands
        halves = it.opcode[-1] in ("f16", "bf16")
        in_registers = a.startswith("{")
        if shape is None or it.opcode[5] != "f32" or scales[:2] != ["1", "1"]:
            raise PtxError(f"unknown: {it.text}")
        turned = [int(flag) for flag in scales[2:]] if halves else [0]
        transposed = [0, turned[0]] if in_registers or not halves else turned
        operands = [self._register(it, text).index for text in parts_of(result)]
        operands += [self._value(it, text, 32 if in_registers else 64) for text in parts_of(a)]
        operands += [self._value(it, b, 64), self._value(it, adds, 8)]
        return f"wgmma.k{shape[2]}.{it.opcode[-1]}", operands, [int(shape[1]), int(in_registers), *transposed]

    def _address(self, it: Statement, text: str, space: str) -> tuple[int, int]:
        """Register and offset of `[register + offset]`."""
        found = re.fullmatch(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+)\s*)?\]", text)
        if found is None:
            raise PtxError(f"unknown: {it.text}")
        return self._value(it, found[1], 64 if space == "global" else 32), int(found[2] or "0", 0)

    def _both(self, it: Statement) -> list[int]:
        """A result and its second, `a|b`, -1 where there is none."""
        names = it.operands[0].split("|")
        found = [-1 if name == "_" else self._register(it, name).index for name in names]
        return [*found, -1][:2]

    def _out(self, it: Statement, at: int) -> int:
        return self._register(it, it.operands[at]).index

    def _in(self, it: Statement, at: int, width: int) -> int:
        return self._value(it, it.operands[at], width)

    def _ins(self, it: Statement, first: int, width: int) -> list[int]:
        return [self._value(it, text, width) for text in it.operands[first:]]

    def _register(self, it: Statement, name: str) -> Register:
        if name not in it.registers:
            raise PtxError(f"no register {name}: {it.text}")
        return it.registers[name]

    def _address_in(self, it: Statement, text: str) -> list[int]:
        """The parameters whose address an operand holds; empty for other operands."""
        return self._addresses.get(it.registers[text].index, []) if text in it.registers else []

    def _value(self, it: Statement, text: str, width: int) -> int:
        """The register of an operand, or that of its constant."""
        if self._address_in(it, text):
            raise PtxError(f"{text} is the address of a parameter: {it.text}")
        if text in it.registers:
            return it.registers[text].index
        if text in SPECIAL:
            return self.special + SPECIAL.index(text)
        if text in FIXED:
            return self._constant(FIXED[text])
        if text == "global_smem":
            return self._constant(0)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
            return self._constant(int(text[2:], 16))
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            return self._constant(int(text.rstrip("U"), 0) & ((1 << width) - 1))
        raise PtxError(f"what is {text}: {it.text}")

    def _constant(self, bits: int) -> int:
        if bits not in self._constants:
            self._constants[bits] = self._take(1)
        return self._constants[bits]
