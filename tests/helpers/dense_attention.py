"""Plain causal attention that keeps its own keys and values: the smallest ``models.forward.Attention``."""

import torch


class DenseAttention:
    """``lengths`` new tokens of each request in the coming forward; earlier tokens are remembered."""

    def __init__(self, lengths):
        self.lengths = list(lengths)
        self.cache = {}

    def step(self, lengths):
        self.lengths = list(lengths)

    def forward(self, q, k, v, layer):
        parts = [x.split(self.lengths) for x in (q, k, v)]
        return torch.cat(
            [self._one(layer, r, *request) for r, request in enumerate(zip(*parts, strict=True))]
        )

    def _one(self, layer, request, q, k, v):
        if (layer, request) in self.cache:
            old_k, old_v = self.cache[layer, request]
            k, v = torch.cat([old_k, k]), torch.cat([old_v, v])
        self.cache[layer, request] = k, v
        groups = q.shape[1] // k.shape[1]
        keys, values = (x.float().repeat_interleave(groups, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * q.shape[2] ** -0.5
        seen = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
