"""Files: what comes back is what was written, or a clear error; whatever happens in between."""

from __future__ import annotations

import copy
import errno
import hashlib
import itertools
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import seqgp
from seqgp.checkpoint import CheckpointError, load_extra, storage
from seqgp.checkpoint.storage import DTYPES, read, write
from tests.checkpoint.hostile import forge, forge_content, header_of, record
from tests.processes import finish, peak_memory, start

pytestmark = pytest.mark.usefixtures("float64")


def small_model() -> seqgp.SequentialGP:
    X = torch.rand(6, 2)
    return seqgp.SequentialGP(X, X[:, :1], inducing_points=3, covar_module=RBFKernel())


def assert_same(a: Any, b: Any) -> None:
    """The same structure, and tensors that are the same bit by bit, in memory as well."""
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.numel():
            assert a.stride() == b.stride()
            flat = (t.as_strided((t.numel(),), (1,)).view(torch.uint8) for t in (a, b))
            assert torch.equal(*flat)
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    else:
        assert repr(a) == repr(b)  # NaN is not equal to itself, and -0.0 is to 0.0


# -------------------------------------------------------------------------------- there and back


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Dense tensors of any dtype, with their dimensions in any order, and any bits."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 100)))
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    if dtype == torch.bool:
        data %= 2
    return data.view(dtype).reshape(shape).permute(draw(st.permutations(range(len(shape)))))


STRUCTURES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.sampled_from(["$", "$tensor", "\ud800"])
    | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(["$tensor", "$$a"]), inner)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=30)
