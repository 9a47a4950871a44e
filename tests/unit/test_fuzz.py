"""A short, repeatable run of what `scripts/fuzz` does for as long as one likes."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.targets import SEEDS, TARGETS


def mutate(data: bytes, others: list[bytes], generator: random.Random) -> bytes:
    """One to four of: a flipped bit, another byte, a piece cut out, repeated, or from elsewhere."""
    mutated = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(mutated) + 1)
        end = min(len(mutated), at + generator.randint(1, 1 << generator.randint(0, 8)))
        match generator.randrange(5):
            case 0 if at < len(mutated):
                mutated[at] ^= 1 << generator.randrange(8)
            case 1 if at < len(mutated):
                mutated[at] = generator.choice((0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256)))
            case 2:
                del mutated[at:end]
            case 3:
                mutated[at:at] = mutated[at:end]
            case _:
                other = generator.choice(others)
                start = generator.randrange(len(other) + 1)
                mutated[at:end] = other[start : start + end - at]
    return bytes(mutated)


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs(name: str) -> None:
    """Whatever is made of an input by mutation is parsed, or refused with an error of ours."""
    target, seeds = TARGETS[name], SEEDS[name]()
    generator = random.Random(name)  # noqa: S311  the same inputs in every run
    for seed in seeds:
        target(seed)
    for _ in range(100 if name in ("load", "repair") else 1000):
        target(mutate(generator.choice(seeds), seeds, generator))
