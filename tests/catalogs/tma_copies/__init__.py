"""A catalog of copies whose launches need what Triton adds to a kernel."""

from typing import Any

import numpy as np

from kiln.backends.cuda.declare import Launch, triton_op
from kiln.compiler.catalog import Catalog
from kiln.ir.dtypes import BF16
from kiln.ir.spec import Tensor

Array = np.ndarray[Any, Any]
OPERANDS = (Tensor("x", BF16, ("M", "N")), Tensor("out", BF16, ("M", "N"), "out"))


def _copy(*, x: Array) -> tuple[Array]:
    return (x,)


MAPPED = triton_op(
    "mapped",
    "tma_copies.kernels:mapped",
    OPERANDS,
    family="COPIES",
    reference=_copy,
    grid=(["cdiv", "M", "ROWS"], ["cdiv", "N", "COLS"]),
    launches=(
        Launch({"ROWS": 16, "COLS": 64}, hints=(True,), min_sm=90),
        Launch({"ROWS": 32, "COLS": 64}, hints=(True,), min_sm=90, options={"num_ctas": 2}),
        Launch({"ROWS": 64, "COLS": 64}, hints=(True,), min_sm=90, options={"launch_pdl": True}),
    ),
)
SPELLED_OUT = triton_op(
    "spelled_out",
    "tma_copies.kernels:spelled_out",
    OPERANDS,
    family="COPIES",
    reference=_copy,
    grid=("M", ["cdiv", "N", "COLS"]),
    launches=(Launch({"COLS": 512}),),
)


def catalog() -> Catalog:
    """What `kiln build --catalog tma_copies` builds."""
    return Catalog((MAPPED.op, SPELLED_OUT.op), (*MAPPED.realizations, *SPELLED_OUT.realizations))
