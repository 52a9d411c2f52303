"""Activations, element-wise glue, casts and copies (KERNEL-EW-NORM-ACT): what each means. No target is
named in this file.
"""

from kiln.ir.dtypes import BF16, F16, F32, I32, I64
from kiln.ir.language import Value, erf, halves, is_nan, logistic, select, take_row, tanh
from kiln.ir.spec import DTypeVar, Op, Scalar, Ship, Tensor

FAMILY = "KERNEL-EW-NORM-ACT"
T = DTypeVar("T", (BF16, F16, F32))
U = DTypeVar("U", (BF16, F16, F32))
O = DTypeVar("O", (BF16, F16, F32))  # noqa: E741  the sheet's name for the output type
EACH = (Ship({"T": BF16}), Ship({"T": F32}))
RARE = (Ship({"T": F32}, rare=True), Ship({"T": F16}, rare=True))
LATENCY = (Ship({"T": BF16}, latency=True), *RARE)
GELU_SCALE = 0.7978845608028654
"""sqrt(2 / pi)."""


def silu(x: Value) -> Value:
    """x / (1 + exp(-x)): -0 for x = -100 (exp is out of range), NaN for -inf."""
    return x * logistic(x)


def sigmoid(x: Value) -> Value:
    """1 / (1 + exp(-x))."""
    return logistic(x)


def relu(x: Value) -> Value:
    """x above 0, NaN for NaN, else +0."""
    return select(x > 0.0, x, select(is_nan(x), x, 0.0))


def gelu(x: Value) -> Value:
    """x/2 (1 + erf(x / sqrt 2))."""
    return 0.5 * x * (1.0 + erf(x * 0.7071067811865476))


