"""Casts from one dtype to another: which can torch make, and which lose nothing?"""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["can_cast", "is_lossless"]


def is_lossless(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a wider dtype of the same kind has every value of another.

    By range and precision, because `torch.promote_types` of torch 2.13 has no answer for float8 and
    for unsigned integers of more than 8 bits.

    Example:
        >>> is_lossless(torch.uint16, torch.int32), is_lossless(torch.bfloat16, torch.float16)
        (True, False)
    """
    if wanted.itemsize <= stored.itemsize or not can_cast(stored, wanted):
        return False
    if stored.is_complex or wanted.is_complex:
        return stored.is_complex and wanted.is_complex
    try:
        if stored.is_floating_point:
            own, other = torch.finfo(stored), torch.finfo(wanted)
            # Subnormal values as well: they lie as far apart as the smallest normal ones.
            return (
                other.eps <= own.eps
                and other.max >= own.max
                and other.tiny * other.eps <= own.tiny * own.eps
            )
        whole, wider = torch.iinfo(stored), torch.iinfo(wanted)
    except TypeError:  # a bool, or of two kinds
        return False
    return wider.min <= whole.min and whole.max <= wider.max


@cache
def can_cast(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether torch can make such a cast at all; of float4 it cannot.

    Example:
        >>> can_cast(torch.float32, torch.float4_e2m1fn_x2)
        False
    """
    try:
        torch.zeros(1, dtype=torch.uint8).repeat(stored.itemsize).view(stored).to(wanted)
    except (RuntimeError, TypeError):  # NotImplementedError is one of these
        return False
    return True
