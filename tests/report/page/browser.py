"""A headless Chromium that looks at reports as a reader does, if one is installed."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

AUDIT = Path(__file__).with_name("audit.js").read_text(encoding="utf-8")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for path in map(shutil.which, NAMES) if path), None)
WHY_NOT = f"none of {', '.join(NAMES)} is installed: apt-get install chromium"
DARK = "--blink-settings=preferredColorScheme=0"
TIMEOUT_S = 120


def run_chromium(*arguments: str) -> str:
    """What it prints; it has a profile of its own, which goes with it."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        done = subprocess.run(
            [*command, f"--user-data-dir={profile}", *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def look_at(folder: Path, pages: Mapping[str, str], widths: tuple[int, ...], *flags: str) -> list[dict[str, Any]]:
    """What is found of each page at each width: copies that audit themselves, each in a frame of that width."""
    frames = []
    for name, page in pages.items():
        # the copy may run a script, which the page itself may not
        without_policy = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
        assert without_policy != page, "the page has no policy"
        script = f"<script data-audit>const NAME = {json.dumps(name)};\n{AUDIT}</script></body>"
        copy = folder / f"{name}.html"
        copy.write_text(without_policy.replace("</body>", script), encoding="utf-8")
        frames += [f'<iframe src="{html.escape(copy.name)}" width="{width}" height="900"></iframe>' for width in widths]
    host = folder / "host.html"
    host.write_text(
        "<!DOCTYPE html><meta charset=utf-8><body><script>const all = [];"
        'addEventListener("message", (event) => { all.push(event.data);'
        'if (all.length === document.querySelectorAll("iframe").length) {'
        "document.body.dataset.found = JSON.stringify(all); } });</script>" + "".join(frames),
        encoding="utf-8",
    )
    text = run_chromium(*flags, "--virtual-time-budget=20000", "--window-size=1400,1000", "--dump-dom", host.as_uri())
    found = re.search(r'data-found="([^"]*)"', text)
    assert found is not None, text[-3000:]
    seen: list[dict[str, Any]] = json.loads(html.unescape(found[1]))
    return seen
