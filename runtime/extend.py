"""What a caller adds to a library, or takes away from it: providers, disabled names, counters."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

from kiln.runtime.arrays import CPU
from kiln.runtime.device import Device
from kiln.runtime.entities import Kernel, Plan
from kiln.runtime.errors import ContractError, KilnError
from kiln.runtime.operation import Operation
from kiln.runtime.provided import check_callable, require_arrays
from kiln.runtime.providers import (
    DEFAULT_PRIORITY,
    REFERENCE,
    REFERENCE_PRIORITY,
    Arrays,
    Provider,
    Providers,
    ProviderStats,
    Supports,
)
from kiln.runtime.select import why_disabled


class Extensible(ABC):
    """The part of a library that callers extend."""

    device: Device
    disabled: dict[str, str]

    def __init__(self, device: Device, disabled: dict[str, str]) -> None:
        self.device = device
        self.disabled = disabled
        self.providers = Providers(device.capabilities, self._forget)
        self._registered: dict[str, bool] = {}
        self._warned: set[str] = set()

    @property
    @abstractmethod
    def ops(self) -> tuple[str, ...]:
        """The name of every op."""

    @abstractmethod
    def op(self, name: str) -> Operation:
        """One op by name."""

    @abstractmethod
    def _everything(self) -> list[Operation]:
        """Every operation, those that plans call included."""

    def _forget(self) -> None:
        self._registered = {}
        for operation in self._everything():
            operation.undecide()

    def register_provider(
        self,
        op: str,
        name: str,
        fn: Callable[..., Any],
        *,
        priority: int = DEFAULT_PRIORITY,
        supports: Supports | None = None,
        mode: Literal["exact", "fast"] = "exact",
        arrays: Arrays | None = None,
    ) -> None:
        """Let a function of the caller's run an op.

        Args:
            op: an op of this library.
            name: what `explain`, `stats` and `disable` call it.
            fn: called as `fn(x=…, weight=…, out=…, eps=…)`: every operand and attribute by name, absent ones
                as None, outputs to be written. It gets the handle of the call's stream too if it has a
                parameter `stream`. It may raise `Decline` before it has written anything; the next candidate
                in order then gets the call. An in/out operand is updated in place; a call that writes one
                elsewhere goes to the next candidate. An output may be the very buffer of an input of the same
                shape and type.
            priority: higher is asked first; the tree's candidates have 0, so that a negative one comes after
                all of them. Equal ones are ordered by name.
            supports: a predicate of the device's capabilities; always usable without one.
            mode: "exact" if it keeps the op's numerics contract; a "fast" one runs only for calls with
                mode="fast".
            arrays: operands as "numpy" arrays (the CPU's default), "torch" tensors (the default on CUDA) or
                "view", the runtime's own description with an address. None of them is a copy.

        Raises:
            ContractError: no such op, a name that is taken or malformed, a function whose parameters do not
                fit, or one provider too many.
        """
        operation = self.op(op)
        where = f"{op}: the provider {name!r}"
        kind: Arrays = arrays or ("numpy" if self.device.ordinal == CPU else "torch")
        require_arrays(kind, self.device.ordinal, where)
        stream = check_callable(fn, operation.sig, where)
        taken = [c.variant for c in operation.candidates]
        self.providers.register(Provider(op, name, priority, fn, supports, mode, kind, stream), taken)

    def register_reference_tier(self, host: "Extensible") -> int:
        """Let the CPU's kernels serve as the last candidate of every op, where the CPU may use this device's
        memory.

        Args:
            host: the same ops loaded for the CPU.

        Returns:
            How many ops have got a reference; 0 on the CPU itself, on a device with memory of its own, and if
            they had one already.

        Raises:
            ContractError: `host` isn't loaded for the CPU.
        """
        if host.device.ordinal != CPU:
            raise ContractError(f"found a library for {host.device.label}, expected one for the CPU.")
        if self.device.ordinal == CPU or not self.device.unified_memory:
            return 0
        count = 0
        for name in host.ops:
            there = {p.variant for p in self.providers.of(name)}
            if name not in self.ops or REFERENCE in there:
                continue
            fn = self._on_host(name, host.op(name))
            self.providers.register(
                Provider(name, REFERENCE, REFERENCE_PRIORITY, fn, None, "exact", "view", True, "reference")
            )
            count += 1
        return count

    def _on_host(self, name: str, operation: Operation) -> Callable[..., Any]:
        def run(stream: int, **operands: Any) -> None:
            if name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"kiln: nothing of {name} may run on {self.device.label}; the CPU runs it, on shared "
                    "memory.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            # The CPU must not read what the device still computes.
            self.device.synchronize(stream)
            operation(**{n: v._replace(device=CPU) if hasattr(v, "ptr") else v for n, v in operands.items()})

        return run

    def reference_hits(self) -> int:
        """Calls that the reference tier has run."""
        return sum(o.counts.get(REFERENCE, [0])[0] for o in self._everything())

    def registered(self, op: str) -> bool:
        """Whether anything of the op's own may be selected on this device: a kernel, a plan or a provider.
        The reference tier does not count, nor does a provider whose predicate fails."""
        found = self._registered.get(op)
        if found is None:
            found = self._registered[op] = self._selectable(self.op(op))
        return found

    def _selectable(self, operation: Operation) -> bool:
        candidates = (*operation.candidates, *self.providers.of(operation.name))
        return any(why_disabled(c, self.disabled) is None and self._usable(operation, c) for c in candidates)

    def _usable(self, operation: Operation, c: Kernel | Plan | Provider) -> bool:
        if isinstance(c, Kernel):
            return self.device.refusal(c) is None
        if isinstance(c, Plan):
            return all(self._selectable(operation.callee(step.op)) for step in c.steps)
        try:
            return c.tier != "reference" and self.providers.refusal(c) is None
        except KilnError:
            return False

    def disable(self, name: str) -> None:
        """Never select what is called so from now on: a provider, an op, a variant, op.variant, a tier or an
        ISA tier; as KILN_DISABLE does. A call that is bound, or captured in a CUDA graph, keeps what it
        has."""
        if not name or "," in name:
            raise ContractError(f"found the name {name!r}, expected one name without commas.")
        self.disabled = {**self.disabled, name: f"disable({name!r})"}
        self._forget()

    def enable(self, name: str) -> None:
        """Undo `disable`, or KILN_DISABLE."""
        self.disabled = {n: by for n, by in self.disabled.items() if n != name}
        self._forget()

    def count_calls(self, on: bool = True) -> None:
        """Count selections from now on, see `provider_stats`. Off by default: counting takes a lock in every
        call."""
        self.providers.counting = on

    def provider_stats(self, op: str, *, reset: bool = False) -> ProviderStats:
        """What happened to the calls of an op; `reset` starts over afterwards."""
        tally = self.providers.tally(self.op(op).name)
        found = tally.read()
        if reset:
            tally.reset()
        return found
