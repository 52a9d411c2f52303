"""Time an op on this machine against its limit and its peers: warm, medians, inputs larger than the cache.

CUDA: replays of a graph of launches over rotated inputs and one set of outputs; the limit is the bandwidth of
a copy kernel measured in the same run; a copy of as many bytes as the op moves stands beside it. CPU: thread
CPU time of one thread. Every output is first checked to be written.
`--evidence` records the figures beside the tree's artifacts."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kiln.runtime.entities import Kernel, Signature, Tensor
from kiln.runtime.errors import ContractError, SelectionError
from kiln.runtime.load import Library, load
from kiln.runtime.select import entry_of
from kiln.tools import peers
from kiln.tools.bench_device import Bench, CpuBench, CudaBench
from kiln.tools.console import UsageError, emit, note, table
from kiln.tools.evidence import Measured, Peer, Proofs
from kiln.tools.peers_cpu import cpu_peers
from kiln.tools.trees import add_tree_option, default_tree, record_proofs

ROWS = (1, 16, 64, 256, 8192, 16384)
WIDTH = 5120
SHAPES: Mapping[str, Sequence[Mapping[str, int]]] = {
    "top_k_pairs": (
        {"R": 1, "V": 151936, "k": 16},
        {"R": 64, "V": 131072, "k": 64},
        {"R": 224, "V": 248320, "k": 16},
    ),
    "matmul_bt": ({"M": 16, "N": 4096, "K": 4096}, {"M": 4096, "N": 4096, "K": 4096}),
}
"""Shapes of ops whose dimensions are not rows and a width."""
_FEATURES = ((3072, 2048), (2048, 2048), (12288, 2048), (2048, 6144))
_PRODUCTS = [(m, n, k) for n, k in _FEATURES for m in (1, 8, 32, 128, 512)] + [(131, 2048, 512)]
CPU_SHAPES: Mapping[str, Sequence[Mapping[str, int]]] = {
    **{op: [{"M": m, "N": n, "K": k} for m, n, k in _PRODUCTS] for op in ("matmul_bt", "matmul")},
    "matmul_packed": [{"M": m, "n": n, "K": k} for m, n, k in _PRODUCTS],
    "matmul_pack": [{"N": n, "K": k} for n, k in _FEATURES],
    "gated_delta_rule_pack": [{"heads": 16, "value_rows": 256, "key_rows": 128, "size": 1, "K": 2048}],
}
"""The same where CPUs have shapes of their own: those of Qwen3.5-2B, prefill and decode."""
COPY = "copy of the same bytes"
"""A kernel that only copies, at the size of the op: what launches and the last programs cost even there."""
NUMBERS = {"scale": 0.02, "global_scale_inv": 100.0, "cap": 30.0, "factor": 1.5}


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kiln bench`."""
    parser.add_argument("op", metavar="OP", nargs="*", help="ops or globs, such as 'rms_norm*'")
    parser.add_argument(
        "--launch",
        action="store_true",
        help="time what a launch costs the host instead, beside a bare driver call and the peers at hand",
    )
    parser.add_argument(
        "--vs", action="append", metavar="PEER", help="only these peers (default: all that are installed)"
    )
    parser.add_argument("--peer-libraries", metavar="DIR", help="a folder of vLLM kernel libraries (*.so)")
    parser.add_argument(
        "--ggml",
        type=Path,
        metavar="ARCHIVE",
        help="ggml's sources, such as the archive of llama-cpp-python: build them beside it, as a peer",
    )
    parser.add_argument(
        "--shape", action="append", metavar="M=16,N=4096", help="may be repeated (default: the shipped ones)"
    )
    parser.add_argument("--mode", choices=("exact", "fast", "composite"), default="exact")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument(
        "--evidence", action="store_true", help="record the figures in the tree's EVIDENCE.json"
    )
    add_tree_option(parser)


@dataclass(frozen=True)
class Case:
    """One call to time."""

    op: str
    shape: Mapping[str, int]
    types: Mapping[str, str]
    attrs: Mapping[str, Any]
    absent: tuple[str, ...]


