"""The store: an oracle in memory, faults at every call, flipped bits."""

import errno
import itertools
import os
import threading
from contextlib import closing
from functools import partial

import numpy as np
import pytest
import torch

from aio import chunks
from offload.program.ops import ALL_CHUNKS, Value
from offload.runtime.store import Store
from tests.faults import aligned_tensor, failure_of
from tests.simulated import MemoryIO, SimulatedIO

pytestmark = pytest.mark.usefixtures("leaks_nothing")

WEIGHT, STATE, GRADIENT = Value("weight", 0), Value("state", 0), Value("gradient", 1)
LAYOUT = {WEIGHT[:2]: [8192, 4096], STATE[:2]: [8192] * 3, GRADIENT[:2]: [16384]}
opened = partial(Store, layout=LAYOUT, names=["a", "b"])
STATE_OFFSET = 8192 + 4096
"""In the file, of the states."""


def content_of(value, seed):
    return aligned_tensor(sum(LAYOUT[value[:2]]), seed)


@pytest.mark.parametrize("where", ["disk", "/dev/shm"])
def test_oracle(tmp_path, where):
    """Random writes and reads of extents and chunks against a dictionary of tensors."""
    directory = tmp_path if where == "disk" else where
    if not os.path.isdir(directory):
        pytest.skip("no tmpfs here")
    rng = np.random.default_rng(3)
    with closing(opened(directory)) as store:
        assert (store.volume.notice is None) == store.volume.direct
        truth = {}
        for key in LAYOUT:
            truth[key] = content_of(key, 1)
            store.write(Value(*key), truth[key], step=0)
        for step in range(1, 120):
            key, sizes = list(LAYOUT.items())[rng.integers(3)]
            chunk = ALL_CHUNKS if rng.random() < 0.4 else int(rng.integers(len(sizes)))
            start, stop, value = 0, sum(sizes), Value(*key, chunk)
            if chunk != ALL_CHUNKS:
                start = sum(sizes[:chunk])
                stop = start + sizes[chunk]
            if rng.random() < 0.5:
                data = aligned_tensor(stop - start, step)
                store.write(value, data, step)
                truth[key][start:stop] = data
            else:
                data = aligned_tensor(stop - start)
                store.read(value, data)
                assert torch.equal(data, truth[key][start:stop])
        assert store.chunks.bytes_read > 0
        assert store.chunks.bytes_written > sum(map(sum, LAYOUT.values()))
    assert os.listdir(tmp_path) == []


def test_after_a_transfer_that_failed_none_is_under_way(monkeypatch):
    for seed in range(5):
        with closing(opened("/simulated", io=SimulatedIO(seed, delay_s_max=0.02))) as store:
            store.write(STATE, content_of(STATE, 1), step=1)
            store.chunks._kept[store.numbers(Value("state", 0, 0)), chunks._CRC] ^= 1
            started, read_into = [], store.volume.read_into

            def read_and_note(*place, started=started, read_into=read_into):
                started.append(read_into(*place))
                return started[-1]

            monkeypatch.setattr(store.volume, "read_into", read_and_note)
            with pytest.raises(OSError, match="checksum"):
                store.read(STATE, content_of(STATE, 2))
            assert len(started) == 3
            assert all(ticket.done() for ticket in started)


def test_long_chunks_are_checked_in_stretches(tmp_path):
    size = (9 << 20) + 4096
    with closing(Store(tmp_path, {WEIGHT[:2]: [size]}, ["w"])) as store:
        data, back = aligned_tensor(size, 5), aligned_tensor(size)
        store.write(WEIGHT, data, 1)
        store.read(WEIGHT, back)
        assert torch.equal(data, back)


def run_all(store):
    """Everything a store does, each value checked."""
    for step in (1, 2):
        for key, sizes in LAYOUT.items():
            data = content_of(key, step)
            store.write(Value(*key), data, step)
            back = aligned_tensor(sum(sizes))
            store.read(Value(*key), back)
            assert torch.equal(data, back)
            assert store.entry(Value(*key, 0)).step == step


@pytest.mark.usefixtures("one_call")
@pytest.mark.parametrize(
    "code", [errno.EIO, *(pytest.param(c, marks=pytest.mark.slow) for c in (28, errno.EDQUOT))]
)
def test_every_call_can_fail(code):
    """The n-th call fails for every n: a clear error, and the store can be used again."""

    def work():
        with closing(opened("/simulated", io=io)) as store:
            error = failure_of(lambda: run_all(store))
            run_all(store)
        if error is not None:
            raise error

    for number in itertools.count(1):
        io = SimulatedIO(number, errors={number: code})
        error = failure_of(work)
        assert io.inner.files == {}
        if error is None:
            break
        assert error.errno == code
        assert "failed: " in error.strerror
        assert error.filename.startswith("/simulated")
        if number > len(io.calls) // 2 + 5:
            break  # from here on it is the second, equal run
    assert number > 25


