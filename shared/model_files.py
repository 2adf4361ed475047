"""Checks a checkpoint's files without loading a model: present, readable and complete."""

import json
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from omnirelay.errors import CheckpointError
from shared.checkpoints import WEIGHT_INDEX, require_readable, weight_files, weight_map

MODEL_PATTERNS: Final = ("*.safetensors", "*.pt")
"""Files that only a stage reads."""
MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors library."""
ELEMENT_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Element types that are converted to the dtype of the engine when they are loaded."""
_LFS_POINTER: Final = b"version https://git-lfs"
_ZIP: Final = b"PK\x03\x04"
_OLDER_FORMAT: Final = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of torch.save's format before ZIP archives."""
_BLOCK_BYTES: Final = 2**20


@dataclass(frozen=True)
class Weights:
    """What the weight files hold.

    Attributes:
        nbytes: All in all.
        elements: Number of the parameters that are floating-point numbers of a dtype to compute in, by the
            first part of their names.
        packed: Bytes of all others, which stay as they are: those of quantised weights.
    """

    nbytes: int
    elements: Mapping[str, int]
    packed: Mapping[str, int] = field(default_factory=dict)


def require_model_files(directory: Path, files: Sequence[str], check_files: Callable[[Path], None]) -> None:
    """Check that all files that a stage reads are present and complete, before minutes are spent on loading.

    Args:
        directory: The checkpoint's.
        files: Those that are needed besides weights and tokenizer.
        check_files: Checks what is in them; raises :class:`CheckpointError`.

    Raises:
        CheckpointError: Naming every missing file, or a damaged one.
    """
    missing = [name for name in files if not (directory / name).is_file()]
    missing += [path.name for path in weight_files(directory) if not path.is_file()]
    if missing:
        raise CheckpointError(f"the checkpoint in {directory} lacks {', '.join(missing)}")
    require_readable(directory, MODEL_PATTERNS)
    try:
        read_weights(directory)
        check_files(directory)
    except CheckpointError as error:
        raise CheckpointError(
            f"the checkpoint in {directory} is damaged: {error}; copy or download it again"
        ) from None


def read_weights(directory: Path) -> Weights:
    """Read the headers of all weight files.

    Raises:
        CheckpointError: A file is missing, truncated or not safetensors, or a tensor is not in the file that
            the index names.
    """
    elements: Counter[str] = Counter()
    packed: Counter[str] = Counter()
    nbytes = 0
    place: dict[str, str] = {}
    for path in weight_files(directory):
        for name, count, rest in _read_header(path):
            elements[name.partition(".")[0]] += count
            packed[name.partition(".")[0]] += rest
            place[name] = path.name
        nbytes += path.stat().st_size
    index = directory / WEIGHT_INDEX
    promised = weight_map(index) if index.is_file() else {}
    lost = [name for name, file in promised.items() if place.get(name) != file]
    if lost:
        raise CheckpointError(f"{promised[lost[0]]} lacks {lost[0]}, which {WEIGHT_INDEX} places there")
    return Weights(nbytes, elements, packed)


def check_torch_file(path: Path) -> None:
    """Check the archive of a file of ``torch.save`` and its checksums, without unpickling it.

    Raises:
        CheckpointError: It is damaged.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(_OLDER_FORMAT))
        if start == _OLDER_FORMAT:
            # No checksums: only loading shows whether it is complete.
            return
        if not start.startswith(_ZIP):
            raise CheckpointError(f"{path.name} is not a file of torch.save")
        with zipfile.ZipFile(path) as archive:
            _check_archive(archive, path)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        ValueError,
        LookupError,
        EOFError,
        RuntimeError,
    ) as error:
        raise CheckpointError(f"{path.name} is cut short or damaged: {error}") from error


def _check_archive(archive: zipfile.ZipFile, path: Path) -> None:
    entries = archive.infolist()
    if not any(each.filename.endswith("/data.pkl") for each in entries):
        raise CheckpointError(f"{path.name} is not a file of torch.save: its archive lacks data.pkl")
    # Uncompressed, so that a small file cannot expand to a large one.
    packed = [each.filename for each in entries if each.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise CheckpointError(f"{path.name} is not a file of torch.save: {packed[0]!r} in it is compressed")
    for entry in entries:
        with archive.open(entry) as content:
            # The checksum is compared at the end.
            while content.read(_BLOCK_BYTES):
                pass


def _read_header(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name of every tensor of a file, its elements if they are converted, and its bytes if not."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if _LFS_POINTER.startswith(start) and len(start) == 8:
                raise CheckpointError(
                    f"{path.name} is a Git LFS pointer: fetch the files with `git lfs pull`"
                )
            (length,) = struct.unpack("<Q", start)
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path.name} is not a safetensors file: its header has {length} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        size = path.stat().st_size
        if size < end:
            raise CheckpointError(f"{path.name} is cut short: it has {size:,} of {end:,} bytes")
        for name, tensor in header.items():
            first, last = tensor["data_offsets"]
            if tensor["dtype"] in ELEMENT_BYTES:
                yield name, (last - first) // ELEMENT_BYTES[tensor["dtype"]], 0
            else:
                yield name, 0, last - first
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.name} is not a safetensors file: {type(error).__name__}") from error
