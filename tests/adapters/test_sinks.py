"""The sinks: whole or not at all, safe names, private memory, what happens when they are full."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading

import pytest
import torch

from slotmirror.adapters.delivery.callback_sink import callback_named
from slotmirror.adapters.delivery.file_names import file_name
from slotmirror.adapters.delivery.file_sink import FileSink, read_rows, request_files
from slotmirror.adapters.delivery.request_rows import RequestRows
from slotmirror.adapters.delivery.shared_memory import SharedMemoryReader, SharedMemorySink
from slotmirror.adapters.delivery.sink import Sink, SinkQueue
from slotmirror.adapters.errors import DeliveryTimeoutError, SinkFullError
from slotmirror.core.errors import ConfigError


def request(req_id="7-994c9113", rows=5, width=3):
    tensor = torch.arange(float(rows * width)).reshape(rows, width)
    keys = {"hidden_states": tensor, "hidden_states.layer_1": tensor.to(torch.bfloat16)}
    return RequestRows(req_id, rows, keys, dict.fromkeys(keys, 0))


def same(one, other):
    assert (one.req_id, one.num_prompt_tokens) == (other.req_id, other.num_prompt_tokens)
    assert one.first_positions == other.first_positions
    assert set(one.rows) == set(other.rows)
    assert all(torch.equal(one.rows[key], other.rows[key]) for key in one.rows)


class GatedSink(Sink):
    """Blocks in `write` until opened; counts."""

    def __init__(self):
        self.open, self.entered, self.written = threading.Event(), threading.Event(), []

    def write(self, request):
        self.entered.set()
        if not self.open.wait(20):
            raise TimeoutError
        self.written.append(request.req_id)

    def stop_waiting(self):
        self.open.set()


def queue(sink, when_full, wait_s=0.01, requests=1):
    return SinkQueue(
        sink,
        bytes_max=requests * request().num_bytes,
        when_full=when_full,
        wait_s=wait_s,
        name="slotmirror-test-sink",
    )


# -- files ----------------------------------------------------------------------------------


def test_a_file_holds_the_whole_request(tmp_path):
    """Rows, dtypes, id and positions come back; the file is the user's alone."""
    sink = FileSink(tmp_path / "rows")
    sink.write(request())
    [path] = request_files(sink.folder)
    same(read_rows(path), request())
    assert path.name == "7-994c9113.safetensors"
    assert path.stat().st_mode & 0o777 == 0o600
    assert sink.folder.stat().st_mode & 0o777 == 0o700


def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch):
    """Neither a half file nor the name; the former file of that name stays."""
    sink = FileSink(tmp_path)
    sink.write(request(rows=2))

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        sink.write(request(rows=5))
    [path] = tmp_path.iterdir()
    assert read_rows(path).num_prompt_tokens == 2


