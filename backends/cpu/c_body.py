"""The innermost function of a loop: one vector of a row, from loads to stores and to what a reduction
takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kiln.backends.cpu.abi import Abi, Memory
from kiln.backends.cpu.c_expr import BARE, NARROW, Lanes, c_type, expression, literal, splat
from kiln.backends.cpu.schedule import LOADS, Cut, Schedule, Space, space_of
from kiln.compiler.rowprogram import Instruction
from kiln.ir.diagnostics import LegalityError


def operand_text(
    schedule: Schedule, user: Instruction, space: Space, value: int, lanes: Lanes = NARROW
) -> str:
    """The text of an operand where `user` is computed in `space`: a number is made a vector where C does not
    do it."""
    i = schedule.defined[value]
    text = f"v{value}"
    if i.name == "arith.constant":
        text = literal(i.constant)
        text = f"({text})" if text.startswith("-") else text
    held = space_of(i.shape)
    single = held is Space.SCALAR or (held is Space.GROUP and space is not Space.GROUP)
    if space is Space.SCALAR or not single:
        return text
    others = [space_of(schedule.defined[a].shape) for a in user.args]
    plain = user.name in BARE and any(o not in (Space.SCALAR, Space.GROUP) or o is space for o in others)
    return text if plain else splat(i, space, text, lanes)


@dataclass
class Body:
    """A function of one vector: its parameters are what its lines use."""

    schedule: Schedule
    abi: Abi
    name: str
    stage: int
    step: int
    buffers: bool = True
    lanes: Lanes = NARROW
    lines: list[str] = field(default_factory=list)
    pointers: set[str] = field(default_factory=set)
    kept: dict[int, Cut] = field(default_factory=dict)
    tables: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    """Values whose buffers are read at any column."""
    numbers: set[int] = field(default_factory=set)
    results: list[Instruction] = field(default_factory=list)
    cost: int = 0
    uses_width: bool = False

    def build(
        self, stores: Iterable[Instruction], keeps: Iterable[Cut], reductions: list[Instruction]
    ) -> Body:
        """Fill in the lines: what `stores` store, what `keeps` put into buffers, what `reductions` take."""
        stores, keeps = list(stores), list(keeps)
        sinks = [*(r.args[0] for r in reductions), *(s.args[0] for s in stores), *(c.value for c in keeps)]
        computed = self.schedule.needed(sinks, self.stage, self.step, buffers=self.buffers)
        self.cost = self.schedule.cost(computed)
        for value in computed:
            if self.schedule.space(value) is not Space.GROUP:
                self._compute(value)
        for store in stores:
            self.lines.append(self._store(store))
        for cut in keeps:
            self.kept[cut.value] = cut
            self.lines.append(
                f"kept_store{self.lanes.suffix}(v{cut.value}_kept, ({self.lanes.f})v{cut.value});"
            )
        self.results = reductions
        texts = [self._result(r) for r in reductions]
        if len(texts) == 1:
            self.lines.append(f"return {texts[0]};")
        else:
            self.lines += [
                f"*v{r.result}_result = {text};" for r, text in zip(reductions, texts, strict=True)
            ]
        return self

    def _result(self, reduction: Instruction) -> str:
        """What the reduction takes: elements beyond the row are the identity, pairs of a wide vector are
        combined."""
        is_sum = reduction.text == "arith.addf"
        kept = f"{self.lanes.f}_keep(v{reduction.args[0]}, k, {'0.0f' if is_sum else '-__builtin_inff()'})"
        return kept if self.lanes is NARROW else f"wf_pair_{'add' if is_sum else 'max'}({kept})"

    def _compute(self, value: int) -> None:
        i = self.schedule.defined[value]
        cut = self.schedule.kept(value, self.stage, self.step, buffers=self.buffers)
        space = self.schedule.space(value)
        kind = c_type(i.dtype, space, self.lanes)
        if cut is not None and cut.operand:
            text = self._load(self.abi.memory(cut.operand))
        elif cut is not None:
            self.kept[value] = cut
            text = f"({kind})kept_load{self.lanes.suffix}(v{value}_kept)"
        elif i.name == "kiln.permute":
            self.whole.add(i.args[0])
            text = f"f32_gather(v{i.args[0]}_row, {self._operand(i, space, i.args[1])}, k)"
        elif i.name == "kiln.take_columns":
            self.tables.add(value)
            text = f"{i.dtype}_gather(v{value}_row, {self._operand(i, space, i.args[1])}, k)"
        elif i.name == "kiln.take_row":
            self.tables.add(value)
            text = f"{i.dtype}_load{self.lanes.suffix}(v{value}_row + i, k)"
        elif i.name in LOADS:
            text = self._load(self.abi.memory(i.text), second_half=i.name == "kiln.half" and i.index == 1)
        else:
            clean = all(self.schedule.clean(a) for a in i.args) if i.name == "arith.truncf" else False
            text = expression(i, space, lambda a: self._operand(i, space, a), self.lanes, clean=clean)
        self.lines.append(f"const {kind} v{value} = {text};")

    def _load(self, memory: Memory, *, second_half: bool = False) -> str:
        self.pointers.add(memory.key)
        self.uses_width |= second_half
        return f"{memory.dtype}_load{self.lanes.suffix}({memory.name}{' + n' if second_half else ''} + i, k)"

    def _operand(self, user: Instruction, space: Space, value: int) -> str:
        i = self.schedule.defined[value]
        if i.name != "arith.constant" and self.schedule.space(value) in (Space.SCALAR, Space.GROUP):
            self.numbers.add(value)
        return operand_text(self.schedule, user, space, value, self.lanes)

    def _store(self, store: Instruction) -> str:
        memory = self.abi.memory(store.text)
        self.pointers.add(memory.key)
        value = self._operand(store, memory.space, store.args[0])
        if memory.space is Space.PAIR:
            if memory.dtype.name != "u8":
                raise LegalityError(
                    f"packed values of type {memory.dtype} have no CPU form; pack u8", store.name
                )
            return f"{'u8x8' if self.lanes is NARROW else 'u8'}_store({memory.name} + i / 2, {value}, k / 2);"
        return f"{memory.dtype}_store{self.lanes.suffix}({memory.name} + i, {value}, k);"

    def parameters(self) -> list[tuple[str, str]]:
        """(C type, name) of each parameter but the position `i` and the count `k`."""
        found = [
            (f"{'' if m.written else 'const '}{m.dtype.c} *", m.name)
            for m in self.abi.memories
            if m.key in self.pointers
        ]
        found += [(f"const {self.schedule.defined[v].dtype.c} *", f"v{v}_row") for v in sorted(self.tables)]
        found += [("const float *", f"v{v}_row") for v in sorted(self.whole)]
        found += [("float *", f"v{value}_kept") for value in sorted(self.kept)]
        found += [("vf *", f"v{r.result}_result") for r in self.results if len(self.results) > 1]
        defined = self.schedule.defined
        found += [(f"{c_type(defined[v].dtype, Space.SCALAR)} ", f"v{v}") for v in sorted(self.numbers)]
        return found + ([("int64_t ", "n")] if self.uses_width else [])

    def text(self) -> str:
        """The function."""
        result = "vf" if len(self.results) == 1 else "void"
        listed = ", ".join(
            kind + name for kind, name in [*self.parameters(), ("int64_t ", "i"), ("int64_t ", "k")]
        )
        inner = "".join(f"  {line}\n" for line in self.lines)
        return f"KILN_INLINE {result} {self.name}({listed})\n{{\n{inner}}}\n"

    def call(self, position: str, count: str, *, lane: str = "j", block: str = "") -> str:
        """A call for the vector at `position`; `lane` is the index of its group, `block` its place in the
        buffers of a block of groups."""
        given = [m.name for m in self.abi.memories if m.key in self.pointers]
        given += [f"v{v}_row" for v in sorted(self.tables)]
        given += [f"v{v}_kept" for v in sorted(self.whole)]
        given += [f"v{v}_kept + {block if c.block else position}" for v, c in sorted(self.kept.items())]
        given += [f"&v{r.result}_part[j]" for r in self.results if len(self.results) > 1]
        given += [
            f"v{v}_lane[{lane}]" if self.schedule.space(v) is Space.GROUP else f"v{v}"
            for v in sorted(self.numbers)
        ]
        given += ["n"] if self.uses_width else []
        return f"{self.name}({', '.join([*given, position, count])})"
