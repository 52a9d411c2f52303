"""The thin runtime: loads verified trees of ahead-of-time compiled kernels and runs them.

    import kiln.runtime as kiln
    lib = kiln.load("aot_artifacts", device="cpu")
    y = lib.rms_norm(x, weight, eps=1e-6)

No compiler, no download, no cache, no environment variable but KILN_DISABLE.
"""

from kiln.runtime.bound import BoundCall
from kiln.runtime.errors import (
    ContextLostError,
    ContractError,
    DriverError,
    IntegrityError,
    KilnError,
    ProviderError,
    SchemaError,
    SelectionError,
    TargetError,
    UnavailableError,
)
from kiln.runtime.load import Library, load
from kiln.runtime.merged import merged
from kiln.runtime.providers import Capabilities, Decline, ProviderStats
from kiln.runtime.scratch import ScratchPolicy

__all__ = [
    "BoundCall",
    "Capabilities",
    "ContextLostError",
    "ContractError",
    "Decline",
    "DriverError",
    "IntegrityError",
    "KilnError",
    "Library",
    "ProviderError",
    "ProviderStats",
    "SchemaError",
    "ScratchPolicy",
    "SelectionError",
    "TargetError",
    "UnavailableError",
    "load",
    "merged",
]
