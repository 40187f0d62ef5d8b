"""Cutting keeps the text, bounds every run, and leaves ordinary text in one piece."""

from hypothesis import given
from hypothesis import strategies as st

from titan_relay.data.splitting import cut_long_runs


@given(st.text(alphabet="ab \n\u2003é", max_size=60), st.integers(1, 8))
def test_pieces_join_to_the_text_and_runs_are_short(text: str, limit: int) -> None:
    pieces = cut_long_runs(text, limit)
    assert "".join(pieces) == text
    for piece in pieces:
        run = 0
        for index, letter in enumerate(piece):
            same = index > 0 and letter.isspace() == piece[index - 1].isspace()
            run = run + 1 if same else 1
            assert run <= limit


def test_text_of_short_runs_is_not_cut() -> None:
    text = "word " * 100
    assert cut_long_runs(text, max_run_chars=5) == [text]
    assert cut_long_runs("ab  cdefgh", max_run_chars=3) == ["ab  cde", "fgh"]
