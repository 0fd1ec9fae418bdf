"""The stages of ``gpu.py``, each in a process of its own.

The training steps are those of ``speed.py`` under bf16, on the shapes of Qwen2.5 0.5B and 1.5B (Q05, Q15) with random
weights, beside TRL where it can be imported.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).with_name("speed_systems"))]

import figures
import speed
import torch
import torch.nn.functional as F
import with_trainkit
from gpu import ROOT
from rich.progress import Progress
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from work import MODELS, Work

import trainkit
from trainkit.config import SamplingConfig
from trainkit.data import Sequences
from trainkit.models import Policy, compiling, make_policy
from trainkit.models.joined import JoinedRows
from trainkit.models.joined import attend as attend_joined
from trainkit.rollouts import CausalSampler
from trainkit.rollouts.sampler import _Responses

TRAINING: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "sft": (
        ("sft:8x512..2048", "Q05", "", ""),
        ("sft:8x512..2048", "Q05", "", "trainkit-padded"),
        ("sft:8x512..2048", "Q15", "--apart", ""),
        ("sft-packed:32x1024", "Q05", "", "trainkit"),
        ("sft-packed:32x1024", "Q15", "", "trainkit"),
    ),
    "dpo": (
        ("dpo:8x256..1024", "Q05", "", ""),
        ("dpo:8x256..1024", "Q05", "", "trainkit-padded"),
        ("dpo:8x256..1024", "Q15", "--apart", ""),
    ),
    "grpo": (
        ("grpo:16x8,512+256", "Q05", "--microbatch 16", ""),
        ("grpo:16x8,512+256", "Q05", "", "trainkit"),
        ("grpo:16x8,512+256", "Q05", "", "trainkit-padded"),
        ("grpo:16x8,512+256", "Q15", "--microbatch 16 --apart", ""),
    ),
    "grpo-large": (("grpo:64x8,512+1024", "Q15", "", "trainkit"),),
}
"""The training steps of a stage: case, model, options of ``speed.py``, and the system, if it is one alone."""
TINY = {
    "sft": (("sft:2x12..16", "S", "", ""), ("sft-packed:16x12", "S", "", "trainkit")),
    "dpo": (("dpo:2x12..16", "S", "", ""),),
    "grpo": (("grpo:2x2,8+8", "S", "", ""),),
    "grpo-large": (("grpo:2x2,8+9", "S", "", "trainkit"),),
}
ONCE = frozenset({"grpo-large"})
"""Stages with one step that is not measured and one that is."""
DECODED = (("S", 4, 8, 64), ("Q05", 128, 512, 256), ("Q15", 128, 512, 256), ("Q15", 512, 512, 256))
"""Model, responses, tokens of a prompt and of a response that are sampled; the first if all is tiny."""
PEAK = 989e12
"""FLOP/s in bf16 of an H100 or H200 by its maker; shares of the peak are shares of it."""
READS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::item", "aten::nonzero")
"""What makes the host wait for the device."""


@dataclass
class Stage:
    """What a stage is told, and where its rows go."""

    stage: str
    out: str
    device: str
    tiny: bool
    limit: float
    """The seconds after which the process is killed."""
    common: dict[str, Any]
    """What is written into every row: the card, versions, the sources."""
    measured: list[dict[str, Any]]
    """The rows that are known, of the same card, versions and sources."""

    @property
    def known(self) -> set[str]:
        """The names of rows that need not be measured."""
        return {row["row"] for row in self.measured}

    @property
    def cuda(self) -> bool:
        """Whether there is a GPU."""
        return self.device == "cuda"

    def add(self, row: str, **facts: Any) -> None:
        """Write a row, and print it."""
        with (Path(self.out) / "gpu.jsonl").open("a", encoding="utf-8") as file:
            print(json.dumps({"row": row, **facts, **self.common}), file=file)
        print(f"{row}: " + ", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)

    def timed(self, call: Callable[[], Any], times: int = 3) -> float:
        """Return the seconds of a call, the least of some after one that is not counted."""
        found = []
        for _ in range(times + 1):
            self.wait()
            started = time.perf_counter()
            call()
            self.wait()
            found.append(time.perf_counter() - started)
        return min(found[1:])

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.cuda:
            torch.cuda.synchronize()

    def profiler(self) -> profile:
        """Return a profiler of the host and of the device."""
        return profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])])


def ceilings(stage: Stage) -> None:
    """Measure the speed of a large product and of a copy, and the time of a launch."""
    n = 256 if stage.tiny else 8192
    for name, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        a, b = (torch.randn(n, n, device=stage.device, dtype=dtype) for _ in range(2))
        stage.add(f"product {n}, {name}", tflops=round(2 * n**3 / stage.timed(lambda a=a, b=b: a @ b) / 1e12, 2))
    stage.add("copy", gb_per_s=round(bandwidth(stage) / 1e9, 1))
    small = torch.zeros(1, device=stage.device)
    stage.add("launch", us=round(stage.timed(lambda: [small.add_(1) for _ in range(1000)]) * 1e3, 2))


def bandwidth(stage: Stage) -> float:
    """Return the bytes per second that a copy reads and writes."""
    a = torch.empty(2**20 if stage.tiny else 2**31, dtype=torch.uint8, device=stage.device)
    return 2 * len(a) / stage.timed(a.clone)


def network(name: str, device: str, **changes: Any) -> PreTrainedModel:
    """Return a model of ``speed.py`` with random weights, which are made on the device."""
    fields = {**MODELS[name], **changes, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))}
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))


def attend(device: str, dtype: torch.dtype, kind: str, length: int) -> bool:
    """Run attention forward and backward; return whether its gradients are finite.

    Args:
        device: where.
        dtype: the type of queries, keys and values.
        kind: "causal" or "mask", the same with padding at the left; with "gqa" after it, two queries share keys.
        length: the number of queries and of keys.
    """
    heads = 2 if kind.endswith("gqa") else 4
    q, k, v = (torch.randn(2, n, length, 64, device=device, dtype=dtype).requires_grad_() for n in (4, heads, heads))
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril() if kind.startswith("mask") else None
    mask = None if mask is None else mask & (torch.arange(length, device=device) >= 3)
    settings = {"is_causal": mask is None, "enable_gqa": kind.endswith("gqa")}
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **settings)[:, :, 3:]
    return all(bool(each.isfinite().all()) for each in torch.autograd.grad(found.float().square().sum(), (q, k, v)))


def probes(stage: Stage) -> None:
    """Ask torch what it does on this device where trainkit relies on it."""
    for kind in ("causal", "causal gqa", "mask", "mask gqa"):
        for dtype in (torch.bfloat16, torch.float32):
            with stage.profiler() as profiler:
                attend(stage.device, dtype, kind, 192)
            names = {event.key for event in profiler.key_averages() if "aten::_scaled_dot" in event.key}
            used = sorted(name.removeprefix("aten::_scaled_dot_product_") for name in names if "backward" not in name)
            stage.add(f"attention, {kind}, {str(dtype)[6:]}", used=used)
    for cudnn in (True, False) if stage.cuda else ():
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        cases = [(kind, length) for kind in ("causal", "mask", "mask gqa") for length in (64, 128, 192, 256, 320)]
        wrong = [f"{kind} {length}" for kind, length in cases if not attend("cuda", torch.bfloat16, kind, length)]
        stage.add(f"gradients of attention in bf16 that are not finite, cuDNN {'on' if cudnn else 'off'}", cases=wrong)
    stage.add("FlashAttention", **{f"version_{version}": flash(stage, version) for version in (2, 3)})
    if importlib.util.find_spec("torch.nn.attention.varlen"):
        from torch.nn.attention.varlen import varlen_attn

        stage.add("varlen_attn", signature=str(inspect.signature(varlen_attn)))


def flash(stage: Stage, version: int) -> str:
    """Return whether a policy passes its checks with a version of FlashAttention, on this device in bf16."""
    policy = make_policy(network("S" if stage.tiny else "Q05", stage.device, use_cache=False))
    try:
        policy.model.set_attn_implementation(f"flash_attention_{version}")
        with torch.autocast(stage.device, torch.bfloat16):
            chosen = make_policy(policy.model)
            fault = chosen.why_not_shared() or ("padding has to be masked" if chosen.needs_mask else "")
    except (ImportError, RuntimeError, ValueError) as error:
        fault = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return fault or "passes"


def attention(stage: Stage) -> None:
    """Measure attention, forward and backward, with the heads of Q15: causal, masked, and of joined rows."""
    rows, length, heads, groups, size = (2, 64, 4, 2, 16) if stage.tiny else (4, 8192, 12, 2, 128)
    ids = torch.ones(rows, length, dtype=torch.long, device=stage.device)
    real = torch.ones_like(ids, dtype=torch.bool)
    joined = JoinedRows.of_rows(Sequences(ids, real, real), shared=False)
    for kind in ("causal", "mask", "joined"):
        if (row := f"attention, {kind}, {rows} x {length}") in stage.known:
            continue
        shape = (1, len(joined.ids)) if kind == "joined" else (rows, length)
        make = partial(torch.randn, device=stage.device, dtype=torch.bfloat16, requires_grad=True)
        q, k, v = (make(shape[0], n, shape[1], size) for n in (heads, groups, groups))
        mask = torch.ones(length, length, dtype=torch.bool, device=stage.device).tril() if kind == "mask" else None

        def call(q: Tensor = q, k: Tensor = k, v: Tensor = v, mask: Tensor | None = mask, kind: str = kind) -> None:
            if kind == "joined":
                outputs = attend_joined(q, k, v, joined)
            else:
                settings = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": True}
                outputs = F.scaled_dot_product_attention(q, k, v, **settings)
            torch.autograd.grad(outputs.sum(), (q, k, v))

        if stage.cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = stage.timed(call)
        facts = {
            "ms": round(seconds * 1e3, 2),
            "tflops": round(7 * heads * size * rows * length**2 / seconds / 1e12, 2),
        }
        stage.add(row, **facts, **({"peak_mb": round(torch.cuda.max_memory_allocated() / 2**20)} if stage.cuda else {}))


def head_gradient(policy: Policy, sequences: Sequences, states: Tensor, *, bf16: bool) -> Tensor:
    """Return the gradient of the head's weights from the mean log-probability of all tokens."""
    tokens, weight = sequences.input_ids[sequences.response_mask], policy.model.get_output_embeddings().weight
    weight.grad = None
    with torch.autocast(states.device.type, torch.bfloat16, enabled=bf16):
        logprobs = policy._read_states((states, tokens, tokens, None), False, None)[0]
    (-logprobs.mean()).backward()
    return weight.grad


