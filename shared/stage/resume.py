"""Checks the tokens of a resumed request: only what an earlier attempt can have produced."""

from collections.abc import Collection, Sequence

from omnirelay.errors import InvalidRequestError
from shared.messages import FinishReason


def check_resumed(
    field: str,
    token_ids: Sequence[int],
    reason: FinishReason | None,
    *,
    most: int,
    end_tokens: Collection[int],
    vocabulary: int,
    keeps_end: bool,
) -> None:
    """Check the tokens that an earlier attempt sampled.

    Args:
        field: Their name in the message.
        token_ids: The tokens.
        reason: Why they ended; None if more are to be sampled.
        most: Limit on all sampled tokens.
        end_tokens: Tokens that end a stream.
        vocabulary: All other tokens are smaller.
        keeps_end: A sampled end token is the last of the tokens; otherwise it is not among them.

    Raises:
        InvalidRequestError: Naming the field.
    """
    stopped = reason == "stop"
    drawn = len(token_ids) + (stopped and not keeps_end)
    if stopped and keeps_end:
        if not token_ids or token_ids[-1] not in end_tokens:
            raise InvalidRequestError(f"{field}: the finish_reason is 'stop', but no end token is the last")
        token_ids = token_ids[:-1]
    for index, token in enumerate(token_ids):
        if token in end_tokens:
            raise InvalidRequestError(f"{field}[{index}]: token {token} would have ended the stream")
        if token >= vocabulary:
            raise InvalidRequestError(
                f"{field}[{index}]: token {token} lies outside the vocabulary of {vocabulary}"
            )
    if drawn > most:
        raise InvalidRequestError(f"{field}: {drawn} tokens were sampled, limit {most}")
    if reason == "length" and not drawn:
        raise InvalidRequestError(f"{field}: the finish_reason is 'length', but there are no tokens")
    if reason is None and drawn == most:
        raise InvalidRequestError(f"{field}: all {most} tokens are there, but no finish_reason")
