"""Ten minutes of a GPU, used well: probes, tests, kernels and training steps, each in a process with a deadline.

``make gpu`` runs it. A stage that fails or hangs loses its own rows and nothing else. Every row is written to
``OUT/gpu.jsonl`` as soon as it is measured, with the card, the versions and a hash of the sources. Rows that ``--known``
has for the same card and sources are not measured again, so that a second call goes on where the first was stopped.

It runs from a plain checkout: the plugins are found in their folders, and nothing is installed. `benchmarks/README.md`
lists the packages that have to be there beside torch.

The training steps are those of ``speed.py``, on the shapes of Qwen2.5 0.5B and 1.5B (Q05, Q15) with random weights,
beside TRL where it can be imported. ``--device cpu --tiny`` runs every stage on a CPU with small models, to try whether
everything works.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STAGES = {
    "ceilings": 30,
    "probes": 60,
    "head": 60,
    "sft": 150,
    "dpo": 150,
    "grpo": 200,
    "profile": 60,
    "tests": 240,
}
"""The stages, in order, and the most seconds of each."""
TRAINING: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "sft": (
        ("sft:8x512..2048", "Q05", ()),
        ("sft:8x512..2048", "Q15", ("--apart",)),
    ),
    "dpo": (("dpo:8x256..1024", "Q05", ()),),
    "grpo": (("grpo:16x8,512+256", "Q05", ("--microbatch", "16")),),
}
"""The training steps of a stage: case, model, and options of ``speed.py``."""
TINY = {"sft": "sft:2x12..16", "dpo": "dpo:2x12..16", "grpo": "grpo:2x2,8+8"}
PEAK = 989e12
"""FLOP/s in bf16 that the maker of an H100 or H200 promises; shares of peak are shares of it."""


def sources() -> str:
    """Return a hash of everything that is measured."""
    found = hashlib.sha256()
    for folder in ("trainkit", "plugins", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def write_entry_points(site: Path) -> list[str]:
    """Write what an installation of trainkit and its plugins would tell Python about them; return where modules are."""
    folders = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
    for folder in folders:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        about = site / f"{project['name'].replace('-', '_')}-0.1.0.dist-info"
        about.mkdir(parents=True, exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n"
        (about / "METADATA").write_text(text, encoding="utf-8")
        groups = {**project.get("entry-points", {}), "console_scripts": project.get("scripts", {})}
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in each.items()) for group, each in groups.items()]
        (about / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return [str(site), *map(str, folders)]


class Rows:
    """The rows of a file, one JSON object a line."""

    def __init__(self, out: Path, known: list[dict[str, Any]], common: dict[str, Any]) -> None:
        self.file, self.common = out / "gpu.jsonl", common
        self.known = {row["row"] for row in known if common.items() <= row.items() and "failed" not in row}

    def add(self, row: str, **facts: Any) -> None:
        """Write a row, and print it."""
        with self.file.open("a", encoding="utf-8") as file:
            print(json.dumps({"row": row, **facts, **self.common}), file=file)
        print(f"{row}: " + ", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)


def timed(call: Callable[[], Any], times: int = 3) -> float:
    """Return the seconds of a call, the least of some after one that is not counted."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    found = []
    for _ in range(times + 1):
        wait()
        started = time.perf_counter()
        call()
        wait()
        found.append(time.perf_counter() - started)
    return min(found[1:])


def ceilings(rows: Rows, options: argparse.Namespace) -> None:
    """The speed of a large product and of a copy, and the time of a launch."""
    import torch

    n = 256 if options.tiny else 8192
    for name, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        a, b = (torch.randn(n, n, device=options.device, dtype=dtype) for _ in range(2))
        rows.add(f"product {n}, {name}", tflops=round(2 * n**3 / timed(lambda a=a, b=b: a @ b) / 1e12, 2))
    a = torch.empty(2**20 if options.tiny else 2**31, dtype=torch.uint8, device=options.device)
    rows.add("copy", gb_per_s=round(2 * len(a) / timed(a.clone) / 1e9, 1))
    small = torch.zeros(1, device=options.device)
    rows.add("launch", us=round(timed(lambda: [small.add_(1) for _ in range(1000)]) * 1e3, 2))


