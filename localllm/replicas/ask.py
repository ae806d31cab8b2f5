"""What a front sends to a replica, and what a replica tells about itself."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from localllm.attach.engine_client import State
from localllm.attach.messages import ModelInfo, Stats
from localllm.replicas.affinity import BLOCK_TOKENS
from localllm.schedule.block_pool import hash_block


@dataclass(frozen=True, slots=True)
class Ask:
    """A request on its way to a replica of `model`, and not to one of those in `avoid`.

    `keys`: of the prompt's full blocks; `submit`: a Submit, packed.
    """

    model: str
    keys: tuple[bytes, ...]
    num_tokens: int
    avoid: frozenset[str]
    submit: bytes


@dataclass(frozen=True, slots=True)
class Report:
    """A replica's name, its model as in Ask, and how its engine is."""

    replica: str
    model: str
    state: State
    stats: Stats
    num_restarts: int
    info: ModelInfo


def keys_of(token_ids: Sequence[int], salt: bytes) -> tuple[bytes, ...]:
    """The keys of a prompt's full blocks, as the prefix cache chains them, but from a root of their
    own: what else they depend on is the same in all replicas.
    """
    ids, key, found = array("q", token_ids), hashlib.sha256(salt).digest(), []
    for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
        key = hash_block(key, ids[end - BLOCK_TOKENS : end])
        found.append(key)
    return tuple(found)
