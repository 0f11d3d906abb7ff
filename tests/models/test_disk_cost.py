"""Measured cost of files: which files are read, and that the folder is as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forge.models.block_files import BlockFiles
from forge.models.disk_cost import MAX_FETCH_NS, WAVES, measure_fetch_ns
from forge.models.file_format import header_bytes
from tests.models.block_contents import read_content

CONTENT_BYTES = 10_000
FILE_BYTES = header_bytes(CONTENT_BYTES) + CONTENT_BYTES
LAYOUT = bytes(64)


def key_of(number: int) -> bytes:
    return number.to_bytes(64, "big")


@dataclass
class TimedFiles(BlockFiles):
    """Files of a folder. A read takes `cold_s` where the file is only on the disk, else `warm_s`.

    reads, dropped   keys, in the order of the calls
    """

    folder: Path
    max_bytes: int = 10**6
    cold_s: float = 0.01
    warm_s: float = 0.001
    now_s: float = 0.0
    reads: list[bytes] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.folder, LAYOUT, self.max_bytes)

    def num_bytes_read(self, key: bytes) -> int:
        self.reads.append(key)
        self.now_s += self.cold_s if key in self.dropped else self.warm_s
        return super().num_bytes_read(key)

    def drop_from_page_cache(self, key: bytes) -> None:
        self.dropped.append(key)
        super().drop_from_page_cache(key)

    def measure(self, content_bytes: int = CONTENT_BYTES) -> int:
        keys = self.keys()
        with ThreadPoolExecutor(1) as executor:
            return measure_fetch_ns(self, keys, executor, content_bytes, lambda: self.now_s)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kv").mkdir(mode=0o700)
    return tmp_path / "kv"


@pytest.fixture
def files(folder: Path) -> Iterator[TimedFiles]:
    opened = TimedFiles(folder)
    yield opened
    opened.close()


def test_without_files_the_cost_is_that_of_the_disk(files: TimedFiles) -> None:
    """A file that was just written is in the page cache: it is dropped from there before."""
    assert files.measure() == 10_000_000
    assert len(files.reads) == sum(WAVES) == len(set(files.reads))
    assert set(files.dropped) == set(files.reads)
    assert files.keys() == [] and files.num_bytes == 0


def test_files_of_an_earlier_start_are_read_as_they_lie(files: TimedFiles) -> None:
    for number in range(30):
        assert files.write(key_of(number), bytes(CONTENT_BYTES))
    before = files.keys()
    assert files.measure() == 1_000_000
    assert not files.dropped and files.keys() == before
    numbers = [int.from_bytes(key, "big") for key in files.reads]
    assert numbers == [number * 30 // 22 for number in range(22)], "old and recent ones"


def test_files_that_left_the_page_cache_are_read_from_the_disk(files: TimedFiles) -> None:
    for number in range(22):
        files.write(key_of(number), bytes(CONTENT_BYTES))
        files.dropped.append(key_of(number))
    assert files.measure() == 10_000_000


def test_few_files_say_too_little(files: TimedFiles) -> None:
    for number in range(21):
        files.write(key_of(number), bytes(CONTENT_BYTES))
    assert files.measure() == 10_000_000
    assert not {key_of(number) for number in range(21)} & set(files.reads)
    assert len(files.keys()) == 21


def test_files_of_another_layout_and_size_count_by_their_bytes_and_stay(folder: Path) -> None:
    other = BlockFiles(folder, bytes(63) + b"x", 10**6)
    for number in range(22):
        other.write(key_of(number), bytes(FILE_BYTES * 2 - header_bytes(2 * CONTENT_BYTES)))
    files = TimedFiles(folder)
    assert files.measure() == 500_000
    assert len(files.keys()) == 22
    assert all(read_content(other, key_of(number)) is not None for number in range(22))
    other.close()
    files.close()


def test_no_file_gives_way_to_those_that_are_measured(folder: Path) -> None:
    """Three files leave room for three more: the waves are of two files, then of one."""
    files = TimedFiles(folder, max_bytes=6 * FILE_BYTES)
    for number in range(3):
        files.write(key_of(number), bytes(CONTENT_BYTES))
    assert files.measure() == 10_000_000
    assert len(files.reads) == 3
    assert [int.from_bytes(key, "big") for key in files.keys()] == [0, 1, 2]
    files.close()


def test_a_full_folder_of_few_files_is_not_read_from_while_idle(folder: Path) -> None:
    files = TimedFiles(folder, max_bytes=FILE_BYTES)
    files.write(key_of(1), bytes(CONTENT_BYTES))
    assert files.measure() == MAX_FETCH_NS
    assert files.keys() == [key_of(1)]
    files.close()


def test_a_slow_disk_is_measured_with_few_files(files: TimedFiles) -> None:
    files.cold_s = 0.3
    assert files.measure() == 300_000_000
    assert len(files.reads) == WAVES[0] and files.keys() == []


def test_files_that_cannot_be_read_cost_more_than_computing(
    files: TimedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "write", lambda key, content: False)
    assert files.measure() == MAX_FETCH_NS


def test_a_folder_that_another_process_holds_costs_more_than_computing(
    files: TimedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held(max_wait_s: float) -> None:
        raise TimeoutError

    with ThreadPoolExecutor(1) as executor:
        monkeypatch.setattr(files, "_lock_folder", held)
        assert measure_fetch_ns(files, [], executor, CONTENT_BYTES) == MAX_FETCH_NS


def test_reading_for_a_measurement_changes_no_file(files: TimedFiles, folder: Path) -> None:
    files.write(key_of(1), bytes(CONTENT_BYTES))
    path = folder / key_of(1).hex()
    path.write_bytes(b"damaged")
    status = path.stat()
    assert files.num_bytes_read(key_of(1)) == len(b"damaged")
    assert files.num_bytes_read(key_of(2)) == 0
    path.with_name(key_of(3).hex()).mkdir()
    assert files.num_bytes_read(key_of(3)) == 0
    files.drop_from_page_cache(key_of(2))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
