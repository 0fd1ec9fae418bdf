"""Following a page: its files are written, its Python blocks run, and its commands are executed, in order."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from hubs import served_hub
from trainkit import cli
from trainkit.testing import character_tokenizer

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
STARTED = ROOT / "docs/getting-started.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PLUGIN_READMES = sorted((ROOT / "plugins").glob("*/README.md"))
OTHERS = {"deepspeed", "early_stop", "kit", "migrate", "ray", "report", "sweep", "tools", "trl", "trlx", "vllm"}
ALGORITHM_READMES = [page for page in PLUGIN_READMES if page.parent.name not in OTHERS]
"""Those of plugins that are trainers."""
DOCUMENTS = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *PAGES,
    *PLUGIN_READMES,
    ROOT / "examples/README.md",
    *sorted((ROOT / "examples/plugins").rglob("README.md")),
]


class Block(NamedTuple):
    """A fenced block of Markdown."""

    language: str
    line: int
    """The line it starts after."""
    text: str
    before: str
    """The line of text before it: of a file, its path in backquotes; of a command that fails, that it does."""

    @property
    def file(self) -> str:
        """The path of the file that the block shows; empty if it shows none."""
        found = re.fullmatch(r"`([\w./-]+)`:", self.before)
        return found[1] if found else ""


def blocks(document: Path, *languages: str) -> list[Block]:
    """The fenced blocks of some languages, or of all."""
    text = document.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    every = [
        Block(m[1], text.count("\n", 0, m.start(2)), m[2], text[: m.start()].rstrip().rpartition("\n")[2])
        for m in found
    ]
    return [block for block in every if not languages or block.language in languages]


class Table(NamedTuple):
    header: str
    rows: list[list[str]]

    @property
    def names(self) -> list[str]:
        """The code spans of the first column."""
        return [span for row in self.rows for span in spans(row[0])]


def prose(document: Path) -> str:
    """The document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def tables(document: Path) -> list[Table]:
    """Every table: what stands in its first header cell, and its rows."""
    found = []
    for lines in re.findall(r"(?:^\|.*\|\n)+", prose(document) + "\n", flags=re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()]
        found.append(Table(header[0].strip("`"), rows))
    return found


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


