"""The state of a live optimizer: what to load for each parameter, where to, and how to set it.

`plan_state` touches nothing. Its plan holds the memory that is to be filled, by the key that the
load will know it by; `StatePlan.state_of` puts together what was loaded. FSDP1's flat parameters
are filled in place, each rank its own elements: the originals of a flat parameter share one buffer
for each kind of state, and one value for each scalar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_reshard._torch import set_element
from dcp_reshard.catalog import Catalog, KeyPath, StoredTensor
from dcp_reshard.errors import OptimizerStateError
from dcp_reshard.hyper_values import same_value
from dcp_reshard.nearest_names import shorten
from dcp_reshard.optimizer_keys import StateKey
from dcp_reshard.optimizer_memory import (
    check_shapes,
    has_param_shape,
    is_scalar,
    make_memory,
    state_dtype,
    step_on_device,
)
from dcp_reshard.optimizer_options import OptimizerOptions
from dcp_reshard.optimizer_params import LiveParam, Original, slice_layout

__all__ = ["StatePlan"]


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """One value of a parameter's state, after the load."""

    keys: tuple[str, ...]
    """Keys of the load that it comes from; several values must be equal."""

    memory: torch.Tensor | None = None
    """The value itself, if it is made of pieces, or of zeros."""

    as_float: bool = False
    """Whether the optimizer's kernels want it as float32."""


