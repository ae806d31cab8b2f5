"""Work that is done while somebody types."""

import signal
import threading
import time

import pytest

from localllm.cli.repl.idle import meanwhile


def test_it_goes_on_until_nothing_is_left() -> None:
    left = [3, 2, 1]
    done = threading.Event()

    def work() -> bool:
        if left:
            left.pop()
            return True
        done.set()
        return False

    with meanwhile(work):
        assert done.wait(5)
    assert left == []


def test_no_call_is_under_way_once_the_block_is_left() -> None:
    state = {"running": False, "calls": 0}

    def work() -> bool:
        state["running"] = True
        time.sleep(0.05)
        state["running"] = False
        state["calls"] += 1
        return True

    for _ in range(3):
        with meanwhile(work):
            time.sleep(0.02)
        assert not state["running"]
        calls = state["calls"]
        time.sleep(0.1)
        assert state["calls"] == calls


def test_ctrl_c_waits_for_the_call_and_is_not_lost() -> None:
    is_running, is_interrupted = threading.Event(), threading.Event()
    ended: list[float] = []

    def work() -> bool:
        is_running.set()
        is_interrupted.wait(30)
        time.sleep(0.1)
        ended.append(time.monotonic())
        return True

    def interrupt_soon() -> None:
        time.sleep(0.1)
        signal.raise_signal(signal.SIGINT)
        is_interrupted.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupter = threading.Thread(target=interrupt_soon)

    def leave_while_it_runs() -> None:
        with meanwhile(work):
            is_running.wait()
            interrupter.start()

    try:
        with pytest.raises(KeyboardInterrupt):
            leave_while_it_runs()
        assert ended
    finally:
        interrupter.join()
        signal.signal(signal.SIGINT, before)


def test_an_error_is_left_to_whoever_needs_the_work() -> None:
    def work() -> bool:
        raise RuntimeError("no")

    with meanwhile(work):
        pass