def gelu_tanh(x: Value) -> Value:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x**3)))."""
    return 0.5 * x * (1.0 + tanh(GELU_SCALE * (x + 0.044715 * (x * x * x))))


def gelu_quick(x: Value) -> Value:
    """x sigmoid(1.702 x)."""
    return x * logistic(x * 1.702)


ACTIVATIONS = {
    "silu": silu,
    "sigmoid": sigmoid,
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_quick": gelu_quick,
}
"""Activations by name, f32 to f32."""
DECODED = frozenset({"silu", "gelu", "gelu_tanh"})
"""Activations that decoding models call alone."""


def gate_activation(x: Value, kind: str) -> Value:
    """The activation `kind` of a gate."""
    return ACTIVATIONS[kind](x)


def _unary_op(name: str) -> Op:
    function = ACTIVATIONS[name]

    def body(x: Value) -> Value:
        return function(x.to(F32))

    operands = (Tensor("x", T, ("M", "N")), Tensor("out", T, ("M", "N"), "out"))
    return Op(
        name,
        FAMILY,
        operands,
        body=body,
        ship=LATENCY if name in DECODED else (EACH[0], *RARE),
        doc=function.__doc__ or "",
    )


UNARY = tuple(_unary_op(name) for name in ACTIVATIONS)


def _gated_op(name: str, activation: str, ship: tuple[Ship, ...]) -> Op:
    function = ACTIVATIONS[activation]

    def body(x: Value) -> Value:
        gate, up = halves(x)
        return function(gate.to(F32)) * up.to(F32)

    operands = (Tensor("x", T, ("M", ["mul", 2, ["dim", "N"]])), Tensor("out", T, ("M", "N"), "out"))
    return Op(
        name, FAMILY, operands, body=body, ship=ship, doc=f"{activation}(gate) * up of one [gate | up] row"
    )


SILU_AND_MUL = _gated_op("silu_and_mul", "silu", LATENCY)
GELU_AND_MUL = _gated_op("gelu_and_mul", "gelu", LATENCY)
GELU_TANH_AND_MUL = _gated_op("gelu_tanh_and_mul", "gelu_tanh", LATENCY)


def _silu_mul(gate: Value, up: Value) -> Value:
    return silu(gate.to(F32)) * up.to(F32)


SILU_MUL = Op(
    "silu_mul",
    FAMILY,
    (Tensor("gate", T, ("M", "N")), Tensor("up", T, ("M", "N")), Tensor("out", O, ("M", "N"), "out")),
    body=_silu_mul,
    ship=(
        Ship({"T": BF16, "O": BF16}, latency=True),
        Ship({"T": F16, "O": F16}, rare=True),
        Ship({"T": F32, "O": F32}, rare=True),
    ),
    doc="silu(gate) * up of two rows",
)


def _sigmoid_gate(x: Value, gate: Value) -> Value:
    return x.to(F32) * sigmoid(gate.to(F32))


SIGMOID_GATE = Op(
    "sigmoid_gate",
    FAMILY,
    (
        Tensor("x", T, ("M", "N")),
        Tensor("gate", U, ("M", "N"), doc="f32 stays unrounded"),
        Tensor("out", O, ("M", "N"), "out"),
    ),
    body=_sigmoid_gate,
    ship=(
        Ship({"T": BF16, "U": F32, "O": BF16}),
        Ship({"T": BF16, "U": BF16, "O": BF16}, rare=True),
        Ship({"T": F32, "U": F32, "O": BF16}, rare=True),
    ),
    doc="x * sigmoid(gate)",
)


def _add(a: Value, b: Value) -> Value:
    return a.to(F32) + b.to(F32)


ADD = Op(
    "add",
    FAMILY,
    (Tensor("a", T, ("M", "N")), Tensor("b", U, ("M", "N")), Tensor("out", U, ("M", "N"), "out")),
    body=_add,
    ship=(
        Ship({"T": BF16, "U": BF16}, unaligned=True),
        Ship({"T": BF16, "U": F32}),
        Ship({"T": F32, "U": F32}),
        Ship({"T": F16, "U": F16}, rare=True),
    ),
    doc="a + b in f32, rounded once to b's type (the residual stream's)",
)

ADD_BIAS = Op(
    "add_bias",
    FAMILY,
    (Tensor("a", T, ("M", "N")), Tensor("bias", U, ("N",)), Tensor("out", T, ("M", "N"), "out")),
    body=lambda a, bias: a.to(F32) + bias.to(F32),
    ship=(Ship({"T": BF16, "U": BF16}),),
    doc="a + one row for all rows",
)

MUL = Op(
    "mul",
    FAMILY,
    (Tensor("a", T, ("M", "N")), Tensor("b", T, ("M", "N")), Tensor("out", T, ("M", "N"), "out")),
    body=lambda a, b: a.to(F32) * b.to(F32),
    ship=(Ship({"T": BF16}), Ship({"T": F32}, rare=True)),
    doc="a * b in f32, rounded once",
)

MUL_SCALAR = Op(
    "mul_scalar",
    FAMILY,
    (Tensor("x", T, ("M", "N")), Scalar("factor", F32), Tensor("out", T, ("M", "N"), "out")),
    body=lambda x, factor: x.to(F32) * factor,
    ship=(Ship({"T": BF16}), Ship({"T": F32}, rare=True)),
    doc="x * factor",
)

MUL_COLUMNS = Op(
    "mul_col_vec",
    FAMILY,
    (Tensor("x", T, ("M", "N")), Tensor("alpha", F32, ("N",)), Tensor("out", T, ("M", "N"), "out")),
    body=lambda x, alpha: x.to(F32) * alpha,
    ship=(Ship({"T": BF16}), Ship({"T": F32}, rare=True)),
    doc="x[m, n] * alpha[n]",
)

SOFT_CAP = Op(
    "soft_cap",
    FAMILY,
    (
        Tensor("x", T, ("M", "N")),
        Scalar("cap", F32, minimum=0.0, positive=True),
        Tensor("out", T, ("M", "N"), "out"),
    ),
    body=lambda x, cap: cap * tanh(x.to(F32) / cap),
    ship=(Ship({"T": F32}), Ship({"T": BF16}, rare=True)),
    doc="cap * tanh(x / cap)",
)

CAST = Op(
    "cast",
    FAMILY,
    (Tensor("x", T, ("M", "N")), Tensor("out", O, ("M", "N"), "out")),
    body=lambda x: x,
    ship=tuple(Ship({"T": a, "O": b}) for a, b in ((F32, BF16), (BF16, F32)))
    + tuple(Ship({"T": a, "O": b}, rare=True) for a, b in ((F32, F16), (F16, F32), (F16, BF16), (BF16, F16))),
    doc="convert, rounding once to nearest even",
)

COPY = Op(
    "copy",
    FAMILY,
    (Tensor("x", T, ("M", "N")), Tensor("out", T, ("M", "N"), "out")),
    body=lambda x: x,
    ship=(Ship({"T": BF16}, unaligned=True), Ship({"T": F32})),
    doc="copy rows between strides: splits and concatenations are copies of column views",
)

EMBEDDING = Op(
    "embedding",
    FAMILY,
    (
        Tensor("table", T, ("V", "N")),
        Tensor("ids", DTypeVar("I", (I32, I64)), ("M",)),
        Tensor("out", T, ("M", "N"), "out"),
    ),
    body=lambda table, ids: take_row(table, ids),
    ship=tuple(Ship({"T": t, "I": i}) for t, i in ((BF16, I32), (BF16, I64))),
    doc="out[t] = table[ids[t]]",
)

OPS: tuple[Op, ...] = (
    *UNARY, SILU_AND_MUL, GELU_AND_MUL, GELU_TANH_AND_MUL, SILU_MUL, SIGMOID_GATE, ADD, ADD_BIAS, MUL,
    MUL_SCALAR, MUL_COLUMNS, SOFT_CAP,
    CAST, COPY, EMBEDDING,
)  # fmt: skip
