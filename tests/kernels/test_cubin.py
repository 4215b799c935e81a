"""Loading and launching with a driver that records: what is refused, by which name, and what reaches a launch."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.catalog import MINIMAX_H3, OPERATORS, source_sha256, specialisations
from kernels.cubin import KernelSet, load_kernels, open_kernels
from kernels.cubin_index import FORMAT, KernelEntry, index_bytes, parse_entries, read_index
from kernels.driver import CudaDriver
from loader.errors import ArtifactError, CapabilityError, InternalError

IMAGE = b"\x7fELF not really"


class RecordingDriver:
    """Keeps the parameter bytes of every launch."""

    device_type = "cuda"

    def __init__(self, version: int = 13000, refuse: bool = False) -> None:
        self._version = version
        self._refuse = refuse
        self.images: list[bytes] = []
        self.launches: list[tuple[Any, ...]] = []
        self.unloaded: list[Any] = []

    def version(self) -> int:
        return self._version

    def load_library(self, image: bytes) -> Any:
        if self._refuse:
            raise InternalError(
                "CUDA driver call failed", where="cuLibraryLoadData", found="NO_BINARY_FOR_GPU"
            )
        self.images.append(image)
        return len(self.images)

    def get_function(self, library: Any, symbol: str) -> Any:
        return library, symbol

    def launch(
        self, function: Any, grid: int, threads: int, shared: int, cuda_stream: int, slots: int
    ) -> None:
        addresses = (ctypes.c_void_p * 9).from_address(slots)
        words = [ctypes.c_uint64.from_address(address).value for address in addresses]
        self.launches.append((function, grid, threads, shared, cuda_stream, words))

    def unload(self, library: Any) -> None:
        self.unloaded.append(library)


def swiglu_entry(**changes: Any) -> KernelEntry:
    operator = OPERATORS["swiglu"]
    entry = KernelEntry(
        operator="swiglu",
        architecture="sm_90a",
        constants={},
        symbol="swiglu",
        arguments=tuple((a.name, a.type, a.multiple) for a in operator.arguments),
        grid=operator.grid,
        block=2048,
        rows=1,
        num_warps=4,
        num_ctas=1,
        shared=64,
        scratch=0,
        file="sm_90a/swiglu.cubin",
        size=len(IMAGE),
        sha256=hashlib.sha256(IMAGE).hexdigest(),
        source_sha256=source_sha256(operator),
        registers=32,
        stack_bytes=0,
        compiler={"name": "triton", "version": "3.6.0", "assembler": "12.9.86", "options": {}},
    )
    return dataclasses.replace(entry, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sm_90a").mkdir()
    (tmp_path / "sm_90a/swiglu.cubin").write_bytes(IMAGE)
    (tmp_path / "index.json").write_bytes(index_bytes([swiglu_entry()]))
    return tmp_path


def load(folder: Path, driver: RecordingDriver | None = None, **changes: Any) -> KernelSet:
    return load_kernels(folder, [swiglu_entry(**changes)], "sm_90a", driver or RecordingDriver())


def test_index_survives_a_round_trip(folder: Path) -> None:
    assert read_index(folder) == (swiglu_entry(),)


def test_launch_packs_every_parameter_into_its_own_slot(folder: Path) -> None:
    driver = RecordingDriver()
    kernels = load(folder, driver)
    kernels.bind()
    kernel = kernels.find("swiglu")
    assert kernel is not None
    kernel.launch(12, 77, 2**40, 2**41, 2**42, 32, 16, 48, 7)
    function, grid, threads, shared, stream, words = driver.launches[0]
    assert (function, grid, threads, shared, stream) == ((1, "swiglu"), 12, 128, 64, 77)
    assert words == [2**40, 2**41, 2**42, 32, 16, 48, 7, 0, 0]  # two null scratch pointers at the end


def test_launch_of_no_programs_does_nothing(folder: Path) -> None:
    driver = RecordingDriver()
    kernels = load(folder, driver)
    kernels.bind()
    kernel = kernels.find("swiglu")
    assert kernel is not None
    kernel.launch(0, 0, 16, 16, 16, 16, 16, 16, 1)
    assert driver.launches == []


@pytest.mark.parametrize(
    ("position", "value", "name"),
    [(0, 8, "up_ptr"), (2, 17, "out_ptr"), (3, 24, "in_stride"), (5, 1, "width")],
)
def test_broken_alignment_promise_is_refused_before_the_launch(
    folder: Path, position: int, value: int, name: str
) -> None:
    driver = RecordingDriver()
    kernels = load(folder, driver)
    kernels.bind()
    kernel = kernels.find("swiglu")
    assert kernel is not None
    values = [16, 16, 16, 16, 16, 16, 1]
    values[position] = value
    with pytest.raises(
        InternalError, match=rf"swiglu\[\] sm_90a: {name}: .*found {value}; allowed: a multiple of 16"
    ):
        kernel.launch(1, 0, *values)
    assert driver.launches == []


def test_launch_needs_bind(folder: Path) -> None:
    kernel = load(folder).find("swiglu")
    assert kernel is not None
    with pytest.raises(InternalError, match=r"before bind\(\)"):
        kernel.launch(1, 0, 16, 16, 16, 16, 16, 16, 1)


def test_threads_do_not_mix_parameters(folder: Path) -> None:
    driver = RecordingDriver()
    kernels = load(folder, driver)
    kernels.bind()
    kernel = kernels.find("swiglu")
    assert kernel is not None

    def work(number: int) -> None:
        for _ in range(200):
            kernel.launch(number, number, *[16 * number] * 6, number)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 600
    for _, grid, _, _, stream, words in driver.launches:
        assert words == [16 * grid] * 6 + [stream, 0, 0]


def test_flipped_bit_is_refused_by_name(folder: Path) -> None:
    damaged = bytes([IMAGE[0] ^ 1]) + IMAGE[1:]
    (folder / "sm_90a/swiglu.cubin").write_bytes(damaged)
    driver = RecordingDriver()
    with pytest.raises(
        ArtifactError, match=r"swiglu\.cubin: swiglu\[\] sm_90a: kernel file is not the one"
    ) as caught:
        load(folder, driver)
    assert hashlib.sha256(damaged).hexdigest() in str(caught.value.found)
    assert driver.images == []


def test_missing_file_is_refused_by_name(folder: Path) -> None:
    (folder / "sm_90a/swiglu.cubin").unlink()
    with pytest.raises(ArtifactError, match=r"swiglu\.cubin: swiglu\[\] sm_90a: kernel file cannot be read"):
        load(folder)


def test_other_architecture_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(CapabilityError, match=r"swiglu\[\] sm_100a: .*found sm_100a; allowed: sm_90a"):
        load(folder, architecture="sm_100a")


def test_older_driver_is_refused_by_name(folder: Path) -> None:
    compiler = {"name": "triton", "version": "3.9.0", "assembler": "13.4.1", "options": {}}
    with pytest.raises(CapabilityError, match=r"swiglu.*found CUDA 12.9; allowed: CUDA 13 or newer"):
        load(folder, RecordingDriver(version=12090), compiler=compiler)


def test_refusal_of_the_driver_names_the_file(folder: Path) -> None:
    with pytest.raises(
        ArtifactError, match=r"swiglu\.cubin: .*driver refuses the kernel; found .*NO_BINARY_FOR_GPU"
    ):
        load(folder, RecordingDriver(refuse=True))


def test_manifest_entries_open_for_the_device_at_hand(folder: Path) -> None:
    documents = [entry.as_dict() for entry in read_index(folder)]
    kernels = open_kernels(folder, documents, (9, 0), RecordingDriver())
    assert kernels.find("swiglu") is not None
    assert kernels.note is None


def test_unprepared_architecture_gives_an_empty_set_with_a_note(folder: Path) -> None:
    documents = [entry.as_dict() for entry in read_index(folder)]
    kernels = open_kernels(folder, documents, (10, 3), RecordingDriver())
    assert len(kernels) == 0
    assert kernels.note == "no kernels were prepared for sm_103a"


def test_other_constants_are_not_found(folder: Path) -> None:
    assert load(folder).find("swiglu", 5376) is None
    assert load(folder).find("norm_modulate", 5376) is None


def test_close_unloads_once(folder: Path) -> None:
    driver = RecordingDriver()
    kernels = load(folder, driver)
    kernels.close()
    kernels.close()
    assert driver.unloaded == [1]


def _drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.pop(name)


def _set(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update({name: value})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop("sha256"), r"kernel 'swiglu': .*fields; found \['sha256'\]"),
        (_set("extra", 1), r"kernel 'swiglu': .*fields; found \['extra'\]"),
        (_set("operator", "gelu"), r"gelu\[\] sm_90a: unknown kernel; found gelu"),
        (_set("architecture", "sm_80"), r"swiglu\[\] sm_80: unknown architecture"),
        (_set("constants", {"D": 8}), r"swiglu\[D=8\] sm_90a: kernel was compiled with other parameters"),
        (_set("arguments", [["x", "i32", 1]]), r"swiglu.*compiled with other parameters"),
        (_set("source_sha256", "0" * 64), r"swiglu.*compiled from other sources; found 0000"),
        (_set("num_ctas", 2), r"swiglu.*launch that is not supported; found num_ctas 2"),
        (_set("scratch", 128), r"swiglu.*found num_ctas 1, scratch 128"),
        (_set("shared", 65536), r"swiglu.*shared 65536"),
        (_set("block", "2048"), r"kernel 'swiglu': block: .*wrong type; found '2048'"),
        (_set("compiler", None), r"kernel 'swiglu': compiler: .*wrong type; found None"),
        (_set("arguments", "up"), r"kernel 'swiglu': arguments: .*wrong type"),
        (_set("file", "../swiglu.cubin"), r"swiglu.*outside its folder"),
        (_set("file", "/swiglu.cubin"), r"swiglu.*outside its folder"),
    ],
)
def test_wrong_entry_is_refused_by_name(damage: Callable[[dict[str, Any]], None], message: str) -> None:
    document = json.loads(index_bytes([swiglu_entry()]))["kernels"][0]
    damage(document)
    with pytest.raises(ArtifactError, match=message):
        parse_entries([document])


def test_key_listed_twice_is_refused() -> None:
    document = json.loads(index_bytes([swiglu_entry()]))["kernels"][0]
    with pytest.raises(ArtifactError, match=r"swiglu\[\] sm_90a: kernel is listed twice"):
        parse_entries([document, document])


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format": "coldframe-kernels/1"}', '{"format": "coldframe-kernels/2", "kernels": []}'],
)
def test_other_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"index\.json"):
        read_index(tmp_path)


def test_sizes_that_do_not_fit_are_left_to_the_eager_path() -> None:
    odd = dataclasses.replace(MINIMAX_H3, hidden=5380, head_dim=96)
    names = {item.operator.name for item in specialisations(odd)}
    assert "norm_modulate" not in names
    assert [item.constants for item in specialisations(odd) if item.operator.name == "qk_norm_rope"] == [
        {"K": 128, "HALF": 64, "ROUND_FIRST": 1}
    ]


def test_format_is_stated() -> None:
    assert json.loads(index_bytes([]))["format"] == FORMAT


def test_machine_without_a_driver_is_a_missing_capability() -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a driver")
    with pytest.raises(CapabilityError, match="precompiled kernels need a CUDA driver"):
        CudaDriver()
