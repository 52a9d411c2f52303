"""Show what an op means, takes, promises and refuses, and what the tree has of it; or a kernel at any
stage: its IR after every pass, its source, PTX, the machine code that ships, its resources on every target,
or how it is launched.

OP alone means every kernel of the op for --resources and --launch, and its first kernel for the rest. Beside
resources, `sheet` has registers/stack of the upstream kernels that the op's specification gives them for."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kiln.compiler.backend import Job
from kiln.compiler.catalog import load
from kiln.compiler.target import TARGETS, Target
from kiln.ir.spec import Op
from kiln.runtime.entities import Kernel, Manifest, Param, Plan
from kiln.runtime.errors import UnavailableError
from kiln.runtime.expr import render
from kiln.runtime.files import Folder
from kiln.runtime.manifest import dump
from kiln.tools.backends import all_backends
from kiln.tools.console import Cell, UsageError, emit, nearest, note, require, table, width
from kiln.tools.declared import add_catalog_option, catalogs, declared
from kiln.tools.sheet import show as show_op
from kiln.tools.sheet_figures import beside
from kiln.tools.stages import Shown, cpu_source, cuda_source, ir_stages, ptx
from kiln.tools.trees import add_tree_option, read_tree, tree_or_none

SASS_BYTES = 16
"""Of an instruction, on every target."""
STAGES = ("ir", "source", "ptx", "sass", "resources", "launch")


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kiln show`."""
    parser.add_argument("what", metavar="OP[.VARIANT]")
    parser.add_argument("--target", metavar="T", help="the target; what is of all of them needs none")
    stage = parser.add_mutually_exclusive_group()
    helps = {
        "ir": "the IR after every pass",
        "source": "generated Triton or C, or the hand-written kernel's file",
        "ptx": "PTX, compiled here and now",
        "sass": "the machine code of the tree's artifact, disassembled",
        "resources": "registers, spills and sizes, from the tree",
        "launch": "parameters, grid, block and predicate, from the tree",
    }
    for name in STAGES:
        stage.add_argument(f"--{name}", dest="stage", action="store_const", const=name, help=helps[name])
    add_tree_option(parser)
    add_catalog_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print one stage, or what the op is."""
    op, _, variant = args.what.partition(".")
    if args.stage is None:
        return _sheet(args, op, variant)
    if args.target is None and args.stage != "resources":
        raise UsageError(f"--{args.stage} is of one target; give --target, one of {', '.join(TARGETS)}")
    if args.target is not None:
        require([args.target], TARGETS, "target")
    if args.stage in ("ir", "source", "ptx"):
        shown = _compiled(args.stage, op, variant, TARGETS[args.target], catalogs(args))
        emit(args, shown.document(args.stage, args.target), shown.text)
        return 0
    tree = read_tree(args.tree, [args.target] if args.target else None)
    if args.stage == "sass":
        return _sass(args, tree.root, tree.manifests[args.target], op, variant)
    document, text = (_resources if args.stage == "resources" else _launch)(tree.manifests, op, variant)
    emit(args, document, text)
    return 0


def _sheet(args: argparse.Namespace, op: str, variant: str) -> int:
    if variant or args.target is not None:
        stages = ", ".join(f"--{stage}" for stage in STAGES)
        raise UsageError(f"give a stage to see of it, one of {stages}; or the op alone: kiln show {op}")
    options = [f"--catalog {c}" for c in args.catalog or ()] + ([f"--tree {args.tree}"] if args.tree else [])
    emit(args, *show_op(op, declared(catalogs(args)), tree_or_none(args.tree), options))
    return 0


def _jobs(op: Op, target: Target, names: tuple[str, ...]) -> list[Job]:
    backend = next(b for b in all_backends() if target.name in b.targets())
    return [j for j in backend.plan({op.name: op}, names, target.name) if j.op == op.name]


def _compiled(stage: str, name: str, variant: str, target: Target, names: tuple[str, ...]) -> Shown:
    """A stage that is made from declarations, without a tree."""
    loaded = load(names)
    if name not in loaded.ops:
        raise UsageError(nearest(name, loaded.ops, "op"))
    op = loaded.ops[name]
    jobs = _jobs(op, target, names)
    if not jobs:
        raise UsageError(
            f"{name} has no kernel of its own for {target.name}; its plans call other ops (--launch)"
        )
    if target.kind == "cpu":
        if stage == "ptx":
            raise UsageError(f"{target.name} has no PTX; give --source or --sass")
        return cpu_source(op, loaded, jobs[0], target, variant, stage)
    job = _chosen([j.variant for j in jobs], jobs, variant, name)
    if stage == "ir":
        return ir_stages(op, loaded.ops, job, target)
    return (cuda_source if stage == "source" else ptx)(op, loaded, job, target)


def _chosen(known: Sequence[str], items: Sequence[Any], variant: str, op: str) -> Any:
    if not variant:
        if len(known) > 1:
            note(f"{op}.{known[0]}, the first of {len(known)}: {', '.join(known)}")
        return items[0]
    if variant not in known:
        raise UsageError(nearest(variant, known, f"variant of {op}"))
    return items[known.index(variant)]


def _entries(manifest: Manifest, op: str, variant: str) -> list[Kernel | Plan]:
    everything: list[Kernel | Plan] = [*manifest.kernels, *manifest.recipes]
    if op not in manifest.ops:
        raise UsageError(nearest(op, manifest.ops, f"op in the tree's {manifest.target}"))
    of_op = [e for e in everything if e.op == op]
    if not variant:
        return of_op
    found = [e for e in of_op if e.variant == variant]
    if not found:
        raise UsageError(
            nearest(variant, [e.variant for e in of_op], f"variant of {op} for {manifest.target}")
        )
    return found


def _resources(manifests: Mapping[str, Manifest], op: str, variant: str) -> tuple[Any, str]:
    listed: list[dict[str, Any]] = []
    misses: list[UsageError] = []
    for target, manifest in manifests.items():
        try:
            entries = _entries(manifest, op, variant)
        except UsageError as miss:
            misses.append(miss)
            continue
        for k in entries:
            if isinstance(k, Kernel):
                listed.append(
                    {
                        "target": target,
                        "variant": k.variant,
                        "bytes": k.bytes,
                        "shared": k.shared_bytes,
                        **k.resources,
                        **_instructions(k),
                        **_upstream(op, target),
                    }
                )
    if misses and not listed:
        raise misses[0]
    columns = list(dict.fromkeys(key for row in listed for key in row))
    rows: list[list[Cell]] = [[_cell(row.get(c)) for c in columns] for row in listed]
    return {"op": op, "kernels": listed}, table(columns, rows, width())


def _instructions(k: Kernel) -> dict[str, int]:
    """How many instructions a cubin's code has room for; padding at its end is among them."""
    return {} if k.isa is not None else {"sass": k.resources["code_bytes"] // SASS_BYTES}


def _upstream(op: str, target: str) -> dict[str, list[dict[str, Any]]]:
    """What the op's specification gives for kernels that do the same."""
    found = [{"kernel": f.kernel, "registers": f.registers, "stack": f.stack} for f in beside(op, target)]
    return {"sheet": found} if found else {}


def _cell(value: Any) -> Cell:
    if isinstance(value, list):
        return ", ".join(f"{f['kernel']} {f['registers']}/{f['stack']}" for f in value)
    found: Cell = value
    return found


def _launch(manifests: Mapping[str, Manifest], op: str, variant: str) -> tuple[Any, str]:
    (manifest,) = manifests.values()
    entries = _entries(manifest, op, variant)
    text = "\n\n".join(_kernel_text(e) if isinstance(e, Kernel) else _plan_text(e) for e in entries)
    return {"op": op, "target": manifest.target, "entries": [dump(e) for e in entries]}, text


def _kernel_text(k: Kernel) -> str:
    lines = [f"{k.op}.{k.variant} ({k.tier}, {k.mode}, priority {k.priority}): {k.entry} of {k.file}"]
    lines.append(f"  when    {render(k.when)}")
    lines.append(f"  grid    {' x '.join(render(e) for e in k.grid)}")
    lines.append(f"  block   {' x '.join(map(str, k.block))}, cluster {' x '.join(map(str, k.cluster))}")
    lines.append(f"  shared  {k.shared_bytes} bytes")
    if k.isa is not None:
        lines.append(f"  isa     {k.isa.tier}: {', '.join(k.isa.features) or 'the baseline'}")
    zeroed = {True: ", zeroed", False: ""}
    lines += [f"  scratch {s.name}: {render(s.bytes)} bytes{zeroed[s.zeroed]}" for s in k.scratch]
    return "\n".join([*lines, *(f"  {_param_text(p)}" for p in k.params)])


def _param_text(p: Param) -> str:
    if p.kind == "ptr":
        return f"{p.dtype:<7} {p.name} -> {p.operand} ({p.access}, aligned to {p.align})"
    if p.map is not None:
        extents, strides = (", ".join(map(render, values)) for values in (p.map.shape, p.map.strides))
        how = f"box {list(p.map.box)}, swizzle {p.map.swizzle}, interleave {p.map.interleave}"
        how = f"[{extents}] by [{strides}], {how}, L2 {p.map.l2}, beyond it {p.map.fill}"
        return f"{p.dtype:<7} {p.name} -> tensor map of {p.operand} ({p.access}): {how}"
    if p.kind == "null":
        return f"{p.dtype:<7} {p.name} = 0"
    unit = f", a multiple of {p.divisible_by}" if (p.divisible_by or 1) > 1 else ""
    gone = ", not passed" if p.kind == "dropped" else ""
    return f"{p.dtype:<7} {p.name} = {render(p.value)}{unit}{gone}"


def _plan_text(p: Plan) -> str:
    lines = [f"{p.op}.{p.variant} ({p.tier}, {p.mode}, priority {p.priority})", f"  when    {render(p.when)}"]
    lines += [f"  temp    {t.name}[{', '.join(render(e) for e in t.shape)}]" for t in p.temps]
    for step in p.steps:
        bound = [f"{k}={v if v is not None else 'none'}" for k, v in step.bind.items()]
        bound += [f"{k}={render(v)}" for k, v in step.args.items()] + [
            f"{k}={v}" for k, v in step.attrs.items()
        ]
        lines.append(f"  {step.op}({', '.join(bound)})")
    return "\n".join(lines)


def _sass(args: argparse.Namespace, root: Path, manifest: Manifest, op: str, variant: str) -> int:
    kernels = [e for e in _entries(manifest, op, variant) if isinstance(e, Kernel)]
    if not kernels:
        raise UsageError(f"{args.what} is a plan, it has no machine code of its own; give --launch")
    kernel = _chosen([k.variant for k in kernels], kernels, variant, op)
    with Folder.open_root(root) as tree, tree.folder(manifest.target) as folder:
        data = folder.read_exact(kernel.file, kernel.bytes, kernel.sha256)
    text = disassemble(manifest.target, kernel, data)
    document = {
        "op": op,
        "variant": kernel.variant,
        "target": manifest.target,
        "digest": kernel.sha256,
        "sass": text,
    }
    emit(args, document, text)
    return 0


def disassemble(target: str, kernel: Kernel, data: bytes) -> str:
    """The machine code of one entry.

    Raises:
        UnavailableError: the disassembler is not installed, or refuses the file.
    """
    with tempfile.TemporaryDirectory(prefix="kiln-show-") as folder:
        path = Path(folder) / "artifact"
        path.write_bytes(data)
        if target.startswith("cpu-"):
            command = [
                _tool("objdump"),
                "-d",
                f"--disassemble={kernel.entry}",
                "--no-show-raw-insn",
                str(path),
            ]
        else:
            command = [_nvdisasm(), "-c", str(path)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise UnavailableError(
            f"{command[0]} refused {kernel.file}: {made.stderr.strip() or made.stdout.strip()}"
        )
    return made.stdout


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise UnavailableError(f"{name} is not installed; install it (binutils) to see machine code.")
    return found


def _nvdisasm() -> str:
    from importlib.util import find_spec

    spec = find_spec("triton.backends.nvidia")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        path = Path(place) / "bin" / "nvdisasm"
        if path.is_file():
            return str(path)
    return _tool("nvdisasm")
