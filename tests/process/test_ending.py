"""A program that is told to end does so within two seconds, whatever it is doing."""

import signal
import subprocess
import sys
import time

import pytest

# What computes in C without Python's lock, as an engine's step does.
STUCK = """
import ctypes, signal, sys
from localllm.process.ending import end_in_time
end_in_time({signal.SIGINT: 130, signal.SIGTERM: 143})
{handler}
print("ready", flush=True)
libc = ctypes.CDLL(None)
while True:
    libc.sleep(30)
"""
PATIENT = """
class Conversation:
    ends_program = False
    def allowed_s(self, count):
        return 2.0 if count > 1 else None
    def handle(self, number, frame):
        pass
signal.signal(signal.SIGINT, Conversation().handle)
"""
SPEAKER = """
class Run:
    def say_last_words(self):
        {speech}
    def leave(self, number, frame):
        pass
signal.signal(signal.SIGINT, Run().leave)
"""
RESTARTING = "signal.siginterrupt(signal.SIGINT, False); signal.siginterrupt(signal.SIGTERM, False)"


def start(code: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_step_in_c_does_not_keep_a_program_from_ending(number: int, code: int) -> None:
    ignore = f"signal.signal({int(number)}, lambda *_: None)\n{RESTARTING}"
    with start(STUCK.replace("{handler}", ignore)) as process:
        time.sleep(0.1)
        began_s = time.monotonic()
        process.send_signal(number)
        assert process.wait(20) == code
        assert 1.5 < time.monotonic() - began_s < 4


def test_a_conversation_goes_on_after_the_first_and_ends_after_two_that_are_not_heard() -> None:
    with start(STUCK.replace("{handler}", PATIENT)) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(2.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_a_handler_that_is_gone_by_then_has_heard() -> None:
    code = STUCK.replace("{handler}", PATIENT).replace(
        "while True:\n    libc.sleep(30)",
        "import time\nwhile True:\n    time.sleep(0.7)\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)",
    )
    with start(code) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        time.sleep(3)
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize(
    ("speech", "said"), [("print('as it was', flush=True)", "as it was\n"), ("libc.sleep(30)", "")]
)
def test_what_a_handler_had_no_time_to_say_is_said_at_the_end(speech: str, said: str) -> None:
    handler = f"{SPEAKER.replace('{speech}', speech)}\n{RESTARTING}"
    with start(STUCK.replace("{handler}", handler)) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stdout is not None
        assert process.stdout.read() == said