def test_a_full_disk_is_an_os_error(tmp_path):
    """What the file system says comes out as OSError, whatever the library wraps it in."""
    sink = FileSink(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(OSError, match="cannot be written"):
            sink.write(request(rows=500))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    """The setting and the path are in the error."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"folder=.*file"):
        FileSink(tmp_path / "file" / "rows")


HOSTILE = [
    "../../etc/passwd",
    "/abs",
    ".",
    "..",
    "",
    "a\0b",
    "A",
    "é",
    "\ud800",
    "x" * 500,
    "a b\n",
]


def test_names_are_safe_and_distinct():
    """No separator, no dot but the suffix's, bounded; ids that differ have names that differ."""
    names = [file_name(req_id) for req_id in [*HOSTILE, "a", "x" * 501, "=41", "chatcmpl-1_0"]]
    assert len({name.lower() for name in names}) == len(names)
    for name in names:
        stem = name.removesuffix(".safetensors")
        assert set(stem) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_=~")
        assert len(name) < 200


@pytest.mark.parametrize("req_id", [r for r in HOSTILE if r != "\ud800"])
def test_a_hostile_id_stays_in_the_folder(tmp_path, req_id):
    """Its file is in the folder, and says the id as it was."""
    sink = FileSink(tmp_path / "rows")
    sink.write(request(req_id))
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
    [path] = sink.folder.iterdir()
    assert read_rows(path).req_id == req_id


# -- a full sink ----------------------------------------------------------------------------


def fill(sink, waiting):
    """One request in the sink, one in the queue: there is no room left."""
    waiting.put(request("first"))
    assert sink.entered.wait(20)


@pytest.mark.parametrize("when_full", ["block", "fail"])
def test_a_full_sink_fails_by_name(when_full):
    """After the wait, or at once; the settings to change are named, and it is counted."""
    sink = GatedSink()
    waiting = queue(sink, when_full)
    fill(sink, waiting)
    with pytest.raises(SinkFullError, match=r"queue_bytes_max.*when_full"):
        waiting.put(request("second"))
    assert waiting.stats.full_waits == 1
    sink.open.set()
    waiting.close(20)
    assert sink.written == ["first"]


def test_a_full_sink_drops_and_counts():
    """The engine goes on; what was dropped is counted."""
    sink = GatedSink()
    waiting = queue(sink, "drop")
    fill(sink, waiting)
    waiting.put(request("second"))
    sink.open.set()
    waiting.drain(20)
    assert (waiting.stats.requests_written, waiting.stats.requests_dropped) == (1, 1)
    waiting.close(20)


def test_a_full_sink_blocks_until_there_is_room():
    """`put` returns when the sink has taken the first request."""
    sink = GatedSink()
    waiting = queue(sink, "block", wait_s=20)
    fill(sink, waiting)
    opener = threading.Timer(0.0, sink.open.set)
    opener.start()
    waiting.put(request("second"))
    waiting.close(20)
    opener.join()
    assert sink.written == ["first", "second"]


def test_an_error_of_the_sink_is_sticky_and_names_its_cause(tmp_path):
    """Later puts, and the drain, raise it."""

    class Broken(GatedSink):
        def write(self, request):
            raise OSError("disk is gone")

    waiting = queue(Broken(), "block", requests=8)
    waiting.put(request())
    with pytest.raises(SinkFullError, match="disk is gone"):
        waiting.drain(20)
    with pytest.raises(SinkFullError, match="disk is gone"):
        waiting.put(request())
    waiting.close(20)
    waiting.close(20)


def test_a_drain_is_bounded():
    """It says what is left."""
    sink = GatedSink()
    waiting = queue(sink, "block")
    fill(sink, waiting)
    with pytest.raises(DeliveryTimeoutError, match="not written"):
        waiting.drain(0.01)
    waiting.close(0.01)


# -- shared memory --------------------------------------------------------------------------


def test_a_reader_takes_requests_in_order_and_unlinks_them(tmp_path):
    """The tensors live on when their segment is gone."""
    sink = SharedMemorySink("rows", bytes_max=1 << 20, root=tmp_path)
    reader = SharedMemoryReader("rows", root=tmp_path)
    for req_id in ("b", "a"):
        sink.write(request(req_id))
    taken = [reader.take(20), reader.take(20)]
    assert [one.req_id for one in taken] == ["b", "a"]
    assert list(request_files(sink.folder)) == []
    same(taken[0], request("b"))
    assert reader.producer_alive()
    sink.close()
    assert reader.take(20) is None
    assert not sink.folder.exists()


def test_shared_memory_is_private(tmp_path):
    """Folder and segments are the user's alone; a folder that is not is refused."""
    sink = SharedMemorySink("rows", bytes_max=1 << 20, root=tmp_path)
    sink.write(request())
    for folder in (sink.folder, sink.folder.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    [path] = request_files(sink.folder)
    assert path.stat().st_mode & 0o777 == 0o600
    sink.close()
    sink.folder.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="not private"):
        SharedMemoryReader("rows", root=tmp_path)


def test_a_name_is_used_once(tmp_path):
    """A second producer is refused while the first lives, and admitted after it."""
    first = SharedMemorySink("rows", bytes_max=1 << 20, root=tmp_path)
    with pytest.raises(ConfigError, match=r"name='rows'.*living producer"):
        SharedMemorySink("rows", bytes_max=1 << 20, root=tmp_path)
    first.close()
    SharedMemorySink("rows", bytes_max=1 << 20, root=tmp_path).close()


def test_a_full_memory_waits_for_the_reader(tmp_path):
    """One request fits; the second is written once the first is taken, or given up at the end."""
    sink = SharedMemorySink("rows", bytes_max=10, root=tmp_path)
    reader = SharedMemoryReader("rows", root=tmp_path)
    sink.write(request("first"))
    writer = threading.Thread(target=sink.write, args=(request("second"),))
    writer.start()
    assert reader.take(20).req_id == "first"
    writer.join(20)
    assert not writer.is_alive()
    sink.stop_waiting()
    with pytest.raises(SinkFullError, match="no room"):
        sink.write(request("third"))
    sink.close()
    assert reader.take(20).req_id == "second"
    reader.close()
    assert not sink.folder.exists()


CRASH = """
import os, signal, sys
from pathlib import Path
import torch
from slotmirror.adapters.delivery.request_rows import RequestRows
from slotmirror.adapters.delivery.shared_memory import SharedMemorySink
sink = SharedMemorySink("dead", bytes_max=1 << 20, root=Path(sys.argv[1]))
sink.write(RequestRows("a", 1, {"k": torch.ones(1, 2)}, {"k": 0}))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("who", ["reader", "next producer"])
def test_what_a_killed_producer_left_is_unlinked(tmp_path, who):
    """The reader still gets the whole request; then, or at the next start, all is gone."""
    done = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    reader = SharedMemoryReader("dead", root=tmp_path)
    assert not reader.producer_alive()
    assert reader.folder.exists()
    if who == "reader":
        assert reader.take(20).req_id == "a"
        reader.close()
    else:
        SharedMemorySink("other", bytes_max=1 << 20, root=tmp_path).close()
    assert not reader.folder.exists()


# -- callbacks ------------------------------------------------------------------------------


def test_a_callback_is_found_by_name():
    """As every worker process finds it."""
    assert callback_named("os.path:join") is os.path.join


@pytest.mark.parametrize("name", [None, 3, "os.path.join", "os:nothing", "no.such:thing", "os:sep"])
def test_a_wrong_callback_is_named(name):
    """The setting, what was given, and how it is written."""
    with pytest.raises(ConfigError, match=r"callback=.*package\.module:function"):
        callback_named(name)
