"""Loops over a row as C text: plain, with row reductions, and in blocks of sixteen groups."""

from __future__ import annotations

from kiln.backends.cpu.abi import Abi
from kiln.backends.cpu.c_body import Body, operand_text
from kiln.backends.cpu.c_expr import NARROW, WIDE, Lanes, c_type, expression
from kiln.backends.cpu.schedule import LOADS, Cut, Schedule, Space, space_of
from kiln.compiler.rowprogram import Instruction
from kiln.ir.diagnostics import LegalityError

BUFFERED = 8192
"""Elements of a row that buffers hold (32 KiB each); the rest of a longer row is computed again."""
ENDLESS = 130
"""Cost of a loop's vector from which wide vectors don't pay."""
HEAVY = 40
"""Cost of a vector from which its code is there once, not for each place in the tree."""

MAX = """\
for (; {limit} - i >= {four}; i += {four}) {{
  {v}_top[0] = vf_max_into(KILN_V(0), {v}_top[0]), {v}_top[1] = vf_max_into(KILN_V(1), {v}_top[1]);
  {v}_top[2] = vf_max_into(KILN_V(2), {v}_top[2]), {v}_top[3] = vf_max_into(KILN_V(3), {v}_top[3]);
}}
for (; {limit} - i >= {unit}; i += {unit}) {v}_top[0] = vf_max_into(KILN_V(0), {v}_top[0]);
if (i < {limit}) {v}_top[0] = vf_max_into({last}, {v}_top[0]), i = {limit};
"""
PLAIN = """\
for (; {limit} - i >= {unit}; i += {unit}) {full};
if (i < {limit}) {last}, i = {limit};
"""
SHARED = """\
for (; i < {limit}; i += {unit}) {{
  const int64_t k = {limit} - i < {unit} ? {limit} - i : {unit};
  {call};
}}
"""
PARTS = """\
while (i < {limit}) {{
  const uint64_t block = (uint64_t)i / 256;
  vf {declared};
#pragma clang loop unroll(disable)
  for (int64_t j = 0; j < {count}; ++j) {{
    const int64_t k = {limit} - i < {unit} ? {limit} - i : {unit};
    if (k > 0) {{
      {call};
      i += k;
    }} else {{
      {clear}
    }}
  }}
{folds}}}
"""
BLOCKS = """\
for (int64_t g = 0; g < n / {size}; g += 16) {{
  const int64_t live = n / {size} - g < 16 ? n / {size} - g : 16;
{inner}}}
"""
REDUCE = """\
vf {v}_part[16];
for (int64_t j = 0; j < 16; ++j) {{
  {v}_part[j] = vf_all(-__builtin_inff());
  for (int64_t t = 0; t < {size} && j < live; t += 16) {{
    const int64_t i = (g + j) * {size} + t;
    {v}_part[j] = vf_max_into({call}, {v}_part[j]);
  }}
}}
#define KILN_V(j) {v}_part[j]
const vf {v} = KILN_FOLD16(pair_max, KILN_V, 0);
#undef KILN_V
"""
USE = """\
for (int64_t j = 0; j < live; ++j) {{
  for (int64_t t = 0; t < {size}; t += 16) {{
    const int64_t i = (g + j) * {size} + t;
    {call};
  }}
}}
"""


def indented(text: str, depth: int) -> str:
    """`text` with every line but preprocessor lines moved right."""
    return "".join(
        line if line.startswith("#") or not line.strip() else "  " * depth + line
        for line in text.splitlines(True)
    )


def is_sum(reduction: Instruction) -> bool:
    """Whether a reduction adds (else it takes the largest)."""
    return reduction.text == "arith.addf"


def fold(function: str, count: int) -> str:
    """`count` vectors KILN_V(0), KILN_V(1), … folded to one."""
    return f"KILN_FOLD{count}({function}, KILN_V, 0)" if count > 1 else "KILN_V(0)"


