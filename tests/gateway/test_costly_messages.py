"""Messages that cost far more than their size: time that grows with its square, or memory not counted."""

import sys

import pytest

from gateway.http.fields import convert
from gateway.http.openai import messages, responses
from gateway.http.openai.messages import Message, joined_results
from omnirelay.content import ChatMessage, TextPart
from omnirelay.errors import InvalidRequestError


@pytest.mark.timeout(60)
def test_a_name_like_a_message_of_an_error_is_not_searched() -> None:
    """65,536 times in one name it would take an hour: 4,000 times took 13 s."""
    fields = {"role": "user", "content": "x", "matching regex '" * 65_536: 1}
    with pytest.raises(InvalidRequestError, match="unknown field"):
        convert(fields, Message, "messages[0]")


def test_results_of_tools_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, 2,047 results behind one of 4 MB took 14 s."""
    made: list[str] = []

    def make(role: str, content: str) -> ChatMessage:
        made.append(content)
        return ChatMessage("user", content)

    monkeypatch.setattr(messages, "ChatMessage", make)
    results = [ChatMessage("user", str(number)) for number in range(100)]
    asked = [Message(role="user"), *[Message(role="tool")] * 100, Message(role="user")]
    question = ChatMessage("user", "and?")
    joined = joined_results(asked, [question, *results, question])
    assert joined == [question, ChatMessage("user", "\n".join(map(str, range(100)))), question]
    assert len(made) == 1


def test_kept_messages_without_text_count_with_what_they_take() -> None:
    message = ChatMessage("user", [TextPart("") for _ in range(1000)])
    assert responses._size(message) >= 1000 * (sys.getsizeof(TextPart("")) + 8)
    assert responses._size(ChatMessage("user", "")) >= sys.getsizeof(ChatMessage("user", ""))
