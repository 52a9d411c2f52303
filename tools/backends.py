"""Who compiles for which targets: the one place where the backends meet the compiler."""

from __future__ import annotations

from kiln.compiler.backend import Backend


def all_backends() -> tuple[Backend, ...]:
    """Every backend; importing them imports no compiler."""
    from kiln.backends.cpu.backend import CpuBackend
    from kiln.backends.cuda.backend import CudaBackend

    return CudaBackend(), CpuBackend()
