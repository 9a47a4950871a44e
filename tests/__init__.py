"""Tests, by what they cost: `unit`, `world`, `dist`, `gpu`; `support` is what they share.

A package, and the root of the checkout comes first on the path (`pythonpath` in pyproject.toml),
so that a test module has the same name, `tests.dist.test_resume` say, for pytest, for its xdist
workers, and for the processes of a gloo world, which import what they run by that name.
"""
