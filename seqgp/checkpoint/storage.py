r"""Files that hold a nested structure of tensors, numbers and strings.

A file is read completely or rejected with a `CheckpointError`. It is not a pickle, and nothing in
it is executed. It consists of three parts::

    preamble  64 bytes: a magic string, the length of the header and its SHA-256
    header    JSON: versions, the structure, and for each tensor its dtype, shape and SHA-256
    data      the bytes of the tensors, one after another

The digest of the header covers the digests of the tensors, and the sizes have to add up to the size
of the file. So any flipped bit, missing byte or spliced part is detected. All sizes are checked
before anything is allocated: reading takes as much memory as the file has bytes, plus the JSON.

A file is written under a temporary name, flushed to disk and then renamed, so that there is a
complete file under its name at all times.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import re
import secrets
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from seqgp._version import __version__

try:
    import fcntl
except ImportError:  # Windows does not have it
    fcntl = None  # type: ignore[assignment]

_MAGIC = b"seqgp checkpoint file\r\n\x1a"  # as in PNG: transfer as text would corrupt it
_PREAMBLE = struct.Struct("<24sQ32s")
_TENSOR = "$tensor"
#: Maximum number of bytes of a header. As Python objects they may take thirty times as much memory.
_MAX_HEADER = 2**26
#: Maximum depth of lists and dictionaries. Deeper ones would exhaust Python's stack.
_MAX_DEPTH = 128
#: Maximum number of dimensions of a tensor; most of torch does not support more.
_MAX_DIMS = 64
#: Limit of the numbers of elements, and of strides, that torch can represent.
_MAX_COUNT = 2**62
#: Seconds after which a temporary file counts as abandoned even if its process cannot be checked.
_ABANDONED_AFTER = 24 * 60 * 60

#: The dtypes of tensors in files.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(ValueError):
    """A file is not a valid checkpoint, or not one that can be loaded in this way.

    Args:
        message: Which file, and what is wrong with it.

    Example:
        >>> import tempfile, seqgp
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = Path(directory) / "model.seqgp"
        ...     _ = path.write_text("something else")
        ...     try:
        ...         seqgp.load(path)
        ...     except seqgp.checkpoint.CheckpointError:
        ...         print("Starting anew.")
        Starting anew.
    """


# -------------------------------------------------------------------------------- write


def write(content: Any, path: str | os.PathLike[str], version: int) -> None:
    """Write a structure to a file, which is replaced as a whole or not at all.

    An existing file keeps its mode, and a new one gets the mode of the umask. Symbolic links are
    followed.

    Args:
        content: None, booleans, numbers, strings and tensors, and lists and dictionaries of these.
            The keys of dictionaries are strings.
        path: The file. Its directory has to exist.
        version: The version of the content, for `read`.

    Raises:
        TypeError: If the structure contains anything else.
        ValueError: If it is nested too deeply, or the path exists and is not a regular file.
        OSError: If the file cannot be written. An old file is then intact.
    """
    tensors: list[Tensor] = []
    encoded = _encode(content, tensors)
    records, chunks = [], []
    for tensor in tensors:
        record, data = _record_of(tensor)
        records.append(record)
        chunks.append(data)
    header = _to_json(
        {
            "version": version,
            "written_by": __version__,
            "byteorder": sys.byteorder,
            "tensors": records,
            "content": encoded,
        }
    )
    if len(header) > _MAX_HEADER:
        raise ValueError(
            f"Numbers and strings take {len(header)} bytes, expected at most {_MAX_HEADER}: make "
            "tensors of long lists."
        )
    preamble = _PREAMBLE.pack(_MAGIC, len(header), hashlib.sha256(header).digest())
    _replace(Path(os.path.realpath(os.fsdecode(path))), [preamble, header, *chunks])


def _to_json(header: dict[str, Any]) -> bytes:
    # Python's JSON has NaN and infinity, and round-trips every float.
    return json.dumps(header, separators=(",", ":")).encode("ascii")


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor belongs to no other subclass, at least once it is on the host.

    Args:
        tensor: The tensor.
    """
    return type(tensor) in (Tensor, torch.nn.Parameter) or type(tensor.detach().cpu()) is Tensor