@dataclass(slots=True, eq=False)
class StatePlan:
    """What to load for the parameters of an optimizer; filled by `add`, one after the other."""

    catalog: Catalog
    """What the checkpoint holds."""

    options: OptimizerOptions
    """What to do where it does not fit."""

    wanted: dict[str, Any] = field(default_factory=dict)
    """State dict of the load: memory by key, None for values that are not tensors."""

    stored_keys: dict[str, str] = field(default_factory=dict)
    """Key in the checkpoint for each key of the load."""

    _slots: dict[torch.Tensor, dict[KeyPath, _Slot]] = field(default_factory=dict)

    def add(
        self,
        live: LiveParam,
        stored: Sequence[Sequence[StateKey]],
        *,
        group: Mapping[str, Any],
    ) -> None:
        """Plan to load the state of a parameter.

        Args:
            live: The parameter.
            stored: State in the checkpoint of each of its originals; empty for those without.
            group: Its group as it will be.

        Raises:
            OptimizerStateError: The originals of a flat parameter do not have the same state, or a
                state cannot be flattened with its parameter.
        """
        slots = self._slots.setdefault(live.param, {})
        if len(live.originals) == 1 and live.originals[0].part is None:
            [original], [keys] = live.originals, stored
            if self.options.make_state is None:
                check_shapes(original.name, original.shape, keys, self.catalog)
            for key in keys:
                slots[key.path] = self._add_whole(key, original, live.param, group)
            return
        self._check_flat(live, stored)
        paths = dict.fromkeys(key.path for keys in stored for key in keys)
        for path in paths if live.is_held else ():
            parts = [
                (original, key)
                for original, keys in zip(live.originals, stored, strict=True)
                for key in keys
                if key.path == path
            ]
            slots[path] = self._add_flat(path, parts, live, group)

    def add_zeros(self, live: LiveParam, like: LiveParam) -> None:
        """Plan to give a parameter zeros of the kinds that another one is given.

        Raises:
            OptimizerStateError: The other has state that zeros cannot stand for.
        """
        slots = self._slots.setdefault(live.param, {})
        for path, slot in self._slots[like.param].items():
            model = slot.memory if slot.memory is not None else self.wanted.get(slot.keys[0])
            if not isinstance(model, torch.Tensor):
                raise OptimizerStateError(
                    f"parameter `{live.originals[0].name}`: it has no state in the checkpoint, "
                    f"and zeros cannot stand for {_text(path)}, which is not a tensor",
                    fqn=live.originals[0].name,
                )
            shape, param_shape = tuple(model.size()), tuple(like.zeros(model.dtype).size())
            if has_param_shape(path, shape, param_shape):
                zeros = live.zeros(model.dtype)
            elif is_scalar(path, shape, param_shape):
                zeros = torch.zeros_like(model)
            else:
                raise OptimizerStateError(
                    f"parameter `{live.originals[0].name}`: it has no state in the checkpoint, "
                    f"and zeros cannot stand for {_text(path)} of shape {shape!r}",
                    fqn=live.originals[0].name,
                )
            slots[path] = _Slot((), zeros, slot.as_float)

    def state_of(self, live: LiveParam) -> dict[Any, Any]:
        """The state of a parameter, after the load.

        Raises:
            OptimizerStateError: Scalars that a flat parameter has once were saved with several
                values.
        """
        state: dict[Any, Any] = {}
        for path, slot in self._slots.get(live.param, {}).items():
            value = slot.memory
            if value is None:
                value = self.wanted[slot.keys[0]]
                for other in slot.keys[1:]:
                    if not same_value(value, self.wanted[other]):
                        raise OptimizerStateError(
                            f"{_text(path)} of `{slot.keys[0]}` is {value!r} and of `{other}` "
                            f"{self.wanted[other]!r}, but these parameters are one flat parameter "
                            f"now; use FSDP with `use_orig_params=True`",
                            fqn=slot.keys[0],
                        )
            if slot.as_float and isinstance(value, torch.Tensor):
                value = value.to(torch.float32)
            if not path:
                assert isinstance(value, dict)
                state |= value
            else:
                set_element(state, path, value)
        return state

    def has_state(self, live: LiveParam) -> bool:
        """Whether there is anything to load for a parameter."""
        return bool(self._slots.get(live.param))

    def _want(self, stored_key: str, value: object, name: str) -> str:
        # A stored parameter may be loaded twice, where a tied one is not tied any more.
        key = stored_key if stored_key not in self.wanted else f"{stored_key} for {name}"
        self.wanted[key], self.stored_keys[key] = value, stored_key
        return key

    def _add_whole(
        self, key: StateKey, original: Original, param: torch.Tensor, group: Mapping[str, Any]
    ) -> _Slot:
        name = original.name
        stored = self.catalog.tensors.get(key.key)
        memory = None
        if stored is not None:
            memory = make_memory(
                key.path, stored, param, name=name, group=group, options=self.options
            )
        return _Slot((self._want(key.key, memory, name),), as_float=step_on_device(key.path, group))

    def _add_flat(
        self,
        path: KeyPath,
        parts: Sequence[tuple[Original, StateKey]],
        live: LiveParam,
        group: Mapping[str, Any],
    ) -> _Slot:
        stored = [self.catalog.tensors.get(key.key) for _, key in parts]
        first = stored[0]
        if first is None or is_scalar(path, first.shape, parts[0][0].shape):
            on_device = step_on_device(path, group) or path != ("step",)
            device = live.param.device if on_device else torch.device("cpu")
            return _Slot(
                tuple(
                    self._want(key.key, _empty(tensor, device), original.name)
                    for (original, key), tensor in zip(parts, stored, strict=True)
                ),
                as_float=step_on_device(path, group),
            )
        # Zeros, because a flat parameter is padded, and its padding is trained as well.
        memory = live.zeros(state_dtype(path, first, live.param, self.options))
        for (original, key), tensor in zip(parts, stored, strict=True):
            name = original.name
            if tensor is None or tensor.shape != original.shape:
                shape = None if tensor is None else tensor.shape
                raise OptimizerStateError(
                    f"parameter `{name}`: {_text(path)} was saved with shape {shape!r}; FSDP1 has "
                    f"flattened the parameter of shape {original.shape!r}, and only state of that "
                    f"shape can be flattened with it",
                    fqn=name,
                )
            if tensor.dtype != first.dtype:
                raise OptimizerStateError(
                    f"parameter `{name}`: {_text(path)} was saved as {tensor.dtype}, that of "
                    f"`{parts[0][0].name}` as {first.dtype}, but they are one flat parameter "
                    f"now",
                    fqn=name,
                )
            self._want(key.key, slice_layout(key.key, original, memory), name)
        return _Slot((), memory)

    def _check_flat(self, live: LiveParam, stored: Sequence[Sequence[StateKey]]) -> None:
        """Check that all originals of a flat parameter have the same kinds of state."""
        kinds: dict[frozenset[KeyPath], list[str]] = {}
        for original, keys in zip(live.originals, stored, strict=True):
            kinds.setdefault(frozenset(key.path for key in keys), []).append(original.name)
        if self.options.on_no_state == "zeros":
            kinds.pop(frozenset(), None)
        if len(kinds) > 1:
            (one, first), (two, second), *_ = kinds.items()
            raise OptimizerStateError(
                f"{shorten(first)} were saved with {_texts(one)} and {shorten(second)} with "
                f"{_texts(two)}, but they are one flat parameter now; use FSDP with "
                f"`use_orig_params=True`, or fill in zeros with `on_no_state='zeros'`",
                fqn=first[0],
            )


def _empty(stored: StoredTensor | None, device: torch.device) -> torch.Tensor | None:
    if stored is None:
        return None
    return torch.empty(stored.shape, dtype=stored.dtype, device=device)


def _text(path: KeyPath) -> str:
    return f"state `{'.'.join(map(str, path))}`"


def _texts(paths: frozenset[KeyPath]) -> str:
    return " and ".join(sorted(map(_text, paths))) or "no state"
