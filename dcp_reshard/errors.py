"""Every exception this package raises.

::

    ReshardError(Exception)
        CheckpointFormatError(ReshardError, ValueError)  the files are not what they claim to be
            UnsafeCheckpointError                        a class, opcode or file name not allowed
            ChunkCoverageError                           stored chunks overlap, or leave a hole
            CorruptRecordError                           bytes do not match their checksum
        LayoutError(ReshardError, ValueError)            a tensor that cannot be described
            MissingParameterError(.., AttributeError)    a module has no parameter of that name
        PlanError(ReshardError, ValueError)              checkpoint and state dict do not fit
            MissingTensorError(PlanError, KeyError)      keys that the checkpoint does not have
            ShapeMismatchError                           stored and wanted global shape differ
            DtypeMismatchError                           dtypes differ by more than is allowed
            InconsistentRanksError                       ranks see different checkpoints or keys
        OptimizerStateError(ReshardError, ValueError)    optimizer state without its parameter
        StorageError(ReshardError, OSError)              a file is missing, short, or changed
        PeerFailedError(ReshardError, RuntimeError)      another rank of the load has failed
        MissingExtraError(ReshardError, ImportError)     an optional dependency is not installed

The message is the one positional argument and the context is keyword-only, so every error survives
pickling: ``torch.distributed.checkpoint`` sends a rank's exception to all ranks, and one that
cannot be rebuilt there loses its message.
"""

from __future__ import annotations

__all__ = [
    "CheckpointFormatError",
    "ChunkCoverageError",
    "CorruptRecordError",
    "DtypeMismatchError",
    "InconsistentRanksError",
    "LayoutError",
    "MissingExtraError",
    "MissingParameterError",
    "MissingTensorError",
    "OptimizerStateError",
    "PeerFailedError",
    "PlanError",
    "ReshardError",
    "ShapeMismatchError",
    "StorageError",
    "UnsafeCheckpointError",
]


class ReshardError(Exception):
    """Base of all errors of this package.

    Attributes:
        fqn: The fully qualified name of the tensor or object concerned, if there is one.
        file: The file concerned, if there is one.
        start: First byte concerned, relative to the file.
        end: One past the last byte concerned.
        destination: What a load that failed has left of its destination: ``"untouched"`` or
            ``"undefined now"``; None if there is no load. It is the end of the text.

    Example:
        >>> error = ReshardError("tensor `w`: too short", fqn="w", file="__0_0.distcp")
        >>> error.fqn, error.file, str(error)
        ('w', '__0_0.distcp', 'tensor `w`: too short')
    """

    def __init__(
        self,
        message: str,
        *,
        fqn: str | None = None,
        file: str | None = None,
        start: int | None = None,
        end: int | None = None,
    ) -> None:
        """Keep the message and its context.

        Args:
            message: What is wrong, where, and both values.
            fqn: The tensor or object concerned.
            file: The file concerned.
            start: First byte concerned.
            end: One past the last byte concerned.
        """
        super().__init__(message)
        self.fqn = fqn
        self.file = file
        self.start = start
        self.end = end
        self.destination: str | None = None

    def __str__(self) -> str:
        """The message: `KeyError` would print its repr, `OSError` may add an errno."""
        if self.destination is None:
            return str(self.args[0])
        return f"{self.args[0]}; the destination is {self.destination}"


class CheckpointFormatError(ReshardError, ValueError):
    """The checkpoint's metadata or data files are not what they claim to be."""


class UnsafeCheckpointError(CheckpointFormatError):
    """A checkpoint names a class, an opcode or a path that this package refuses to follow."""


class ChunkCoverageError(CheckpointFormatError):
    """Stored chunks of a tensor overlap, or leave part of it uncovered."""


class CorruptRecordError(CheckpointFormatError):
    """Stored bytes do not have the checksum that was recorded when they were saved."""


class LayoutError(ReshardError, ValueError):
    """What this rank holds of a tensor cannot be described: placement, nesting, or local shape."""


class MissingParameterError(LayoutError, AttributeError):
    """A module has no parameter of the given name."""


class PlanError(ReshardError, ValueError):
    """The checkpoint does not fit the state dict to be loaded."""


class MissingTensorError(PlanError, KeyError):
    """Keys of the state dict that the checkpoint does not have."""


class ShapeMismatchError(PlanError):
    """The stored global shape is not the wanted one."""


class DtypeMismatchError(PlanError):
    """The stored dtype is not the wanted one, and the dtype policy does not allow the cast."""


class InconsistentRanksError(PlanError):
    """The ranks of one load do not see the same checkpoint, or ask for different keys."""


class OptimizerStateError(ReshardError, ValueError):
    """Optimizer state of the checkpoint cannot be matched to the model or its parameter groups."""


class StorageError(ReshardError, OSError):
    """A file of the checkpoint is missing, too short, changed during the load, or not a file."""


class PeerFailedError(ReshardError, RuntimeError):
    """Another rank of the load has failed; that rank raises the cause."""


class MissingExtraError(ReshardError, ImportError):
    """An optional dependency is needed; the message names the extra that installs it."""
