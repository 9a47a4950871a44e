"""Elements into a destination, in place: casts are looked at, and small tensors copied together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from dcp_reshard._torch import copy_together
from dcp_reshard.errors import DtypeMismatchError

__all__ = ["Copy", "copy_all", "copy_elements"]

# A cast is made, and looked at, in memory of its own, on each thread: several times the size of
# what is cast.
_CAST_ELEMENTS = 2**14


class Copy(NamedTuple):
    """One copy to be made."""

    fqn: str
    """Key in the state dict, for messages."""

    dest: torch.Tensor
    """The destination."""

    source: torch.Tensor
    """The elements, of the same shape; on the CPU."""


def copy_all(copies: Iterable[Copy]) -> None:
    """Make many small copies, with one call of torch for all those that cast nothing.

    Raises:
        DtypeMismatchError: A cast made something else of a value than its nearest neighbour.
    """
    dests: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for copy in copies:
        if _is_plain(copy.dest) and copy.dest.dtype == copy.source.dtype:
            dests.append(copy.dest)
            sources.append(copy.source)
        else:
            copy_elements(*copy)
    copy_together(dests, sources)


def _is_plain(dest: torch.Tensor) -> bool:
    """Whether torch 2.13 can fill it together with others: conjugates, say, raise there."""
    odd = dest.is_conj() or dest.is_neg() or dest.is_inference()
    return type(dest) is torch.Tensor and not odd


def copy_elements(
    fqn: str, dest: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False
) -> None:
    """Copy into the destination, in place.

    Args:
        fqn: Key in the state dict, for messages.
        dest: The destination.
        source: The elements, of the same shape; on the CPU.
        non_blocking: Whether the copy may still be under way on return.

    Raises:
        DtypeMismatchError: A cast made something else of a value than its nearest neighbour.
    """
    with torch.inference_mode() if dest.is_inference() else torch.no_grad():
        if dest.dtype == source.dtype or not dest.dtype.is_floating_point:
            dest.copy_(source, non_blocking=non_blocking)
            return
        # A cast is rare, and has to be looked at: the result is made on the host first.
        for part, elements in _slabs(dest, source):
            cast = elements.to(dest.dtype)
            _check_cast(fqn, elements, cast)
            part.copy_(cast)


def _slabs(dest: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both, in parts of bounded size."""
    if dest.numel() <= _CAST_ELEMENTS:
        yield dest, source
        return
    outermost = next(dim for dim, size in enumerate(dest.shape) if size > 1)
    for pair in zip(dest.chunk(2, outermost), source.chunk(2, outermost), strict=True):
        yield from _slabs(*pair)


def _check_cast(fqn: str, source: torch.Tensor, cast: torch.Tensor) -> None:
    # Floats of one byte lack infinities, or signs and zero, whatever their range.
    one_byte = cast.dtype.itemsize == 1
    if not one_byte and torch.finfo(cast.dtype).max >= torch.finfo(source.dtype).max:
        return
    # float8 has no `isfinite` of its own; every narrower type fits into float32.
    wide = source if source.dtype == torch.float64 else source.to(torch.float32)
    back = cast.to(torch.float32)
    lost = (wide.isfinite() != back.isfinite()) | (wide.isinf() != back.isinf())
    if one_byte:
        # torch 2.13 gives the largest value for what is larger, and drops signs that cannot be.
        lost |= wide.isfinite() & (wide.abs() > torch.finfo(cast.dtype).max)
        lost |= (back != 0) & (wide.sign() != back.sign()) & ~wide.isnan()
    if bool(lost.any()):
        raise DtypeMismatchError(
            f"tensor `{fqn}`: {int(lost.sum())} values of {source.dtype} do not fit into "
            f"{cast.dtype}, the first is {wide[lost][0].item()!r}",
            fqn=fqn,
        )
