"""The text of `offload train`: the split, the windows, and what is refused."""

import shutil

import numpy as np
import pytest
import torch

from offload.cli import data

LENGTH = 16


@pytest.fixture
def folder(tmp_path):
    """Twenty text files in two folders, each of its own bytes."""
    root = tmp_path / "text"
    for number in range(20):
        file = root / f"part{number % 2}" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"file {number} " * 40)
    return root


def test_the_same_files_give_the_same_split_anywhere(folder, tmp_path):
    first = data.load(str(folder), LENGTH)
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    again = data.load(str(copy), LENGTH)
    assert np.array_equal(first.training, again.training)
    assert np.array_equal(first.held_out, again.held_out)
    assert not first.notices


def test_the_parts_are_all_the_text_and_share_nothing(folder):
    corpus = data.load(str(folder), LENGTH)
    total = sum(file.stat().st_size for file in folder.rglob("*.txt"))
    assert len(corpus.training) + len(corpus.held_out) == total
    assert len(corpus.held_out) == int(total * data.HELD_OUT_SHARE)
    assert not np.shares_memory(corpus.training, corpus.held_out)


def test_a_file_is_mapped_and_split_at_its_end(tmp_path):
    content = bytes(range(256)) * 40
    (tmp_path / "file.bin").write_bytes(content)
    corpus = data.load(str(tmp_path / "file.bin"), LENGTH)
    assert isinstance(corpus.training, np.memmap)
    assert corpus.training.tobytes() + corpus.held_out.tobytes() == content


def test_batches_depend_on_seed_and_index_alone(folder):
    corpus = data.load(str(folder), LENGTH)
    inputs, targets = corpus.batch(1, 5, 4, LENGTH)
    assert inputs.shape == targets.shape == (4, LENGTH)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, corpus.batch(1, 5, 4, LENGTH)[0])
    assert not torch.equal(inputs, corpus.batch(1, 6, 4, LENGTH)[0])
    assert not torch.equal(inputs, corpus.batch(2, 5, 4, LENGTH)[0])


def test_every_training_byte_can_be_drawn(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(200)))
    corpus = data.load(str(tmp_path / "file"), 4)
    inputs, targets = corpus.batch(0, 0, 4000, 4)
    assert set(inputs.flatten().tolist()) == set(corpus.training[:-1].tolist())
    assert set(targets.flatten().tolist()) == set(corpus.training[1:].tolist())


@pytest.mark.parametrize(("windows", "found"), [(1, 1), (7, 7), (10_000, None)])
def test_held_out_windows_are_spread_and_do_not_overlap(folder, windows, found):
    corpus = data.load(str(folder), LENGTH)
    room = (len(corpus.held_out) - 1) // LENGTH
    batches = corpus.held_out_batches(windows, 3, LENGTH)
    inputs = torch.cat([inputs for inputs, _ in batches])
    assert len(inputs) == (found or room)
    assert all(len(inputs) <= 3 for inputs, _ in batches)
    held_out = torch.from_numpy(corpus.held_out.astype(np.int64))
    places = held_out[: room * LENGTH].view(room, LENGTH)
    taken = [int((places == row).all(1).nonzero()[0]) for row in inputs]
    assert taken[0] == 0
    if found is None:
        assert torch.equal(inputs.flatten(), held_out[: room * LENGTH])


def test_of_a_folder_what_is_not_text_is_left_out_with_one_notice(folder):
    before = data.load(str(folder), LENGTH)
    (folder / "picture.txt").write_bytes(b"PNG\0\1\2")
    (folder / ".hidden").write_text("secret" * 99)
    (folder / "dangling").symlink_to(folder / "nothing")
    after = data.load(str(folder), LENGTH)
    assert after.notices == ("files left out: 1 binary",)
    assert np.array_equal(before.training, after.training)


def test_a_folder_is_read_up_to_a_limit(folder, monkeypatch):
    monkeypatch.setattr(data, "FOLDER_BYTES_MAX", 2000)
    corpus = data.load(str(folder), LENGTH)
    assert len(corpus.training) + len(corpus.held_out) <= 2000
    assert "beyond" in corpus.notices[0]


def test_the_default_is_the_standard_library_without_its_tests():
    corpus = data.load(None, 256)
    assert len(corpus.training) > 4_000_000
    text = corpus.training.tobytes() + corpus.held_out.tobytes()
    assert b"class OrderedDict" in text
    assert b"class TestOrderedDict" not in text


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 120])
def test_too_little_text_is_refused_with_what_it_takes(tmp_path, content):
    (tmp_path / "few").write_bytes(content)
    with pytest.raises(ValueError, match=rf"holds {len(content)} bytes.*at least 130.*--seq-len"):
        data.load(str(tmp_path / "few"), LENGTH)


def test_a_folder_of_binaries_says_why_it_is_empty(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\0" * 500)
    with pytest.raises(ValueError, match=r"holds 0 bytes of text \(files left out: 1 binary"):
        data.load(str(tmp_path), LENGTH)


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--data .*nowhere: there is no such"):
        data.load(str(tmp_path / "nowhere"), LENGTH)
    with pytest.raises(ValueError, match="neither a regular file nor a folder"):
        data.load("/dev/null", LENGTH)