def run(args: argparse.Namespace) -> int:
    """Time every case and print a table."""
    if args.launch:
        from kiln.tools.bench_launch import run as time_launches

        return time_launches(args)
    if not args.op:
        raise UsageError("name an op or a glob, such as 'rms_norm*'; or give --launch")
    root = args.tree or default_tree()
    with load(root, args.device, threads=1 if args.device == "cpu" else None) as library:
        names = [n for n in library.ops if any(fnmatch.fnmatchcase(n, g) for g in args.op)]
        if not names:
            raise UsageError(f"no op matches {', '.join(args.op)}; kiln list shows what there is")
        bench: Bench = CpuBench(library) if args.device == "cpu" else CudaBench(library)
        known = cpu_peers(args.ggml) if args.device == "cpu" else peers.installed(args.peer_libraries)
        libraries = [p for p in known if not args.vs or p.name in args.vs]
        results = []
        for name in names:
            own = CPU_SHAPES.get(name, ()) if args.device == "cpu" else ()
            for case in cases(library, name, _shapes(args.shape) or own):
                try:
                    results.append(measure(library, bench, case, libraries, args.mode))
                except (ContractError, SelectionError) as error:
                    note(f"{name} {dict(case.shape)}: {str(error).split(' (')[0]}")
        if args.evidence:
            record(root, library, results)
    emit(args, [asdict(r) for r in results], lambda: listing(results))
    return 0


def _shapes(texts: Sequence[str] | None) -> list[dict[str, int]]:
    try:
        return [{k: int(v) for k, v in (part.split("=") for part in text.split(","))} for text in texts or ()]
    except ValueError:
        raise UsageError(f"found --shape {texts}, expected sizes such as M=16,N=4096") from None


def cases(library: Library, name: str, shapes: Sequence[Mapping[str, int]]) -> Iterator[Case]:
    """One case per distinct choice of types, attributes and absent operands among an op's kernels."""
    operation = library.op(name)
    seen = set()
    for kernel in operation.candidates:
        facts = _facts(kernel.when)
        if kernel.tier == "composite" or kernel.variant.endswith("unaligned"):
            continue
        if entry_of(kernel, operation.candidates) is not None:
            continue
        rows, columns = operation.sig.rows, operation.sig.width
        width = _named_width(kernel.when, columns)
        given = [{columns: width or WIDTH, **shape} for shape in shapes]
        for shape in given or SHAPES.get(name) or [{rows: m, columns: width or WIDTH} for m in ROWS]:
            if width is not None and shape.get(columns, width) != width:
                continue
            key = (str(facts), str(sorted(shape.items())))
            if key not in seen:
                seen.add(key)
                yield Case(name, shape, *facts)


def _terms(when: Any) -> list[Any]:
    if not isinstance(when, list | tuple):
        return []
    return list(when[1:]) if when[0] == "and" else [when]


def _named_width(when: Any, columns: str) -> int | None:
    """The width that is a constant of the kernel."""
    return next((p[2] for p in _terms(when) if p[0] == "eq" and list(p[1]) == ["dim", columns]), None)


def _facts(when: Any) -> tuple[dict[str, str], dict[str, Any], tuple[str, ...]]:
    terms = _terms(when)
    types = {p[1]: p[2] for p in terms if p[0] == "dtype"}
    attrs = {p[1]: p[2] for p in terms if p[0] == "attr"}
    return types, attrs, tuple(p[1] for p in terms if p[0] == "absent")


def operands(bench: Bench, sig: Signature, case: Case) -> dict[str, Any]:
    """Random operands of one call, outputs poisoned."""
    made: dict[str, Any] = {}
    sizes = {**case.shape, **{k.upper(): v for k, v in case.shape.items()}}
    for t in sig.tensors:
        if t.name in case.absent:
            made[t.name] = None
            continue
        shape = [_size(e, sizes, case.attrs) for e in t.shape]
        made[t.name] = (
            bench.random(shape, _dtype(t, sig, case))
            if t.role != "out"
            else bench.poisoned(shape, _dtype(t, sig, case))
        )
    for s in sig.scalars:
        made[s.name] = case.shape.get(s.name, NUMBERS.get(s.name, s.default))
    return made | dict(case.attrs)


def _dtype(t: Tensor, sig: Signature, case: Case) -> str:
    if isinstance(t.dtype, str):
        return t.dtype
    if t.name in case.types:
        return case.types[t.name]
    shared = [o.name for o in sig.tensors if o.dtype == t.dtype and o.name in case.types]
    return case.types[shared[0]] if shared else t.dtype.choices[0]


