"""Models of several architectures and ragged rows, for the ways in which a policy can run them: all must be equal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from trainkit.data import Sequences
from trainkit.models import make_policy
from trainkit.models.backend import use_fast_exact_matmul
from trainkit.models.policy import Policy, TokenOutputs
from trainkit.testing import tiny_gpt2, tiny_llama

if TYPE_CHECKING:
    from transformers import PreTrainedModel

V = 20
LLAMA = tiny_llama(V)
GPT2 = tiny_gpt2(V)
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    **{name: {**LLAMA, "model_type": name} for name in ("qwen2", "qwen3", "gpt_neox", "opt", "olmo2", "mixtral")},
    **{name: {**LLAMA, "model_type": name, "sliding_window": 4} for name in ("mistral", "gemma2")},
    "bloom": {"model_type": "bloom", "vocab_size": V, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "falcon": {
        "model_type": "falcon",
        "vocab_size": V,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
}


def make(name: str, dtype: torch.dtype = torch.float32, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**MODELS[name], "bos_token_id": None, "eos_token_id": None, **fields})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():  # larger than usual, so that every token matters
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


def rows() -> Sequences:
    """Ragged prompts and responses; the prompt of rows 0, 1 and 5 is the same, and that of row 2 stands alone."""
    generator = torch.Generator().manual_seed(1)

    def some(count: int) -> list[int]:
        return torch.randint(1, V, (count,), generator=generator).tolist()

    a, b, c = some(9), some(2), some(5)
    return Sequences.from_lists([a, a, b, c, c, a], [some(count) for count in (3, 7, 1, 4, 6, 2)])


def padded_on_the_left() -> Sequences:
    """The rows, with their padding on the left."""
    found = rows()
    width = found.input_ids.size(1)
    columns = (torch.arange(width) + found.lengths.unsqueeze(1)) % width
    return found.map(lambda x: x.gather(1, columns))


def with_turns() -> Sequences:
    """The rows, in which tokens 2 and 3 of longer responses are an environment's."""
    found = rows()
    after, last = found.response_mask.cumsum(1), found.response_mask.sum(1, keepdim=True)
    environment = ((after == 2) | (after == 3)) & (after < last)
    return replace(found, response_mask=found.response_mask & ~environment)


def results(
    policy: Policy, sequences: Sequences, shared: bool, joined: bool = False, **wanted: Any
) -> tuple[TokenOutputs, dict[str, Tensor]]:
    """Return the outputs, and the gradients of a sum with another weight for each of them."""
    policy.shares_prompts, policy.joins_rows = shared, joined
    policy.zero_grad()
    found = policy(sequences, **wanted)
    parts = [part for part in found if isinstance(part, Tensor)] + list(found.head.values())
    total = sum((part.double() * torch.linspace(-1, 1, part.numel()).view_as(part)).sum() for part in parts)
    total.backward()
    return found, {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


PATHS = {"shared": (True, False), "joined": (False, True), "joined, shared": (True, True)}
PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.float32}


def table_of_differences() -> None:
    """Print how far gradients of each path are from those of padded rows, relative to their norm."""
    columns = [f"{path}, {precision}" for path in PATHS for precision in PRECISIONS]
    print("| |", " | ".join(columns), "|\n|---|" + "---|" * len(columns))
    for name in MODELS:
        cells = dict[str, str]()
        for precision, dtype in PRECISIONS.items():
            if (name, precision) == ("mixtral", "float64"):  # torch has no grouped products in it
                cells |= {f"{path}, {precision}": "–" for path in PATHS}
                continue
            policy = make_policy(make(name, dtype), value_head=True).to(dtype)
            cannot = {"shared": policy.why_not_shared(), "joined": policy.why_not_joined()}
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                expected = flat(results(policy, with_turns(), shared=False)[1])
                for path, (shared, joined) in PATHS.items():
                    if any(cannot[part] for part in path.split(", ")):
                        cells[f"{path}, {precision}"] = "–"
                        continue
                    found = flat(results(policy, with_turns(), shared, joined)[1])
                    cells[f"{path}, {precision}"] = f"{float((found - expected).norm() / expected.norm()):.0e}"
        print(f"| {name} |", " | ".join(cells[column] for column in columns), "|")


def flat(gradients: dict[str, Tensor]) -> Tensor:
    """Return all gradients as one tensor in float64."""
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


if __name__ == "__main__":
    use_fast_exact_matmul(torch.device("cpu"))
    table_of_differences()
