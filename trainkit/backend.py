"""The matrix-product backend: the fastest one that is exact on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import torch

SHAPES = ((256, 512, 1024), (32, 1024, 256))
"""(rows, summed over, columns) of the products that are compared: of many tokens, and of one sampled token."""

TOLERANCE = 8.0
"""How many times larger the largest error may be. Another order of summation makes it 1 to 4 times as large, TF32
over 500, bfloat16 over 5,000."""


def use_fast_exact_matmul(device: torch.device) -> bool:
    """Let float32 products on the CPU go through oneDNN if they stay float32 there; whether they now do.

    torch hands products to oneDNN where `torch.get_float32_matmul_precision` is "medium", which also allows it to
    round the factors to bfloat16. CPUs without matrix units for bfloat16 do not round, and many (AMD's above all)
    are about twice as fast as with the default library; so "medium" is tried out, and kept where it rounds nothing.
    Nothing is changed on other devices, where "medium" does round, nor if the precision has been set already. The
    setting is the process's, and depends on the CPU and torch's build alone.
    """
    if device.type != "cpu" or torch.get_float32_matmul_precision() != "highest":
        return False
    before = list(_errors())
    torch.set_float32_matmul_precision("medium")
    exact = all(now <= TOLERANCE * old for now, old in zip(_errors(), before, strict=True))
    if not exact:
        torch.set_float32_matmul_precision("highest")
    return exact


def _errors() -> Iterator[float]:
    """The largest error of each kind of product, against float64."""
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in SHAPES:
        a, b = (torch.randn(shape, generator=generator) for shape in ((rows, inner), (inner, columns)))
        right = a.double() @ b.double()
        transposed = b.t().contiguous().t()  # as the weight of a linear layer is
        batched = torch.bmm(a.view(2, -1, inner), b.expand(2, -1, -1)).view_as(right)
        for product in (a @ b, a @ transposed, torch.addmm(torch.zeros(columns), a, b), batched):
            yield float((product.double() - right).abs().max())
