"""What a resumed request may claim to have: only what some run can have given."""

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
    """Check the tokens that an earlier attempt drew.

    Args:
        field: What the message calls them.
        token_ids: The tokens.
        reason: Why they ended; none if more are to be drawn.
        most: Most tokens that may be drawn in all.
        end_tokens: Those that end a stream.
        vocabulary: All tokens that can be drawn are smaller, but for those that end a stream.
        keeps_end: The end token that was drawn is the last of the tokens; else it is not among them.

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
        raise InvalidRequestError(f"{field}: {drawn} tokens were drawn, though no more than {most} may be")
    if reason == "length" and not drawn:
        raise InvalidRequestError(f"{field}: the finish_reason is 'length', but there are no tokens")
    if reason is None and drawn == most:
        raise InvalidRequestError(f"{field}: all {most} tokens are there, but no finish_reason")
