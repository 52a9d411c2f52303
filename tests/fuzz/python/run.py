"""Fuzzes one of the Python loaders with atheris: `python -m kiln.tests.fuzz.python.run NAME [libFuzzer
options] [corpora]`. See tests/fuzz/README.md."""

from __future__ import annotations

import random
import sys

import atheris

with atheris.instrument_imports(include=["kiln.runtime"]):
    from kiln.tests.fuzz.python import checks

from kiln.tests.fuzz.mutations import cut_up, overwritten


def mutated(name: str, data: bytes, most: int, seed: int) -> bytes:
    """Half of the time what libFuzzer does, else a change that knows the form of the bytes."""
    rng = random.Random(seed)
    if len(data) < 64 or rng.random() < 0.5:
        return bytes(atheris.Mutate(data, most))
    if name == "tree":
        text, zero, artifact = data.partition(b"\0")
        if len(artifact) > 64 and rng.random() < 0.3:
            return (text + zero + overwritten(artifact, rng))[:most]
        return (cut_up(text, rng) + zero + artifact)[:most]
    change = overwritten if name in ("cubin", "object") else cut_up
    return change(data, rng)[:most]


def main() -> None:
    """Run until libFuzzer's options say stop."""
    name = sys.argv.pop(1)
    check = checks.Trees().check if name == "tree" else checks.CHECKS[name]

    def one(data: bytes) -> None:
        check(data)

    atheris.Setup(
        sys.argv,
        one,
        custom_mutator=lambda data, most, seed: mutated(name, data, most, seed),
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
