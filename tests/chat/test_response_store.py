"""Kept answers: whose they are, how long they stay, and what goes on from them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.chat.response_store import Quota, ResponseStore, StoredResponse
from localllm.errors import ContextLengthError

OWNER, OTHER = b"a", b"b"
MANY = 1 << 20


def answer(name: str, previous: str | None = None, text: str = "x") -> StoredResponse:
    return StoredResponse(name, previous, [{"content": text}], {"id": name, "output": [text]})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ResponseStore]:
    store = ResponseStore(tmp_path / "sessions.db", Quota(MANY, 3600))
    yield store
    store.close()


def test_a_conversation_is_read_from_its_beginning(store: ResponseStore) -> None:
    store.put(OWNER, answer("1"))
    store.put(OWNER, answer("2", "1"))
    store.put(OWNER, answer("3", "2"))
    store.put(OWNER, answer("other", "1"))
    found = store.conversation(OWNER, "3", MANY)
    assert found == [answer("1"), answer("2", "1"), answer("3", "2")]


def test_it_is_gone_if_one_of_its_answers_is(store: ResponseStore) -> None:
    store.put(OWNER, answer("1"))
    store.put(OWNER, answer("2", "1"))
    assert store.remove(OWNER, "1")
    assert not store.remove(OWNER, "1")
    assert store.conversation(OWNER, "2", MANY) is None
    assert store.get(OWNER, "2") == answer("2", "1")


def test_it_belongs_to_one_key(store: ResponseStore) -> None:
    store.put(OWNER, answer("1"))
    assert store.get(OTHER, "1") is None
    assert store.conversation(OTHER, "1", MANY) is None
    assert not store.remove(OTHER, "1")
    assert store.get(OWNER, "1") is not None


def test_it_is_no_larger_than_a_request_may_be(store: ResponseStore) -> None:
    store.put(OWNER, answer("1", text="x" * 1000))
    store.put(OWNER, answer("2", "1", text="x" * 1000))
    assert store.conversation(OWNER, "1", 3000) is not None
    with pytest.raises(ContextLengthError, match="over 3,000 bytes"):
        store.conversation(OWNER, "2", 3000)


def test_the_quota_keeps_what_was_used_last(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "sessions.db", Quota(6000, 3600))
    for name in ("1", "2"):
        store.put(OWNER, answer(name, text="x" * 1000))
    assert store.conversation(OWNER, "1", MANY) is not None
    store.put(OWNER, answer("3", text="x" * 1000))
    assert [name for name in "123" if store.get(OWNER, name)] == ["1", "3"]
    store.close()


def test_who_keeps_much_pushes_out_nobody_else(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "sessions.db", Quota(6000, 3600))
    store.put(OTHER, answer("kept", text="x" * 500))
    for number in range(40):
        store.put(OWNER, answer(f"{number}", text="x" * 1000))
    assert store.get(OTHER, "kept") is not None
    assert [number for number in range(40) if store.get(OWNER, f"{number}")] == [38, 39]
    store.put(OWNER, answer("too large", text="x" * 10_000))
    assert store.get(OTHER, "kept") is not None
    store.close()


def test_age_ends_it(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "sessions.db", Quota(MANY, -1))
    store.put(OWNER, answer("1"))
    assert store.get(OWNER, "1") is None
    store.close()