def head(stage: Stage) -> None:
    """Measure log-probabilities of the head, forward and backward: seconds, memory, and the gradient's error."""
    for name in ("S",) if stage.tiny else ("Q05", "Q15"):
        policy = make_policy(network(name, stage.device, **{"n_layer" if name == "S" else "num_hidden_layers": 1}))
        for count in (64,) if stage.tiny else (8192, 32768):
            if (row := f"head, {name}, {count} tokens") in stage.known:
                continue
            torch.manual_seed(0)
            width = policy.model.get_input_embeddings().weight.shape[1]
            states = torch.randn(count, width, device=stage.device, requires_grad=True)
            ids = torch.randint(0, MODELS[name]["vocab_size"], (1, count))
            sequences = Sequences(ids, torch.ones_like(ids).bool(), torch.ones_like(ids).bool()).to(stage.device)
            exact = head_gradient(policy, sequences, states, bf16=False).double()
            error = (head_gradient(policy, sequences, states, bf16=True).double() - exact).norm() / exact.norm()
            products = 6 * count * width * MODELS[name]["vocab_size"] / PEAK
            facts = {"gradient_error": round(float(error), 5), "least_bf16": round(products, 5)}
            del exact
            for bf16, key in ((True, "bf16"), (False, "float32")):
                before = torch.cuda.memory_allocated() if stage.cuda else 0
                if stage.cuda:
                    torch.cuda.reset_peak_memory_stats()
                seconds = stage.timed(partial(head_gradient, policy, sequences, states, bf16=bf16), 2)
                facts[f"seconds_{key}"] = round(seconds, 4)
                if stage.cuda:
                    facts[f"mb_{key}"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
            stage.add(row, **facts)


def tokens(stage: Stage) -> None:
    """Measure the choice of a token for 512 rows, beside the time in which their logits are read once."""
    rows, model = (4, "S") if stage.tiny else (512, "Q05")
    one_layer = network(model, stage.device, **{"n_layer" if model == "S" else "num_hidden_layers": 1})
    sampler = CausalSampler(one_layer, Work("", "grpo", model).tokenizer(), head_alone=True)
    logits = torch.randn(rows, MODELS[model]["vocab_size"], device=stage.device, dtype=torch.bfloat16)
    least = logits.numel() * 2 / bandwidth(stage)
    for name, settings in (("whole", {}), ("top_p 0.95", {"top_p": 0.95})):
        if (row := f"tokens, {name}, {rows} rows") in stage.known:
            continue
        draws = torch.rand(rows, 9, device=stage.device)
        responses = _Responses(sampler, [[0]] * rows, SamplingConfig(max_new_tokens=8, **settings), draws)
        at = torch.arange(rows, device=stage.device)

        def call(responses: _Responses = responses, at: Tensor = at) -> None:
            responses.extend(at, at, logits, None)

        with torch.no_grad():
            seconds = stage.timed(call)
        facts = {"ms": round(seconds * 1e3, 3), "least_ms": round(least * 1e3, 3)}
        stage.add(row, **facts, kernel=responses.kernels is not None)


def blocks(stage: Stage) -> None:
    """Measure two blocks, forward and backward: as they are, compiled, and with Liger's kernels if they are there."""
    model_name, length = ("S", 64) if stage.tiny else ("Q15", 8192)
    layers = "n_layer" if model_name == "S" else "num_hidden_layers"
    kinds = ["eager", "compiled", *(["liger"] if importlib.util.find_spec("liger_kernel") else [])]
    for kind in kinds:
        if (row := f"blocks, {model_name}, {length} tokens, {kind}") in stage.known:
            continue
        facts: dict[str, Any] = {}
        model = network(model_name, stage.device, **{layers: 2})
        ids = torch.randint(0, 200, (1, length), device=stage.device)
        with torch.autocast(stage.device, torch.bfloat16):
            if kind == "liger":
                from liger_kernel.transformers import _apply_liger_kernel_to_instance

                _apply_liger_kernel_to_instance(model=model)
            elif kind == "compiled":
                started = time.perf_counter()
                compiling.BACKEND = "aot_eager" if stage.tiny else compiling.BACKEND  # generated code takes minutes
                fault = compiling.compile_blocks(model)
                facts = {"seconds_to_compile": round(time.perf_counter() - started, 1), "fault": fault}

            def call(model: PreTrainedModel = model, ids: Tensor = ids) -> None:
                model.base_model(ids).last_hidden_state.sum().backward()

            facts["ms"] = round(stage.timed(call) * 1e3, 2)
        weights = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
        facts["least_ms"] = round(6 * weights * length / PEAK * 1e3, 2)
        stage.add(row, **facts)


def decode(stage: Stage) -> None:
    """Measure sampling under bf16, four responses to a prompt, beside the least time of a step.

    That is the time in which the weights and the cache of each row, half filled, are read.
    """
    for name, rows, prompt, new in DECODED[:1] if stage.tiny else DECODED[1:]:
        if (row := f"decode, {name}, {rows} rows, {prompt}+{new}") in stage.known:
            continue
        model = network(name, stage.device).eval()
        tokenizer = Work("", "grpo", name).tokenizer()
        sampler = CausalSampler(model, tokenizer, head_alone=make_policy(model).head_alone)
        prompts = torch.randint(0, 200, (rows // 4, prompt), generator=torch.Generator().manual_seed(0)).tolist()
        if stage.cuda:
            torch.cuda.reset_peak_memory_stats()

        def sample(tokens: int, sampler: CausalSampler = sampler, queries: list[list[int]] = prompts * 4) -> None:
            with torch.autocast(stage.device, torch.bfloat16):
                sampler.generate(queries, SamplingConfig(max_new_tokens=tokens), range(len(queries)))

        step = (stage.timed(partial(sample, new), 2) - stage.timed(partial(sample, 1), 2)) / (new - 1)
        config, numbers = model.config, sum(parameter.numel() for parameter in model.parameters())
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        cached = 2 * config.num_hidden_layers * heads * config.hidden_size // config.num_attention_heads  # of a token
        least = 2 * (numbers + rows * (prompt + new / 2) * cached) / bandwidth(stage)
        facts = {"ms": round(step * 1e3, 2), "least_ms": round(least * 1e3, 2), "tokens_per_s": round(rows / step)}
        facts["share_of_peak"] = round(2 * numbers * rows / step / PEAK, 4)
        if stage.cuda:
            facts["peak_mb"] = round(torch.cuda.max_memory_allocated() / 2**20)
        stage.add(row, **facts, graphs=sampler.decoder.graphed)


def training(stage: Stage) -> None:
    """Measure training steps with ``speed.py``."""
    systems = ["trainkit", *(["trl"] if importlib.util.find_spec("trl") else [])]
    cases = TINY[stage.stage] if stage.tiny else TRAINING[stage.stage]
    reads = bandwidth(stage)
    for case, model, more, alone in cases:
        own = [alone] if alone else systems
        name = f"{case}, {model}{more.replace('--apart', '').rstrip().replace('--', ', ')}"
        for part in [[each] for each in own] if "--apart" in more else [own]:
            if {f"{name}, {system}" for system in part} <= stage.known:
                continue
            steps, first = ("1", "1") if stage.stage in ONCE else ("3", "2")
            arguments = ["--cases", case, "--models", model, "--precision", "bf16", "--steps", steps, "--warmup", first]
            arguments += ["--trl-python", sys.executable, "--threads", "1" if stage.tiny else "8", *more.split()]
            arguments += [] if stage.cuda else ["--device", "cpu"]
            options = speed.parse([*arguments, "--systems", *part])
            with Progress(disable=True) as progress:
                workers = speed.measure(options.jobs[0], options, progress)
            for missing in set(part) - {worker.system for worker in workers}:
                stage.add(f"{name}, {missing}", failed="see the output")
            for worker in workers:
                measured = speed.row(options.jobs[0], worker)
                facts = {
                    key: measured[key] for key in ("seconds", "peak", "before", "waits", "phases") if key in measured
                }
                facts |= speeds(options.jobs[0], facts["seconds"], least(options.jobs[0], reads))
                stage.add(f"{name}, {worker.system}", **facts)


def work_of(case: figures.Case, model: str, system: str = "trainkit", **more: Any) -> Work:
    """Return the work of a case in bf16."""
    return Work(system=system, case=case.name, model=model, precision="bf16", **case.fields(), **more)


def least(job: speed.Job, bandwidth: float) -> dict[str, float]:
    """Return the least seconds of the products of a step, by the maker's figure, and those of the step.

    Reads of memory take the time that is measured.

    A forward pass counts as one, a backward pass as two, a reference or the log-probabilities before training as one.
    The prompt of a group is run once. A step of sampling reads the weights, and the keys and values of each row.
    """
    work = work_of(job.case, job.model)
    fields = {name.removeprefix("n_"): value for name, value in work.fields.items()}  # as GPT-2 has them
    depth = fields.get("num_hidden_layers") or fields["layer"]
    width = fields.get("hidden_size") or fields["embd"]
    heads = fields.get("num_attention_heads") or fields["head"]
    keys = width * fields.get("num_key_value_heads", heads) // heads
    layer = 2 * width * width + 2 * width * keys + 3 * width * fields.get("intermediate_size", 4 * width)
    weights, head = depth * layer, width * fields["vocab_size"]

    def passes(tokens: float, pairs: float, read: float) -> float:
        return (2 * weights * tokens + 2 * head * read + 2 * depth * width * pairs) / PEAK

    lengths = [length + 1 for length in work.lengths()]
    squares = sum(length * length for length in lengths)  # causal: half of all pairs, in two products
    if work.case != "grpo":
        times, rows = (4, 2) if work.case == "dpo" else (3, 1)
        products = rows * times * passes(sum(lengths), squares, sum(lengths))
        return {"products": products, "least": products}
    groups, whole = work.rows // work.samples, work.prompt + work.new
    tokens = groups * work.prompt + work.rows * work.new
    pairs = groups * work.prompt**2 + work.rows * (whole**2 - work.prompt**2)
    cached = 2 * depth * keys * (work.prompt + work.new / 2)
    sampling = passes(groups * work.prompt, groups * work.prompt**2, groups)
    step = max(2 * (weights + head + work.rows * cached) / bandwidth, passes(work.rows, 0, work.rows))
    training = 4 * passes(tokens, pairs, work.rows * work.new)
    products = training + passes(tokens, pairs, work.rows * work.new)
    return {"products": products, "least": training + sampling + work.new * step}


def speeds(job: speed.Job, seconds: float, shortest: dict[str, float]) -> dict[str, Any]:
    """Return tokens per second, the share of the peak, the least seconds and the gap to them."""
    work = work_of(job.case, job.model)
    online = job.case.name == "grpo"
    tokens = work.rows * work.new if online else sum(work.lengths()) + work.rows
    tokens *= 2 if job.case.name == "dpo" else 1
    found = {"response_tokens_per_s" if online else "tokens_per_s": round(tokens / seconds)}
    found |= {"least": round(shortest["least"], 4), "gap": round(seconds / shortest["least"], 2)}
    return {**found, "share_of_peak": round(shortest["products"] / seconds, 4)}


class Watch:
    """A callback that profiles the third step."""

    def __init__(self, stage: Stage, case: str, row: str) -> None:
        self.stage, self.case, self.row, self.profiler, self.started = stage, case, row, stage.profiler(), 0.0

    @trainkit.hookimpl
    def on_step(self, step: int) -> None:
        """Begin after the second step, and report after the third."""
        self.stage.wait()
        if step == 2:
            self.profiler.__enter__()
            self.started = time.perf_counter()
        elif step == 3:
            seconds = time.perf_counter() - self.started
            self.profiler.__exit__(None, None, None)
            self.report(seconds)

    def report(self, seconds: float) -> None:
        """Write the longest kernels and calls to a file, and a row."""
        events = self.profiler.key_averages()
        kernels = [each for each in events if str(each.device_type).endswith("CUDA")]
        longest = sorted(kernels, key=lambda each: -each.self_device_time_total)[:25]
        lines = [f"{each.self_device_time_total / 1e3:10.2f} ms {each.count:7} {each.key[:110]}" for each in longest]
        calls = events.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)
        path = Path(self.stage.out) / f"profile-{self.case}.txt"
        path.write_text("\n".join([*lines, "", calls, ""]), encoding="utf-8")
        busy = sum(each.self_device_time_total for each in kernels) / 1e6
        reads = {each.key: each.count for each in events if each.key in READS}
        self.stage.add(self.row, seconds=round(seconds, 3), gpu_seconds=round(busy, 3), host_reads=reads)


def profiles(stage: Stage) -> None:
    """Profile a step of the three cases furthest from their least time: kernels, what is busy, and what waits."""
    measured = [*stage.measured, *(json.loads(line) for line in (Path(stage.out) / "gpu.jsonl").open())]
    gaps = {row["row"]: row["gap"] for row in measured if "gap" in row and row["row"].endswith(", trainkit")}
    if not gaps:
        print("no training step has been measured, so none is profiled; run the stages sft, dpo and grpo first")
    for measured_row in sorted(gaps, key=gaps.__getitem__, reverse=True)[:3]:
        name = measured_row.removesuffix(", trainkit")
        if (row := f"profile of {name}") in stage.known:
            continue
        case, model, more = re.fullmatch(r"(.*), ([A-Z]\w*?)(?:, microbatch (\d+))?", name).groups()
        work = work_of(figures.Case.read(case), model, **({"microbatch": int(more)} if more else {}))
        settings = with_trainkit.settings(work)
        with tempfile.TemporaryDirectory() as run_dir:
            settings["train"] |= {"total_steps": 3, "run_dir": run_dir}
            trainkit.train(
                work.network(),
                config=trainkit.TRLConfig.from_dict(settings),
                tokenizer=work.tokenizer(ends=True),
                callbacks=[Watch(stage, re.sub(r"\W+", "-", name), row)],
                **with_trainkit.data(work),
            )


def tests(stage: Stage) -> None:
    """Run the tests that need a GPU, without vLLM's; those that take long, the kit of each trainer, come last."""
    ends, log = time.monotonic() + stage.limit - 10, Path(stage.out) / "tests.txt"
    how = ["--collect-only", "-q"] if stage.tiny else ["-n", "8", "-v", "--tb=short", "-p", "no:benchmark"]
    for name, chosen in (("tests", "not vllm and not kit"), ("kit", "kit and not vllm")):
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-k", chosen, *how, "tests/test_gpu.py"]
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
            try:
                last = f"ended with {process.wait(max(ends - time.monotonic(), 1))}"
            except subprocess.TimeoutExpired:
                process.kill()
                last = "not all in the time"
        said = log.read_text(encoding="utf-8")
        log.rename(log.with_name(f"tests-{name}.txt"))
        results = {test: result for result, test in re.findall(r"(PASSED|FAILED|ERROR) (tests/\S+)", said)}
        broken = sorted(test for test, result in results.items() if result != "PASSED")
        late = {"failed": last} if last.startswith("not") else {}
        stage.add(name, passed=len(results) - len(broken), broken=broken, last=last, **late)


RUN: dict[str, Callable[[Stage], None]] = {
    "ceilings": ceilings,
    "probes": probes,
    "attention": attention,
    "head": head,
    "tokens": tokens,
    "blocks": blocks,
    "decode": decode,
    **dict.fromkeys(TRAINING, training),
    "profile": profiles,
    "tests": tests,
}

if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    for name in settings.pop("stages"):
        stage = Stage(stage=name, **settings)
        RUN[name](stage)