def probes(rows: Rows, options: argparse.Namespace) -> None:
    """What torch does on this card where trainkit relies on it."""
    import inspect

    import torch
    import torch.nn.functional as F
    from torch.profiler import ProfilerActivity, profile

    device, cuda = options.device, options.device == "cuda"

    def attend(dtype: torch.dtype, kind: str, queries: int, keys: int, far: bool = False) -> tuple[Any, ...]:
        heads = (4, 2) if kind.endswith("gqa") else (4, 4)
        shape = ((2, heads[0], queries, 64), (2, heads[1], keys, 64), (2, heads[1], keys, 64))
        q, k, v = (torch.randn(each, device=device, dtype=dtype) for each in shape)
        if far:  # a query that is far from every key: its log-sum-exp is about −128
            q[:, :, -1], k[:] = 4.0, -4.0
        q, k, v = (each.requires_grad_() for each in (q, k, v))
        mask = None
        if kind.startswith("mask"):
            mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[None, None]
            mask = mask & (torch.arange(keys, device=device) >= 3)  # left padding: queries that see nothing
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=kind.endswith("gqa")
        )
        seen = out if mask is None else out[:, :, 3:]
        return torch.autograd.grad(seen.float().square().sum(), (q, k, v))

    for kind in ("causal", "causal gqa", "mask", "mask gqa"):
        for dtype in (torch.bfloat16, torch.float32):
            used: dict[str, str] = {}
            with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as found:
                attend(dtype, kind, 192, 192)
            for event in found.key_averages():
                if "scaled_dot_product" in event.key and "backward" not in event.key:
                    used[event.key.removeprefix("aten::_scaled_dot_product_")] = ""
            rows.add(f"attention, {kind}, {str(dtype)[6:]}", used=" ".join(used))
    if cuda:
        for cudnn in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            for far in (False, True):
                broken = [
                    f"{kind} {length}"
                    for kind in ("causal", "mask", "mask gqa")
                    for length in (64, 128, 192, 256, 320)
                    if not all(each.isfinite().all() for each in attend(torch.bfloat16, kind, length, length, far))
                ]
                rows.add(f"gradients that are not finite, cuDNN {cudnn}, far {far}", found=broken)
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as missing:
        rows.add("varlen_attn", failed=str(missing))
    else:
        rows.add("varlen_attn", signature=str(inspect.signature(varlen_attn)))


def tests(rows: Rows, options: argparse.Namespace) -> None:
    """The tests that need a GPU, without vLLM's."""
    import re

    select = ["--collect-only", "-q"] if options.tiny else ["-n", "12", "-q", "--tb=short", "-k", "not vllm", "-p", "no:benchmark"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *select, "tests/test_gpu.py"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    (options.out / "tests.txt").write_text(ran.stdout + ran.stderr, encoding="utf-8")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    rows.add("tests", result=ran.stdout.strip().splitlines()[-1] if ran.stdout else ran.stderr[-300:], broken=failed)


def head(rows: Rows, options: argparse.Namespace) -> None:
    """Log-probabilities from the head under autocast, forward and backward: seconds, memory, error of the gradient."""
    import torch
    from speed_systems.work import MODELS
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainkit.models import make_policy

    for name in ("S",) if options.tiny else ("Q05", "Q15"):
        fields = {**MODELS[name], "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        fields["n_layer" if name == "S" else "num_hidden_layers"] = 1
        with torch.device(options.device):
            policy = make_policy(AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)))
        weight, vocabulary = policy.model.get_output_embeddings().weight, fields["vocab_size"]
        for count in (64,) if options.tiny else (8192, 32768):
            torch.manual_seed(0)
            states = torch.randn(count, weight.shape[1], device=options.device, requires_grad=True)
            tokens = torch.randint(0, vocabulary, (count,), device=options.device)

            def step(bf16: bool = True) -> torch.Tensor:
                weight.grad = states.grad = None
                with torch.autocast(options.device, torch.bfloat16, enabled=bf16):
                    logprobs = policy._read_states((states, tokens, tokens, None), False, None)[0]
                (-logprobs.sum() / count).backward()
                return weight.grad

            if options.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            exact = step(bf16=False).double()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if options.device == "cuda" else 0
            error = float((step().double() - exact).norm() / exact.norm())
            if options.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            rows.add(
                f"head, {name}, {count} tokens",
                seconds=round(timed(step), 4),
                seconds_float32=round(timed(lambda: step(bf16=False), 1), 4),
                gradient_error=round(error, 5),
                mb_float32=round(peak),
                mb=round((torch.cuda.max_memory_allocated() - before) / 2**20) if options.device == "cuda" else 0,
            )


