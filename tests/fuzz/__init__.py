"""Fuzzing: what is tried on the parsers of this package, by `scripts/fuzz` or in the tests."""
