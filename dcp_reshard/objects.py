"""Values that are not tensors: is an item plain data, and what is its value?

What `torch.save` wrote for a value is a pickle, and unpickling is running it. `check_data_only`
interprets it first (`pickle_data`), which runs nothing, and refuses whatever is not data:

* a class or function that data does not need, or one of those below called with other arguments
  than data has (`bytearray(10**12)` is a call of a harmless class too);
* values nested deeper than `_MAX_DEPTH`, or more of them than `_MAX_VALUES` when each is counted
  as often as it occurs;
* more bytes or records than an object has.

What has passed is loaded by torch with ``weights_only=True``, which has a list of its own.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dcp_reshard.container import read_directory
from dcp_reshard.errors import CheckpointFormatError, UnsafeCheckpointError
from dcp_reshard.payload import read_pickle
from dcp_reshard.pickle_data import Call, Global, interpret_pickle
from dcp_reshard.pickle_extent import check_extent, find_calls

__all__ = ["MAX_OBJECT_BYTES", "MAX_OBJECT_RECORDS", "check_data_only", "load_data"]

MAX_OBJECT_BYTES = 64 * 2**20
"""Most bytes of a value that is not a tensor."""

MAX_OBJECT_RECORDS = 4096
"""Most records of such a value: it may hold tensors, each a record of its own."""

_MAX_DEPTH = 64
_MAX_VALUES = 4_000_000

_REBUILDS = frozenset(
    f"torch._utils {name}"
    for name in (
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
        "_rebuild_parameter",
        "_rebuild_parameter_with_state",
        "_rebuild_sparse_tensor",
        "_rebuild_qtensor",
        "_rebuild_meta_tensor_no_storage",
    )
)
# torch keeps the classes that it may unpickle in one set for all threads.
_classes_lock = threading.Lock()


def check_data_only(
    contents: memoryview,
    *,
    allowed_classes: Iterable[type] = (),
    max_bytes: int = MAX_OBJECT_BYTES,
) -> None:
    """Check that an item is data and nothing else, without running any of it.

    Args:
        contents: The whole item.
        allowed_classes: Classes whose instances it may hold as well.
        max_bytes: A longer item is refused.

    Raises:
        UnsafeCheckpointError: It is not.
        CheckpointFormatError: It is not what `torch.save` writes, or is larger than objects are.
        CorruptRecordError: The pickle does not have its recorded checksum.
    """
    if len(contents) > max_bytes:
        raise CheckpointFormatError(
            f"{len(contents)} bytes for a value that is not a tensor, allowed are {max_bytes}"
        )

    def read(start: int, end: int) -> bytes:
        return bytes(contents[start:end])

    directory = read_directory(len(contents), read, max_records=MAX_OBJECT_RECORDS)
    data = read_pickle({record.name: record for record in directory}, read, max_bytes=max_bytes)
    assert data is not None  # it is not longer than the item
    left_out: list[object] = []
    value = interpret_pickle(data, left_out=left_out)
    check_extent([value, *left_out], max_depth=_MAX_DEPTH + 1, max_values=_MAX_VALUES)
    allowed = {f"{cls.__module__} {cls.__qualname__}" for cls in allowed_classes}
    for call in find_calls([value, *left_out]):
        if call.function not in allowed and not _is_data(call):
            raise UnsafeCheckpointError(
                f"`{call.function.replace(' ', '.')}` is not plain data, and nothing else is "
                f"loaded from a checkpoint unless its class is listed in `allowed_classes`; "
                f"nothing was run"
            )


def load_data(
    contents: memoryview,
    *,
    allowed_classes: Sequence[type] = (),
    max_bytes: int = MAX_OBJECT_BYTES,
) -> object:
    """The value of an item, as data only.

    Args:
        contents: The whole item.
        allowed_classes: Classes whose instances it may hold, beside plain data.
        max_bytes: A longer item is refused.

    Raises:
        UnsafeCheckpointError: It is not data.
        CheckpointFormatError: It is not what `torch.save` writes, or cannot be loaded.
    """
    check_data_only(contents, allowed_classes=allowed_classes, max_bytes=max_bytes)
    try:
        if not allowed_classes:
            return torch.load(io.BytesIO(contents), map_location="cpu", weights_only=True)
        with _classes_lock:
            # Those that the caller has allowed everywhere must stay so afterwards.
            known = torch.serialization.get_safe_globals()
            mine: list[Any] = [cls for cls in allowed_classes if cls not in known]
            with torch.serialization.safe_globals(mine):
                return torch.load(io.BytesIO(contents), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # What torch says before it is advice that does not apply here.
        why = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
        raise UnsafeCheckpointError(f"not plain data: {why.partition(chr(10))[0]:.500}") from error
    except Exception as error:
        # What torch and the classes allowed raise on bad arguments is of any type.
        raise CheckpointFormatError(
            f"not loadable ({type(error).__name__}: {str(error)[:500]})"
        ) from error


def _is_data(call: Call) -> bool:
    """Whether a call makes data, of about the size of its arguments."""
    function = call.function.replace("__builtin__ ", "builtins ")
    match function, call.args:
        case "torch Size", (tuple() | list() as sizes,):
            return all(type(size) is int for size in sizes)
        case "torch device", (str(),) | (str(), int()):
            return True
        case "torch.serialization _get_layout", (str(),):
            return True
        case "collections Counter", () | (dict(),):
            return True
        case "builtins set", (list() as items,):
            return all(isinstance(item, (str, int, float, bytes, type(None))) for item in items)
        case "builtins complex", (float(), float()):
            return True
        case "builtins bytearray", (str(), "latin-1") | (bytes(),) | ():
            return True
        case "builtins bytearray", (Call(function="_codecs encode"),):
            return True
        case "_codecs encode", (str(), "latin1"):
            return True
        case "torch._tensor _rebuild_from_type_v2", (Global(name=name), Global(), tuple(), _):
            return name in _REBUILDS
        case _:
            return function in _REBUILDS