def _size(expr: Any, sizes: Mapping[str, int], attrs: Mapping[str, Any]) -> int:
    if isinstance(expr, int):
        return expr
    head, *rest = expr
    if head in ("dim", "arg"):
        return sizes.get(rest[0], 1000)
    if head == "attr":
        return int(attrs[rest[0]])
    a, b = (_size(e, sizes, attrs) for e in rest)
    if head == "mul":
        return a * b
    sized = {"add": a + b, "sub": a - b}
    whole = max(b, 1)
    divided = {"floordiv": a // whole, "cdiv": -(-a // whole), "roundup": -(-a // whole) * whole}
    return {**sized, **divided}[str(head)]


def measure(
    library: Library, bench: Bench, case: Case, libraries: Sequence[peers.PeerLibrary], mode: str
) -> Measured:
    """Kiln's time and each peer's, on the same rotated operands."""
    sig = library.op(case.op).sig
    first = operands(bench, sig, case)
    size = sum(
        bench.bytes(v) * (2 if t.role == "inout" else 1)
        for t in sig.tensors
        if (v := first[t.name]) is not None
    )
    sets = [first, *(operands(bench, sig, case) for _ in range(bench.copies(size) - 1))]
    # Peers that make their own outputs get the same memory again in each launch of a graph: so do all others.
    written = {t.name: first[t.name] for t in sig.tensors if t.role == "out"}
    sets = [{**s, **written} for s in sets]
    chosen = {"tier": "composite"} if mode == "composite" else {"mode": mode}
    calls = [
        library.bind(case.op, stream=bench.stream, out=_outputs(sig, s), **_inputs(sig, s), **chosen)
        for s in sets
    ]
    bench.settle()
    calls[0]()
    bench.check_written([first[t.name] for t in sig.tensors if t.role != "in" and first[t.name] is not None])
    kernel = calls[0].candidate
    median, spread = bench.time(calls)
    others = {COPY: Peer(bench.copy_version, round(bench.time(bench.copy(size))[0], 3))}
    for peer in libraries:
        factory = peer.ops.get(case.op)
        runs = [r for s in sets if factory is not None and (r := factory(s)) is not None]
        if runs:
            try:
                others[peer.name] = Peer(peer.version, round(bench.time(runs)[0], 3))
            except (RuntimeError, TypeError) as error:
                note(f"{peer.name} {case.op}: {str(error).splitlines()[0]}")
    limit = size / bench.bandwidth * 1e6 if bench.bandwidth else None
    digest = kernel.sha256 if isinstance(kernel, Kernel) else ""
    variant = kernel.variant if kernel is not None else "none"
    note(
        f"{case.op}.{variant} {dict(case.shape)}: {median:.2f} us"
        + (f", {limit / median:.3f} of the limit" if limit else "")
    )
    found = Measured(
        op=case.op,
        variant=variant,
        digest=digest,
        device=bench.device,
        driver=bench.driver,
        date=datetime.date.today().isoformat(),
        shape=dict(case.shape),
        median_us=round(median, 3),
        spread_us=round(spread, 3),
        bytes=size,
        flops=0,
        limit_us=round(limit, 3) if limit else None,
        limit_from=bench.limit_from if limit else None,
        ratio_to_limit=round(limit / median, 4) if limit else None,
        peers=others,
    )
    return found


def _inputs(sig: Signature, values: Mapping[str, Any]) -> dict[str, Any]:
    outs = {t.name for t in sig.tensors if t.role == "out"}
    return {k: v for k, v in values.items() if k not in outs}


def _outputs(sig: Signature, values: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(values[n] for n in sig.returns)


def record(root: Any, library: Library, results: Sequence[Measured]) -> None:
    """Add the figures to the evidence of the artifacts that were timed."""
    by_digest: dict[str, list[Measured]] = {}
    for r in results:
        if r.digest:
            by_digest.setdefault(r.digest, []).append(r)
    for target, manifest in library.manifests.items():
        known = {k.sha256 for k in manifest.kernels}
        proofs = {d: Proofs(measured=tuple(m)) for d, m in by_digest.items() if d in known}
        if proofs:
            record_proofs(root, target, proofs)


def listing(results: Sequence[Measured]) -> str:
    """One line a case."""
    names = sorted({n for r in results for n in r.peers})
    rows = [
        (f"{r.op}.{r.variant}", ",".join(f"{k}={v}" for k, v in r.shape.items()), f"{r.median_us:.2f}",
         "" if r.ratio_to_limit is None else f"{r.ratio_to_limit:.3f}",
         *(f"{r.peers[n].median_us:.2f}" if n in r.peers else "" for n in names))
        for r in results
    ]  # fmt: skip
    geometric = [p.median_us / r.median_us for r in results for n, p in r.peers.items() if n != COPY]
    tail = f"\n{len(results)} timings" + (
        f", peers take {math.prod(geometric) ** (1 / len(geometric)):.2f} x the time" if geometric else ""
    )
    return table(("kernel", "shape", "us", "of limit", *(f"{n} us" for n in names)), rows) + tail
