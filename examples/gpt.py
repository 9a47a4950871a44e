"""A small GPT over bytes: the model that the examples train.

Pre-norm blocks with separate query, key, value and output projections, rotary positions, and a
plain two-layer MLP. Embedding and head are not tied. The sub-modules have the names that a
tensor-parallel plan addresses (`train_fsdp.tensor_parallel_plan`); nothing else here knows about
parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of the model. The defaults make 3.3 million parameters."""

    vocab_size: int = 256
    """Number of tokens; 256 for plain bytes."""
    dim: int = 256
    """Width of the residual stream."""
    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Attention heads; `dim` must be divisible by it."""
    hidden_dim: int = 1024
    """Width of the MLP."""
    context: int = 64
    """Longest sequence, in tokens."""

    def __post_init__(self) -> None:
        """Checks that the heads divide the width."""
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"`dim` ({self.dim}) must be an even multiple of `heads` ({self.heads})"
            )


def rotary_angles(config: GPTConfig) -> Tensor:
    """Returns the angle of every (position, pair of channels): shape (context, head_dim / 2)."""
    head_dim = config.dim // config.heads
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return torch.outer(torch.arange(config.context), frequencies)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns `x`, (batch, heads, time, head_dim), with its channel pairs turned by position."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.wq = nn.Linear(config.dim, config.dim)
        self.wk = nn.Linear(config.dim, config.dim)
        self.wv = nn.Linear(config.dim, config.dim)
        self.wo = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns what every position gathers from itself and those before it, shaped like `x`."""
        batch, time, _ = x.shape
        # The number of heads is left to `view`: under tensor parallelism a rank has only its own.
        q, k, v = (
            linear(x).view(batch, time, -1, self.head_dim).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, time, -1))


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.w_in = nn.Linear(config.dim, config.hidden_dim)
        self.w_out = nn.Linear(config.hidden_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output of the second layer, shaped like `x`."""
        return self.w_out(nn.functional.gelu(self.w_in(x)))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns the residual stream after this block."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Byte-level language model: tokens and targets, both (batch, time), in; mean loss out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        angles = rotary_angles(config)
        # Not persistent: a function of the configuration has no place in a checkpoint.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(_init_weights)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy of `targets`."""
        time = tokens.shape[1]
        cos, sin = self.cos[:time], self.sin[:time]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
