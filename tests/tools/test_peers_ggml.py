"""ggml as a peer: built only from an archive that holds it. No test builds it: that takes minutes."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from kiln.tools.console import UsageError
from kiln.tools.peers_ggml import build, ggml_peers


def _archive(folder: Path, name: str, text: str) -> Path:
    source = folder / "file"
    source.write_text(text)
    with tarfile.open(folder / "peer.tar.gz", "w:gz") as packed:
        packed.add(source, name)
    return folder / "peer.tar.gz"


def test_an_archive_without_ggml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no ggml/src/CMakeLists\.txt"):
        build(_archive(tmp_path, "llama/CMakeLists.txt", "project(llama)"))


def test_an_archive_that_does_not_build_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = _archive(tmp_path, "llama/ggml/src/CMakeLists.txt", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="building ggml needs cmake, which is not installed"):
        ggml_peers(archive)