@pytest.mark.usefixtures("one_call")
def test_every_transfer_can_be_short():
    for number in itertools.count(1):
        io = SimulatedIO(number, shorts={number})
        with closing(opened("/simulated", io=io)) as store:
            run_all(store)
        if number > len(io.calls):
            break
    assert number > 25


@pytest.mark.parametrize("seed", range(5))
def test_slow_short_and_interrupted(seed):
    io = SimulatedIO(seed, short_rate=0.4, retry_rate=0.2, delay_s_max=0.0003)
    with closing(opened("/simulated", io=io)) as store:
        run_all(store)


@pytest.mark.usefixtures("one_call")
def test_failed_write_is_not_read_as_the_old_value():
    io = SimulatedIO(0)
    with closing(opened("/simulated", io=io)) as store:
        data = content_of(GRADIENT, 1)
        store.write(GRADIENT, data, 1)
        io.errors[len(io.calls) + 1] = errno.EIO
        with pytest.raises(OSError, match="chunk 0 of gradient of 'b'"):
            store.write(GRADIENT, data, 2)
        with pytest.raises(ValueError, match="never completely written"):
            store.read(GRADIENT, data)
        store.write(GRADIENT, data, 2)
        store.read(GRADIENT, data)


def test_flipped_bits_are_found():
    io = MemoryIO()
    with closing(opened("/simulated", io=io)) as store:
        data = content_of(STATE, 1)
        store.write(STATE, data, 1)
        sizes = LAYOUT[STATE[:2]]
        (content,) = io.files.values()
        start = STATE_OFFSET + sum(sizes[:2])
        at = start + 77
        content[at] ^= 4
        text = f"offset {start}, chunk 2 of state of 'a'.*mismatch"
        with pytest.raises(OSError, match=text) as caught:
            store.read(STATE, aligned_tensor(sum(sizes)))
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == store.volume.path
        store.read(Value("state", 0, 1), aligned_tensor(8192))
        content[at] ^= 4
        store.read(STATE, data)
    with closing(opened("/simulated", io=SimulatedIO(0, flip_rate=1.0))) as store:
        store.write(STATE, data, 1)
        with pytest.raises(OSError, match="failed") as caught:
            store.read(STATE, data)
        assert caught.value.errno == errno.EIO


def test_what_was_read_instead_is_told():
    """Of a place that holds another chunk, and of one that holds what was there before."""
    io = MemoryIO()
    with closing(opened("/simulated", io=io)) as store:
        found = aligned_tensor(24576)
        store.write(STATE, content_of(STATE, 1), 4)
        store.write(WEIGHT, content_of(WEIGHT, 3), 5)
        (content,) = io.files.values()
        first = slice(STATE_OFFSET, STATE_OFFSET + 8192)
        before = bytes(content[first])
        content[first] = content[STATE_OFFSET + 8192 : STATE_OFFSET + 16384]
        told = r"chunk 0 of state of 'a'.*bytes of chunk 1 of state of 'a', written in step 4"
        with pytest.raises(OSError, match=told):
            store.read(STATE, found)
        content[first] = content[:8192]
        with pytest.raises(OSError, match=r"bytes of chunk 0 of weight of 'a', written in step 5"):
            store.read(STATE, found)
        store.write(STATE, content_of(STATE, 2), 6)
        content[first] = before
        told = r"those of step 4: likely the drive lost the write of 6;"
        with pytest.raises(OSError, match=told):
            store.read(STATE, found)
        crc = store.chunks._crc(np.frombuffer(before, np.uint8), 0)
        number = store.numbers(Value("state", 0, 0))[0]
        assert told[:20] in str(store.chunks.explain((0, number, 0, 0, 0, 0, 0, crc)))


def test_what_a_caller_can_get_wrong():
    with closing(opened("/simulated", io=MemoryIO())) as store:
        good = content_of(GRADIENT, 1)
        with pytest.raises(ValueError, match="never"):
            store.read(GRADIENT, good)
        with pytest.raises(KeyError):
            store.read(Value("weight", 1), good)
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.write(GRADIENT, good, 1)


def test_bad_directory_and_no_space(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        opened(tmp_path / "missing")
    with pytest.raises(OSError, match="8,192 bytes are free") as caught:
        opened("/simulated", io=MemoryIO(capacity_bytes=8192))
    assert caught.value.errno == errno.ENOSPC


def test_threads_and_several_stores_in_one_directory(tmp_path):
    failures = []

    def work(store, chunk):
        try:
            data, back = aligned_tensor(8192, chunk), aligned_tensor(8192)
            for step in range(20):
                data += 1
                store.write(Value("state", 0, chunk), data, step)
                store.read(Value("state", 0, chunk), back)
                assert torch.equal(data, back)
        except BaseException as error:
            failures.append(error)

    with closing(opened(tmp_path)) as one, closing(opened(tmp_path)) as two:
        threads = [threading.Thread(target=work, args=(s, n)) for s in (one, two) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
