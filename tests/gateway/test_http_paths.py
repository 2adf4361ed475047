"""Paths that clients of other servers ask for, besides OpenAI's."""

from typing import Any

from tests.gateway.bench import Configure
from tests.gateway.fake_stages import SPEAKERS
from tests.gateway.http_bench import HI, MODEL, HttpBench, http_bench, http_gateway, speaking


async def test_slashes_too_many(web: HttpBench) -> None:
    plain = (await web.http.get("/v1/models")).json()
    for path in ("//v1/models", "/v1/models/", "/v1//models//"):
        assert (await web.http.get(web.url + path)).json() == plain
    assert (await web.http.get("/v1/none/")).status_code == 404


async def test_voices_as_clients_list_them(web: HttpBench) -> None:
    voices = (await web.http.get("/v1/audio/voices")).json()["voices"]
    names = [each["id"] for each in voices]
    assert sorted(names[: len(SPEAKERS)]) == sorted(SPEAKERS)
    assert "alloy" in names
    assert all(each["name"] == each["id"] for each in voices)


async def test_further_names_of_the_model(configure: Configure) -> None:
    config = configure(http_gateway(model_names=["tts-1"]))
    async with http_bench(config) as b, speaking(b, "Hello", []):
        assert (await b.post(model="tts-1")).status_code == 200
        refused = await b.post(model="tts-2")
        assert refused.status_code == 404
        assert "gateway.model_names" in refused.text


async def test_tokens_of_a_text_and_back(web: HttpBench) -> None:
    async with speaking(web, "Hello", []):
        text = "How are you? 😀 <|im_end|>"
        body = {"model": MODEL, "prompt": text, "add_special_tokens": True, "return_token_strs": True}
        answer = (await web.http.post("/tokenize", json=body)).json()
        # Special tokens of a client are ordinary text.
        assert len(answer["tokens"]) > len(web.encode(text))
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == web.stages.max_positions
        back = await web.http.post("/detokenize", json={"tokens": answer["tokens"]})
        assert back.json() == {"prompt": text}
        chat = (await web.http.post("/tokenize", json={"messages": HI})).json()
        await web.post()
        assert chat["tokens"] == web.stages.requests[0].prompt_token_ids
        wrongs: list[dict[str, Any]] = [
            {},
            {"prompt": 5},
            {"messages": []},
            {"prompt": "x", "model": "none"},
        ]
        for wrong in wrongs:
            assert (await web.http.post("/tokenize", json=wrong)).status_code in (400, 404)
        assert (await web.http.post("/detokenize", json={"tokens": ["x"]})).status_code == 400
        assert (await web.http.post("/detokenize", json={"tokens": [-1]})).status_code == 400
