"""Whose prompts share blocks of the prefix cache and encoded media."""

from vllm.inputs import MultiModalInput, TokensInput


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