def lanes_of(schedule: Schedule) -> Lanes:
    """Wide vectors where rows are bf16 for the most part: they need no shuffle then; f32 would need two, and
    f16 has an instruction for neighbours.

    Very long bodies (erf) would spill on SSE2: 48 against 27 ns an element for gelu. So would heavy
    reductions (softmax)."""
    if any(i.name == "kiln.columns" for i in schedule.instructions):
        return NARROW
    rows = [i for i in schedule.instructions if space_of(i.shape) is Space.ROW]
    types = [i.dtype.name for i in rows if i.name in LOADS or i.name == "kiln.store"]
    bf16 = types.count("bf16")
    summed = {schedule.stage[r.args[0]] for r in schedule.reductions if is_sum(r)}
    costs = {
        n: schedule.cost(schedule.needed(schedule.sinks(n), n, whole=True)) for n in range(schedule.last + 1)
    }
    dear = any(cost >= (HEAVY if n in summed else ENDLESS) for n, cost in costs.items())
    return (
        WIDE if bf16 * 2 > len(types) and not dear and "f16" not in types and "i32" not in types else NARROW
    )


class Loops:
    """The loops of one stage of a schedule, as text to be run for one row; `functions` are what they call."""

    def __init__(self, schedule: Schedule, abi: Abi, entry: str, stage: int) -> None:
        self.schedule, self.abi, self.entry, self.stage = schedule, abi, entry, stage
        self.functions: list[str] = []
        self.lanes = lanes_of(schedule)
        self.reductions = [r for r in schedule.reductions if schedule.stage[r.args[0]] == stage]
        stores = [s for s in schedule.stores if schedule.store_stage(s) == stage]
        self.element_stores = [s for s in stores if abi.memory(s.text).space in (Space.ROW, Space.PAIR)]
        self.group_stores = [s for s in stores if abi.memory(s.text).space is Space.GROUP]

    def text(self) -> str:
        """The loops; empty for a stage without any."""
        kept = any(c.stage == self.stage for c in self.schedule.row_buffers())
        if not self.reductions and not self.element_stores and not self.group_stores and not kept:
            return ""
        return self._blocks() if self.schedule.steps(self.stage) else self._simple()

    def _body(
        self,
        name: str,
        step: int,
        stores: list[Instruction],
        reductions: list[Instruction],
        keeps: list[Cut],
        buffers: bool,
        lanes: Lanes,
    ) -> Body:
        body = Body(self.schedule, self.abi, f"{self.entry}_{name}", self.stage, step, buffers, lanes)
        body.build(stores, keeps, reductions)
        self.functions.append(body.text())
        return body

    def _simple(self) -> str:
        """One pass over the row, vector by vector."""
        buffers = self.schedule.row_buffers()
        keeps = [c for c in buffers if c.stage == self.stage]
        split = any(c.stage <= self.stage for c in buffers) and not self.schedule.permuted
        name = f"s{self.stage}"
        bodies = (
            {"near": self._body(name, 0, self.element_stores, self.reductions, keeps, True, self.lanes)}
            if split
            else {}
        )
        name = f"{name}_far" if split else name
        bodies["n"] = self._body(
            name, 0, self.element_stores, self.reductions, [] if split else keeps, not split, self.lanes
        )
        heavy = any(b.cost >= HEAVY for b in bodies.values()) and any(map(is_sum, self.reductions))
        parted = len(self.reductions) > 1 or heavy
        text = "".join(self._accumulators(r) for r in self.reductions) + "int64_t i = 0;\n"
        text += f"const int64_t near = n < {BUFFERED} ? n : {BUFFERED};\n" if split else ""
        text += "".join(self._range(body, limit, parted) for limit, body in bodies.items())
        text += "".join(self._root(r, parted) for r in self.reductions)
        names = "".join(f"float v{r.result};\n" for r in self.reductions)
        return f"{names}{{\n{indented(text, 1)}}}\n"

    def _range(self, body: Body, limit: str, parted: bool) -> str:
        unit = self.lanes.count
        full, last = body.call("i", str(unit)), body.call("i", f"{limit} - i")
        if not self.reductions and body.cost >= HEAVY:
            return SHARED.format(limit=limit, unit=unit, call=body.call("i", "k"))
        if not self.reductions:
            return PLAIN.format(limit=limit, unit=unit, full=full, last=last)
        if parted:
            return self._in_parts(limit, body.call("i", "k"))
        v = f"v{self.reductions[0].result}"
        text = self._sum(v, limit, last)
        if not is_sum(self.reductions[0]):
            text = MAX.format(limit=limit, v=v, last=last, unit=unit, four=4 * unit)
        return f"#define KILN_V(j) {body.call(f'i + {unit} * (j)', str(unit))}\n{text}#undef KILN_V\n"

    def _sum(self, v: str, limit: str, last: str) -> str:
        """Blocks of 256 elements pushed into the tree, then what is left: each power of two in its own
        level."""
        unit = self.lanes.count
        push = f"tree_push({v}_level + 4, (uint64_t)i / 256, {fold('pair_add', 256 // unit)})"
        text = f"for (; {limit} - i >= 256; i += 256) {push};\n"
        for level in range(3, -1, -1):
            size = 16 << level
            if size >= unit:
                subtree = fold("pair_add", size // unit)
                text += f"if (({limit} - i) & {size}) {v}_level[{level}] = {subtree}, i += {size};\n"
        return text + f"if (i < {limit}) {v}_rest = {last}, i = {limit};\n"

    def _in_parts(self, limit: str, call: str) -> str:
        """256 elements' vectors put on the stack, then folded."""
        parts = [f"v{r.result}_part" for r in self.reductions]
        assign = f"{parts[0]}[j] = " if len(parts) == 1 else ""
        identity = ["0.0f" if is_sum(r) else "-__builtin_inff()" for r in self.reductions]
        count = 256 // self.lanes.count
        return PARTS.format(
            limit=limit,
            unit=self.lanes.count,
            count=count,
            declared=", ".join(f"{p}[{count}]" for p in parts),
            call=assign + call,
            clear=" ".join(f"{p}[j] = vf_all({e});" for p, e in zip(parts, identity, strict=True)),
            folds="".join(self._fold(r, p, count) for r, p in zip(self.reductions, parts, strict=True)),
        )

    def _fold(self, reduction: Instruction, part: str, count: int) -> str:
        v = f"v{reduction.result}"
        if not is_sum(reduction):
            return f"  for (int j = 0; j < {count}; ++j) {v}_top[0] = vf_max_into({part}[j], {v}_top[0]);\n"
        push = f"tree_push({v}_level + 4, block, {fold('pair_add', count)});"
        return f"#define KILN_V(j) {part}[j]\n  {push}\n#undef KILN_V\n"

    def _accumulators(self, reduction: Instruction) -> str:
        v = f"v{reduction.result}"
        if is_sum(reduction):
            return f"vf {v}_level[KILN_LEVELS], {v}_rest = {{0}};\n"
        return f"vf {v}_top[4];\nfor (int j = 0; j < 4; ++j) {v}_top[j] = vf_all(-__builtin_inff());\n"

    def _root(self, reduction: Instruction, parted: bool) -> str:
        v = f"v{reduction.result}"
        if not is_sum(reduction):
            pairs = f"vf_max_into({v}_top[0], {v}_top[1]), vf_max_into({v}_top[2], {v}_top[3])"
            return f"{v} = lanes_max(vf_max_into({pairs}));\n"
        if parted:
            return f"{v} = tree_root({v}_level + 4, ((uint64_t)n + 255) / 256, {v}_rest, 0);\n"
        unit = self.lanes.count
        level = f"{v}_level + 1" if unit == 32 else f"{v}_level"
        return f"{v} = tree_root({level}, (uint64_t)n / {unit}, {v}_rest, n % {unit} != 0);\n"

    def _blocks(self) -> str:
        """The row in blocks of sixteen groups: reduce them, compute one vector with a lane a group, use its
        lanes."""
        count = self.schedule.steps(self.stage)
        inside = self.schedule.needed(self.schedule.sinks(self.stage), self.stage, whole=True, buffers=False)
        if self.reductions or any(c.stage == self.stage for c in self.schedule.row_buffers()):
            raise LegalityError(
                "a row reduction or permutation beside a group reduction has no CPU form", "row program"
            )
        bodies, text = [], ""
        groups = [v for v in inside if self.schedule.space(v) is Space.GROUP]
        reduced = {
            self.schedule.step[v]: v for v in groups if self.schedule.defined[v].name == "linalg.reduce"
        }
        for step in range(count):
            if len([v for v in groups if self._reduces(v) and self.schedule.step[v] == step + 1]) != 1:
                raise LegalityError("two group reductions of one step have no CPU form", "linalg.reduce")
            reduction = self.schedule.defined[reduced[step + 1]]
            keeps = self.schedule.block_cuts(self.stage, step)
            bodies.append(self._body(f"s{self.stage}_{step}", step, [], [reduction], keeps, False, NARROW))
        if self.element_stores:
            bodies.append(
                self._body(f"s{self.stage}_{count}", count, self.element_stores, [], [], False, NARROW)
            )
        size = self.schedule.group
        kept = {c.value for b in bodies for c in b.kept.values()}
        text += "".join(f"float v{v}_kept[16 * {size}];\n" for v in sorted(kept))
        for step, body in enumerate(bodies):
            if step == count:
                text += USE.format(size=size, call=body.call("i", "16", block=f"j * {size} + t"))
                continue
            text += self._reduce_groups(reduced[step + 1], body)
            computed = [v for v in groups if self.schedule.step[v] == step + 1 and not self._reduces(v)]
            text += "".join(self._group_value(v) for v in computed)
            later = {v for b in bodies[step + 1 :] for v in b.numbers}
            text += "".join(self._lanes(v) for v in (reduced[step + 1], *computed) if v in later)
            text += "".join(
                self._group_store(s) for s in self.group_stores if self.schedule.step[s.args[0]] == step + 1
            )
        return BLOCKS.format(size=size, inner=indented(text, 1))

    def _reduces(self, value: int) -> bool:
        return self.schedule.defined[value].name == "linalg.reduce"

    def _reduce_groups(self, value: int, body: Body) -> str:
        if self.schedule.defined[value].text != "arith.maxnumf":
            raise LegalityError("sums of groups have no CPU form", "linalg.reduce")
        size = self.schedule.group
        call = body.call("i", "16", block=f"j * {size} + t")
        return REDUCE.format(v=f"v{value}", size=size, call=call)

    def _group_value(self, value: int) -> str:
        i = self.schedule.defined[value]
        text = expression(i, Space.GROUP, lambda a: operand_text(self.schedule, i, Space.GROUP, a))
        return f"const {c_type(i.dtype, Space.GROUP)} v{value} = {text};\n"

    def _lanes(self, value: int) -> str:
        i = self.schedule.defined[value]
        kind, store = ("float", "f32_store") if i.dtype.is_float else ("int32_t", "i32_store")
        return f"{kind} v{value}_lane[16];\n{store}(v{value}_lane, v{value}, 16);\n"

    def _group_store(self, store: Instruction) -> str:
        memory = self.abi.memory(store.text)
        value = f"v{store.args[0]}"
        if memory.layout == "nvfp4_128x4":
            return f"nvfp4_store({memory.name}, m, g, n / 16, {value}, live);\n"
        plain = f"{memory.dtype}_store({memory.name} + g, {value}, live);\n"
        if not memory.column_stride:
            return plain
        target = f"{memory.name}[(g + j) * {memory.column_stride}]"
        apart = f"for (int64_t j = 0; j < live; ++j) {target} = {value}[j];\n"
        return f"if ({memory.column_stride} == 1) {plain}else {apart}"
