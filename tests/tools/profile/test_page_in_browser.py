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

from edgeq.tools.profile.output.page import page
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


def dumped(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The page after its scripts have run, on standard output."""
    alone = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    own = (f"--user-data-dir={path.parent / 'user'}", "--allow-file-access-from-files", "--enable-logging=stderr")
    command = [str(BROWSER), *alone, *own, *options, "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def _browser(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where there is none, or one that does not start or may not read a file here: of another system's package there can
    be a script alone that says how to install it."""
    if BROWSER is None:
        pytest.skip("no Chromium here")
    empty = tmp_path_factory.mktemp("browser") / "empty.html"
    empty.write_text("<!doctype html><pre>it reads this</pre>", encoding="utf-8")
    try:
        shown = dumped(empty).stdout
    except (OSError, subprocess.TimeoutExpired):
        shown = ""
    if "it reads this" not in shown:
        pytest.skip(f"{BROWSER} does not show an empty page")


@pytest.mark.usefixtures("_browser")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_every_chart_and_says_nothing(calm: dict[str, Any], dark: bool, tmp_path: Path) -> None:
    calm["measurements"].append(invented("tg", "tg4 @ d64", 1.2, depth=64))
    calm["memory"].append({"seconds": 2.0, "rss": 3_000_000, "cache": 20})
    (tmp_path / "page.html").write_text(page(calm), encoding="utf-8")
    (tmp_path / "phone.html").write_text(PHONE, encoding="utf-8")
    # Blink's names of the themes: 0 dark, 1 light.
    theme = f"--blink-settings=preferredColorScheme={int(not dark)}"
    result = dumped(tmp_path / "phone.html", theme)
    assert "CONSOLE" not in result.stderr, result.stderr
    match = re.search(r'<pre id="found">(.*?)</pre>', result.stdout)
    assert match, result.stderr
    found = json.loads(unescape(match[1]))
    assert len(found["boxes"]) == 6
    assert all(width > 300 and height > 20 and shapes for width, height, shapes in found["boxes"]), found
    assert found["needed"] <= found["width"] == 390 and found["dark"] == dark
    assert (found["paper"] == "rgb(255, 255, 255)") != dark
