"""The speed benchmark runs, its floor does the work of the model that it stands for, and its page is up to date."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tables import table

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
ONE_STEP = ["--models", "S", "--small", "--steps", "1", "--warmup", "0"]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a module of the benchmarks or of the documents."""
    for place in ("benchmarks/speed_systems", "benchmarks", "docs"):
        monkeypatch.syspath_prepend(str(ROOT / place))
    return importlib.import_module


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_trainkit_and_the_floor_make_steps_in_turn(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    said = run("speed.py", "--cases", "rloo:8x4,32+64", "--systems", "trainkit", "bare", *ONE_STEP, "--json", str(out))
    (entry,) = json.loads(out.read_text())["machines"]
    assert min(entry["machine"]["products"].values()) > 0
    assert [row["system"] for row in entry["rows"]] == ["trainkit", "bare"], said
    for row in entry["rows"]:
        assert row["peak"] >= row["before"] > 0
        assert sum(row["phases"].values()) == pytest.approx(row["seconds"], abs=1e-3)
        assert {"generate", "reference", "forward", "backward", "optimizer"} <= row["phases"].keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "precision"),
    [
        *((name, "float32") for name in ("grpo", "online-dpo", "ppo-frozen", "rft", "sft:8x32..256", "reward")),
        *((name, "float32") for name in ("dpo", "dpo-3", "ilql")),
        ("rloo", "bf16"),
    ],
)
def test_trainkit_makes_a_step_of_every_case(
    case: str, precision: str, load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    speed, figures, with_trainkit = load("speed"), load("figures"), load("with_trainkit")
    read = figures.Case.read(case)
    fields = {"case": read.name, **read.fields(small=True), **speed.FIELDS.get(read.name, {})}
    work, turns = load("work").Work(system="trainkit", model="S", precision=precision, **fields), OneTurn(monkeypatch)
    with pytest.raises(BaseException) as ended:
        with_trainkit.run(work, turns)
    assert isinstance(ended.value, TurnEnded) or isinstance(ended.value.__cause__, TurnEnded), ended.value
    steps = {"ppo": 4, "dpo-3": 3}.get(read.name.removesuffix("-frozen"), 1)
    assert turns.counted["optimizer"] == steps
    assert turns.counted["generate"] == (figures.KINDS[read.name].shape.count("+"))
    assert ("reference" in turns.counted) == (read.name in ("online-dpo", "rloo", "ppo-frozen", "dpo", "dpo-3"))


@pytest.mark.parity
@pytest.mark.parametrize("case", ["rloo", "grpo", "online-dpo", "sft", "sft:8x32..256", "reward", "dpo", "dpo-3"])
def test_trl_makes_a_step_of_every_case_that_it_has(case: str, load: Any, tmp_path: Path) -> None:
    out, written = tmp_path / "figures.json", str(load("figures").Case.read(case))
    run(
        "speed.py",
        "--cases",
        written,
        "--trl-python",
        sys.executable,
        "--systems",
        "trl",
        *ONE_STEP,
        "--json",
        str(out),
    )
    ((row,),) = (entry["rows"] for entry in json.loads(out.read_text())["machines"])
    assert (row["case"], row["system"]) == (written, "trl")
    assert {"forward", "backward", "optimizer"} <= row["phases"].keys() | {"forward"} * (case == "online-dpo")


@pytest.mark.slow
def test_every_stage_of_a_gpu_runs_on_a_cpu_and_is_not_run_again(tmp_path: Path) -> None:
    tiny = ["--device", "cpu", "--tiny", "--out", str(tmp_path)]
    run("gpu.py", *tiny)
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    names = {row["row"].split(":")[0].split(",")[0] for row in rows}
    kernels = {"product 256", "copy", "launch", "attention", "head", "tokens", "blocks", "decode", "sft-packed"}
    assert names >= {*kernels, "sft", "dpo", "grpo", "kit"}
    assert sum(name.startswith("profile of ") for name in names) == 3
    steps = [row for row in rows if "gap" in row]
    assert len(steps) >= 5
    assert all(row["gap"] > 0 for row in steps)
    assert not [row for row in rows if "failed" in row or row.get("broken")]
    run("gpu.py", *tiny)
    assert len((tmp_path / "gpu.jsonl").read_text().splitlines()) == len(rows)


@pytest.mark.parity
def test_trl_makes_the_steps_that_are_measured_on_a_gpu(tmp_path: Path) -> None:
    run("gpu.py", "--device", "cpu", "--tiny", "--out", str(tmp_path), "--only", "sft", "dpo", "grpo")
    rows = [json.loads(line)["row"] for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    cases = {row.removesuffix(", trl") for row in rows if row.endswith(", trl")}
    assert len(cases) == 3
    assert {f"{case}, trainkit" for case in cases} <= set(rows)


@pytest.mark.slow
def test_growth_is_measured_and_fitted(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    sizes = ["--small", "--what", "k", "--doublings", "1", "--systems", "trainkit", "--steps", "1", "--warmup", "0"]
    said = run("growth.py", *sizes, "--json", str(out))
    (entry,) = json.loads(out.read_text())["machines"]
    assert [(row["what"], row["size"]) for row in entry["growth"]] == [("k", 1), ("k", 2)]
    assert "exponent of time" in said


def test_what_cannot_be_measured_is_said_and_left_out(load: Any, capsys: Any, tmp_path: Path) -> None:
    speed = load("speed")
    arguments = ["--cases", "sft:8x256", "--models", "S", "--systems", "trl", "trlx"]
    options = speed.parse([*arguments, "--trl-python", str(tmp_path / "none")])
    assert speed.measure(options.jobs[0], options, speed.Progress(disable=True)) == []
    said = " ".join(capsys.readouterr().out.split())
    assert "make .venv-bench/made" in said
    assert "--trlx-python" in said


def test_rows_of_a_step_have_the_lengths_of_the_shape(load: Any) -> None:
    work, figures = load("work"), load("figures")
    of = work.Work("trainkit", "dpo", "M50k", **figures.Case.read("dpo:4x8..32").fields())
    assert of.lengths() == [7, 15, 23, 31]  # and EOS
    assert [len(sample) for sample in of.samples_of_a_step()] == [7, 15, 23, 31]
    pairs = of.pairs_of_a_step()
    sizes = [tuple(len(pair[name]) for name in ("prompt", "chosen", "rejected")) for pair in pairs]
    assert sizes == [(3, 4, 28), (3, 12, 4), (7, 16, 8), (11, 20, 12)]  # half of the shorter side is the prompt
    tokenizer = of.tokenizer()
    assert tokenizer(pairs[0]["prompt"] + "<eos>")["input_ids"][-1] == tokenizer.eos_token_id == 50256
    assert len(tokenizer(pairs[0]["chosen"])["input_ids"]) == 4
    assert work.Work("trainkit", "rloo", "S").tokenizer().eos_token_id == 2**20


def test_the_table_names_cases_that_exist_and_targets_that_it_measures(load: Any) -> None:
    figures = load("figures")
    measured = {
        (part.case, model, precision, backend)
        for part in figures.TABLE
        for model in part.models
        for precision in part.precisions
        for backend in part.backends
    }
    assert all(str(figures.Case.read(part.case)) == part.case for part in figures.TABLE)
    for target in figures.TARGETS:
        for model in target.models:
            assert (target.case, model, target.precision, target.backend or "default") in measured, target
    for wrong, reason in (("rlhf", "there is no case"), ("rloo:8x256", "no shape"), ("sft:8x4,32+64", "no shape")):
        with pytest.raises(ValueError, match=reason):
            figures.Case.read(wrong)


@table(
    "asked, jobs",
    [
        (["--cases", "ppo-frozen"], ["ppo-frozen:32x1,32+64 on M"]),
        (["--cases", "rloo", "--precision", "bf16"], ["rloo:8x4,32+64 on M bf16"]),
        (["--cases", "sft", "--models", "M50k"], ["sft:8x256 on M50k"]),
        (["--cases", "grpo:2x2,8+8", "--models", "M50k", "--backend", "equal"], ["grpo:2x2,8+8 on M50k equal"]),
    ],
)
def test_options_select_from_the_table_and_a_shape_is_measured_as_they_say(
    asked: list[str], jobs: list[str], load: Any
) -> None:
    assert [str(job) for job in load("speed").parse(asked).jobs] == jobs


def test_bf16_is_measured_where_its_products_are_fast(load: Any) -> None:
    speed, figures = load("speed"), load("figures")
    job = speed.Job(figures.Case.read("rloo"), "M", "bf16")
    assert speed.why_not(job, {"float32, default library": 100.0, "bf16": 400.0}) is None
    assert "skipped" in speed.why_not(job, {"float32, default library": 100.0, "bf16": 20.0})


# ----------------------------------------------------------------------------------------------------------- figures


def machine(**fields: Any) -> dict[str, Any]:
    about = {"device": "cpu", "hardware": "a CPU", "threads": 1, "clock": "wall", "small": False, "date": "2026-11-25"}
    products = {"float32, default library": 50.0, "float32, precision medium": 100.0, "bf16": 200.0}
    return {**about, "products": products, "versions": {"torch": "2.13", "trl": "1.16"}, **fields}


def row(case: str, system: str, seconds: float, peak: float, **fields: Any) -> dict[str, Any]:
    same = {"model": "M", "precision": "float32", "backend": "equal", "range": [seconds, seconds], "before": 100.0}
    return {"case": case, "system": system, "seconds": seconds, "peak": peak, "phases": {}, **same, **fields}


LONG = "rloo:4x8,512+128"


def test_runs_on_one_machine_complete_each_other_and_those_of_another_are_refused(load: Any, tmp_path: Path) -> None:
    figures, path = load("figures"), tmp_path / "figures.json"
    figures.Figures.open(path, machine()).add([row(LONG, "trainkit", 2.0, 500), row(LONG, "trl", 8.0, 1000)])
    figures.Figures.open(path, machine(device="cuda", hardware="a GPU")).add([row(LONG, "trainkit", 0.1, 400)])
    later = machine(date="2026-11-26", versions={"torch": "2.13"})
    figures.Figures.open(path, later).add([row(LONG, "trainkit", 2.5, 500), row("sft:8x256", "trainkit", 1.0, 400)])
    cpu, cuda = figures.machines(path)
    assert [(each["case"], each["system"], each["seconds"]) for each in cpu["rows"]] == [
        (LONG, "trainkit", 2.5),
        (LONG, "trl", 8.0),
        ("sft:8x256", "trainkit", 1.0),
    ]
    assert cpu["machine"]["date"] == "2026-11-26"
    assert cpu["machine"]["versions"] == {"torch": "2.13", "trl": "1.16"}
    assert [each["seconds"] for each in cuda["rows"]] == [0.1]
    for other in ({"hardware": "another CPU"}, {"threads": 2}, {"small": True}, {"versions": {"torch": "2.14"}}):
        with pytest.raises(figures.MachineError, match="remove it"):
            figures.Figures.open(path, machine(**other))


def test_targets_are_judged_by_the_ratio_of_medians(load: Any) -> None:
    figures = load("figures")
    rows = [
        row(LONG, "trainkit", 2.0, 500),
        row(LONG, "trl", 5.0, 1000),  # 2.5 times the time, half of the memory
        row(LONG, "trainkit", 2.0, 500, backend="default"),  # the target is for equal products
        row(LONG, "trl", 9.0, 1000, backend="default"),
        row("generate:32x1,32+64", "trainkit", 1.04, 500),
        row("generate:32x1,32+64", "bare", 1.0, 500),
        row("generate:32x1,32+64", "bare", 1.0, 500, model="S"),  # without trainkit's
    ]
    assert [(round(found, 2), fits) for _, found, fits, _ in figures.verdicts(rows)] == [
        (2.5, False),
        (0.5, True),
        (1.04, True),
    ]


def growth(what: str, exponent: float, memory: float, system: str = "trainkit") -> list[dict[str, Any]]:
    return [
        {"what": what, "size": size, "system": system, "seconds": 3 * size**exponent, "peak": 50 * size**memory + 400}
        | {"before": 400}
        for size in (1, 2, 4, 8)
    ]


def test_exponents_are_slopes_on_logarithms(load: Any) -> None:
    found = load("figures").exponents([*growth("k", 0.75, 0.5), *growth("length", 1.25, 1.0)])
    assert found["k", "trainkit"] == pytest.approx((0.75, 0.5))
    assert found["length", "trainkit"] == pytest.approx((1.25, 1.0))


def test_the_page_has_the_figures_of_every_device(load: Any) -> None:
    page = load("make_performance")
    rows = [
        row("rloo:8x4,32+64", "trainkit", 2.0, 500, backend="default"),
        row("rloo:8x4,32+64", "trl", 8.0, 1000, backend="default"),
        row("rloo:8x4,32+64", "trainkit", 2.0, 500),
        row("rloo:8x4,32+64", "trl", 5.0, 1000),
        row("rloo:8x4,32+64", "bare", 1.9, 450),
        row("rft:8x4,32+64", "trainkit", 1.6, 500, backend="default"),
        row("generate:32x1,32+64", "bare", 1.0, 500, phases={"prefill": 0.2}),
        row("generate:32x1,32+64", "trainkit", 1.5, 500, phases={"generate": 1.5}),  # a target is missed
    ]
    entry = {"machine": machine(), "rows": rows, "growth": growth("k", 0.75, 0.5)}
    other = {"machine": machine(device="cuda", hardware="a GPU"), "rows": rows[:2], "growth": []}
    text = page.written("before\n<!-- table: measured -->\nold\n<!-- end of table -->\nafter", [entry, other])
    assert "old" not in text
    assert text.startswith("before\n<!-- table: measured -->\n")
    assert text.endswith("<!-- end of table -->\nafter")
    assert "| RLOO, 8 × 4, 32 + 64 | M | 2.00 | 8.00 | 4.00 | 2.50 | 500 | 1000 | 0.50 |" in text
    assert "| RFT, 8 × 4, 32 + 64 | M | 1.60 | 50.0 | 500 |" in text  # ms for each of 32 rows
    assert "| k | 0.75 | 0.50 |" in text
    missed = "| Generation, 32 × 1, 32 + 64, M, equal products | {} |"
    assert f"{missed.format('trainkit | generate 1.50')} 100 | 500 |\n{missed.format('bare | prefill 0.20')} " in text
    assert "RLOO, 8 × 4, 32 + 64, M, equal products | trainkit" not in text  # its targets are reached
    assert "float32, precision medium 100; bf16 200" in text
    assert text.index("### On a CPU") < text.index("### On a CUDA device") < text.index("a GPU; ")
    assert [name for name, _ in page.charts(entry)] == ["growth-time-cpu.svg", "growth-memory-cpu.svg"]
    assert list(page.charts(other)) == []


def test_the_page_of_performance_is_that_of_the_figures(load: Any) -> None:
    page = load("make_performance")
    entries = load("figures").machines(page.FIGURES)
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.written(text, entries) == text, "run docs/make_performance.py"
    for name, chart in (chart for entry in entries for chart in page.charts(entry)):
        assert (page.DOCS / name).read_text(encoding="utf-8") == chart, "run docs/make_performance.py"
        assert f"]({name})" in text


# ------------------------------------------------------------------------------------------------------ its baseline


class TurnEnded(BaseException):
    """The first turn of a worker is over."""


class OneTurn:
    """The turns of a worker that is stopped after its first one; counts the calls of each phase."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.counted: Counter[str] = Counter()

    def ready(self) -> None:
        self.counted.clear()

    def end(self) -> None:
        raise TurnEnded

    def phase(self, name: str) -> Any:
        self.counted[name] += 1
        return nullcontext()

    def time(self, owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.counted[name] += 1
            return inner(*args, **kwargs)

        self.patch.setattr(owner, method, timed)


class Phases(Counter[str]):
    def phase(self, name: str) -> Any:
        self[name] += 1
        return nullcontext()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["S", "M"])
def test_the_floor_learns_with_the_models_own_arithmetic(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "speed_systems"))
    import with_bare
    from work import Work

    precision = torch.get_float32_matmul_precision()
    for case, updates in (("sft", 1), ("rloo", 1), ("ppo", 4)):
        work = Work("bare", case, model, rows=4, prompt=6, new=5, samples=2, epochs=updates, shortest=16, longest=16)
        turns = Phases()
        floor = with_bare.Floor(work, turns)
        assert with_bare.check(floor.net) < 1e-4
        before = [parameter.detach().clone() for parameter in floor.trained]
        getattr(floor, case)()
        assert turns["backward"] == updates
        assert any(not torch.equal(a, b) for a, b in zip(before, floor.trained, strict=True))
    assert torch.get_float32_matmul_precision() == precision


def test_the_floors_gradient_is_that_of_the_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "speed_systems"))
    from with_bare import HeadLogprobs

    hidden, weight, tokens = torch.randn(5, 3), torch.randn(7, 3), torch.tensor([0, 6, 3, 3, 1])
    grads = []
    for by_hand in (True, False):
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        plain = (inputs[0] @ inputs[1].t()).log_softmax(1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        logprobs = HeadLogprobs.apply(*inputs, tokens) if by_hand else plain
        (logprobs * torch.arange(5.0)).sum().backward()
        grads.append([x.grad for x in inputs])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
