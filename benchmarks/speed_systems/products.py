"""Prints the device, its name, and the speed of matrix products in GFLOP/s, as JSON."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

SIZE = {"cpu": 512, "cuda": 4096}
"""Rows, columns and inner dimension of the products."""
ENOUGH = 0.5
"""Seconds for which a product is repeated."""


def speed(dtype: torch.dtype, precision: str, device: str) -> float:
    """Return the GFLOP/s of a product; ``precision`` is torch's for products of float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    size = SIZE[device]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds[1:]) < ENOUGH:
        started = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    torch.set_float32_matmul_precision(before)
    return 2e-9 * size**3 / statistics.median(seconds[1:])


def hardware(device: str) -> str:
    """Return the name of the processor or of the CUDA device."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    known = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in known if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    """Measure with the number of threads that the command line gives, and print."""
    torch.set_num_threads(int(sys.argv[1]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    products = {
        "float32, default library": speed(torch.float32, "highest", device),
        "float32, precision medium": speed(torch.float32, "medium", device),
        "bf16": speed(torch.bfloat16, "highest", device),
    }
    rounded = {name: round(value, 1) for name, value in products.items()}
    print(json.dumps({"device": device, "hardware": hardware(device), "products": rounded}))


if __name__ == "__main__":
    main()
