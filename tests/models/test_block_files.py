"""Files of blocks: a content comes back as it was written, or not at all, and within the budget."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from forge.errors import InvalidConfig
from forge.models.block_files import BlockFiles, try_lock
from forge.models.file_format import PIECE_BYTES, header_bytes
from tests.models.block_contents import (
    KILLED_BYTES,
    LAYOUT,
    NUM_KILLED_KEYS,
    OTHER_LAYOUT,
    content_of,
    key_of,
    read_content,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def files(folder: Path) -> Iterator[BlockFiles]:
    opened = BlockFiles(folder, LAYOUT, 10**7)
    yield opened
    opened.close()
    opened.close()


def fill(files: BlockFiles, numbers: range, size: int = 1000) -> None:
    for number in numbers:
        assert files.write(key_of(number), content_of(number, size))


def read(files: BlockFiles, number: int) -> bytes | None:
    return read_content(files, key_of(number))


def bytes_on_disk(folder: Path) -> int:
    """Return the sizes of all files but the lock."""
    return sum(each.lstat().st_size for each in folder.iterdir() if each.name != ".lock")


@pytest.mark.parametrize(
    "size", [1, 1000, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7]
)
def test_a_content_comes_back_in_another_opening(folder: Path, size: int) -> None:
    BlockFiles(folder, LAYOUT, 10**7).write(key_of(1), content_of(1, size))
    again = BlockFiles(folder, LAYOUT, 10**7)
    assert read(again, 1) == content_of(1, size) and again.keys() == [key_of(1)]
    assert again.num_bytes == bytes_on_disk(folder) == header_bytes(size) + size
    again.close()


def test_a_file_of_another_layout_or_key_is_a_miss(folder: Path, files: BlockFiles) -> None:
    fill(files, range(3))
    os.unlink(folder / key_of(1).hex())
    assert read(BlockFiles(folder, OTHER_LAYOUT, 10**7), 0) is None
    os.rename(folder / key_of(2).hex(), folder / key_of(3).hex())
    assert read(files, 3) is None
    assert not [each for each in folder.iterdir() if each.name != ".lock"], "misses are removed"
    assert BlockFiles(folder, LAYOUT, 10**7).num_bytes == 0


def test_the_same_key_again_replaces_the_content(folder: Path, files: BlockFiles) -> None:
    fill(files, range(2))
    assert files.write(key_of(0), b"other")
    assert read(files, 0) == b"other" and len(files.keys()) == 2
    assert files.num_bytes == bytes_on_disk(folder)


def test_no_content_and_more_than_the_budget_are_not_written(folder: Path) -> None:
    small = BlockFiles(folder, LAYOUT, header_bytes(100) + 100)
    assert small.write(key_of(0), bytes(100))
    assert not small.write(key_of(1), b"")
    assert not small.write(key_of(1), bytes(101))
    assert small.keys() == [key_of(0)], "what cannot be written evicts nothing"
    assert small.write(key_of(1), bytes(99))
    assert small.keys() == [key_of(1)]


# Damage.


def flip_a_bit(rng: Random, data: bytearray, other: bytes) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def cut(rng: Random, data: bytearray, other: bytes) -> None:
    del data[rng.randrange(len(data)) :]


def append(rng: Random, data: bytearray, other: bytes) -> None:
    data += rng.randbytes(rng.randint(1, 40))


def remove_a_part(rng: Random, data: bytearray, other: bytes) -> None:
    start = rng.randrange(len(data))
    del data[start : start + rng.randint(1, 40)]


def insert_a_part(rng: Random, data: bytearray, other: bytes) -> None:
    start = rng.randrange(len(data))
    data[start:start] = rng.randbytes(rng.randint(1, 40))


def zero_a_part(rng: Random, data: bytearray, other: bytes) -> None:
    start = rng.randrange(len(data))
    data[start : start + 64] = bytes(len(data[start : start + 64]))


def take_the_rest_of_another(rng: Random, data: bytearray, other: bytes) -> None:
    start = rng.randrange(len(data))
    data[start:] = other[start:]


def take_the_beginning_of_another(rng: Random, data: bytearray, other: bytes) -> None:
    start = rng.randrange(1, len(data))
    data[:start] = other[:start]


def put_a_number_into_the_header(rng: Random, data: bytearray, other: bytes) -> None:
    start = rng.randrange(8, 24)
    data[start : start + 4] = rng.choice((0, 1, 2**31, 2**32 - 1)).to_bytes(4, "little")


MUTATIONS = (
    *(flip_a_bit, cut, append, remove_a_part, insert_a_part, zero_a_part),
    *(take_the_rest_of_another, take_the_beginning_of_another, put_a_number_into_the_header),
)


def check_mutations(folder: Path, seeds: range) -> Counter[str]:
    """Mutate a file once for each seed, and check that reading it is a miss or harmless."""
    files, reached = BlockFiles(folder, LAYOUT, 10**8), Counter[str]()
    path, size = folder / key_of(0).hex(), 700
    fill(files, range(2), size)
    whole, other = path.read_bytes(), (folder / key_of(1).hex()).read_bytes()
    for seed in seeds:
        rng, data = Random(seed), bytearray(whole)
        mutate: Callable[[Random, bytearray, bytes], None] = rng.choice(MUTATIONS)
        mutate(rng, data, other)
        path.write_bytes(data)
        found = read(files, 0)
        if bytes(data) == whole:
            assert found == content_of(0, size)
        else:
            assert found is None, f"{seed=} {mutate.__name__}"
            assert not path.exists()
            reached[mutate.__name__] += 1
    assert read(files, 1) == content_of(1, size)
    files.close()
    return reached


def test_a_damaged_file_is_a_miss(folder: Path) -> None:
    reached = check_mutations(folder, range(900))
    assert set(reached) == {each.__name__ for each in MUTATIONS}


@pytest.mark.long
def test_thousands_of_damaged_files_are_misses(folder: Path) -> None:
    assert check_mutations(folder, range(10_000, 16_000)).total() > 5_000


def test_every_single_byte_of_a_file_counts(folder: Path, files: BlockFiles) -> None:
    fill(files, range(1), 50)
    path = folder / key_of(0).hex()
    whole = path.read_bytes()
    for index in range(len(whole)):
        data = bytearray(whole)
        data[index] ^= 0xFF
        path.write_bytes(data)
        assert read(files, 0) is None, index


def test_pieces_before_a_damaged_one_are_passed_and_none_after(
    folder: Path, files: BlockFiles
) -> None:
    """The second of three has another byte, or the file ends in it."""
    content = content_of(1, 3 * PIECE_BYTES)
    path = folder / key_of(1).hex()
    middle = header_bytes(len(content)) + PIECE_BYTES + 7

    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(middle)
            file.write(bytes([content[PIECE_BYTES + 7] ^ 1]))

    def cut(path: Path) -> None:
        os.truncate(path, middle)

    for damage in (change, cut):  # while the first piece is used
        assert files.write(key_of(1), content)
        pieces: list[bytes] = []

        def write(
            piece: memoryview,
            pieces: list[bytes] = pieces,
            damage: Callable[[Path], None] = damage,
        ) -> bool:
            pieces.append(bytes(piece))
            damage(path)
            return True

        assert not files.read(key_of(1), write)
        assert pieces == [content[:PIECE_BYTES]] and not path.exists()


def test_a_file_stays_when_its_reader_wants_no_more(files: BlockFiles) -> None:
    content = content_of(1, 2 * PIECE_BYTES)
    assert files.write(key_of(1), content)
    pieces: list[bytes] = []

    def write(piece: memoryview) -> bool:
        pieces.append(bytes(piece))
        return False

    assert not files.read(key_of(1), write)
    assert pieces == [content[:PIECE_BYTES]] and read(files, 1) == content


# The folder.


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o770])
def test_a_folder_that_others_can_enter_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(InvalidConfig, match=r"kv_disk_path: .*reveal prompts"):
        BlockFiles(folder, LAYOUT, 1)


def test_a_file_or_a_link_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("file", "link"):
        with pytest.raises(InvalidConfig, match=rf"kv_disk_path: .*{name} cannot be opened"):
            BlockFiles(tmp_path / name, LAYOUT, 1)


def test_folder_and_files_are_private(folder: Path, files: BlockFiles) -> None:
    fill(files, range(1))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o600}


def test_a_process_without_file_descriptors_keeps_the_files(
    folder: Path, files: BlockFiles
) -> None:
    """The file is as it was written, and read again once there are descriptors."""
    fill(files, range(1))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        found, was_written = read(files, 0), files.write(key_of(1), content_of(1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found is None and not was_written
    assert read(files, 0) == content_of(0) and files.num_bytes == bytes_on_disk(folder)


def test_what_is_not_a_file_of_this_user_is_a_miss(folder: Path, files: BlockFiles) -> None:
    """A link is not followed, a FIFO does not block, and what they lead to stays."""
    fill(files, range(1))
    outside = folder.parent / "outside"
    os.rename(folder / key_of(0).hex(), outside)
    (folder / key_of(0).hex()).symlink_to(outside)
    (folder / key_of(1).hex()).symlink_to(folder / "nowhere")
    os.mkfifo(folder / key_of(2).hex())
    (folder / key_of(3).hex()).mkdir()
    assert [read(files, number) for number in range(4)] == [None] * 4
    assert outside.exists() and not (folder / key_of(0).hex()).is_symlink()
    fill(files, range(3))
    assert [read(files, number) for number in range(3)] == [content_of(n) for n in range(3)]
    assert not files.write(key_of(3), b"content"), "a folder is in its place"
    assert not [each for each in folder.iterdir() if each.name.endswith(".tmp")]
    assert files.num_bytes <= bytes_on_disk(folder)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_under_the_name_of_a_temporary_file_is_not_followed(
    folder: Path, files: BlockFiles, link: Callable[[Path, Path], None]
) -> None:
    outside = folder.parent / "outside"
    outside.write_bytes(b"precious")
    link(outside, folder / f".{key_of(0).hex()}.2.tmp")  # the second change of the folder
    assert not files.write(key_of(0), b"content")
    assert outside.read_bytes() == b"precious"
    assert files.write(key_of(0), b"content")


def test_a_folder_under_the_name_of_a_key_stops_no_write(folder: Path) -> None:
    """It cannot be removed to make room, so it is not counted either."""
    folder.mkdir(mode=0o700)
    (folder / key_of(9).hex()).mkdir()
    os.utime(folder / key_of(9).hex(), (1, 1))
    small = BlockFiles(folder, LAYOUT, 2 * (header_bytes(1000) + 1000))
    fill(small, range(4))
    assert [read(small, number) is not None for number in range(4)] == [False, False, True, True]
    small.close()


def test_no_more_of_a_file_is_read_than_its_header_promises(
    folder: Path, files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file of terabytes takes no memory."""
    fill(files, range(2))
    os.truncate(folder / key_of(0).hex(), 2**43)
    with (folder / key_of(1).hex()).open("wb") as file:
        file.truncate(2**43)
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("the content is read"))
    assert [read(files, number) for number in range(2)] == [None, None]
    assert not files.keys()


