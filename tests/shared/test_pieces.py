"""How large the pieces of prompts are."""

import pytest

from shared.vllm.pieces import FIRST_TOKENS, MIN_TOKENS, SLOWDOWN, PieceSize

ROW_S = 0.02


def settled(without_s: float, per_token_s: float) -> tuple[int, float]:
    """The size of pieces after some steps of a machine, and how long a step with one takes."""
    size = PieceSize(2048)
    for _ in range(30):
        size.took(without_s, 0, ROW_S)
        size.took(without_s + per_token_s * size.tokens, size.tokens, ROW_S)
    return size.tokens, without_s + per_token_s * size.tokens


@pytest.mark.parametrize(
    ("without_s", "per_token_s"), [(0.004, 5e-5), (0.015, 1e-4), (0.1, 1e-3), (0.5, 0.01)]
)
def test_a_step_with_a_piece_lasts_a_row_or_twice_one_without(without_s: float, per_token_s: float) -> None:
    tokens, seconds = settled(without_s, per_token_s)
    assert MIN_TOKENS < tokens < 2048
    assert seconds == pytest.approx(max(ROW_S, SLOWDOWN * without_s), rel=0.1)


def test_pieces_have_bounds_and_other_steps_do_not_count() -> None:
    assert settled(0.001, 1.0)[0] == MIN_TOKENS
    assert settled(0.001, 1e-9)[0] == 2048
    assert PieceSize(8).tokens == 8
    size = PieceSize(2048)
    size.took(100.0, 700, ROW_S)
    assert size.tokens == FIRST_TOKENS