NOT_RUN = {
    r"make (demo|test)": "continuous integration runs them",
    r"make examples-real": "it downloads a model, and takes half an hour",
    r"git switch": "the checkout is not the test's",
    r"trainkit eval .*--lm-eval": "it needs lm-eval and data of the hub",
    r"trainkit (watch|serve)": "it serves until Ctrl-C",
    r"trainkit export .*--format": "it needs the converter of llama.cpp",
    r".*smollm2": "it downloads a model; make examples-real does both",
    r"python dialogues\.py": "it downloads a dataset",
    r"trainkit (train dialogues-|export runs/dialogues)": "that model is trained on that dataset",
    r"python benchmarks/beside_trl\.py": "it needs TRL, and trains that model for minutes",
    r"ray (start|stop)": "it needs Ray and several machines; make engines runs with Ray",
}
"""Commands that are not executed, as patterns, and why."""
MOST = ",".join(sorted(path.name for path in (ROOT / "plugins").iterdir() if path.name not in ("sft", "dpo", "kit")))
SMALL = (
    "model.model_path='{model_type: gpt2, vocab_size: 28, n_layer: 1, n_head: 2, n_embd: 16, n_positions: 64, "
    "bos_token_id: null, eos_token_id: null}' tokenizer.tokenizer_path=letters "
    "rollout.num_rollouts=8 rollout.max_new_tokens=4 train.batch_size=8 train.total_steps=2 train.seq_length=null"
)
SMALL_IMAGES = (
    "model.model_path='{model_type: pixel_unet, image_size: 8, width: 16, "
    "prompts: [a lighthouse at night, a bowl of fruit, blurry]}' "
    "method.num_steps=5 rollout.num_rollouts=4 rollout.batch_size=4 train.batch_size=8 train.total_steps=2"
)
STANDS_FOR = [
    (r"--prompts FILE", "--prompts prompts.jsonl"),
    (r"runs/(second|x|y)\b", "runs/first"),
    (r"answers\.jsonl --config run\.yaml --row 12", "prompts.jsonl --config CONFIG.yaml --row 1"),
    (r"answers\.jsonl --method dpo --model org/name", "pairs.jsonl --method dpo tokenizer.tokenizer_path=letters"),
    (r"answers\.jsonl --model org/name", "samples.jsonl tokenizer.tokenizer_path=letters"),
    (r"data check (data|answers)\.jsonl", "data check samples.jsonl"),
    (r"--prompts test\.jsonl", "--prompts prompts.jsonl"),
    (r"rewards\.py:(score|measure)", r"FILE.py:\1"),
    (r"--task task\.py:task", "--task FILE.py:function"),
    (r"plugins check NAME(?! --)", "plugins check sft --only resume_every_step"),
    (r"plugins check NAME", "plugins check sft"),
    (r"PLUGINS=NAME,NAME", "PLUGINS=early_stop,ray"),
    (r"--no-plugin NAME", "--no-plugin early_stop"),
    (r"(examples run \w+.*)", r"\1 --steps 2 --sft-epochs 1"),
    (r"(trainkit train examples/randomwalks/\w+\.yaml)", r"\1 train.epochs=null train.total_steps=2"),
    (r"(trainkit train lora\.yaml)", r"\1 " + SMALL),
    (r"(trainkit train ddpo\.yaml)", r"\1 " + SMALL_IMAGES),
    (r"trainkit plugins list --probe", f"TRAINKIT_DISABLE_PLUGINS={MOST} trainkit plugins list --probe"),
    (r"--nnodes=2 .*--nproc_per_node=8", "--nnodes=2 --node_rank=RANK --nproc_per_node=1"),
    (r"--num_processes (8|16)", "--num_processes 2"),
    (r"--nproc_per_node=8", "--nproc_per_node=2"),
    (r"train\.run_dir=RUN$", "train.run_dir=runs/machines-$RANDOM"),
    (r"(.* --(?:nnodes|num_machines).*)", r"for rank in 0 1; do \1 & done; wait -n && wait -n"),  # here, not on two
    (r"(node_|machine_)(rank[= ])RANK", r"\1\2$rank"),
    (r"(master_addr=|main_process_ip )HOST", r"\g<1>127.0.0.1"),
    (r"postgresql\+psycopg:\S+", "sqlite:///shared.db"),
]
"""What is executed in place of placeholders, and smaller settings of what would take longer than half a minute."""
SINCE = {"write-an-algorithm.md": "\n## The contract\n"}
"""Headings before which a page is followed by another test: by test_tutorial.py."""
NEW = "A command that cannot run as it is: give it what it needs in WORLD or STANDS_FOR, or a reason in NOT_RUN."
SMALLER = {
    "sweep.yaml": {"trials: 20": "trials: 2", "seeds: [1, 2, 3]": "seeds: [1]", "total_steps: 200": "total_steps: 2"}
}
"""What is changed in files of pages, for the same reason."""
LAUNCH = (
    r"(\w+=\S+ )*(torchrun|accelerate launch)|"
    r"trainkit (plugins list --probe|plugins check NAME$|examples run|sweep)|export TRAINKIT_SWEEP_STORAGE"
)
"""Commands that take several seconds, most of them because they start further processes; they are slow tests."""
TINY = """
model: {model_path: {model_type: gpt2, vocab_size: 30, n_layer: 1, n_head: 2, n_embd: 16, n_positions: 64,
                     bos_token_id: null, eos_token_id: null}}
tokenizer: {tokenizer_path: letters}
"""
WORLD = {
    "CONFIG.yaml": f"method: ppo\n{TINY}rollout: {{max_new_tokens: 4, num_rollouts: 8}}\n"
    "train: {batch_size: 8, total_steps: 2, eval_interval: 0, trackers: []}\n",
    "run.yaml": "method: ppo\nmodel: {model_path: openai-community/gpt2}\ntrain: {total_steps: 2}\n",
    "other.yaml": "method: {name: ppo, gamma: 0.9}\nmodel: {model_path: openai-community/gpt2}\n",
    "prompts.jsonl": '"a"\n"bc"\n',
    "samples.jsonl": '{"prompt": "a", "completion": "b"}\n' * 8,
    "pairs.jsonl": '{"prompt": "a", "chosen": "b", "rejected": "c", "id": 1}\n',
    "FILE.py": """
def function(*_, outputs=None, **__):
    if outputs is not None:
        return [float(output.count("a")) for output in outputs]
    return {"reward_fn": function, "prompts": ["a", "bc"], "eval_prompts": ["a", "bc"]}

score = function

def measure(outputs, **_):
    return {"letters": [float(len(output)) for output in outputs]}
""",
    "ppo.yaml": f"method: ppo\n{TINY}rollout: {{max_new_tokens: 4, num_rollouts: 64}}\n"
    "train: {batch_size: 8, eval_interval: 2, trackers: []}\n",
    "SWEEP.yaml": "run: {config: ppo.yaml, task: FILE.py:function, overrides: {train.total_steps: 2}}\n"
    "trials: 1\nparameters: {optimizer.lr: [1e-4, 1e-3]}\n",
    "rewards.py": "def reward(outputs, **_):\n    return [float(len(output)) for output in outputs]\n",
    "game.py": """
from trainkit.rollouts import Turn

class GuessNumber:
    def __init__(self, row):
        self.row = row

    def step(self, output):
        return Turn(reward=float(len(output)), done=True)
""",
}
"""The files that placeholders of commands name."""