def parameters(fields: dict[str, Any]) -> tuple[int, int]:
    """Return how many weights a token is multiplied with in the layers of a Llama or Qwen, and in the head."""
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    kv = width * fields["num_key_value_heads"] // heads
    layer = 2 * width * width + 2 * width * kv + 3 * width * fields["intermediate_size"]
    return fields["num_hidden_layers"] * layer, width * fields["vocab_size"]


def training(stage: str) -> Callable[[Rows, argparse.Namespace], None]:
    """Return the stage that measures the training steps of ``stage`` with ``speed.py``."""

    def run(rows: Rows, options: argparse.Namespace) -> None:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        import importlib.util

        import speed
        from rich.progress import Progress

        systems = ["trainkit", *(["trl"] if importlib.util.find_spec("trl") else [])]
        cases = ((TINY[stage], "S", ()),) if options.tiny else TRAINING[stage]
        for case, model, more in cases:
            for part in [[each] for each in systems] if "--apart" in more else [systems]:
                names = [f"{case}, {model}, {system}" for system in part]
                if rows.known >= set(names):
                    continue
                arguments = ["--cases", case, "--models", model, "--precision", "bf16", "--steps", "3", "--warmup", "2"]
                arguments += ["--trl-python", sys.executable, "--threads", "2" if options.tiny else "8", *more]
                arguments += ["--device", "cpu"] * (options.device == "cpu")
                chosen = speed.parse([*arguments, "--systems", *part])
                job = next(speed.jobs(chosen))
                with Progress(disable=True) as progress:
                    workers = speed.measure(job, chosen, progress)
                    for missing in set(part) - {worker.system for worker in workers}:
                        rows.add(f"{case}, {model}, {missing}", failed="see the output")
                    for worker in workers:
                        measured = speed.row(job, worker)
                        facts = {name: measured[name] for name in ("seconds", "peak", "before", "phases")}
                        rows.add(f"{case}, {model}, {worker.system}", **facts, **speeds(job, model, facts["seconds"]))

    return run


