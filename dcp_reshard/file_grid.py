"""Which file belongs to which rank of a grid, and files of several folders as one source.

A grid of rank files is given as paths (``paths[tp][dp]``, or ``paths[tp]`` where there is one
data-parallel rank), or as a template: ``step_100/model.tp{tp}.dp{dp}.pt``. The numbers may be
padded, and may stand in names of folders as well: ``mp_rank_{tp:02d}/model.pt``.

Which numbers there are is found by listing folders, or said by the caller, who then is told if the
last ranks are missing, too.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dcp_reshard.errors import StorageError
from dcp_reshard.storage import ByteSource, open_source

__all__ = ["FolderFiles", "GridPaths", "find_paths", "name_files"]

PathLike = str | os.PathLike[str]

GridPaths = PathLike | Sequence[PathLike | Sequence[PathLike]]
"""A template, or paths by tensor-parallel and data-parallel rank."""

_FIELD = re.compile(r"\{(tp|dp)(?::0(\d+)d?)?\}")
_SHOWN = 8


def find_paths(paths: GridPaths, sizes: tuple[int, int] | None) -> list[list[str]]:
    """The path of the file of tp rank t and dp rank d, at ``[t][d]``.

    Args:
        paths: The grid.
        sizes: Number of tp and of dp ranks; None to find them by listing folders, or from the
            paths.

    Raises:
        StorageError: No file fits the template, or some rank's file is missing.
        ValueError: The paths are no grid, or not of these sizes.
    """
    if isinstance(paths, (str, os.PathLike)):
        return _fill_template(os.fspath(paths), sizes)
    rows = [
        [os.fspath(row)] if isinstance(row, (str, os.PathLike)) else [os.fspath(p) for p in row]
        for row in paths
    ]
    lengths = [len(row) for row in rows]
    if not rows or not lengths[0] or len(set(lengths)) > 1:
        raise ValueError(f"paths of {len(rows)} tp ranks with {lengths!r} files are no grid")
    if sizes is not None and sizes != (len(rows), lengths[0]):
        raise ValueError(f"paths of a grid of {(len(rows), lengths[0])!r}, not of {sizes!r}")
    return rows


def _fill_template(template: str, sizes: tuple[int, int] | None) -> list[list[str]]:
    if re.search(r"[{}]", _FIELD.sub("", template)):
        raise ValueError(f"template {template!r}: only {{tp}} and {{dp}} are filled in")
    if sizes is None:
        found = set(_find_ranks(template))
        if not found:
            raise StorageError(f"no file fits the template {template!r}")
        sizes = (max(t for t, _ in found) + 1, max(d for _, d in found) + 1)
        missing = [
            template.format(tp=t, dp=d)
            for t, d in itertools.product(*map(range, sizes))
            if (t, d) not in found
        ]
        if missing:
            raise StorageError(
                f"files of the grid {sizes!r} are missing: {', '.join(missing[:_SHOWN])}"
                f"{' and more' if len(missing) > _SHOWN else ''}",
                file=missing[0],
            )
    fields = {match[1] for match in _FIELD.finditer(template)}
    for name, size in zip(("tp", "dp"), sizes, strict=True):
        if size > 1 and name not in fields:
            raise ValueError(f"template {template!r}: has no {{{name}}}, but {size} {name} ranks")
    return [[template.format(tp=t, dp=d) for d in range(sizes[1])] for t in range(sizes[0])]


def _find_ranks(template: str) -> Iterator[tuple[int, int]]:
    """The tp and dp ranks of which there is a file."""
    parts = re.split(r"(?<=/)", template)
    starts = [""]
    for part in parts:
        if _FIELD.search(part):
            starts = [start + name for start in starts for name in _matching(start, part)]
        else:
            starts = [start + part for start in starts]
    if not _FIELD.search(parts[-1]):
        starts = [path for path in starts if _split(path)[1] in _list(_split(path)[0])]
    pattern = _pattern(template)
    for path in starts:
        match = pattern.fullmatch(path)
        ranks = {name: int(number) for name, number in match.groupdict().items()} if match else {}
        t, d = ranks.get("tp", 0), ranks.get("dp", 0)
        # A number that is padded otherwise, or differs where it occurs twice, is another name.
        if match and template.format(tp=t, dp=d) == path:
            yield t, d


def _matching(folder: str, part: str) -> list[str]:
    pattern = _pattern(part.rstrip("/"))
    slash = "/" if part.endswith("/") else ""
    return [name + slash for name in _list(folder or ".") if pattern.fullmatch(name)]


def _list(folder: str) -> list[str]:
    source = open_source(folder)
    try:
        return source.names()
    finally:
        source.close()


def _pattern(template: str) -> re.Pattern[str]:
    seen: set[str] = set()
    pattern, position = "", 0
    for match in _FIELD.finditer(template):
        pattern += re.escape(template[position : match.start()])
        name = match[1]
        pattern += r"\d{1,9}" if name in seen else rf"(?P<{name}>\d{{1,9}})"
        seen.add(name)
        position = match.end()
    return re.compile(pattern + re.escape(template[position:]), re.ASCII)


def name_files(paths: Sequence[Sequence[str]]) -> list[list[str]]:
    """A name for each file: its path, without the folders that all have in common.

    Example:
        >>> name_files([["step_1/tp0/model.pt"], ["step_1/tp1/model.pt"]])
        [['tp0/model.pt'], ['tp1/model.pt']]
    """
    folders = [path.split("/")[:-1] for row in paths for path in row]
    common = 0
    for parts in zip(*folders, strict=False):
        if len(set(parts)) > 1:
            break
        common += 1
    return [["/".join(path.split("/")[common:]) for path in row] for row in paths]


@dataclass(slots=True, eq=False)
class FolderFiles:
    """Files of several folders: a `ByteSource`. Not frozen: it owns the sources of its folders."""

    paths: Mapping[str, str]
    """Path by name."""

    _folders: dict[str, ByteSource] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Make a source for each folder."""
        for path in self.paths.values():
            folder = _split(path)[0]
            if folder not in self._folders:
                self._folders[folder] = open_source(folder)

    def names(self) -> list[str]:
        """Names of those files that there are, sorted."""
        there = {folder: set(source.names()) for folder, source in self._folders.items()}
        split = {name: _split(path) for name, path in self.paths.items()}
        return sorted(name for name, (folder, base) in split.items() if base in there[folder])

    def size(self, name: str) -> int:
        """Size of a file in bytes."""
        folder, base = self._find(name)
        return self._folders[folder].size(base)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers with the bytes that start at `offset`."""
        folder, base = self._find(name)
        self._folders[folder].read_into(base, offset, buffers)

    def close(self) -> None:
        """Close all folders, and check that no file changed."""
        for source in self._folders.values():
            source.close()

    def _find(self, name: str) -> tuple[str, str]:
        if name not in self.paths:
            raise StorageError(f"file {name!r}: not one of this grid", file=name)
        return _split(self.paths[name])


def _split(path: str) -> tuple[str, str]:
    folder, slash, name = path.rpartition("/")
    return folder or slash or ".", name
