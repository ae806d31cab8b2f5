"""The engine's loop on its own: whose end it follows, and what it tells while it is busy."""

import socket
import subprocess
import sys
import time

from localllm.attach.messages import COMMANDS, REPLIES, Ping, Pong
from localllm.process.frames import Unpacker

# An engine whose step takes a minute, in C.
BUSY = """
import ctypes, socket, sys
from localllm.process.ending import end_with
from localllm.attach.engine_loop import EngineLoop
from localllm.attach.messages import ModelInfo, Stats

class Engine:
    is_warm = {is_warm}
    def has_unfinished(self): return True
    class scheduler:
        class pool: num_free, num_blocks = 0, 1
        running, waiting, num_preemptions = [], [], 0
        def unfinished(): return []

class TextEngine:
    engine = Engine()
    def step(self): ctypes.CDLL(None).sleep(60)
    def forget(self, own): pass
    def is_open(self, own): return True

channel = socket.socket(fileno=int(sys.argv[1]))
end_with(channel)
loop = EngineLoop(TextEngine(), channel, ModelInfo("model", 1, "", 1, None, 0.0))
loop._stats = Stats
loop.run()
"""


def start(*, is_warm: bool) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        code = BUSY.format(is_warm=is_warm)
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    ours.settimeout(20)
    return process, ours


def ping(channel: socket.socket) -> Pong:
    channel.sendall(COMMANDS.pack(Ping(3)))
    unpacker = Unpacker(REPLIES)
    while True:
        piece = channel.recv(1 << 16)
        assert piece, "the engine is gone"
        for message in unpacker.feed(piece):
            if isinstance(message, Pong):
                return message


def test_an_engine_whose_owner_is_gone_ends_whatever_it_is_doing() -> None:
    process, channel = start(is_warm=True)
    ping(channel)
    time.sleep(0.5)
    channel.close()
    began_s = time.monotonic()
    assert process.wait(20) != 0
    assert time.monotonic() - began_s < 4


def test_a_busy_engine_says_for_how_long_and_whether_it_may_compile() -> None:
    for is_warm in (True, False):
        process, channel = start(is_warm=is_warm)
        ping(channel)
        time.sleep(1)
        told = ping(channel)
        assert told.id == 3
        assert told.busy_s > 0.5
        assert told.is_compiling is not is_warm
        process.kill()
        process.wait()
        channel.close()
