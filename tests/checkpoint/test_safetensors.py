"""Our safetensors reader against the library's own writer and reader, against raw bytes, and against damaged files."""

import json
import math
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from dspark_jax.checkpoint.safetensors import DTYPES, SafetensorsFile
from dspark_jax.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden"
GOLDEN_FILES = sorted(GOLDEN.glob("*/*.safetensors"))
READ_BY_THE_LIBRARY = ("BOOL", "U8", "I8", "I32", "I64", "F16", "BF16", "F32", "F64")


def raw_header(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header without metadata and the data section, by the shortest reading of the format."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header.pop("__metadata__", None)
    return header, content[end:]


def write_raw(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file with any header: a string is taken as it is, anything else becomes JSON."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2, 3), data_offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


def refusal(path: Path) -> str:
    """The message with which a file is refused; it always names the file and ends as a sentence."""
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and message.endswith(".")
    return message


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_golden_tensor_has_the_headers_dtype_shape_and_bytes(path: Path) -> None:
    header, data = raw_header(path)
    file = SafetensorsFile(path)
    assert list(file.tensors) == list(header)
    for name, described in header.items():
        info, tensor = file.tensors[name], file.read(name)
        start, stop = described["data_offsets"]
        assert (info.dtype, info.shape) == (described["dtype"], tuple(described["shape"]))
        assert (tensor.dtype, tensor.shape) == (DTYPES[described["dtype"]], tuple(described["shape"]))
        assert tensor.tobytes() == data[start:stop] == path.read_bytes()[info.start : info.stop]


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_golden_tensors_equal_the_librarys_reading(path: Path) -> None:
    file = SafetensorsFile(path)
    with safe_open(path, "np") as library:
        assert set(library.keys()) == set(file.tensors)
        compared = [name for name, info in file.tensors.items() if info.dtype in READ_BY_THE_LIBRARY]
        assert compared
        for name in compared:
            np.testing.assert_array_equal(file.read(name), library.get_tensor(name), strict=True)


@pytest.mark.parametrize("stored", DTYPES)
def test_every_dtype_survives_from_the_library_to_us(stored: str, tmp_path: Path) -> None:
    dtype = DTYPES[stored]
    data = np.arange(48, dtype=np.uint8) * 5 if stored != "BOOL" else np.arange(48, dtype=np.uint8) % 2
    tensors = {
        "odd": np.zeros(1, np.int8),
        "full": data.view(dtype).reshape(2, 3, -1),
        "scalar": data[-dtype.itemsize :].view(dtype).reshape(()),
        "empty": np.empty((0, 3), dtype),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert {name: info.dtype for name, info in file.tensors.items()} == dict.fromkeys(tensors, stored) | {"odd": "I8"}
    for name, tensor in tensors.items():
        read = file.read(name)
        assert (read.dtype, read.shape, read.tobytes()) == (tensor.dtype, tensor.shape, tensor.tobytes())


def test_values_of_the_narrow_floats_are_the_formats_own(tmp_path: Path) -> None:
    header = {
        "e4m3": entry("F8_E4M3", [4], [0, 4]),
        "e8m0": entry("F8_E8M0", [3], [4, 7]),
        "e5m2": entry("F8_E5M2", [2], [7, 9]),
    }
    path = write_raw(tmp_path / "x", header, bytes([0x38, 0x7E, 0xFE, 0x01, 127, 0, 254, 0x3C, 0x7C]))
    file = SafetensorsFile(path)
    assert file.read("e4m3").astype(np.float64).tolist() == [1, 448, -448, 2.0**-9]
    assert file.read("e8m0").astype(np.float64).tolist() == [1, 2.0**-127, 2.0**127]
    assert file.read("e5m2").astype(np.float64).tolist() == [1, math.inf]


def test_unaligned_tensors_read_right(tmp_path: Path) -> None:
    values = np.array([1.5, -2.25], np.float32)
    header = {"byte": entry("I8", [1], [0, 1]), "x": entry("F32", [2], [1, 9])}
    for pad in range(4):
        path = write_raw(tmp_path / f"x{pad}", json.dumps(header) + " " * pad, b"\x07" + values.tobytes())
        np.testing.assert_array_equal(SafetensorsFile(path).read("x"), values, strict=True)


def test_views_are_read_only_and_share_the_mapping(tmp_path: Path) -> None:
    save_file({"x": np.arange(4, dtype=np.float32)}, tmp_path / "x")
    file = SafetensorsFile(str(tmp_path / "x"))
    view = file.read("x")
    assert not view.flags.owndata and np.shares_memory(view, file.read("x"))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_opening_and_reading_a_file_larger_than_memory_touches_only_its_header(tmp_path: Path) -> None:
    size = 2**40
    path = write_raw(tmp_path / "x", {"x": entry("I8", [2**20, 2**20], [0, size])})
    os.truncate(path, path.stat().st_size + size)  # sparse: takes no room on the disk
    tensor = SafetensorsFile(path).read("x")
    assert tensor.shape == (2**20, 2**20) and tensor[-1, -1] == 0


def test_a_file_of_no_tensors_opens(tmp_path: Path) -> None:
    assert SafetensorsFile(write_raw(tmp_path / "x", {"__metadata__": {"format": "pt"}})).tensors == {}


def test_an_empty_tensor_may_lie_anywhere_between_others(tmp_path: Path) -> None:
    def empty(position: int) -> dict[str, Any]:
        return entry("I64", [0, 3], [position, position])

    header = {"a": entry(), "front": empty(0), "b": entry("I8", [8], [24, 32]), "middle": empty(24), "end": empty(32)}
    file = SafetensorsFile(write_raw(tmp_path / "x", header, bytes(32)))
    assert all(file.read(name).shape == (0, 3) for name in ("front", "middle", "end"))


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    file = SafetensorsFile(write_raw(tmp_path / "x", {"here": entry()}, bytes(24)))
    with pytest.raises(CheckpointError, match=r"x: holds no tensor 'gone' \(it holds 1 others\)"):
        file.read("gone")


@pytest.mark.parametrize("size", [0, 20])
def test_a_file_cut_after_it_was_opened_is_refused(tmp_path: Path, size: int) -> None:
    path = write_raw(tmp_path / "x", {"here": entry()}, bytes(24))
    file = SafetensorsFile(path)
    os.truncate(path, size)
    with pytest.raises(CheckpointError, match="x: held .* bytes when it was opened and holds 20" if size else "mapped"):
        file.read("here")


def test_paths_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "gone.safetensors")
    assert "directory" in refusal(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_without_room_for_the_length_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "x").write_bytes(bytes(size))
    assert f"holds {size} bytes, expected at least the 8" in refusal(tmp_path / "x")


def test_a_header_beyond_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes((100).to_bytes(8, "little") + b"{}")
    assert "header of 100 bytes, expected at most 2 in a file of 10 bytes" in refusal(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    assert "Git LFS pointer?" in refusal(path)


def test_a_damaged_length_does_not_make_us_read_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes((2**33).to_bytes(8, "little"))
    os.truncate(path, 2**34)
    assert f"header of {2**33} bytes, expected at most 100000000" in refusal(path)


HEADER_FAULTS = {
    "not JSON": ('{"x": ', "the header is not valid JSON"),
    "zeros": ("\0\0\0\0", "the header is not valid JSON"),
    "not an object": ("[1, 2]", "the header: expected a JSON object, found [1, 2]"),
    "too deep": ("[" * 100_000, "the header is not valid JSON"),
    "long integer": ('{"x": ' + "1" * 5000 + "}", "the header is not valid JSON"),
    "duplicate": ('{"x": 1, "y": 2, "x": 1}', "the header is not valid JSON (name 'x' appears twice)"),
    "duplicate field": ('{"x": {"shape": [2], "shape": [3]}}', "name 'shape' appears twice"),
}


@pytest.mark.parametrize(("header", "expected"), HEADER_FAULTS.values(), ids=HEADER_FAULTS)
def test_a_damaged_header_is_refused(tmp_path: Path, header: str, expected: str) -> None:
    assert expected in refusal(write_raw(tmp_path / "x", header, bytes(24)))


def test_a_header_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes((4).to_bytes(8, "little") + b'{"\xff"')
    assert "can't decode byte 0xff" in refusal(tmp_path / "x")


ENTRY_FAULTS: dict[str, tuple[Any, str]] = {
    "no object": ([1], "expected an object of dtype, shape and data_offsets, found [1]"),
    "no dtype": ({"shape": [2, 3], "data_offsets": [0, 24]}, "dtype is None, expected one of BOOL, U8, I8"),
    "unknown dtype": (entry(dtype="F4"), "dtype is 'F4', expected one of BOOL, U8, I8"),
    "dtype a list": (entry(dtype=["F32"]), "dtype is ['F32']"),
    "no shape": ({"dtype": "F32", "data_offsets": [0, 24]}, "shape is None"),
    "shape no list": (entry(shape=6), "shape is 6, expected a list of sizes"),
    "shape of floats": (entry(shape=[2.0, 3]), "shape is [2.0, 3]"),
    "shape of truths": (entry(shape=[True, 6]), "shape is [True, 6]"),
    "negative shape": (entry(shape=[-2, -3]), "shape is [-2, -3]"),
    "rank too high": (entry(shape=[1] * 64 + [6]), "shape is [1, 1, 1, 1, 1, 1, ...]"),
    "empty but too large": (entry(shape=[0, 2**62], data_offsets=[0, 0]), "shape is [0, 4611686018427387904]"),
    "no offsets": ({"dtype": "F32", "shape": [2, 3]}, "data_offsets is None, expected two byte positions"),
    "three offsets": (entry(data_offsets=[0, 12, 24]), "data_offsets is [0, 12, 24]"),
    "negative offset": (entry(data_offsets=[-24, 0]), "data_offsets is [-24, 0]"),
    "too few bytes": (
        entry(data_offsets=[0, 20]),
        "F32 of shape [2, 3] takes 24 bytes, but data_offsets [0, 20] enclose 20",
    ),
    "too many bytes": (entry(shape=[2, 2]), "F32 of shape [2, 2] takes 16 bytes, but data_offsets [0, 24] enclose 24"),
    "backwards": (entry(data_offsets=[24, 0]), "takes 24 bytes, but data_offsets [24, 0] enclose -24"),
    "wrong shape": (entry(shape=[2, 4]), "F32 of shape [2, 4] takes 32 bytes, but data_offsets [0, 24] enclose 24"),
}


@pytest.mark.parametrize(("described", "expected"), ENTRY_FAULTS.values(), ids=ENTRY_FAULTS)
def test_a_damaged_entry_is_refused_by_name(tmp_path: Path, described: Any, expected: str) -> None:
    message = refusal(write_raw(tmp_path / "x", {"layers.0.w": described}, bytes(24)))
    assert "tensor 'layers.0.w'" in message and expected in message


def test_overlap_gap_and_offsets_out_of_range_are_refused(tmp_path: Path) -> None:
    def second(start: int) -> str:
        header = {"a": entry(), "b": entry("I8", [8], [start, start + 8])}
        return refusal(write_raw(tmp_path / "x", header, bytes(32)))

    assert "tensor 'b' overlaps with tensor 'a': it starts at byte 20 of the data, expected 24" in second(20)
    assert "tensor 'b' leaves a gap after tensor 'a': it starts at byte 25 of the data, expected 24" in second(25)
    assert "byte 1000000 of the data, expected 24" in second(1_000_000)
    late = write_raw(tmp_path / "x", {"a": entry(data_offsets=[4, 28])}, bytes(28))
    assert "tensor 'a' leaves a gap after the header: it starts at byte 4 of the data, expected 0" in refusal(late)


def test_a_cut_or_overlong_file_is_refused_with_both_sizes(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x", {"a": entry(), "b": entry("I8", [8], [24, 32])}, bytes(32))
    size = path.stat().st_size
    for found in (size - 32, size - 9, size - 1, size + 1):
        os.truncate(path, found)
        fault = "is cut short" if found < size else "holds more than its header describes"
        assert f"{fault}: expected {size} bytes (where tensor 'b' ends), found {found}" in refusal(path)


BASE: dict[str, np.ndarray] = {
    "a.weight": np.arange(6, dtype=np.int8).reshape(2, 3),
    "a.scale": np.ones((), np.float32),
    "b": np.ones((4, 25), ml_dtypes.bfloat16),
    "c.e8m0": np.ones(3, ml_dtypes.float8_e8m0fnu),
    "empty": np.empty((2, 0), np.float64),
}
JSON_BYTES = st.sampled_from(list(b'0123456789-eE.,:[]{}" '))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    """A good file's path for damaged copies, its bytes, and where its header ends."""
    path = tmp_path_factory.mktemp("corrupt") / "x"
    save_file(BASE, path)
    content = path.read_bytes()
    return path, content, 8 + int.from_bytes(content[:8], "little")


def opened(path: Path, content: bytes, changes: list[tuple[int, int]]) -> SafetensorsFile | None:
    damaged = bytearray(content)
    for position, byte in changes:
        damaged[position] = byte
    path.write_bytes(damaged)
    try:
        return SafetensorsFile(path)
    except CheckpointError as error:
        assert str(path) in str(error)
        return None


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(where=st.floats(0, 1, exclude_max=True), byte=JSON_BYTES | st.integers(0, 255))
@example(where=0.0, byte=7)
def test_one_damaged_header_byte_is_refused_or_leaves_every_shape_as_it_was(
    base: tuple[Path, bytes, int], where: float, byte: int
) -> None:
    path, content, end = base
    file = opened(path, content, [(int(where * end), byte)])
    if file is not None:
        # An empty tensor may change its shape unnoticed: no byte of data contradicts it.
        kept = {name for name in BASE.keys() & file.tensors.keys() if BASE[name].size}
        assert {name: file.read(name).shape for name in kept} == {name: BASE[name].shape for name in kept}


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), JSON_BYTES), min_size=2, max_size=4))
def test_damaged_header_bytes_are_refused_or_still_tile_the_data_exactly(
    base: tuple[Path, bytes, int], changes: list[tuple[float, int]]
) -> None:
    path, content, end = base
    file = opened(path, content, [(int(where * end), byte) for where, byte in changes])
    if file is not None:
        arrays = [file.read(name) for name in file.tensors]
        assert [(array.shape, array.dtype) for array in arrays] == [
            (info.shape, DTYPES[info.dtype]) for info in file.tensors.values()
        ]
        assert sum(array.nbytes for array in arrays) == len(content) - end
