"""Calls that a provider runs: its operands made from addresses, its answer checked, and the next candidate if
it declines."""

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol

from kiln.runtime.arrays import CPU, View, contiguous
from kiln.runtime.bind import Bound
from kiln.runtime.device import Args, Launcher, PlainLauncher
from kiln.runtime.dtypes import DTYPES, NUMPY_NAMES, numpy_dtype
from kiln.runtime.entities import Signature
from kiln.runtime.errors import ContractError, ProviderError, SelectionError, UnavailableError
from kiln.runtime.plan import Attrs, Decided, Place, Views
from kiln.runtime.providers import Arrays, Decline, Provider, Tally
from kiln.runtime.select import Wanted


class Op(Protocol):
    """What a provider's launcher needs of its op."""

    name: str
    sig: Signature
    counts: dict[str, list[int]]

    def decide(
        self, reads: Views, writes: Views, args: Args, attrs: Attrs, wanted: Wanted, place: Place | None
    ) -> Decided:
        """What a call whose outputs are all given does; kernels are loaded."""

    def fall_back(
        self, reads: Views, writes: Views, args: Args, attrs: Attrs, wanted: Wanted, stream: int
    ) -> None:
        """Run a call that a provider declined; its outputs are all given."""


class ProviderLauncher(PlainLauncher):
    """A provider for one call's shape."""

    def __init__(
        self,
        provider: Provider,
        op: Op,
        bound: Bound,
        views: tuple[Views, Views],
        wanted: Wanted,
        tally: Tally,
    ) -> None:
        """`views` are what each tensor operand is read from and written to; None for outputs still to be
        allocated."""
        self._provider = provider
        self._op = op
        self._wanted = Wanted(*wanted)
        self._tally = tally
        self._names = [t.name for t in op.sig.tensors]
        self._scalars = [o.name for o in op.sig.scalars]
        self._attrs = tuple(bound.env.attrs[a.name] for a in op.sig.attrs)
        # It may be kept for long: it must not keep the arrays of the call it was made for.
        self._reads, self._writes = (
            [None if v is None else v._replace(owner=None) for v in side] for side in views
        )
        device = next((v.device for side in views for v in side if v is not None), CPU)
        for i, o in bound.outputs.items():
            self._writes[i] = View(0, o.shape, contiguous(o.shape), o.dtype, device, False, None)
        self._make = MAKERS[provider.arrays]
        self._fixed = {a.name: v for a, v in zip(op.sig.attrs, self._attrs, strict=True)}
        self._count = op.counts.setdefault(provider.variant, [0])

    def run(
        self, pointers: Sequence[int], args: Args, stream: int, scratch: int = 0, zeroed: int = 0
    ) -> None:
        """Call the provider; if it declines, run the next candidate below it.

        Raises:
            ProviderError: it failed, or returned what it should have written.
            SelectionError: it declined, and nothing below it may run the call.
        """
        p = self._provider
        count = len(self._names)
        reads = _placed(self._reads, pointers[:count])
        writes = _placed(self._writes, pointers[count:])
        operands = [w if w is not None else r for r, w in zip(reads, writes, strict=True)]
        apart = [n for n, r, w in zip(self._names, reads, writes, strict=True) if r and w and r.ptr != w.ptr]
        if apart:
            self._below(f"{apart[0]} is written elsewhere than it is read", reads, writes, args, stream)
            return
        given = {n: None if v is None else self._make(v) for n, v in zip(self._names, operands, strict=True)}
        call = {**given, **dict(zip(self._scalars, args, strict=True)), **self._fixed}
        if p.stream:
            call["stream"] = stream
        declined = self._call(call, [given[n] for n, w in zip(self._names, writes, strict=True) if w])
        if declined is not None:
            self._below(str(declined), reads, writes, args, stream)
            return
        self._count[0] += 1

    def below(self, args: Args) -> Launcher | None:
        """What runs such a call if the provider declines it, loaded; None if nothing may.

        Raises:
            KilnError: it cannot be loaded now.
        """
        below = self._wanted._replace(below=self._provider.variant)
        try:
            return self._op.decide(self._reads, self._writes, args, self._attrs, below, None).launcher
        except SelectionError:
            return None

    def _call(self, call: dict[str, Any], written: list[Any]) -> Decline | None:
        p = self._provider
        try:
            answer = p.fn(**call)
        except Decline as declined:
            return declined
        except Exception as e:
            raise ProviderError(
                f"{p.op}: the provider {p.variant} failed with {type(e).__name__}: {e}. It should decline "
                "what it does not take."
            ) from e
        if isinstance(answer, Decline):
            return answer
        returned = answer if isinstance(answer, tuple) else (answer,)
        if any(a is not None and all(a is not w for w in written) for a in returned):
            raise ProviderError(
                f"{p.op}: the provider {p.variant} returned a {type(answer).__name__}; expected None: write "
                "the outputs that are passed by name."
            )
        return None

    def _below(self, why: str, reads: Views, writes: Views, args: Args, stream: int) -> None:
        p = self._provider
        below = self._wanted._replace(below=p.variant)
        try:
            self._op.fall_back(reads, writes, args, self._attrs, below, stream)
        except SelectionError as e:
            self._tally.add(declines=1, misses=1)
            raise SelectionError(
                f"{p.op}: the provider {p.variant} declined ({why or 'no reason given'}), and no candidate "
                f"below it may run the call: {e}"
            ) from None
        self._tally.add(declines=1, fallbacks=1)


