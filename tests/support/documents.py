"""Documents of built trees as values that a test may change."""

import copy
import json
from pathlib import Path
from typing import Any

from kiln.compiler.alike import whole


def manifest_document(folder: Path) -> dict[str, Any]:
    """A target's MANIFEST.json, each kernel written out and a value of its own."""
    document = json.loads((folder / "MANIFEST.json").read_bytes())
    return {**document, "kernels": [copy.deepcopy(k) for k in whole(document["kernels"])]}
