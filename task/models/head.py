"""Classifiers on top of the features: a linear one that grows with the tasks, and one with quadratic terms."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from task.utils.seeding import torch_rng


class Head(nn.Module):
    """Linear classifier that grows with the tasks: weight [seen, D], bias [seen].

    With ``projection`` > 0 its inputs are D = ``projection`` random features max(0, x W), W ~ N(0, 1) drawn from the
    seed (RanPAC, McDonnell et al. 2023). With ``trained`` false no gradient reaches it: the server computes it.

    ``init`` is how new rows start: "normal", with deviation 0.02 and bias 0; or "linear", weight and bias uniform in
    +-1/sqrt(D) as in torch's Linear, whose deviation is 0.021 at D = 768 and 0.055 at D = 112.
    """

    projection: Tensor | None

    def __init__(self, dim: int, seed: int, projection: int = 0, init: str = "normal", trained: bool = True) -> None:
        super().__init__()
        self.seed, self.init, self.trained = seed, init, trained
        drawn = torch.randn(dim, projection, generator=torch_rng(seed, "projection")) if projection else None
        self.register_buffer("projection", drawn, persistent=False)
        dim = projection or dim
        self.weight = nn.Parameter(torch.empty(0, dim))
        self.bias = nn.Parameter(torch.empty(0))

    def grow(self, classes: int) -> None:
        """Add rows; the initial value of a row depends on the seed and the number of rows before."""
        seen, dim = self.weight.shape
        rng, start = torch_rng(self.seed, "head", seen), torch.zeros(classes, dim + 1)
        if self.init == "normal":
            start[:, :-1] = 0.02 * torch.randn(classes, dim, generator=rng)
        else:
            start.uniform_(-(dim**-0.5), dim**-0.5, generator=rng)
        self._extend("weight", start[:, :-1])
        self._extend("bias", start[:, -1])

    def _extend(self, name: str, rows: Tensor) -> None:
        old = getattr(self, name).data
        setattr(self, name, nn.Parameter(torch.cat([old, rows.to(old.device)]), requires_grad=self.trained))

    def project(self, features: Tensor) -> Tensor:
        """Inputs of the linear layer: features [B, backbone's D] themselves, or their random projection [B, D]."""
        return features if self.projection is None else (features @ self.projection).relu()

    def forward(self, features: Tensor) -> Tensor:
        """Features of the backbone -> logits [B, seen]."""
        return F.linear(self.project(features), self.weight, self.bias)


class QuadraticHead(Head):
    """A head that adds |directions_c h - offsets_c|^2 / 2 to the logit of class c; the server computes it.

    directions [seen, rank, D] and offsets [seen, rank], see :func:`strategies.closed_form.solve_regularised`.
    """

    def __init__(self, dim: int, seed: int, projection: int, rank: int) -> None:
        super().__init__(dim, seed, projection, trained=False)
        width = self.weight.shape[1]
        self.directions = nn.Parameter(torch.empty(0, min(rank, width), width), requires_grad=False)
        self.offsets = nn.Parameter(torch.empty(0, min(rank, width)), requires_grad=False)

    def grow(self, classes: int) -> None:
        """Add rows; those of directions and offsets are zero."""
        super().grow(classes)
        for name in ("directions", "offsets"):
            self._extend(name, torch.zeros(classes, *getattr(self, name).shape[1:]))

    def forward(self, features: Tensor) -> Tensor:
        """Features of the backbone -> logits [B, seen]."""
        h = self.project(features)
        along = (h @ self.directions.flatten(0, 1).T).unflatten(1, self.offsets.shape)
        return F.linear(h, self.weight, self.bias) + 0.5 * (along - self.offsets).square().sum(dim=2)
