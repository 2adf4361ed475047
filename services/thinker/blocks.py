"""How the prefix cache tells blocks of KV memory apart: by their tokens, and by where these stand.

vLLM takes a block for another one if both have the same tokens behind the same ones.  What was computed for
them is the same only if their position ids are, and those of a reply need not be: while it is drawn it counts
on from the largest position of its prompt, and in the next turn it is text behind the prompt's last token.
The two differ, in transformers too, where a video is wider than its sound is long.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

from vllm.inputs import MultiModalInput, TokensInput
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from services.thinker.media.rules import Positions
from services.thinker.resume import prompt_length

BlockHasher = Callable[[Request], list[BlockHash]]
"""Hashes of the blocks that a request has filled since the last time; each covers those before it."""

PromptPositions = Callable[[int, Sequence[MultiModalFeatureSpec]], Positions]
"""Position ids int64 ``[3, length]`` of a prompt, from its length and the engine's features of its media."""

_APART: Final = b"a reply that counts from the largest position of its prompt"


def hash_replies_apart(hash_blocks: BlockHasher, block_size: int, positions: PromptPositions) -> BlockHasher:
    """vLLM's hasher, which tells a reply from the same text in a prompt where their positions differ."""

    def hash_apart(request: Request) -> list[BlockHash]:
        hashes = hash_blocks(request)
        length = prompt_length(request.prompt_token_ids or [])
        # Of the new blocks, the first that has a token of the reply.
        first = length // block_size - len(request.block_hashes)
        if not 0 <= first < len(hashes) or not _has_gap(request, length, positions):
            return hashes
        apart = BlockHash(hashlib.sha256(hashes[first] + _APART).digest())
        # What follows is hashed behind this one, of an earlier attempt or still to come.
        request.block_hashes += [*hashes[:first], apart]
        return hash_blocks(request)

    return hash_apart


def salted(prompt: TokensInput | MultiModalInput, salt: str | None) -> TokensInput | MultiModalInput:
    """The prompt, whose blocks and encoded media only prompts of the same salt share."""
    if salt is None:
        return prompt
    prompt = prompt.copy()
    prompt["cache_salt"] = salt
    if prompt["type"] == "multimodal":
        hashes = prompt["mm_hashes"].items()
        prompt["mm_hashes"] = {kind: [f"{salt}:{each}" for each in of_kind] for kind, of_kind in hashes}
    return prompt


def _has_gap(request: Request, length: int, positions_of: PromptPositions) -> bool:
    """Whether the reply's positions do not follow that of the prompt's last token."""
    if not request.mm_features:
        return False
    positions = positions_of(length, request.mm_features)
    return bool(positions.max() > positions[:, -1].max())