def test_other_files_are_neither_counted_nor_removed(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    for name in ("letter.txt", "0123", key_of(0).hex() + "0", f".{key_of(0).hex()}.tmp"):
        (folder / name).write_bytes(bytes(5000))
    small = BlockFiles(folder, LAYOUT, 3 * (header_bytes(1000) + 1000))
    fill(small, range(9))
    assert len(small.keys()) == 3
    others = [each for each in folder.iterdir() if each.stat().st_size == 5000]
    assert len(others) == 4


# The budget.


def test_the_least_recently_used_file_is_removed_for_another(folder: Path) -> None:
    """Reading a file is a use, in this opening and in the next one."""
    small = BlockFiles(folder, LAYOUT, 3 * (header_bytes(1000) + 1000))
    for number in range(3):
        fill(small, range(number, number + 1))
        os.utime(folder / key_of(number).hex(), ns=(number, number))
    assert read(small, 0) is not None
    fill(small, range(3, 4))
    assert set(small.keys()) == {key_of(n) for n in (0, 2, 3)}
    again = BlockFiles(folder, LAYOUT, 3 * (header_bytes(1000) + 1000))
    fill(again, range(4, 5))
    assert set(small.keys()) == set(again.keys()) == {key_of(n) for n in (0, 3, 4)}


def test_two_openings_share_one_budget(folder: Path) -> None:
    """Each sees the files of the other before it writes."""
    max_bytes = 5 * (header_bytes(1000) + 1000) + 10
    both = [BlockFiles(folder, LAYOUT, max_bytes) for _ in range(2)]
    rng = Random(1)
    for number in range(60):
        files = rng.choice(both)
        fill(files, range(number, number + 1))
        if rng.random() < 0.2:
            rng.choice(both).remove(key_of(number).hex())
        assert bytes_on_disk(folder) <= max_bytes
        assert both[0].num_bytes == both[1].num_bytes == bytes_on_disk(folder)


def test_openings_share_one_budget_after_something_has_removed_the_lock(folder: Path) -> None:
    """The first one locks the file that the second one has made since."""
    one_file = header_bytes(1000) + 1000
    first = BlockFiles(folder, LAYOUT, 2 * one_file)
    fill(first, range(1))
    (folder / ".lock").unlink()
    second = BlockFiles(folder, LAYOUT, 2 * one_file)
    fill(second, range(1, 2))
    fill(first, range(2, 3))
    assert bytes_on_disk(folder) == first.num_bytes == second.num_bytes == 2 * one_file
    for each in folder.iterdir():
        each.unlink()
    folder.rmdir()
    assert not first.write(key_of(3), content_of(3)), "nor is there a folder"
    first.close()
    second.close()


def test_threads_keep_the_budget(folder: Path) -> None:
    max_bytes = 6 * (header_bytes(1000) + 1000)
    files = BlockFiles(folder, LAYOUT, max_bytes)
    failures: list[object] = []

    def work(first: int) -> None:
        for number in range(first, first + 30):
            files.write(key_of(number), content_of(number))
            for each in (number, number - 7):
                found = read(files, each)
                if found not in (None, content_of(each)):
                    failures.append(each)
            if bytes_on_disk_or_zero(folder) > max_bytes:
                failures.append("budget")

    threads = [threading.Thread(target=work, args=(20 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and files.num_bytes == bytes_on_disk(folder) <= max_bytes


def bytes_on_disk_or_zero(folder: Path) -> int:
    """Return the sizes of all files, without those that are removed while they are counted."""
    total = 0
    for name in os.listdir(folder):
        try:
            total += (folder / name).stat().st_size if name != ".lock" else 0
        except FileNotFoundError:
            return 0
    return total


# Failures of the disk.


def test_a_folder_that_is_gone_is_a_miss(folder: Path, files: BlockFiles) -> None:
    fill(files, range(2))
    for each in folder.iterdir():
        each.unlink()
    folder.rmdir()
    assert read(files, 0) is None and not files.write(key_of(3), b"content")


def test_a_disk_that_takes_no_more_bytes_fails_the_write_alone(
    folder: Path, files: BlockFiles
) -> None:
    """A limit on the size of files is the full disk of one process."""
    fill(files, range(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        assert not files.write(key_of(1), content_of(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files.keys() == [key_of(0)] and files.num_bytes == bytes_on_disk(folder)
    fill(files, range(1, 2))
    assert [read(files, number) for number in range(2)] == [content_of(n) for n in range(2)]


def test_writes_that_end_in_the_middle_leave_nothing(folder: Path, files: BlockFiles) -> None:
    """The limit is reached while the content is written: after the header, and in it."""
    size = 3 * PIECE_BYTES
    for limit in (100, header_bytes(size) + 10, header_bytes(size) + 2 * PIECE_BYTES):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            assert not files.write(key_of(1), content_of(1, size))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not files.keys() and files.num_bytes == bytes_on_disk(folder) == 0


WRITE_FOREVER = """
import itertools, sys
from forge.models.block_files import BlockFiles
from tests.models.block_contents import KILLED_BYTES, LAYOUT, NUM_KILLED_KEYS, content_of, key_of
files = BlockFiles(sys.argv[1], LAYOUT, int(sys.argv[2]))
contents = [content_of(number, KILLED_BYTES) for number in range(NUM_KILLED_KEYS)]
for number in itertools.count():
    files.write(key_of(number % NUM_KILLED_KEYS), contents[number % NUM_KILLED_KEYS])
"""


class Kills(NamedTuple):
    """Processes that were killed in the middle of a write.

    num_left   temporary files that they left
    num_cut    those of them that had some of their bytes, and not all
    """

    num_left: int
    num_cut: int


def temporary_files(folder: Path) -> list[Path]:
    """Return the temporary files of a folder that may be missing yet."""
    if not folder.exists():
        return []
    return [folder / name for name in os.listdir(folder) if name.endswith(".tmp")]


def is_unfinished(path: Path) -> bool:
    """Return whether the end of a temporary file is not written yet: it is zeros until then."""
    try:
        with path.open("rb") as file:
            file.seek(-16, os.SEEK_END)
            return not any(file.read())
    except OSError:  # it has its name by now, or no size yet
        return False


def kill_while_it_writes(process: subprocess.Popen[bytes], folder: Path, num_looks: int) -> None:
    """Kill the process once an unfinished file was seen more than `num_looks` times."""
    end_s = time.monotonic() + 60
    try:
        while num_looks >= 0:
            assert process.poll() is None and time.monotonic() < end_s, "no write was seen"
            num_looks -= any(map(is_unfinished, temporary_files(folder)))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def check_kills(folder: Path, seeds: range) -> Kills:
    """Kill processes, until for each seed one has left a temporary file, and open the folder."""
    max_bytes, num_left, num_cut = 2 * (KILLED_BYTES + header_bytes(KILLED_BYTES)), 0, 0
    contents = [content_of(number, KILLED_BYTES) for number in range(NUM_KILLED_KEYS)]
    for seed in seeds:
        left: list[Path] = []
        while not left:
            process = subprocess.Popen(
                [sys.executable, "-c", WRITE_FOREVER, str(folder), str(max_bytes)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            kill_while_it_writes(process, folder, Random(seed).randint(0, 6))
            left = temporary_files(folder)
        num_left += len(left)
        num_cut += sum(is_unfinished(each) and any(each.read_bytes()) for each in left)
        assert bytes_on_disk(folder) <= max_bytes
        files = BlockFiles(folder, LAYOUT, max_bytes)
        assert not temporary_files(folder)
        assert files.num_bytes == bytes_on_disk(folder)
        for number in range(NUM_KILLED_KEYS):
            assert read(files, number) in (None, contents[number])
        files.close()
    return Kills(num_left, num_cut)


@pytest.mark.long
def test_a_process_that_is_killed_while_it_writes_leaves_a_folder_that_opens(folder: Path) -> None:
    assert check_kills(folder, range(3)).num_left == 3


@pytest.mark.soak
def test_two_hundred_processes_that_are_killed_leave_a_folder_that_opens(folder: Path) -> None:
    kills = check_kills(folder, range(200))
    print(kills)
    assert kills.num_left == 200 and kills.num_cut


def test_temporary_files_that_are_being_written_stay(folder: Path) -> None:
    """Their writers have locked them, in this process or another."""
    folder.mkdir(mode=0o700)
    names = [f".{key_of(0).hex()}.{number}.tmp" for number in (7, 8)]
    for name in names:
        (folder / name).write_bytes(bytes(100))
    with (folder / names[0]).open() as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        files = BlockFiles(folder, LAYOUT, header_bytes(1000) + 1000)
        assert [(folder / name).exists() for name in names] == [True, False]
        assert not files.write(key_of(1), content_of(1)), "they count"
        files.close()
    again = BlockFiles(folder, LAYOUT, header_bytes(1000) + 1000)
    assert not (folder / names[0]).exists() and again.write(key_of(1), content_of(1))


@pytest.mark.parametrize("when", ["write", "close"])
def test_a_second_opening_leaves_what_the_first_one_writes(
    folder: Path, files: BlockFiles, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The folder is opened again while the content is written, and before the file is closed.

    The second opening writes the same key, under a temporary name of its own.
    """
    original = getattr(os, when)
    written = []

    def interrupt(fd: int, *data: bytes) -> object:
        result = original(fd, *data)
        monkeypatch.setattr(os, when, original)
        second = BlockFiles(folder, LAYOUT, 10**7)
        written.append(second.write(key_of(0), content_of(0)))
        second.close()
        return result

    monkeypatch.setattr(os, when, interrupt)
    assert files.write(key_of(0), content_of(0))
    assert written == [True] and read(files, 0) == content_of(0)
    assert files.num_bytes == bytes_on_disk(folder)


# The lock.


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_what_is_no_file_in_the_place_of_the_lock_is_refused(folder: Path, kind: str) -> None:
    folder.mkdir(mode=0o700)
    outside = folder.parent / "outside"
    outside.write_bytes(b"precious")
    lock = folder / ".lock"
    {
        "link": lambda: lock.symlink_to(outside),
        "folder": lock.mkdir,
        "fifo": lambda: os.mkfifo(lock),
    }[kind]()
    with pytest.raises(InvalidConfig, match=r"kv_disk_path: .*/\.lock cannot be used.* Remove it"):
        BlockFiles(folder, LAYOUT, 10**7)
    assert outside.read_bytes() == b"precious"


def test_a_folder_that_another_process_holds_is_refused(folder: Path) -> None:
    """An opening that is there already finds its files, and writes none."""
    files = BlockFiles(folder, LAYOUT, 10**7, max_lock_wait_s=0.0)
    fill(files, range(1))
    with (folder / ".lock").open() as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(InvalidConfig, match=r"kv_disk_path: another process has held .*\.lock"):
            BlockFiles(folder, LAYOUT, 10**7, max_lock_wait_s=0.0)
        assert read(files, 0) == content_of(0)
        assert not files.write(key_of(1), content_of(1))
        with pytest.raises(TimeoutError, match=r"for more than 0\.0 s"):
            files.keys()
    fill(files, range(1, 2))
    assert files.keys() == [key_of(0), key_of(1)]
    files.close()


class CountingLock:
    """Takes the folder's lock, unless another process is said to hold it. Counts the tries."""

    def __init__(self) -> None:
        self.is_held_elsewhere = False
        self.num_tries = 0

    def __call__(self, fd: int) -> bool:
        self.num_tries += 1
        return not self.is_held_elsewhere and try_lock(fd)


def test_after_one_timeout_writes_fail_at_once_until_the_folder_is_free(folder: Path) -> None:
    lock = CountingLock()
    files = BlockFiles(folder, LAYOUT, 10**7, max_lock_wait_s=0.01, try_lock=lock)
    for _ in range(2):
        lock.is_held_elsewhere = True
        lock.num_tries = 0
        assert not files.write(key_of(0), content_of(0))
        assert lock.num_tries > 1, "the first one waits"
        lock.num_tries = 0
        threads = [
            threading.Thread(target=files.write, args=(key_of(i), content_of(i))) for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert lock.num_tries == 8
        lock.is_held_elsewhere = False
        fill(files, range(3))
    assert files.keys() == [key_of(number) for number in range(3)]


def test_reads_do_not_wait_for_a_folder_that_another_process_holds(folder: Path) -> None:
    """What was read counts as used, and a damaged file is removed, once the folder is free."""
    lock = CountingLock()
    max_bytes = 3 * (header_bytes(1000) + 1000)
    files = BlockFiles(folder, LAYOUT, max_bytes, max_lock_wait_s=60.0, try_lock=lock)
    fill(files, range(3))
    (folder / key_of(2).hex()).write_bytes(b"damaged")
    lock.is_held_elsewhere = True
    lock.num_tries = 0
    assert read(files, 0) == content_of(0)
    assert lock.num_tries == 0
    assert [read(files, 2), read(files, 2)] == [None, None]
    assert lock.num_tries == 2, "each tries once to remove the file"
    lock.is_held_elsewhere = False
    fill(files, range(3, 4))
    assert files.keys() == [key_of(number) for number in (1, 0, 3)]
    fill(files, range(4, 5))
    assert files.keys() == [key_of(number) for number in (0, 3, 4)]


def test_a_read_does_not_wait_for_a_thread_that_writes(folder: Path) -> None:
    """A write waits for another process, and with it whatever takes the lock of the threads."""
    waits, goes_on = threading.Event(), threading.Event()

    def wait_for_the_test(fd: int) -> bool:
        if waits.is_set():
            assert goes_on.wait(60)
        return try_lock(fd)

    files = BlockFiles(folder, LAYOUT, 10**7, try_lock=wait_for_the_test)
    fill(files, range(2))
    (folder / key_of(1).hex()).write_bytes(b"damaged")
    waits.set()
    writer = threading.Thread(target=files.write, args=(key_of(2), content_of(2)))
    writer.start()
    while not files._lock.locked():
        threading.Event().wait(0.001)
    assert (read(files, 0), read(files, 1)) == (content_of(0), None)
    goes_on.set()
    writer.join()
    assert files.keys() == [key_of(0), key_of(2)]


# A folder that is deleted.


def test_a_folder_that_is_made_again_gets_files_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = BlockFiles(folder, LAYOUT, 10**7)
    fill(files, range(2))
    num_open = len(os.listdir("/proc/self/fd"))
    for round_ in range(2):
        shutil.rmtree(folder)
        for _ in range(5):
            assert not files.write(key_of(3), content_of(3)) and read(files, 0) is None
        folder.mkdir(mode=0o755)
        assert not files.write(key_of(3), content_of(3)), "others can enter it"
        folder.chmod(0o700)
        fill(files, range(3, 5))
        assert [read(files, number) for number in (0, 3)] == [None, content_of(3)]
        assert files.keys() == [key_of(4), key_of(3)]
        assert files.num_bytes == bytes_on_disk(folder)
        assert len(os.listdir("/proc/self/fd")) == num_open
        assert len(caplog.records) == round_ + 1, "each row of failures is logged once"
    assert "No such file or directory" in caplog.text
    files.close()