class Reader:
    """Somebody who does what a page says, in an empty directory with the files of `WORLD`."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, *, launches: bool = False) -> None:
        self.monkeypatch, self.launches, self.printed = monkeypatch, launches, ""
        """What the last block printed."""
        for name, text in WORLD.items():
            (home / name).write_text(text, encoding="utf-8")
        character_tokenizer("abcdefghijklmnopqrstuvwxyz").save_pretrained(home / "letters")
        (home / "examples").symlink_to(ROOT / "examples")

    def follow(self, document: Path) -> ModuleType:
        """Follow a page from top to bottom, or from its heading of `SINCE` on; return the module of its Python blocks.

        With ``launches``, only files are written, and only the commands of `LAUNCH` are executed.
        """
        module = ModuleType(f"document_{document.stem.lower().replace('-', '_')}")
        self.monkeypatch.setitem(sys.modules, module.__name__, module)
        text = document.read_text(encoding="utf-8")
        first = text.count("\n", 0, text.index(SINCE.get(document.name, "")))
        for block in blocks(document):
            if block.line < first:
                continue
            if block.file:
                Path(block.file).write_text(self.smaller(block), encoding="utf-8")
            if block.language == "python" and not self.launches:
                source = "\n" * block.line + block.text  # so that tracebacks show the document's lines
                with redirect_stdout(StringIO()) as printed:
                    exec(compile(source, str(document), "exec", dont_inherit=True), vars(module))
                self.printed = printed.getvalue()
            elif block.language == "console":
                found = [c for c in commands(block) if bool(re.match(LAUNCH, c)) == self.launches]
                self.printed = "".join(self.run(c, fails=block.before.endswith("fails:")) for c in found)
            elif block.language == "text" and self.printed:
                compare(block.text, self.printed)
        return module

    def smaller(self, block: Block) -> str:
        """Return the text of a file, with what `SMALLER` changes in it."""
        text = block.text
        for shown, smaller in SMALLER.get(block.file, {}).items():
            assert shown in text
            text = text.replace(shown, smaller)
        return text

    def run(self, command: str, *, fails: bool) -> str:
        """Execute a command, check its exit code, and return what it printed."""
        if any(re.match(pattern, command) for pattern in NOT_RUN):
            return ""
        for pattern, replacement in STANDS_FOR:
            command = re.sub(pattern, replacement, command)
        if "runs/first" in command and "run_dir" not in command and not Path("runs/first").exists():
            self.run("trainkit train CONFIG.yaml train.run_dir=runs/first --task FILE.py:function", fails=False)
        if command.startswith("export "):
            self.monkeypatch.setenv(*command.removeprefix("export ").split("=", 1))
            return ""
        simple = re.match(r"((?:\w+=\S+ )*)trainkit ([^>]*?)(?: > (\S+))?$", command)
        if simple is None:
            return self.shell(command)
        words = shlex.split(simple[2])
        if words[0] == "train" and not any(word.startswith("--") and word != "--no-plugin" for word in words):
            words += ["--samples", "samples.jsonl"]
        if "CONFIG.yaml" in words:
            method = "sft" if "--samples" in words else "ppo"
            Path("CONFIG.yaml").write_text(WORLD["CONFIG.yaml"].replace("ppo", method), encoding="utf-8")
        with self.monkeypatch.context() as patch, served_hub(patch) if words[0] == "push" else nullcontext():
            for name, _, value in (word.partition("=") for word in simple[1].split()):
                patch.setenv(name, value)
            result = CliRunner().invoke(cli.app, words, prog_name="trainkit")
        assert (result.exit_code != 0) == fails, f"$ {command}\n{result.output}{result.exception!r}\n{NEW}"
        if simple[3]:
            Path(simple[3]).write_text(result.stdout, encoding="utf-8")
        return result.output

    def shell(self, command: str) -> str:
        """Execute a command of another program, on CPUs, with the programs of this environment."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        given = {**os.environ, "PATH": path, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(["bash", "-c", command], env=given, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


def commands(block: Block) -> Iterator[str]:
    """The commands after ``$`` of a block, without comments; lines that end in a backslash continue."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            yield re.sub(r"\s+#.*|\s+$", "", line[2:]).replace("   ", " ")


def compare(shown: str, printed: str) -> None:
    """Check that every line that is shown was printed, in this order; ``...`` stands for any text."""
    at = 0
    for line in shown.splitlines():
        pattern = r"\s+".join(re.escape(word).replace(r"\.\.\.", ".*") for word in line.split())
        found = re.compile(rf"^\s*{pattern}\s*$", flags=re.MULTILINE).search(printed, at)
        assert found is not None, f"{line!r} is not in what was printed:\n{printed[at:]}"
        at = found.end()
