"""The critic's head."""

from __future__ import annotations

from torch import Tensor, nn


class ValueHead(nn.Module):
    """V(s) from a hidden state: Linear(D, 2D), ReLU, Linear(2D, 1), the shape that trlX uses. [*, D] -> [*].

    The last layer starts at zero, so the first values are 0 whatever the trunk is.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, 2 * width)
        self.out = nn.Linear(2 * width, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values of the states ``hidden``."""
        values: Tensor = self.out(self.hidden(hidden.to(self.hidden.weight.dtype)).relu()).squeeze(-1)
        return values.float()
