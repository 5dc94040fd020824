"""A model file is mapped with large pages where the system has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgeq.format.container import ModelFile

SMAPS = Path("/proc/self/smaps")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without large pages")
def test_the_mapping_asks_for_large_pages(sample: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f.edgeq"
    path.write_bytes(sample)
    file = ModelFile.open(path)
    found = re.search(rf"{re.escape(str(path))}\n(?:\w+:.*\n)*?VmFlags: (.*)", SMAPS.read_text())
    assert found and "hg" in found[1].split()
    assert file.size