@given(STRUCTURES)
def test_there_and_back(content: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "file"
        write(content, path, 7)
        assert_same(content, read(path, 7))
        assert os.listdir(directory) == ["file"]


def test_tensors_are_complete_and_nothing_else_is_written(tmp_path: Path) -> None:
    path, large = tmp_path / "file", torch.rand(1000, 1000)
    views = [large[:3, :2], torch.rand(3, 1).expand(3, 5), large[::400], large[0, 0]]
    imaginary = torch.complex(torch.rand(3), torch.rand(3))
    views += [imaginary.conj(), imaginary.conj().imag, torch.nn.Parameter(torch.rand(2))]
    write(views, path, 2)
    for view, again in zip(views, read(path, 2), strict=True):
        assert type(again) is Tensor
        assert not again.requires_grad
        assert torch.equal(view, again)
        assert storage._is_dense(again.shape, again.stride())
    assert path.stat().st_size < 30_000


def test_the_format_is_the_documented_one(tmp_path: Path) -> None:
    """Files that are forged by an implementation of its own are read."""
    content = {"a": [1, 2.5, None, "ä"], "b": {"c": torch.rand(3, 2)}, "d": torch.tensor(True)}
    forge_content(tmp_path / "file", content)
    assert_same(content, read(tmp_path / "file", 2))


def test_what_cannot_be_written(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    for content, error, message in (
        ((1, 2), TypeError, "got a tuple"),
        ({1: 2}, TypeError, "strings as keys, got a dict"),
        (torch.zeros(2).to_sparse(), TypeError, "sparse"),
        (torch.zeros(2, device="meta"), TypeError, "meta"),
        (torch.zeros(2, dtype=torch.float8_e5m2), TypeError, "float8"),
        (deep, ValueError, "more than 128 levels"),
        ("x" * 2**26, ValueError, "make tensors of long lists"),
    ):
        with pytest.raises(error, match=message):
            write([content], tmp_path / "file", 2)
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------- damage


def test_every_bit_counts(tmp_path: Path) -> None:
    """All bits of the preamble, and those of every 13th byte in turn, which is enough of each."""
    path = tmp_path / "model.pt"
    seqgp.save(small_model(), path)
    whole = path.read_bytes()
    flips = [(at, 1 << bit) for at in range(64) for bit in range(8)]
    flips += [(at, 1 << at % 8) for at in range(64, len(whole), 13)]
    assert len(flips) > 2000
    with open(path, "r+b", buffering=0) as file:
        for at, bit in flips:
            os.pwrite(file.fileno(), bytes([whole[at] ^ bit]), at)
            with pytest.raises(CheckpointError, match="damaged"):
                seqgp.load(path)
            os.pwrite(file.fileno(), whole[at : at + 1], at)
    assert path.read_bytes() == whole
    seqgp.load(path)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_pieces_of_files(data: st.DataObject) -> None:
    """Bytes that are missing, added, moved, or those of another checkpoint of the same shapes."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.pt"
        one, other = ({"a": torch.rand(9), "b": torch.rand(9), "c": k} for k in (1, 2))
        files = []
        for content in (one, other):
            write(content, path, 2)
            files.append(path.read_bytes())
        length = len(files[0])
        a, b = sorted(data.draw(st.integers(0, length)) for _ in range(2))
        pieces = [files[0][:a], files[0][a:b], files[0][b:], files[1][:a], files[1][a:b]]
        spliced = b"".join(data.draw(st.lists(st.sampled_from(pieces), max_size=4)))
        path.write_bytes(spliced)
        if spliced in files:
            assert_same([one, other][files.index(spliced)], read(path, 2))
        else:
            with pytest.raises(CheckpointError, match="damaged"):
                read(path, 2)


def test_tensors_that_change_places(tmp_path: Path) -> None:
    """The header of one file with the data of another, and data in another order."""
    path = tmp_path / "file"
    write([torch.full((4,), 1.0), torch.full((4,), 2.0)], path, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-64] + whole[-32:] + whole[-64:-32])
    with pytest.raises(CheckpointError, match="damaged: a tensor has changed"):
        read(path, 2)


def test_truncated_files(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    seqgp.save(small_model(), path)
    whole = path.read_bytes()
    for length in (*range(130), *range(130, len(whole), 99), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            seqgp.load(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="damaged: expected"):
        seqgp.load(path)


# -------------------------------------------------------------------------------- other files


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("raw").write_bytes(pickle.dumps(Bomb()))
    torch.save(Bomb(), "torch")
    torch.save({"format": "seqgp checkpoint", "version": 1, "bomb": Bomb()}, "content")
    torch.save(Bomb(), "legacy", _use_new_zipfile_serialization=False)
    torch.save(small_model(), "model")
    torch.save(small_model().state_dict(), "state")
    forge(Path("inside"), pickle.dumps(Bomb()))
    names = os.listdir()
    for name in names:
        for function in (seqgp.load, load_extra):
            with pytest.raises(CheckpointError, match=f"^{name} is not a .*checkpoint"):
                function(name)
    with pytest.raises(CheckpointError, match="a pickle can execute anything; a state_dict is for"):
        seqgp.load("state")
    assert sorted(os.listdir()) == sorted(names)


def test_the_first_version_is_named(tmp_path: Path) -> None:
    """It was a dictionary in an archive of torch.save."""
    old = {"format": "seqgp checkpoint", "version": 1, "written_by": "0.0.7.dev3", "class": "x"}
    with open(tmp_path / "model.pt", "wb") as file:
        torch.save({**old, "tensor": torch.rand(3)}, file)
    with pytest.raises(CheckpointError, match=r"written by seqgp 0\.0\.7\.dev3, in version 1"):
        seqgp.load(tmp_path / "model.pt")
    forge(tmp_path / "later", header_of({}, [], version=99, written_by="9.1"))
    with pytest.raises(CheckpointError, match=r"written by seqgp 9\.1, in version 99 .* version 2"):
        seqgp.load(tmp_path / "later")


@pytest.mark.parametrize("text", [b"", b"hello", b"a,b\n1,2\n", bytes(range(256)), b"PK\x03\x04"])
def test_something_else(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(text)
    with pytest.raises(CheckpointError, match="not a checkpoint of seqgp"):
        seqgp.load(tmp_path / "file")


def test_places_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nothing", 2)
    with pytest.raises(IsADirectoryError):
        read(tmp_path, 2)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read("/dev/zero", 2)
    with pytest.raises(FileNotFoundError, match="does not exist; create it"):
        write([], tmp_path / "nowhere" / "file", 2)
    with pytest.raises(IsADirectoryError, match="is a directory"):
        write([], tmp_path, 2)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="a device, pipe or socket"):
        write([], tmp_path / "pipe", 2)


# -------------------------------------------------------------------------------- hostile files

TENSOR, DATA = record(torch.rand(2, 3, dtype=torch.float64))
ONE = {"$tensor": 0}
#: Headers, with correct digests, for the data of a 2 x 3 tensor.
HOSTILE: dict[str, Any] = {
    "not JSON": b"{",
    "not ASCII": '{"version": "ä"}'.encode(),
    "not UTF-8": b"\xff\xfe",
    "no object": [1],
    "an empty object": {},
    "deep lists": b"[" * 10**6,
    "deep objects": b'{"a":' * 10**6,
    "deep content": b'{"version":2,"written_by":"","byteorder":"little","tensors":[],"content":'
    + b"[" * 900
    + b"]" * 900
    + b"}",
    "many digits": b'{"version": 1' + b"0" * 5000 + b"}",
    "another byte order": header_of(ONE, [TENSOR], byteorder="middle"),
    "version of another type": header_of(ONE, [TENSOR], version=True),
    "writer of another type": header_of(ONE, [TENSOR], written_by=[]),
    "a tensor that is not there": header_of([ONE, {"$tensor": 1}], [TENSOR]),
    "a tensor before the first": header_of({"$tensor": -1}, [TENSOR]),
    "a tensor with a name": header_of({"$tensor": "0"}, [TENSOR]),
    "a tensor called true": header_of({"$tensor": False}, [TENSOR]),
    "a tensor twice": header_of([ONE, ONE], [TENSOR]),
    "a tensor and more": header_of({**ONE, "a": 1}, [TENSOR]),
    "a tensor that is not used": header_of([], [TENSOR]),
    "tensors that are no list": header_of(ONE, TENSOR),
    "a tensor of nothing": header_of(ONE, [None]),
    "more elements than bytes": header_of(ONE, [{**TENSOR, "shape": [2**30]}]),
    "many small tensors": header_of(ONE, [TENSOR] * 1000),
    **{
        f"{key} of {value!r:.30}": header_of(ONE, [{**TENSOR, key: value}])
        for key, value in [
            *(("dtype", value) for value in (None, [], "float128", "save", "float32", "Tensor")),
            *(("shape", value) for value in (None, 6, "23", {}, [2, 4], [3, -2], [-2, -3])),
            *(("shape", value) for value in ([2.0, 3.0], ["2", "3"], [True, 6], [[2, 3]])),
            *(("shape", value) for value in ([2**62, 0, 2**62], [2**31, 2**31, 2**31], [2**64])),
            *(("shape", value) for value in ([6, *[1] * 64], [0], [10**12], [2**63, 2**63, 6])),
            *(("strides", value) for value in ([3], [], [3, 1, 1], [-3, 1], [0, 0], [0, 1])),
            *(
                ("strides", value)
                for value in ([1, 1], [3, 2], [6, 1], [2, 1], [3.0, 1], [2**70, 1])
            ),
            *(("sha256", value) for value in (None, 1, "", "0" * 64)),
        ]
    },
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_headers(name: str, tmp_path: Path) -> None:
    forge(tmp_path / "file", HOSTILE[name], DATA)
    with pytest.raises(CheckpointError):
        read(tmp_path / "file", 2)
    with pytest.raises(CheckpointError):
        seqgp.load(tmp_path / "file")


def test_tensors_that_are_not_quite_hostile(tmp_path: Path) -> None:
    """Of the same tensor, what else there may be: other orders, and strides of no consequence."""
    for shape, strides in (([2, 3], [1, 2]), ([6], [1]), ([1, 6, 1], [99, 1, 0]), ([3, 2], None)):
        header = header_of(ONE, [{**TENSOR, "shape": shape, "strides": strides}])
        forge(tmp_path / "file", header, DATA)
        again = read(tmp_path / "file", 2)
        assert list(again.shape) == shape
        assert again.untyped_storage().nbytes() == 48
    entry, data = record(torch.tensor([0, 1, 2], dtype=torch.uint8))
    forge(tmp_path / "file", header_of(ONE, [{**entry, "dtype": "bool"}]), data)
    with pytest.raises(CheckpointError, match="neither true nor false"):
        read(tmp_path / "file", 2)


def test_small_files_take_little_memory(tmp_path: Path) -> None:
    """Bombs: in archives, in headers, and in the sizes of files with holes."""
    for name, header in HOSTILE.items():
        forge(tmp_path / hashlib.sha256(name.encode()).hexdigest(), header, DATA)
    archive = tmp_path / "bomb.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("archive/data.pkl", bytes(100 * 2**20))
    assert archive.stat().st_size < 2**20
    whole = tmp_path / "holes"
    write([torch.rand(3)], whole, 2)
    os.truncate(whole, 2**40)
    long_header = tmp_path / "long header"
    with open(whole, "rb") as file, open(long_header, "wb") as longer:
        longer.write(file.read(24) + (2**39).to_bytes(8, "little") + bytes(32))
    os.truncate(long_header, 2**40)

    def load_all() -> None:
        for path in tmp_path.iterdir():
            with pytest.raises(CheckpointError):
                seqgp.load(path)

    assert peak_memory(load_all) < 50


# -------------------------------------------------------------------------------- writing


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def temporary(path: Path, pid: int, host: str | None = None, token: str = "0" * 8) -> Path:
    """Where a process writes what is to become a file."""
    target, machine = (
        hashlib.sha256(name.encode()).hexdigest()[:12]
        for name in (path.name, host or socket.gethostname())
    )
    return path.with_name(f".seqgp-{target}-{machine}-{pid}-{token}.tmp")


@pytest.fixture
def nobody() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def test_modes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    mask = os.umask(0o027)
    try:
        write([], path, 2)
        assert mode_of(path) == 0o640
        for mode in (0o600, 0o644, 0o666, 0o440):
            path.chmod(mode)
            write([mode], path, 2)
            assert read(path, 2) == [mode]
            assert mode_of(path) == mode
    finally:
        os.umask(mask)


def test_owners(tmp_path: Path) -> None:
    owner = (12345, 23456) if os.getuid() == 0 else (os.getuid(), os.getgid())
    write([], tmp_path / "file", 2)
    os.chown(tmp_path / "file", *owner)
    write([1], tmp_path / "file", 2)
    found = (tmp_path / "file").stat()
    assert (found.st_uid, found.st_gid) == owner


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127 + "x"])
def test_long_names(name: str, tmp_path: Path) -> None:
    assert len(name.encode()) == 255
    write([1], tmp_path / name, 2)
    write([2], tmp_path / name, 2)
    assert read(tmp_path / name, 2) == [2]
    assert os.listdir(tmp_path) == [name]
    with pytest.raises(OSError, match="too long"):
        write([1], tmp_path / f"{name}y", 2)
    assert os.listdir(tmp_path) == [name]


def test_abandoned_files_are_removed(tmp_path: Path, nobody: int) -> None:
    path, other = tmp_path / "model.pt", tmp_path / "other.pt"
    yesterday = time.time() - 25 * 60 * 60
    abandoned = [temporary(path, nobody), temporary(path, os.getpid(), "elsewhere")]
    kept = {
        "of a process that lives": temporary(path, os.getppid()),
        "of this process, another thread": temporary(path, os.getpid()),
        "of another host": temporary(path, nobody, "elsewhere"),
        "for another file": temporary(other, nobody),
        "nobody knows": tmp_path / f"{temporary(path, nobody).name}.old",
        "of somebody else": tmp_path / f".model.pt.{nobody}.tmp",
    }
    assert len({*abandoned, *kept.values()}) == 8
    for file in (*abandoned, *kept.values()):
        file.touch()
    os.utime(abandoned[1], (yesterday, yesterday))
    directory = temporary(path, nobody, token="2" * 8)
    directory.mkdir()
    locked = temporary(path, nobody, token="1" * 8)
    with storage._create(locked, None):  # by a process that cannot be seen from here
        write([1], path, 2)
        assert locked.exists()
    write([2], path, 2)
    assert {*tmp_path.iterdir()} == {path, directory, *kept.values()}
    assert read(path, 2) == [2]


def test_killed_while_writing(tmp_path: Path) -> None:
    """There is a complete file at all times, and the next save clears up."""
    path = tmp_path / "model.pt"
    write({"number": 0, "tensor": torch.zeros(500_000)}, path, 2)

    def write_forever() -> None:
        for number in itertools.count(1):
            write({"number": number, "tensor": torch.full((500_000,), float(number))}, path, 2)

    left_behind = 0
    for attempt in range(50):
        pid = start(write_forever)
        time.sleep(0.03 * 1.1**attempt)  # on a busy machine, it takes long to begin
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        left_behind += len(os.listdir(tmp_path)) - 1
        content = read(path, 2)
        assert (content["tensor"] == content["number"]).all()
        if left_behind and attempt >= 5:
            break
    assert left_behind
    write([], path, 2)
    assert os.listdir(tmp_path) == ["model.pt"]


def test_many_writers_and_readers(tmp_path: Path) -> None:
    """Two processes and two threads write one file, while others read it."""
    path = tmp_path / "model.pt"
    done = multiprocessing.get_context("fork").Event()

    def content_of(number: int) -> dict[str, Any]:
        return {"number": number, "tensor": torch.full((1000 + number,), float(number))}

    def write_some(first: int) -> None:
        for number in itertools.count(first, 4):
            write(content_of(number), path, 2)
            if done.is_set():
                return

    seen: list[int] = []
    failures: list[BaseException] = []

    def guarded(function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            failures.append(error)
            done.set()

    def read_some() -> None:
        """Until enough has been read, of several writers."""
        end = time.monotonic() + 60
        while not done.is_set() and time.monotonic() < end:
            content = read(path, 2)
            assert_same(content, content_of(content["number"]))
            seen.append(content["number"])
            if len(seen) >= 200 and len({number % 4 for number in seen}) > 1:
                break
        done.set()

    write(content_of(0), path, 2)
    processes = [start(lambda first=first: write_some(first)) for first in (0, 1)]
    threads = [threading.Thread(target=guarded, args=(write_some, first)) for first in (2, 3)]
    threads += [threading.Thread(target=guarded, args=(read_some,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    for pid in processes:
        finish(pid)
    assert failures == []
    assert len(seen) >= 200
    assert len({number % 4 for number in seen}) > 1
    assert os.listdir(tmp_path) == ["model.pt"]


def test_no_space(tmp_path: Path) -> None:
    """A process that must not write large files is like a disk without space."""
    path = tmp_path / "model.pt"

    def fill_up() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        for before in (None, [1]):
            if before is not None:
                write(before, path, 2)
            with pytest.raises(OSError, match="the checkpoint was not written") as caught:
                write(torch.rand(100_000), path, 2)
            assert caught.value.errno == errno.EFBIG
            assert caught.value.filename == str(path)
            assert ("before is intact" in str(caught.value)) == (before is not None)
            assert os.listdir(tmp_path) == ([] if before is None else ["model.pt"])

    finish(start(fill_up))
    assert read(path, 2) == [1]


def test_directories_that_cannot_be_written() -> None:
    with tempfile.TemporaryDirectory() as name:  # those of pytest are private to root
        directory = Path(name)
        write([1], directory / "model.pt", 2)
        (directory / "model.pt").chmod(0o666)
        directory.chmod(0o555)

        def refused() -> None:
            if os.getuid() == 0:
                os.setuid(65534)
            for file in ("model.pt", "another.pt"):
                with pytest.raises(PermissionError, match="denied: the checkpoint was not written"):
                    write([2], directory / file, 2)
            assert read(directory / "model.pt", 2) == [1]

        finish(start(refused))
        directory.chmod(0o333)  # can be written, not listed

        def accepted() -> None:
            if os.getuid() == 0:
                os.setuid(65534)
            write([3], directory / "another.pt", 2)

        finish(start(accepted))
        assert read(directory / "another.pt", 2) == [3]
        directory.chmod(0o755)


def test_errors_can_be_pickled_and_are_value_errors() -> None:
    error = pickle.loads(pickle.dumps(CheckpointError("message")))
    assert isinstance(error, CheckpointError | ValueError)
    assert str(error) == str(copy.copy(error)) == "message"
