"""Launching a loaded kernel: everything of one call's shape is laid out once, a launch packs addresses and
goes.

Configurations are kept per stream, because setting a field of one costs as much as writing all pointers.
Records are taken and put back around a launch, so that threads never share one: `list.pop` and `append` are
atomic. The driver is asked nothing else: which context is current shows in the status of the launch.
"""

import copy
import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn

from kiln.runtime.cuda_maps import Maps
from kiln.runtime.device import Call, PlainCall, Route
from kiln.runtime.entities import Kernel
from kiln.runtime.errors import ContractError
from kiln.runtime.packed import Packed
from kiln.runtime.recipe import Recipe

if TYPE_CHECKING:
    from kiln.runtime.cuda import CudaDevice

Args = tuple[int | float, ...]
_FORMATS = {"ptr": "Q", "i32": "i4x", "i64": "q", "f32": "f4x", "f64": "d"}
_COOPERATIVE, _CLUSTER, _SERIALIZATION = 2, 4, 6
"""The driver's CUlaunchAttributeID."""
_STREAMS = 64
"""Streams whose records a launcher keeps; a workload with more starts over."""


class Record:
    """One launch: the table of parameter addresses followed by the parameters, and the configuration; and the
    scalars that are packed in it, to pack them again only where they change."""

    __slots__ = ("address", "args", "buffer", "config", "mapped", "maps", "values")

    def __init__(self, buffer: Any, count: int, config: Any) -> None:
        self.buffer, self.address, self.config = buffer, ctypes.addressof(buffer), config
        self.values: Any = (ctypes.c_uint64 * count).from_buffer(buffer, 8 * count)
        self.args: Args | None = None
        self.mapped: Any = None
        self.maps: Any = ()
        """The addresses of which it passes tensor maps, and these maps."""


class CudaLauncher:
    """A function with everything of one call's shape fixed."""

    def __init__(self, device: "CudaDevice", kernel: Kernel, function: Any, recipe: Recipe) -> None:
        self._device = device
        self._kernel = kernel
        self._function = function
        self._recipe = recipe
        self.scratch_bytes, self.zeroed_bytes = recipe.scratch.size, recipe.zeroed.size
        self._free: dict[int, list[Record]] = {}
        self.empty = 0 in recipe.grid
        # Where each per-call value goes: the values follow the table of their addresses, eight bytes each.
        first = 8 * len(recipe.dtypes)
        packers = [struct.Struct("=" + _FORMATS[d]).pack_into for d in recipe.dtypes]
        self._pointers = _runs(recipe.pointers)
        self._args = [(packers[at], first + 8 * at, i) for at, i in recipe.args]
        self._computed = [(packers[at], first + 8 * at, f) for at, f in recipe.computed]
        self._scratches = [(first + 8 * at, offset) for at, offset in recipe.scratch.places]
        self._zeroed = [(first + 8 * at, offset) for at, offset in recipe.zeroed.places]
        self._maps = Maps(device, kernel, recipe.maps) if recipe.maps else None

    def run(
        self, pointers: Sequence[int], args: Args, stream: int, scratch: int = 0, zeroed: int = 0
    ) -> None:
        """Queue the kernel on a stream.

        Raises:
            DriverError: the driver refuses the launch.
            UnavailableError: the device was closed, or this is a child of the process that loaded it.
        """
        if self.empty:
            return
        device = self._device
        if device.gone:
            device.check_usable()
        free = self._free.get(stream)
        if free is None:
            free = self._records(stream)
        try:
            record = free.pop()
        except IndexError:
            record = self._new(stream)
        values = record.values
        for run, pick in self._pointers:
            values[run] = pick(pointers)
        last = record.args
        if scratch or zeroed or (args is not last and (args != last or 0 in args)):
            # Equal scalars have equal bits, but for zeros of either sign.
            self._pack(record, args, scratch, zeroed)
        if self._maps is not None:
            self._maps.point(record, pointers)
        (status,) = device.launch(record.config, self._function, record.address, 0)
        if status:
            self.relaunch(record, status)
        free.append(record)

    def bind(self, pointers: Sequence[int], args: Args, stream: int) -> Call:
        """A launch with all its parameters packed."""
        if self.empty:
            return PlainCall(self, pointers, args, stream)
        return CudaCall(self, self._device, self._function, self._new(stream), pointers, args)

    def via(self, order: Sequence[int]) -> Route:
        """`run` of addresses that are still to be brought in order."""
        other = copy.copy(self)
        other._pointers = _runs([(at, order[i]) for at, i in self._recipe.pointers])
        other._maps = None if self._maps is None else self._maps.via(order)
        return other.run

    def pack(
        self, record: Record, pointers: Sequence[int], args: Args, scratch: int, zeroed: int
    ) -> None:
        """Write a call's values into a record."""
        if self._maps is not None:
            self._maps.point(record, pointers)
        for run, pick in self._pointers:
            record.values[run] = pick(pointers)
        self._pack(record, args, scratch, zeroed)

    def _pack(self, record: Record, args: Args, scratch: int, zeroed: int) -> None:
        buffer = record.buffer
        record.args = None
        try:
            for pack, where, i in self._args:
                pack(buffer, where, args[i])
            for pack, where, compute in self._computed:
                pack(buffer, where, compute(args))
        except struct.error as e:
            k = self._kernel
            raise ContractError(f"{k.op}.{k.variant}: a scalar is out of range ({e}).") from None
        for where, offset in self._scratches:
            _pack_address(buffer, where, scratch + offset)
        for where, offset in self._zeroed:
            _pack_address(buffer, where, zeroed + offset)
        record.args = args

    def packed(
        self, order: Sequence[int], pointers: Sequence[int] | None, args: Args | None
    ) -> Packed | None:
        """See Packs."""
        address, recipe, k = self._device.driver.launch_address, self._recipe, self._kernel
        held = self.scratch_bytes or self.zeroed_bytes or self._maps is not None
        if address is None or held or self.empty or (args is None and recipe.computed):
            return None
        values = recipe.constants(pointers, args)
        return Packed(
            code=address,
            function=int(self._function),
            config=struct.pack("=7I", *recipe.grid, *k.block, k.shared_bytes),
            attributes=_packed_attributes(k),
            template=struct.pack("=" + "".join(_FORMATS[d] for d in recipe.dtypes), *values),
            addresses=Packed.patches((at, order[i]) for at, i in recipe.pointers if pointers is None),
            scalars=Packed.patches(
                (at, i, ord(_FORMATS[recipe.dtypes[at]][0])) for at, i in recipe.args if args is None
            ),
        )

    def refuse(self, status: int) -> NoReturn:
        """Raise what a status other than success means.

        Raises:
            DriverError: always.
        """
        self._refuse(self._device.driver.module.CUresult(status))

    def _refuse(self, status: Any) -> NoReturn:
        k = self._kernel
        self._device.driver.refuse(f"{k.op}.{k.variant}: cuLaunchKernelEx", status)

    def relaunch(self, record: Record, status: Any) -> None:
        """Try again in this device's context where another one, or none, was current; else refuse.

        A launch that fails so has queued nothing: functions belong to a context, and the driver compares.
        """
        if int(status) in (201, 400, 709):
            status = self._device.launch_in_context(record.config, self._function, record.address)
        if status:
            self._refuse(status)

    def _records(self, stream: int) -> list[Record]:
        if len(self._free) >= _STREAMS:
            self._free = {}
        return self._free.setdefault(stream, [])

    def _new(self, stream: int) -> Record:
        recipe = self._recipe
        count = len(recipe.dtypes)
        buffer = (ctypes.c_char * (16 * count + 8))()
        address = ctypes.addressof(buffer)
        struct.pack_into(f"={count}Q", buffer, 0, *(address + 8 * (count + i) for i in range(count)))
        formats = "".join(_FORMATS[d] for d in recipe.dtypes)
        struct.pack_into(f"={formats}", buffer, 8 * count, *recipe.template)
        return Record(buffer, count, self._config(stream))

    def _config(self, stream: int) -> Any:
        module, k = self._device.driver.module, self._kernel
        config = module.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._recipe.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = k.block
        config.sharedMemBytes = k.shared_bytes
        config.hStream = stream
        attributes = _attributes(module, k)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config


