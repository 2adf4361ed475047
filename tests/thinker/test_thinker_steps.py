"""A step of the thinker as on GPUs: the decoder is traced whole, and nothing waits."""

from tests.support.answers import random_prompt
from tests.support.compiled import compiled
from tests.support.lint import linted
from tests.support.thinking import ThinkerRig, speech_of, thinker_request


def test_the_decoder_is_traced_whole_and_nothing_in_a_step_waits(thinker: ThinkerRig) -> None:
    runner = thinker.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    model = runner.get_model()

    def answered() -> list[list[int]]:
        thinker.forget()
        # All of a prompt is computed each time.
        assert thinker.engine.reset_prefix_cache()
        names = {f"r{length}": random_prompt(length) for length in (9, 130)}
        thinker.run(
            *(
                thinker_request(name, prompt, speech=speech_of(), max_tokens=12)
                for name, prompt in names.items()
            )
        )
        return [thinker.text(name) for name in names]

    expected = answered()
    with linted(model) as counts:
        assert answered() == expected
    assert min(counts) > 20
    with compiled(model.language_model.model) as graphs:
        assert answered() == expected
    # Prompts and several requests are of one; PyTorch makes another of a single token.
    assert 1 <= len(graphs) <= 2
