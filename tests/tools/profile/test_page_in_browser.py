"""The page in a browser: nothing on its console, every chart drawn, nothing wider than a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from edgeq.tools.profile.page import page
from tests.tools.profile.conftest import invented

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE = """<!doctype html><title>a phone</title><iframe width="390" height="844" style="border: 0" src="page.html"></iframe>
<script>
onload = () => {
  const frame = document.querySelector("iframe"), page = frame.contentDocument, view = frame.contentWindow;
  const boxes = [...page.querySelectorAll("svg")].map(svg => {
    const drawn = [...svg.querySelectorAll("path, rect, circle")].filter(e => e.getBBox().width + e.getBBox().height > 0);
    return [svg.getBoundingClientRect().width, svg.getBoundingClientRect().height, drawn.length];
  });
  const told = document.body.appendChild(document.createElement("pre"));
  told.id = "found";
  told.textContent = JSON.stringify({boxes, width: view.innerWidth, needed: page.documentElement.scrollWidth,
    paper: view.getComputedStyle(page.body).backgroundColor, dark: view.matchMedia("(prefers-color-scheme: dark)").matches});
};
</script>"""
"""The page as wide as a phone: a window of a browser may not be so small."""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_every_chart_and_says_nothing(calm: dict[str, Any], dark: bool, tmp_path: Path) -> None:
    calm["measurements"].append(invented("tg", "tg4 @ d64", 1.2, depth=64))
    calm["memory"].append({"seconds": 2.0, "rss": 3_000_000, "cache": 20})
    (tmp_path / "page.html").write_text(page(calm), encoding="utf-8")
    (tmp_path / "phone.html").write_text(PHONE, encoding="utf-8")
    # Blink's names of the themes: 0 dark, 1 light.
    theme = f"--blink-settings=preferredColorScheme={int(not dark)}"
    alone = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'user'}")
    command = [str(BROWSER), *alone, theme, "--allow-file-access-from-files", "--enable-logging=stderr", "--dump-dom"]
    result = subprocess.run([*command, (tmp_path / "phone.html").as_uri()], capture_output=True, text=True, timeout=300)
    assert "CONSOLE" not in result.stderr, result.stderr
    match = re.search(r'<pre id="found">(.*?)</pre>', result.stdout)
    assert match, result.stderr
    found = json.loads(unescape(match[1]))
    assert len(found["boxes"]) == 6
    assert all(width > 300 and height > 20 and shapes for width, height, shapes in found["boxes"]), found
    assert found["needed"] <= found["width"] == 390 and found["dark"] == dark
    assert (found["paper"] == "rgb(255, 255, 255)") != dark
