"""Trains a small GPT on any mesh, saves, and resumes on any other mesh.

The text is the Python standard library's own source code, read as bytes. Start on one machine with
eight GPUs, sharded by FSDP2:

    torchrun --nproc-per-node 8 examples/train_fsdp.py --mesh fsdp \
        --steps 200 --save-every 50 --checkpoint-dir checkpoints

Go on with what is left of the machine, or with another kind of parallelism. The checkpoint needs no
conversion; `--resume` takes the newest one in the folder:

    torchrun --nproc-per-node 6 examples/train_fsdp.py --mesh fsdp ... --resume
    torchrun --nproc-per-node 2 examples/train_fsdp.py --mesh tp ... --resume
    torchrun --nproc-per-node 8 examples/train_fsdp.py --mesh fsdp_tp=4x2 ... --resume
    torchrun --nproc-per-node 8 examples/train_fsdp.py --mesh hsdp=2x4 ... --resume

Without GPUs the same commands run with `--backend gloo`. The loss of a step does not depend on the
mesh (up to the order of floating-point sums): the global batch is a function of seed and step.

What concerns checkpoints is in `Trainer.state`, `Trainer.save` and `Trainer.resume`.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dcp_reshard

MESH_AXES = {
    "fsdp": ("fsdp",),
    "tp": ("tp",),
    "fsdp_tp": ("fsdp", "tp"),
    "hsdp": ("replicate", "fsdp"),
}
"""The kinds of mesh, with the names of their axes, outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What decides the course of the training. The mesh is deliberately not part of it."""

    seed: int = 0
    """Seed of the initial weights and of the order of the text."""
    global_batch: int = 24
    """Sequences per step over all ranks; the number of data-parallel ranks must divide it."""
    learning_rate: float = 1e-3
    """Highest learning rate; it is reached after `warmup` steps and then decays."""
    warmup: int = 10
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decay of the matrices; norms, biases and embeddings have none."""
    clip: float = 1.0
    """Largest norm of the gradient."""


def make_mesh(text: str, device_type: str) -> DeviceMesh:
    """Returns the mesh that `text` names, over all ranks of the job.

    Args:
        text: `fsdp`, `tp`, `fsdp_tp=AxB` or `hsdp=AxB`. A mesh with one axis takes every rank.
        device_type: `cuda` or `cpu`.
    """
    kind, _, sizes = text.partition("=")
    if kind not in MESH_AXES:
        raise ValueError(f"`mesh` must be one of {', '.join(MESH_AXES)}, got {text!r}")
    axes = MESH_AXES[kind]
    shape = tuple(int(size) for size in sizes.split("x")) if sizes else (dist.get_world_size(),)
    if len(shape) != len(axes) or math.prod(shape) != dist.get_world_size():
        raise ValueError(
            f"`mesh` {text!r} must give {len(axes)} sizes ({' x '.join(axes)}) whose product is "
            f"the number of ranks, {dist.get_world_size()}"
        )
    return init_device_mesh(device_type, shape, mesh_dim_names=axes)