def _encode(value: Any, tensors: list[Tensor], depth: int = 0) -> Any:
    """Encode a structure for JSON; tensors are appended to a list, and replaced by their index."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"Lists and dictionaries are nested more than {_MAX_DEPTH} levels deep.")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor) and is_plain(value):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    if type(value) is list:
        return [_encode(item, tensors, depth + 1) for item in value]
    if type(value) is dict and all(type(key) is str for key in value):
        # Keys that begin with a dollar get another one, so as not to be confused with tensors.
        return {
            f"${key}" if key.startswith("$") else key: _encode(item, tensors, depth + 1)
            for key, item in value.items()
        }
    raise TypeError(
        "Expected tensors, numbers, strings, None, lists, and dictionaries with strings as keys, "
        f"got a {type(value).__name__}."
    )


def _record_of(tensor: Tensor) -> tuple[dict[str, Any], memoryview]:
    """Return the header's record of a tensor, and its bytes."""
    if tensor.dtype not in _NAMES or tensor.layout != torch.strided or tensor.is_meta:
        raise TypeError(
            f"A tensor of {tensor.dtype}, {tensor.layout} on {tensor.device} cannot be written."
        )
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if not _is_dense(tensor.shape, tensor.stride()):
        tensor = tensor.clone()  # the clone is dense
    data = _bytes_of(tensor)
    # BLAS rounds differently for transposed matrices: strides are part of a tensor.
    strides = None if tensor.numel() == 0 else list(tensor.stride())
    record = {
        "dtype": _NAMES[tensor.dtype],
        "shape": list(tensor.shape),
        "strides": None if strides == _contiguous_strides(tensor.shape) else strides,
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    return record, data


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a dense tensor on the CPU, in the order of addresses."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def _contiguous_strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements fill their memory without gaps or overlaps."""
    if 0 in shape:
        return True
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue  # the stride has no effect
        if stride != expected:
            return False
        expected *= size
    return True


# -------------------------------------------------------------------------------- files


def _replace(path: Path, chunks: Sequence[bytes | memoryview]) -> None:
    """Write a file under a temporary name, flush it to the disk and rename it."""
    old = _stat_of_target(path)
    try:
        _remove_abandoned(path)
        beside = path.with_name(f"{_prefix(path)}{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            with _create(beside, old) as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):  # only the first error matters
                beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        intact = "" if old is None else "; the file that was there before is intact"
        reason = error.strerror or str(error)
        raise OSError(
            error.errno, f"{reason}: the checkpoint was not written{intact}", os.fspath(path)
        ) from error
    _flush_directory(path.parent)


def _stat_of_target(path: Path) -> os.stat_result | None:
    """Return the status of the file to be replaced, or ``None``; raise if it is not a file."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path: the directory {path.parent} does not exist; create it.")
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(f"path: {path} is a directory; expected the name of a file.")
    if not stat.S_ISREG(found.st_mode):  # otherwise /dev/null would be replaced, too
        raise ValueError(f"path: {path} is a device, pipe or socket; expected a regular file.")
    return found


@contextlib.contextmanager
def _create(path: Path, old: os.stat_result | None) -> Iterator[BinaryIO]:
    """Create a file, locked while it is open, with the owner and the mode of an old one."""
    # A file that replaces a private one is private from the start.
    mode = 0o666 if old is None else 0o600
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # not all file systems have locks
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        if old is not None:
            if hasattr(os, "chown"):
                with contextlib.suppress(PermissionError):  # only root can give files away
                    os.chown(path, old.st_uid, old.st_gid)
            os.chmod(path, stat.S_IMODE(old.st_mode))
        yield file


def _flush_directory(directory: Path) -> None:
    """Flush a new name to disk, where directories can be opened and flushed."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # the directory is writable but not readable
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _prefix(path: Path) -> str:
    """Return the prefix of temporary names for a path on this host.

    It is short for any length of the path's own name, and differs between paths and hosts.
    """
    target, host = (
        hashlib.sha256(os.fsencode(name)).hexdigest()[:12]
        for name in (path.name, socket.gethostname())
    )
    return f".seqgp-{target}-{host}-"


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files of killed saves to the same path.

    A file is abandoned if its process, on this host, has ended, or if it is a day old; and if no
    process holds its lock.
    """
    here = _prefix(path)
    anywhere = here.rpartition("-")[0].rpartition("-")[0]
    pattern = re.compile(re.escape(anywhere) + r"-[0-9a-f]{12}-([0-9]{1,10})-[0-9a-f]{8}\.tmp")
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            match = pattern.fullmatch(entry.name)
            if match is None or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):  # already removed, or not permitted
                age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                ended = entry.name.startswith(here) and _has_ended(int(match[1]))
                if (ended or age > _ABANDONED_AFTER) and not _is_locked(entry.path):
                    os.unlink(entry.path)


def _has_ended(pid: int) -> bool:
    """Whether there is certainly no process with this id."""
    if os.name != "posix":
        return False  # on other systems, os.kill with signal 0 would kill the process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _is_locked(path: str) -> bool:
    """Whether a process, perhaps in another container, is still writing a file."""
    if fcntl is None:
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file system has no locks
        return False
    finally:
        os.close(descriptor)
    return False


# -------------------------------------------------------------------------------- read


class _Record(NamedTuple):
    """A tensor in a file, before it is allocated."""

    dtype: torch.dtype
    shape: list[int]
    strides: list[int]
    sha256: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read(path: str | os.PathLike[str], version: int) -> Any:
    """Read a structure that was written by `write`; tensors are on the CPU.

    Args:
        path: The file.
        version: The version of its content that can be read.

    Raises:
        CheckpointError: If the file is not complete and unchanged, or of another version.
        OSError: If it cannot be read.
    """
    with open(path, "rb") as file:
        try:
            return _read(file, version)
        except CheckpointError as error:
            raise CheckpointError(f"{os.fsdecode(path)} {error}") from error.__cause__
        except MemoryError as error:
            raise CheckpointError(f"{os.fsdecode(path)} does not fit into memory.") from error


def _read(file: io.BufferedReader, version: int) -> Any:
    """Read the structure; error messages continue a sentence that begins with the file's name."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError("is not a checkpoint of seqgp: it is not a regular file.")
    preamble = file.read(_PREAMBLE.size)
    if len(preamble) < _PREAMBLE.size or not preamble.startswith(_MAGIC):
        file.seek(0)
        raise CheckpointError(_what_else(file.read(4096)))
    _, length, digest = _PREAMBLE.unpack(preamble)
    if length > status.st_size - _PREAMBLE.size:
        raise CheckpointError("is damaged: it is shorter than it was written.")
    if length > _MAX_HEADER:
        raise CheckpointError(f"is not a valid checkpoint: its header has {length} bytes.")
    text = file.read(length)
    if hashlib.sha256(text).digest() != digest:
        raise CheckpointError("is damaged: its header has changed since it was written.")
    header = _parse_header(text)
    if header["version"] != version:
        raise CheckpointError(_of_another_version(header["written_by"], header["version"], version))
    if header["byteorder"] != sys.byteorder:
        raise CheckpointError("was written on a machine with another byte order.")
    records = [_parse_record(record) for record in header["tensors"]]
    size = _PREAMBLE.size + length + sum(record.num_bytes for record in records)
    if size != status.st_size:
        raise CheckpointError(
            f"is damaged: expected {size} bytes, according to its header, got {status.st_size}."
        )
    tensors: list[Tensor | None] = [_read_tensor(file, record) for record in records]
    content = _decode(header["content"], tensors)
    if any(tensor is not None for tensor in tensors):
        raise CheckpointError("is not a valid checkpoint: it has tensors that are not used.")
    return content


def _what_else(beginning: bytes) -> str:
    """Describe a file that is not a checkpoint of the present format."""
    # The first version was an archive of torch.save, which is recognised without unpickling.
    first = re.search(
        rb"seqgp checkpoint.{1,12}?version.{1,12}?written_by.{1,6}?X(.)\0\0\0", beginning, re.DOTALL
    )
    if beginning.startswith(b"PK\x03\x04") and first is not None:
        written_by = beginning[first.end() : first.end() + first[1][0]]
        return _of_another_version(written_by.decode("ascii", "replace"), 1, None)
    return (
        "is not a checkpoint of seqgp, or it is damaged: write one with seqgp.save. (Files of "
        "torch.save are not read, since a pickle can execute anything; a state_dict is for "
        "model.load_state_dict.)"
    )


def _of_another_version(written_by: str, version: int, readable: int | None) -> str:
    reads = "another version" if readable is None else f"version {readable}"
    return (
        f"was written by seqgp {written_by:.40}, in version {version} of the format; this is seqgp "
        f"{__version__}, which reads {reads}. Load it with the seqgp that wrote it."
    )


def _parse_header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError("is not a valid checkpoint: its header is not JSON.") from error
    types = {"version": int, "written_by": str, "byteorder": str, "tensors": list}
    if (
        type(header) is not dict
        or "content" not in header
        or any(type(header.get(key)) is not kind for key, kind in types.items())
    ):
        raise CheckpointError("is not a valid checkpoint: its header is not one of seqgp.")
    return header


def _parse_record(record: Any) -> _Record:
    """Return the header's record of a tensor, if it is valid."""
    if type(record) is not dict:
        record = {}
    dtype, shape, strides, sha256 = map(record.get, ("dtype", "shape", "strides", "sha256"))
    if (
        type(dtype) is str
        and dtype in DTYPES
        and type(sha256) is str
        and _are_counts(shape)
        and math.prod(size or 1 for size in shape) * DTYPES[dtype].itemsize <= _MAX_COUNT
    ):
        if strides is None:
            strides = _contiguous_strides(shape)
        if _are_counts(strides) and len(strides) == len(shape) and _is_dense(shape, strides):
            return _Record(DTYPES[dtype], shape, strides, sha256)
    raise CheckpointError("is not a valid checkpoint: it describes an impossible tensor.")


def _are_counts(values: Any) -> bool:
    return (
        type(values) is list
        and len(values) <= _MAX_DIMS
        and all(type(value) is int and 0 <= value <= _MAX_COUNT for value in values)
    )


def _read_tensor(file: io.BufferedReader, record: _Record) -> Tensor:
    try:
        tensor = torch.empty_strided(record.shape, record.strides, dtype=record.dtype, device="cpu")
    except RuntimeError as error:  # too large for memory: the file has all elements
        raise MemoryError from error
    data = _bytes_of(tensor)
    if file.readinto(data) != len(data) or hashlib.sha256(data).hexdigest() != record.sha256:
        raise CheckpointError("is damaged: a tensor has changed since it was written.")
    if record.dtype == torch.bool and (tensor.view(torch.uint8) > 1).any():
        raise CheckpointError("is not a valid checkpoint: a boolean is neither true nor false.")
    return tensor


def _decode(value: Any, tensors: list[Tensor | None], depth: int = 0) -> Any:
    """Decode a structure encoded by `_encode`; each tensor is used once."""
    if depth > _MAX_DEPTH:
        raise CheckpointError("is not a valid checkpoint: it is nested too deeply.")
    if type(value) is list:
        return [_decode(item, tensors, depth + 1) for item in value]
    if type(value) is not dict:
        return value
    if _TENSOR in value:
        index = value[_TENSOR]
        if type(index) is int and 0 <= index < len(tensors) and len(value) == 1:
            tensor, tensors[index] = tensors[index], None
            if tensor is not None:
                return tensor
        raise CheckpointError("is not a valid checkpoint: it refers to a tensor that is missing.")
    return {
        key[1:] if key.startswith("$$") else key: _decode(item, tensors, depth + 1)
        for key, item in value.items()
    }
