"""Every error the runtime raises: one small tree, so that a caller can catch as much or as little as it
wants.

A message says what was found, what was expected and what to do.
"""


class KilnError(Exception):
    """Anything Kiln refuses or could not do."""


class IntegrityError(KilnError):
    """A tree's bytes are not what its manifests say: nothing of the file was used."""


class SchemaError(IntegrityError):
    """A document is not strict JSON, or not of the schema this version reads."""


class TargetError(KilnError):
    """The tree holds nothing that is legal for this device, driver or CPU."""


class ContractError(KilnError):
    """A call breaks the op's contract: operands, shapes, dtypes, strides, aliasing, scalar ranges or
    indices."""


class SelectionError(KilnError):
    """No candidate may run this call; the message lists each with its reason."""


class ProviderError(KilnError):
    """A provider of the caller's failed in another way than by declining; the message names it."""


class UnavailableError(KilnError):
    """Something that is needed is not there: a tree, a driver, a package; or the library was closed or
    forked."""


class DriverError(KilnError):
    """The CUDA driver refused a call.

    Attributes:
        code: the driver's CUresult number.
        name: its name, as in CUDA_ERROR_INVALID_VALUE.
    """

    def __init__(self, message: str, code: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.name = name


class ContextLostError(DriverError):
    """The CUDA context was reset, destroyed or broken by a kernel: every later call in it fails too."""
