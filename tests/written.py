"""The files of runs, written as runs write them, without running any; and what pages about them have."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m & \"quoted\" 'text'"
"""Text that would have an effect in HTML or on a terminal."""


def write_run(
    path: Path,
    *,
    seed: int = 1,
    method: str = "ppo",
    steps: int = 20,
    metrics: list[dict[str, Any]] | None = None,
    samples: bool = True,
    lr: float = 1e-3,
    gain: float = 0.0,
) -> Path:
    """Write the files of a run, as a run writes them, without running it."""
    path.mkdir(parents=True)
    lines = [
        "method:",
        f"  name: {method}  # /home/somebody/project/ppo.yaml:1",
        "optimizer:",
        f"  lr: {lr}  # command line",
        "train:",
        f"  seed: {seed}  # default",
        f"  total_steps: {steps}  # default",
    ]
    (path / "config.yaml").write_text("\n".join(lines) + "\n")
    if metrics is None:
        metrics = [
            {"step": step, "reward/mean": step / steps + gain, "time/update": 0.5} for step in range(1, steps + 1)
        ]
        metrics += [{"step": step, "eval/reward": step / steps + gain, "eval/time": 0.1} for step in (0, steps)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    if samples:
        rows = [
            {
                "step": step,
                "kind": "evaluation",
                "prompt": f"p{at} {EVIL}",
                "output": f"said {step}",
                "reward": at + gain,
            }
            for step in (0, steps)
            for at in range(12)
        ]
        (path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Page(HTMLParser):
    """What a browser would load or run, and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data
