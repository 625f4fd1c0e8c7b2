"""Files that are written and hashed while their content is produced."""

import threading
import weakref
from pathlib import Path

import pytest
from blake3 import blake3

from rheostat.infra.store.bundles import BundledFile
from rheostat.infra.store.file_writer import (
    FILES_AT_ONCE,
    PIECES_IN_FLIGHT,
    describe_pieces,
    write_files,
    write_hashed,
    write_pieces,
)

PIECES = [bytes([index]) * size for index, size in enumerate((0, 1, 100, 1 << 20, 3, 2 << 20))]
CONTENT = b"".join(PIECES)
FILE = BundledFile(digest=blake3(CONTENT).hexdigest(), bytes=len(CONTENT))


@pytest.mark.parametrize("kind", [bytes, memoryview])
@pytest.mark.parametrize("pieces", [PIECES, [CONTENT]])
def test_a_file_and_its_digest_are_those_of_all_pieces_in_order(tmp_path, pieces, kind):
    pieces = [kind(piece) for piece in pieces]
    assert write_hashed(tmp_path / "hashed", pieces) == describe_pieces(pieces) == FILE
    write_pieces(tmp_path / "plain", pieces)
    assert (tmp_path / "hashed").read_bytes() == (tmp_path / "plain").read_bytes() == CONTENT


def test_no_pieces_make_an_empty_file(tmp_path):
    assert write_hashed(tmp_path / "empty", []) == describe_pieces([]) == describe_pieces([b""])
    assert (tmp_path / "empty").read_bytes() == b""


def test_several_files_are_written_at_once_and_described_in_their_order(tmp_path):
    produced = []

    def pieces(name):
        for piece in PIECES:
            produced.append(name)
            yield piece

    names = [*range(FILES_AT_ONCE + 2)]
    progress = []
    files = write_files({tmp_path / f"{name}": pieces(name) for name in names}, on_progress=lambda: progress.append(1))
    assert files == {tmp_path / f"{name}": FILE for name in names} and [*files] == [tmp_path / f"{x}" for x in names]
    assert all(path.read_bytes() == CONTENT for path in files)
    assert produced[:FILES_AT_ONCE] == names[:FILES_AT_ONCE], "the first files begin before one of them is complete"
    assert set(produced[: FILES_AT_ONCE * len(PIECES)]) == set(names[:FILES_AT_ONCE])
    assert len(progress) == len(names) * len(PIECES)


class Piece(bytearray):
    """Piece whose release can be observed."""

    __hash__ = object.__hash__


@pytest.mark.parametrize("files", [1, 3])
def test_few_pieces_are_kept_in_memory(tmp_path, files):
    alive, counts = weakref.WeakSet(), []

    def pieces():
        for _ in range(20):
            piece = Piece(1 << 16)
            alive.add(piece)
            counts.append(len(alive))
            yield memoryview(piece)

    write_files({tmp_path / f"{index}": pieces() for index in range(files)})
    assert max(counts) <= files * (PIECES_IN_FLIGHT + 1)
    assert not alive


def test_pieces_are_produced_in_the_calling_thread(tmp_path):
    """Ranks gather sharded weights in the thread that runs all other collective operations."""
    threads = []

    def pieces():
        threads.append(threading.current_thread())
        yield b"a"

    write_files({tmp_path / "a": pieces(), tmp_path / "b": pieces()})
    assert set(threads) == {threading.current_thread()}


def test_errors_of_writing_and_of_producing_are_raised_and_end_the_threads(tmp_path):
    def broken():
        yield b"a"
        raise ValueError("no weights")

    before = threading.active_count()
    with pytest.raises(OSError, match="No space left on device"):
        write_files({tmp_path / "whole": PIECES, Path("/dev/full"): PIECES * 10})
    with pytest.raises(ValueError, match="no weights"):
        write_files({tmp_path / "whole": PIECES, tmp_path / "broken": broken()})
    with pytest.raises(ValueError, match="no weights"):
        describe_pieces(broken())
    assert threading.active_count() == before


def test_the_pieces_of_skipped_files_are_produced_in_the_same_order_but_not_written(tmp_path):
    def write(skipped):
        produced = []

        def pieces(name):
            for piece in PIECES[: 2 + int(name)]:
                produced.append(name)
                yield b"" if name in skipped else piece

        files = {tmp_path / name: pieces(name) for name in "0123"}
        written = write_files(files, skipped=[tmp_path / name for name in skipped], at_once=3)
        assert {path.name for path in written} == {*"0123"} - {*skipped}
        return produced

    assert write("13") == write("02")
    for path in tmp_path.iterdir():
        path.unlink()
    write("13")
    assert {path.name for path in tmp_path.iterdir()} == {*"02"}