def data_parallel_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Returns (rank, size) of this process among those that read different data.

    Ranks that differ only along `tp` compute parts of the same matrices, so they need the same
    data. Replicas of HSDP hold the same parameters, but each reads its own data.
    """
    rank, size = 0, 1
    for axis in mesh.mesh_dim_names or ():
        if axis != "tp":
            rank = rank * mesh[axis].size() + mesh[axis].get_local_rank()
            size = size * mesh[axis].size()
    return rank, size


def tensor_parallel_plan(layers: int) -> dict[str, ParallelStyle]:
    """Returns the tensor-parallel style of every sub-module of `GPT`.

    Between the matrices the sequence is split over the ranks (`SequenceParallel`), so the
    parameters of the norms are distributed tensors too. Optimizers and `clip_grad_norm_` do not
    accept a mixture of distributed and plain parameters.
    """
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for index in range(layers):
        block = f"blocks.{index}"
        plan |= {
            f"{block}.attention_norm": SequenceParallel(),
            f"{block}.attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None),
                desired_input_layouts=(Replicate(), None, None),
            ),
            f"{block}.attention.wq": ColwiseParallel(),
            f"{block}.attention.wk": ColwiseParallel(),
            f"{block}.attention.wv": ColwiseParallel(),
            f"{block}.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            f"{block}.mlp_norm": SequenceParallel(),
            f"{block}.mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            f"{block}.mlp.w_in": ColwiseParallel(),
            f"{block}.mlp.w_out": RowwiseParallel(output_layouts=Shard(1)),
        }
    return plan


def build_model(config: GPTConfig, mesh: DeviceMesh, *, seed: int) -> GPT:
    """Returns the model with its parameters distributed over `mesh`.

    Every rank draws the same full weights first, which a model of this size allows. A model that
    does not fit is built under `torch.device("meta")` instead, distributed, and given memory by
    `to_empty`.
    """
    torch.manual_seed(seed)
    model = GPT(config).to(mesh.device_type)
    axes = mesh.mesh_dim_names or ()
    # Tensor parallelism comes first: FSDP then shards what it left on each rank.
    if "tp" in axes:
        parallelize_module(model, mesh["tp"], tensor_parallel_plan(config.layers))
    if "fsdp" in axes:
        # Over two axes, (replicate, fsdp), `fully_shard` shards over the second: HSDP.
        data_mesh = mesh if "replicate" in axes else mesh["fsdp"]
        for block in model.blocks:
            fully_shard(block, mesh=data_mesh)
        fully_shard(model, mesh=data_mesh)
    return model


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Returns AdamW with two groups: matrices decay; norms, biases and embeddings do not."""
    decayed = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    groups = [
        {
            "params": [p for p in model.parameters() if id(p) in decayed],
            "weight_decay": config.weight_decay,
        },
        {"params": [p for p in model.parameters() if id(p) not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))


def read_corpus() -> Tensor:
    """Returns the sources of the standard library's modules, one after the other, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Trainer:
    """A model, its optimizer, the text, and how far they are."""

    def __init__(self, model_config: GPTConfig, config: TrainConfig, mesh: DeviceMesh) -> None:
        self.config = config
        self.context = model_config.context
        self.mesh = mesh
        self.model = build_model(model_config, mesh, seed=config.seed)
        self.optimizer = build_optimizer(self.model, config)
        self.corpus = read_corpus()
        self.step = 0
        self.dp_rank, self.dp_size = data_parallel_rank(mesh)
        if config.global_batch % self.dp_size:
            raise ValueError(
                f"`global_batch` ({config.global_batch}) must be divisible by the number of "
                f"data-parallel ranks ({self.dp_size})"
            )

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Returns this rank's part of the global batch: inputs and targets, (sequences, context).

        Where the sequences start depends on seed and step only, so a resumed job goes on with the
        text that the interrupted one would have read, whatever its number of ranks.
        """
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step)
        last = len(self.corpus) - self.context - 1
        starts = torch.randint(last, (self.config.global_batch,), generator=generator)
        own = starts.chunk(self.dp_size)[self.dp_rank]
        rows = torch.stack(
            [self.corpus[start : start + self.context + 1] for start in own.tolist()]
        )
        tokens = rows.to(self.mesh.device_type, torch.int64)
        return tokens[:, :-1], tokens[:, 1:]

    def learning_rate(self) -> float:
        """Returns the rate for this step: linear warm-up, then decay with the square root."""
        step, warmup = self.step + 1, self.config.warmup
        return self.config.learning_rate * min(step / warmup, math.sqrt(warmup / step))

    def train_step(self) -> float:
        """Makes one step and returns the loss, averaged over the global batch."""
        inputs, targets = self.next_batch()
        loss = self.model(inputs, targets)
        # Every data-parallel rank has equally many tokens, so the mean that FSDP takes over the
        # ranks' gradients is the gradient of the mean over the global batch.
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

        # Ranks of one tensor-parallel group have the same loss: they do not change the mean.
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint holds. Its tensors are those of the model and the optimizer.

        torch names everything by fully qualified parameter names (also in the optimizer's state and
        groups), so the result means the same on every mesh. The optimizer gets its state here if it
        has not made a step yet: the template that a load fills.
        """
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {
            "model": model_state,
            "optimizer": optimizer_state,
            "trainer": {"step": self.step, "seed": self.config.seed},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over a state that was loaded into the result of `state`."""
        # The tensors are in place already; this sets what is none, such as the groups' rates.
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["trainer"]["step"]
        if state["trainer"]["seed"] != self.config.seed:
            raise ValueError(
                f"`seed` is {self.config.seed}, but the checkpoint was made with "
                f"{state['trainer']['seed']}: the text would come in another order"
            )

    def save(self, path: Path) -> None:
        """Writes a checkpoint with torch's own `dcp.save`: every rank writes what it holds."""
        dcp.save(self.state(), checkpoint_id=path)

    def resume(self, path: Path) -> dcp_reshard.LoadReport:
        """Loads a checkpoint that any number of ranks saved from any mesh."""
        state = self.state()
        report = dcp_reshard.load(state, path)
        self.restore(state)
        return report


def find_latest(folder: Path) -> Path:
    """Returns the newest complete checkpoint in `folder`. All ranks get rank 0's answer."""
    found: list[Path | None] = [None]
    if dist.get_rank() == 0:
        # `dcp.save` writes `.metadata` last, so a folder without it is an unfinished checkpoint.
        found = [max((path.parent for path in folder.glob("step-*/.metadata")), default=None)]
    dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        raise FileNotFoundError(f"there is no complete checkpoint in {folder}")
    return found[0]


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description="Train a small GPT; resume it on another mesh.")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument(
        "--mesh", default="fsdp", help="fsdp, tp, fsdp_tp=AxB, or hsdp=AxB (replicas x shards)"
    )
    parser.add_argument("--steps", type=int, default=200, help="stop after this step")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--global-batch", type=int, default=24, help="sequences per step")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Trains; run by torchrun, once per rank."""
    arguments = parse_arguments()
    device_type = "cuda" if arguments.backend == "nccl" else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(arguments.backend)
    is_first = dist.get_rank() == 0

    config = TrainConfig(seed=arguments.seed, global_batch=arguments.global_batch)
    trainer = Trainer(GPTConfig(), config, make_mesh(arguments.mesh, device_type))
    if arguments.resume:
        path = find_latest(arguments.checkpoint_dir)
        report = trainer.resume(path)
        if is_first:
            print(f"resumed from {path}\n{report}", flush=True)

    while trainer.step < arguments.steps:
        loss = trainer.train_step()
        if is_first:
            print(f"step {trainer.step:5d}  loss {loss:.6f}", flush=True)
        if trainer.step % arguments.save_every == 0 or trainer.step == arguments.steps:
            trainer.save(arguments.checkpoint_dir / f"step-{trainer.step:08d}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