class CudaCall:
    """A launch that is ready to go again and again. One thread at a time may change it.

    Attributes:
        function, record: what the driver is given.
    """

    def __init__(
        self,
        launcher: CudaLauncher,
        device: "CudaDevice",
        function: Any,
        record: Record,
        pointers: Sequence[int],
        args: Args,
    ) -> None:
        self.function, self.record = function, record
        self._launcher, self._args = launcher, args
        self.run: Callable[[], Any] = partial(device.launch, record.config, function, record.address, 0)
        """Launch; a tuple with the driver's status."""
        self.update(pointers)

    def update(self, pointers: Sequence[int], scratch: int = 0, zeroed: int = 0) -> None:
        """Use other addresses from the next launch on."""
        self._launcher.pack(self.record, pointers, self._args, scratch, zeroed)

    def failed(self, status: Any) -> None:
        """Try again where another context was current; else raise what the status means."""
        self._launcher.relaunch(self.record, status)


_pack_address = struct.Struct("=Q").pack_into


def _runs(pointers: list[tuple[int, int]]) -> list[tuple[slice, Callable[[Sequence[int]], Sequence[int]]]]:
    """(where among the parameters, what picks the addresses) for each run of neighbouring pointers."""
    runs: list[list[tuple[int, int]]] = []
    for at, i in pointers:
        if runs and at == runs[-1][-1][0] + 1:
            runs[-1].append((at, i))
        else:
            runs.append([(at, i)])
    return [(slice(r[0][0], r[-1][0] + 1), _picker([i for _, i in r])) for r in runs]


def _picker(at: list[int]) -> Callable[[Sequence[int]], Sequence[int]]:
    # A single index gives an item, a slice a sequence of one.
    return itemgetter(*at) if len(at) > 1 else itemgetter(slice(at[0], at[0] + 1))


def _attributes(module: Any, k: Kernel) -> list[Any]:
    attributes = []
    ids = module.CUlaunchAttributeID
    if k.cluster != (1, 1, 1):
        a = module.CUlaunchAttribute()
        a.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z = k.cluster
        attributes.append(a)
    if k.launch.get("pdl"):
        a = module.CUlaunchAttribute()
        a.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        a.value.programmaticStreamSerializationAllowed = 1
        attributes.append(a)
    if k.launch.get("cooperative"):
        a = module.CUlaunchAttribute()
        a.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        a.value.cooperative = 1
        attributes.append(a)
    return attributes


def _packed_attributes(k: Kernel) -> bytes:
    """The same as the driver's own records, CUlaunchAttribute[]."""
    cluster = () if k.cluster == (1, 1, 1) else ((_CLUSTER, k.cluster),)
    flags = (("pdl", _SERIALIZATION), ("cooperative", _COOPERATIVE))
    values = (*cluster, *((number, (1, 0, 0)) for name, number in flags if k.launch.get(name)))
    return b"".join(struct.pack("=I4x3I52x", number, *value) for number, value in values)