class CountingLauncher(PlainLauncher):
    """A launcher whose runs are counted."""

    def __init__(self, inner: Launcher, name: str, tally: Tally) -> None:
        self.inner = inner
        self.scratch_bytes, self.zeroed_bytes = inner.scratch_bytes, inner.zeroed_bytes
        self._name = name
        self._tally = tally

    def run(
        self, pointers: Sequence[int], args: Args, stream: int, scratch: int = 0, zeroed: int = 0
    ) -> None:
        """Count, then run."""
        self._tally.add(self._name, selections=1)
        self.inner.run(pointers, args, stream, scratch, zeroed)


def _placed(views: Views, pointers: Sequence[int]) -> Views:
    return [None if v is None else v._replace(ptr=p) for v, p in zip(views, pointers, strict=True)]


class _Memory:
    """Memory as NumPy and CUDA's array interface describe it, elements as unsigned bits."""

    def __init__(self, v: View) -> None:
        size = DTYPES[v.dtype]
        face = {
            "data": (v.ptr, v.readonly),
            "shape": v.shape,
            "strides": tuple(s * size for s in v.strides),
            "typestr": "|u1" if size == 1 else f"<i{size}",
            "version": 3,
        }
        setattr(self, "__array_interface__" if v.device == CPU else "__cuda_array_interface__", face)


def _numpy(v: View) -> Any:
    import numpy as np

    return np.asarray(_Memory(v)).view(numpy_dtype(v.dtype))


def _torch(v: View) -> Any:
    # Not a dependency: only a provider that asks for tensors needs it.
    torch = import_module("torch")
    name = next(n for n, kiln in NUMPY_NAMES.items() if kiln == v.dtype)
    if v.device == CPU:
        # PyTorch has no arrays that are read-only; a provider writes outputs alone.
        bits = torch.from_numpy(_numpy(v._replace(readonly=False, dtype=_BITS[DTYPES[v.dtype]])))
    else:
        bits = torch.as_tensor(_Memory(v), device=f"cuda:{v.device}")
    return bits.view(getattr(torch, name))


_BITS = {1: "u8", 2: "i16", 4: "i32", 8: "i64"}

MAKERS: dict[Arrays, Callable[[View], Any]] = {"numpy": _numpy, "torch": _torch, "view": lambda v: v}
"""How an operand is made from its memory; nothing is copied."""


def check_callable(fn: Callable[..., Any], sig: Signature, where: str) -> bool:
    """Whether `fn` takes a stream as well as every operand and attribute by name.

    Raises:
        ContractError: a name that it doesn't take, or needs and will not get.
    """
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        # Some functions of extension modules do not tell: the first call will.
        return False
    names = {*(o.name for o in sig.operands), *(a.name for a in sig.attrs)}
    keywords = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = {n for n, p in parameters.items() if p.default is p.empty and p.kind not in variadic}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    odd = (set() if takes_any else names - keywords) | (needed - names - {"stream"}) | (needed - keywords)
    if odd:
        raise ContractError(
            f"{where}: its parameters and the op's differ in {', '.join(sorted(odd))}; expected "
            f"{', '.join(sorted(names))}, and stream if it wants it."
        )
    return "stream" in keywords


def require_arrays(arrays: Arrays, device: int, where: str) -> None:
    """Refuse NumPy arrays over device memory, and torch where it is not installed.

    Raises:
        ContractError: NumPy on a CUDA device.
        UnavailableError: no PyTorch.
    """
    if arrays == "numpy" and device != CPU:
        raise ContractError(f'{where}: NumPy cannot see device memory; expected arrays="torch" or "view".')
    if arrays == "torch":
        from importlib.util import find_spec

        if find_spec("torch") is None:
            raise UnavailableError(f'{where}: arrays="torch" needs PyTorch; install kernel-kiln[torch].')
