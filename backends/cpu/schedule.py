"""How a row of a row program is walked: in which loop each value is computed, what is kept between loops,
when each output is stored.

A row reduction ends a loop over the row, and so does a permutation: *stage* s runs after s of them. A
reduction of groups ends a *step* inside a stage: sixteen groups are reduced, then used. A value that several
loops need is computed again from memory, unless it was stored to an output (then it is read back) or is dear
(then it is kept in a buffer)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from kiln.compiler.rowprogram import Instruction, RowProgram
from kiln.ir.diagnostics import LegalityError
from kiln.ir.dtypes import BF16, F16
from kiln.ir.language import Shape

COSTS = {
    "arith.divf": 12,
    "math.sqrt": 12,
    "arith.truncf": 6,
    "math.fma": 4,
    "kiln.load": 2,
    "kiln.half": 2,
    "kiln.take_row": 2,
    "kiln.permute": 4,
}
"""Instructions of a vector, roughly; one for what is not named."""
ALIASES = frozenset(
    {"tensor.splat", "tensor.expand_shape", "tensor.collapse_shape", "arith.extf", "linalg.broadcast"}
)
"""Operations whose result is held like their operand."""
LOADS = frozenset({"kiln.load", "kiln.half", "kiln.take_row", "kiln.take_columns"})
SINGLE = frozenset({"kiln.load", "kiln.take_element", "kiln.row", "linalg.reduce"})
"""Operations whose scalar result differs from row to row."""
DEAR_ROW = 16
"""Cost from which a value is kept for a whole row rather than computed again."""
DEAR_BLOCK = 4
"""The same within a block of sixteen groups, whose buffer stays in the first-level cache."""


class Space(Enum):
    """How a value is held: once a row, a lane an element, a lane two elements, a lane a group, or only in
    memory."""

    SCALAR = "scalar"
    ROW = "row"
    PAIR = "pair"
    GROUP = "group"
    MEMORY = "memory"


def space_of(shape: Shape) -> Space:
    """The space of a value; LegalityError for shapes that this backend cannot hold."""
    if shape.fraction is None:
        return Space.SCALAR
    density = shape.fraction * shape.inner
    if density == 1:
        return Space.ROW
    if density == 2 and shape.inner == 1:
        return Space.MEMORY
    if shape.inner == 1 and density.numerator == 1 and density.denominator == 2:
        return Space.PAIR
    if shape.inner == 1 and density.numerator == 1 and density.denominator % 16 == 0:
        return Space.GROUP
    raise LegalityError(
        f"a value of shape {shape} has no vector form; group by 2 or by a multiple of 16", "row program"
    )


def normalized(program: RowProgram) -> tuple[Instruction, ...]:
    """The program without operations that change nothing; a half becomes a load of its own."""
    root: dict[int, int] = {}
    memory: dict[int, str] = {}
    made: list[Instruction] = []
    for i in program.instructions:
        args = tuple(root.get(a, a) for a in i.args)
        if i.result >= 0 and space_of(i.shape) is Space.MEMORY:
            memory[i.result] = i.text
        elif i.name in ALIASES:
            root[i.result] = args[0]
        elif i.name == "kiln.half":
            made.append(replace(i, args=(), text=memory[args[0]]))
        else:
            made.append(replace(i, args=args))
    return tuple(made)


@dataclass(frozen=True)
class Cut:
    """A row value that is kept from (stage, step) to later loops: in the memory of output `operand`, or in a
    buffer.

    `block` cuts live within a block of sixteen groups: from one step to the next of the same stage.
    """

    value: int
    stage: int
    step: int
    operand: str = ""
    block: bool = False


class Schedule:
    """The analysis of one row program. Values are numbered as in the program; see the module docstring for
    stages and steps."""

    def __init__(self, program: RowProgram) -> None:
        self.instructions = normalized(program)
        self.defined = {i.result: i for i in self.instructions if i.result >= 0}
        self.order = {i.result: n for n, i in enumerate(self.instructions) if i.result >= 0}
        self.stage: dict[int, int] = {}
        self.step: dict[int, int] = {}
        for i in self.instructions:
            self._place(i)
        self.stores = tuple(i for i in self.instructions if i.name == "kiln.store")
        self.reductions = tuple(
            i for i in self.instructions if i.name == "linalg.reduce" and i.shape.is_scalar
        )
        self.permuted = frozenset(i.args[0] for i in self.instructions if i.name == "kiln.permute")
        """Row values that are read at other columns: their buffers hold the whole row."""
        self.group = self._group_size()
        self.last = max(self.stage[i.args[0]] for i in (*self.reductions, *self.stores))
        self.cuts: tuple[Cut, ...] = ()
        self.deferred: set[str] = set()
        self._settle()

    def _place(self, i: Instruction) -> None:
        stage = max((self.stage[a] for a in i.args), default=0)
        step = max((self.step[a] for a in i.args), default=0)
        if i.name == "linalg.reduce" and not i.shape.is_scalar:
            step += 1
        elif i.name in ("linalg.reduce", "kiln.permute"):
            if step:
                raise LegalityError(
                    f"{i.name} of values that depend on a group reduction has no CPU form", i.name
                )
            stage = max(stage, self.stage[i.args[0]] + 1)
        if i.result >= 0:
            self.stage[i.result], self.step[i.result] = stage, step

    def _group_size(self) -> int:
        grouped = (i.shape.fraction for i in self.defined.values() if space_of(i.shape) is Space.GROUP)
        sizes = {f.denominator for f in grouped if f is not None}
        if len(sizes) > 1:
            listed = " and ".join(map(str, sorted(sizes)))
            raise LegalityError(
                f"groups of {listed} in one kernel have no CPU form; use one size", "row program"
            )
        return sizes.pop() if sizes else 16

    def space(self, value: int) -> Space:
        """The space of a value."""
        return space_of(self.defined[value].shape)

    def uniform(self, value: int) -> bool:
        """Whether a scalar is the same for all rows."""
        i = self.defined[value]
        return i.name not in SINGLE and all(self.uniform(a) for a in i.args)

    def clean(self, value: int) -> bool:
        """Whether NaN in a float value has no bit set in its lower half: NaN from bf16 and from arithmetic
        has not."""
        i = self.defined[value]
        if i.name in LOADS:
            return i.dtype is BF16
        if i.name in ("arith.constant", "kiln.argument", "arith.sitofp", "arith.truncf"):
            return i.dtype is not F16
        return i.name != "arith.bitcast" and all(
            self.clean(a) for a in i.args if self.defined[a].dtype.is_float
        )

    def store_stage(self, store: Instruction) -> int:
        """The stage in whose loop an output is stored."""
        return self.last if store.text in self.deferred else self.stage[store.args[0]]

    def sinks(self, stage: int, buffers: bool = True) -> list[int]:
        """Row values that the loops of a stage are run for: reduced, stored, or put into a buffer for later
        stages."""
        reduced = [r.args[0] for r in self.reductions if self.stage[r.args[0]] == stage]
        stored = [s.args[0] for s in self.stores if self.store_stage(s) == stage]
        kept = [c.value for c in self.cuts if buffers and not c.block and not c.operand and c.stage == stage]
        return [v for v in (*reduced, *stored, *kept) if self.space(v) is not Space.SCALAR]

    def needed(
        self, sinks: Iterable[int], stage: int, step: int = 0, *, whole: bool = False, buffers: bool = True
    ) -> list[int]:
        """Values to compute in loop (stage, step) for `sinks`, in program order; what is kept from earlier
        loops ends the search.

        Scalars are left out. Values of groups end it too, since they are computed between the steps, unless
        `whole`. Without `buffers`, row buffers are not used (the part of a row that is beyond them)."""
        found: set[int] = set()
        todo = list(sinks)
        while todo:
            value = todo.pop()
            if value in found or self.space(value) is Space.SCALAR:
                continue
            found.add(value)
            between = self.space(value) is Space.GROUP and not whole
            if between or self.kept(value, stage, step, buffers=buffers) is not None:
                continue
            i = self.defined[value]
            turned = i.name == "kiln.permute" and self.kept(i.args[0], stage, step) is not None
            todo += i.args[1:] if turned else i.args
        return sorted(found, key=self.order.__getitem__)

    def kept(self, value: int, stage: int, step: int, *, buffers: bool = True) -> Cut | None:
        """Where loop (stage, step) finds the value, if it need not compute it."""
        for c in self.cuts:
            whole = buffers or bool(c.operand) or value in self.permuted
            earlier = (c.stage == stage and c.step < step) if c.block else (c.stage < stage and whole)
            if c.value == value and earlier:
                return c
        return None

    def steps(self, stage: int) -> int:
        """Number of group reductions that follow each other in a stage."""
        inside = self.needed(self.sinks(stage), stage, 0, whole=True)
        return max((self.step[v] for v in inside), default=0)

    def block_cuts(self, stage: int, step: int) -> list[Cut]:
        """What a step of a stage keeps for its later steps."""
        return [c for c in self.cuts if c.block and (c.stage, c.step) == (stage, step)]

    def row_buffers(self) -> list[Cut]:
        """What is kept in buffers for later stages."""
        return [c for c in self.cuts if not c.block and not c.operand]

    def cost(self, values: Iterable[int]) -> int:
        """Work to compute `values` for one vector."""
        rows = (self.defined[v] for v in values if self.space(v) in (Space.ROW, Space.PAIR))
        return sum(COSTS.get(i.name, 1) for i in rows)

    def _settle(self) -> None:
        """Choose cuts; an output whose early store could overwrite what later loops read is stored in the
        last stage instead."""
        while True:
            self.cuts = ()
            for stage in range(self.last + 1):
                self._cut_stage(stage)
            for stage in range(self.last + 1):
                self._cut_steps(stage)
            unsafe = {s.text for s in self.stores if s.text not in self.deferred and self._overwrites(s)}
            if not unsafe:
                return
            self.deferred |= unsafe

    def _crossing(self, inside: Iterable[int], rank: dict[int, int], at: int) -> Iterable[int]:
        """Row values of rank `at` that values of higher rank use; a reduction uses its operand in the
        operand's own loop."""
        users = (self.defined[v] for v in inside if rank[v] > at)
        used = {a for i in users if i.name != "linalg.reduce" for a in i.args}
        return [
            v
            for v in sorted(used, key=self.order.__getitem__)
            if rank[v] == at and self.space(v) is Space.ROW
        ]

    def _cut_stage(self, stage: int) -> None:
        later = {
            v for s in range(stage + 1, self.last + 1) for v in self.needed(self.sinks(s), s, whole=True)
        }
        own = self.needed(self.sinks(stage), stage, whole=True)
        stored = {
            s.args[0]: s.text
            for s in self.stores
            if self.store_stage(s) == stage and space_of(s.shape) is Space.ROW
        }
        for value in self._crossing(later, self.stage, stage):
            if value in self.permuted:
                self.cuts += (Cut(value, stage, 0),)
            elif value in stored:
                self.cuts += (Cut(value, stage, 0, stored[value]),)
            elif (
                value in own
                and self.step[value] == 0
                and self.cost(self.needed([value], stage + 1)) >= DEAR_ROW
            ):
                self.cuts += (Cut(value, stage, 0),)

    def _cut_steps(self, stage: int) -> None:
        inside = self.needed(self.sinks(stage), stage, whole=True)
        for step in range(self.steps(stage)):
            reduced = [
                self.defined[v].args[0]
                for v in inside
                if self.step[v] == step + 1 and self.defined[v].name == "linalg.reduce"
            ]
            own = self.needed(reduced, stage, step)
            for value in self._crossing(inside, self.step, step):
                if value in own and self.cost(self.needed([value], stage, step)) >= DEAR_BLOCK:
                    self.cuts += (Cut(value, stage, step, block=True),)

    def _overwrites(self, store: Instruction) -> bool:
        """Whether a loop after the store reads an input that may be the same memory: an in-place call."""
        if space_of(store.shape) is not Space.ROW:
            return False
        for stage in range(self.store_stage(store) + 1, self.last + 1):
            for v in self.needed(self.sinks(stage, buffers=False), stage, whole=True, buffers=False):
                i = self.defined[v]
                fresh = self.kept(v, stage, 0, buffers=False) is None
                if fresh and i.name == "kiln.load" and i.index == 1 and i.dtype is store.dtype:
                    return True
        return False
