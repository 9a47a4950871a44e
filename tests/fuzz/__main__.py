"""Fuzz one target with atheris: ``python -m tests.fuzz TARGET CORPUS [LIBFUZZER OPTIONS]``.

See `scripts/fuzz`, which runs all of them.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from pathlib import Path


def main() -> None:
    """Fill the corpus with inputs to begin with, and fuzz; ends the process."""
    import atheris

    name, corpus, *options = sys.argv[1:]
    with atheris.instrument_imports(include=["dcp_reshard"]):
        from tests.fuzz.targets import SEEDS, TARGETS

    folder = Path(corpus)
    folder.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS[name]():
        # The name that libFuzzer itself would give it.
        (folder / hashlib.sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(seed)
    warnings.simplefilter("ignore")
    atheris.Setup([sys.argv[0], *options, corpus], TARGETS[name])
    atheris.Fuzz()


main()
