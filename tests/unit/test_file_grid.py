"""Names of the files of a grid: templates, lists, several folders, and what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dcp_reshard import StorageError, UnsafeCheckpointError
from dcp_reshard.file_grid import FolderFiles, find_paths, name_files
from dcp_reshard.storage import read_bytes


def make_files(root: Path, *names: str) -> str:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return str(root)


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("model.tp{tp}.dp{dp}.pt", "model.tp%d.dp%d.pt"),
        ("tp_{tp:02d}/dp_{dp:03}/model.pt", "tp_%02d/dp_%03d/model.pt"),
        ("{dp}-of-2/rank{tp}.safetensors", "{1}-of-2/rank{0}.safetensors"),
        ("rank_{tp}/model_{tp}_{dp}.pt", "rank_{0}/model_{0}_{1}.pt"),
    ],
)
def test_templates_find_their_files(template: str, names: str, tmp_path: Path) -> None:
    """Numbers are found in names of files and folders, padded or not, in any order."""
    grid = [(t, d) for t in range(3) for d in range(2)]
    named = {g: names % g if "%" in names else names.format(*g) for g in grid}
    root = make_files(tmp_path, *named.values(), "model.tp00.dp0.pt", "other.pt", "rank_1/x.pt")
    wanted = [[f"{root}/{named[t, d]}" for d in range(2)] for t in range(3)]
    assert find_paths(f"{root}/{template}", None) == wanted
    assert find_paths(Path(root) / template, (3, 2)) == wanted


def test_a_template_without_a_number_is_one_rank(tmp_path: Path) -> None:
    """Where the template has no `{dp}`, or no number at all, there is one rank of these."""
    root = make_files(tmp_path, "m0.pt", "m1.pt")
    assert find_paths(f"{root}/m{{tp}}.pt", None) == [[f"{root}/m0.pt"], [f"{root}/m1.pt"]]
    assert find_paths(f"{root}/m1.pt", None) == [[f"{root}/m1.pt"]]


def test_missing_files_are_named(tmp_path: Path) -> None:
    """A hole in the grid names the files that are not there; so does an empty folder."""
    root = make_files(tmp_path, "m.0.0", "m.0.1", "m.2.1")
    with pytest.raises(StorageError, match=r"grid \(3, 2\) are missing: .*m.1.0, .*m.1.1, .*m.2.0"):
        find_paths(f"{root}/m.{{tp}}.{{dp}}", None)
    with pytest.raises(StorageError, match="no file fits the template"):
        find_paths(f"{root}/n.{{tp}}", None)
    with pytest.raises(StorageError, match="nowhere"):
        find_paths(f"{root}/nowhere/m.{{tp}}", None)


@pytest.mark.parametrize(
    ("paths", "sizes", "message"),
    [
        ([["a", "b"], ["c"]], None, r"2 tp ranks with \[2, 1\] files are no grid"),
        ([], None, "no grid"),
        ([[]], None, "no grid"),
        (["a", "b"], (2, 2), r"grid of \(2, 1\), not of \(2, 2\)"),
        ("m.{tp}.pt", (2, 2), r"has no \{dp\}, but 2 dp ranks"),
        ("m.{pp}.pt", None, "only {tp} and {dp}"),
        ("m.{tp!r}.pt", None, "only {tp} and {dp}"),
    ],
)
def test_what_is_no_grid_is_refused(paths: Any, sizes: Any, message: str) -> None:
    """Ragged lists, other sizes and other fields of a template are errors."""
    with pytest.raises(ValueError, match=message):
        find_paths(paths, sizes)


def test_lists_of_paths() -> None:
    """Paths by rank, with or without a level for dp."""
    assert find_paths([Path("a/0"), "b/1"], None) == [["a/0"], ["b/1"]]
    assert find_paths([["a", "b"], ["c", "d"]], (2, 2)) == [["a", "b"], ["c", "d"]]


def test_files_of_several_folders_are_one_source(tmp_path: Path) -> None:
    """Each file has a name without the common folders; only files of the grid are there."""
    root = make_files(tmp_path, "x/0/m.pt", "x/1/m.pt", "x/1/other.pt")
    paths = [[f"{root}/x/{i}/m.pt"] for i in range(3)]
    names = name_files(paths)
    assert names == [["0/m.pt"], ["1/m.pt"], ["2/m.pt"]]
    (tmp_path / "x/2").mkdir()
    source = FolderFiles({n[0]: p[0] for n, p in zip(names, paths, strict=True)})
    assert source.names() == ["0/m.pt", "1/m.pt"]
    assert source.size("1/m.pt") == 8
    assert read_bytes(source, "1/m.pt", 2, 8) == b"1/m.pt"
    with pytest.raises(StorageError, match=r"'\.\./x': not one of this grid"):
        source.size("../x")
    source.close()


def test_a_link_to_a_file_is_not_followed(tmp_path: Path) -> None:
    """Rank files are opened as safely as those of other checkpoints."""
    root = make_files(tmp_path, "a.pt")
    (tmp_path / "b.pt").symlink_to(tmp_path / "a.pt")
    source = FolderFiles({"b.pt": f"{root}/b.pt"})
    with pytest.raises(UnsafeCheckpointError, match="symbolic link"):
        source.size("b.pt")
    source.close()


def test_names_of_one_folder_are_bare(tmp_path: Path) -> None:
    """Where all files are in one folder, a name is the file's own; relative paths work."""
    assert name_files([["c/a.pt", "c/b.pt"]]) == [["a.pt", "b.pt"]]
    assert name_files([["a.pt"]]) == [["a.pt"]]
    assert name_files([["/a.pt"], ["/b/a.pt"]]) == [["a.pt"], ["b/a.pt"]]