def speeds(job: Any, model: str, seconds: float) -> dict[str, Any]:
    """Return the tokens per second of a step, and for SFT the share of the peak, without recomputation."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "speed_systems"))
    from work import Work

    work = Work(system="", case=job.case.name, model=model, **job.case.fields())
    if job.case.name == "grpo":
        return {"response_tokens_per_s": round(work.rows * work.new / seconds)}
    lengths = [length + 1 for length in work.lengths()]
    tokens = sum(lengths) * (2 if job.case.name == "dpo" else 1)
    found = {"tokens_per_s": round(tokens / seconds)}
    if job.case.name == "sft" and model != "S":
        layers, last = parameters(work.fields)
        attention = 2 * work.fields["num_hidden_layers"] * work.fields["hidden_size"] * sum(n * n for n in lengths)
        found["share_of_peak"] = round(3 * (2 * (layers + last) * tokens + attention) / seconds / PEAK, 4)
    return found


def profiled(rows: Rows, options: argparse.Namespace) -> None:
    """Where a step's time goes: kernels, the GPU's idle share, and the reads of the host."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    sys.path.insert(0, str(ROOT / "benchmarks" / "speed_systems"))
    import figures
    import with_trainkit
    from work import Work

    import trainkit

    cuda = options.device == "cuda"
    for stage in ("sft",) if options.tiny else ("sft", "dpo"):
        case, model, _ = (TINY[stage], "S", ()) if options.tiny else TRAINING[stage][0]
        if f"profile of {case}, {model}" in rows.known:
            continue
        fields = figures.Case.read(case).fields()
        work = Work(system="trainkit", case=stage, model=model, precision="bf16", **fields)

        class Watch:
            profiler: Any = None
            started = 0.0

            @trainkit.hookimpl
            def on_step(self, trainer: Any, step: int) -> None:
                if cuda:
                    torch.cuda.synchronize()
                if step == 2:
                    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
                    self.profiler = profile(activities=kinds)
                    self.profiler.__enter__()
                    self.started = time.perf_counter()
                elif step == 3:
                    seconds = time.perf_counter() - self.started
                    self.profiler.__exit__(None, None, None)
                    report(seconds, self.profiler, f"profile of {case}, {model}", stage)

        def report(seconds: float, profiler: Any, name: str, stage: str) -> None:
            events = profiler.key_averages()
            on_device = [each for each in events if cuda and str(each.device_type).endswith("CUDA")]
            top = sorted(on_device, key=lambda each: -each.self_device_time_total)[:25]
            busy = sum(each.self_device_time_total for each in on_device) / 1e6
            reads = {
                each.key: each.count
                for each in events
                if each.key in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::item", "aten::nonzero")
            }
            table = [(each.key[:110], each.count, round(each.self_device_time_total / 1e3, 2)) for each in top]
            text = "\n".join(f"{ms:10.2f} ms {count:7} {key}" for key, count, ms in table)
            calls = events.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)
            (options.out / f"profile-{stage}.txt").write_text(f"{text}\n\n{calls}\n", encoding="utf-8")
            rows.add(name, seconds=round(seconds, 3), gpu_seconds=round(busy, 3), host_reads=reads)

        settings = with_trainkit.settings(work)
        settings["train"] |= {"total_steps": 3, "run_dir": tempfile.mkdtemp()}
        trainkit.train(
            work.network(),
            config=trainkit.TRLConfig.from_dict(settings),
            tokenizer=work.tokenizer(),
            callbacks=[Watch()],
            **with_trainkit.data(work),
        )


RUN: dict[str, Callable[[Rows, argparse.Namespace], None]] = {
    "ceilings": ceilings,
    "probes": probes,
    "tests": tests,
    "head": head,
    **{stage: training(stage) for stage in TRAINING},
    "profile": profiled,
}


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Return what makes rows comparable: the card, the versions, the sources."""
    code = (
        "import json, torch, transformers;"
        "card = torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU';"
        "print(json.dumps({'card': card, 'torch': torch.__version__, 'transformers': transformers.__version__}))"
    )
    found: dict[str, Any] = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))
    if options.device == "cuda" and found["card"] == "CPU":
        raise SystemExit("there is no CUDA device; give --device cpu --tiny to try the stages on a CPU")
    return {**found, "sources": sources(), "tiny": options.tiny}


def lines(path: Path | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, if there is one."""
    if path is not None and path.exists():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def main(arguments: list[str] | None = None) -> int:
    """Run the stages within the budget; return 1 if one of them failed, else 0."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--budget", type=float, default=540, help="seconds in all")
    made.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    made.add_argument("--known", type=Path, help="a file with rows of before")
    made.add_argument("--only", nargs="+", choices=STAGES)
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    made.add_argument("--tiny", action="store_true", help="small models and few rows")
    made.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    made.add_argument("--common", help=argparse.SUPPRESS)
    options = made.parse_args(arguments)
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    common = json.loads(options.common) if options.common else about(options)
    rows = Rows(options.out, [*lines(options.known), *lines(options.out / "gpu.jsonl")], common)
    if options.stage:
        RUN[options.stage](rows, options)
        return 0
    paths = write_entry_points(Path(tempfile.mkdtemp()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}
    ends, failed = time.monotonic() + options.budget, False
    for stage in options.only or STAGES:
        limit, started = min(STAGES[stage], ends - time.monotonic()), time.monotonic()
        if limit < 5:
            print(f"{stage}: no time left")
            continue
        command = [sys.executable, "-W", "ignore", __file__, *(arguments or sys.argv[1:]), "--stage", stage]
        try:
            subprocess.run([*command, "--common", json.dumps(common)], env=environment, timeout=limit, check=True)
            failed |= any("failed" in row for row in lines(rows.file))
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as reason:
            failed = True
            rows.add(stage, failed=f"{type(reason).__name__} after {time.monotonic() - started:.0f} s")
        print(f"-- {stage}: {time.monotonic() - started:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
