"""How an optimizer and a checkpoint that do not match exactly are brought together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from dcp_reshard.catalog import KeyPath, StoredTensor
from dcp_reshard.plan import Rename

__all__ = ["MakeState", "OptimizerOptions"]

MakeState = Callable[[str, KeyPath, StoredTensor, torch.Tensor], torch.Tensor | None]
"""Makes the memory for a stored value: parameter, path of the value in its state, what is stored,
the parameter. None leaves it to this package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """What to do where an optimizer and the checkpoint differ.

    `load_sharded_optimizer_state_dict` knows the model but not the optimizer; it takes `rename`,
    `on_extra`, `state_dtype` and `make_state`, and has no use for the rest.

    Example:
        >>> OptimizerOptions(on_new="ignore")
        Traceback (most recent call last):
            ...
        ValueError: `on_new` must be 'error' or 'keep', got 'ignore'
    """

    rename: Rename | None = None
    """Gives the name of a parameter in the checkpoint for its name in the model: a mapping (others
    keep their name) or a function. Parts that wrappers add need no renaming."""

    on_new: Literal["error", "keep"] = "error"
    """A parameter of the optimizer that the checkpoint does not know fails the load, or keeps the
    state and the hyper-parameters that it has."""

    on_extra: Literal["report", "error"] = "report"
    """A parameter that only the checkpoint has is reported, or fails the load."""

    on_no_state: Literal["leave", "zeros", "error"] = "leave"
    """A parameter that had no state when it was saved (frozen, or never stepped) has none
    afterwards, gets zeros of the kinds that others of its group have, at step 0, or fails the
    load. Part of an FSDP1 flat parameter cannot be left without."""

    on_frozen: Literal["restore", "skip"] = "restore"
    """State of a parameter that is frozen now is restored all the same, or left out."""

    groups: Mapping[int, int | str | None] | None = None
    """Hyper-parameters of a group of the optimizer (by number) are those of a saved group (by
    number), or of the saved group of a parameter (by its name in the checkpoint), or the ones it
    has (None). For groups not named here they follow from the parameters."""

    keep_hyper_parameters: Collection[str] = ()
    """Names of hyper-parameters that keep their value in the optimizer, such as ``lr``."""

    by_position: bool = False
    """State that was saved by number, as `Optimizer.state_dict` does, belongs to the parameter at
    that position. Without names nothing shows whether that is right."""

    state_dtype: Literal["stored", "parameter"] | torch.dtype = "stored"
    """dtype of floating state of a parameter's shape: as stored, as the parameter's, or this one.
    Casts are reported, and one that overflows fails."""

    make_state: MakeState | None = None
    """Makes the memory for a stored value in another way than this package would. It is not asked
    for parameters that FSDP1 has flattened."""

    def __post_init__(self) -> None:
        """Check the choices."""
        for name, choices in (
            ("on_new", ("error", "keep")),
            ("on_extra", ("report", "error")),
            ("on_no_state", ("leave", "zeros", "error")),
            ("on_frozen", ("restore", "skip")),
        ):
            if getattr(self, name) not in choices:
                wanted = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
                raise ValueError(f"`{name}` must be {wanted}, got {getattr(self, name)!r}")
        dtype = self.state_dtype
        if dtype not in ("stored", "parameter") and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point
        ):
            raise ValueError(
                f"`state_dtype` must be 'stored', 'parameter' or a floating dtype, got {dtype!r}"
            )
        if isinstance(self.keep_hyper_parameters, str):
            raise ValueError(
                f"`keep_hyper_parameters` must be a collection of names, got "
                f"{self.keep_hyper_parameters!r}"
            )
