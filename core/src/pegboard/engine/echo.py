"""Echo: the prompt's text in front of the answer's, and where in it each prompt token begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pegboard.contracts.tokenizer import Tokenizer
from pegboard.engine.answer_text import LocatedText
from pegboard.engine.outputs import EchoedPrompt
from pegboard.engine.token_names import TokenNames

_NEAR: Final = 16
"""Bytes within which a token is looked for that does not end where the next one begins."""


def echoed_prompt(
    tokenizer: Tokenizer,
    names: TokenNames,
    token_ids: Sequence[int],
    text: str | None,
    skip_special_tokens: bool,
    located: bool,
) -> EchoedPrompt:
    """The prompt ``token_ids`` as it is shown: as the caller wrote it (``text``), or decoded where it came as ids. With
    ``located`` also its tokens and where they begin."""
    if not located:
        return EchoedPrompt(tokenizer.decode(token_ids, skip_special_tokens) if text is None else text)
    tokens = [names[token_id][0] for token_id in token_ids]
    if text is not None:
        return EchoedPrompt(text, tokens, _found(tokenizer, token_ids, text))
    shown = LocatedText(tokenizer, skip_special_tokens)
    pieces, offsets = [], []
    for token_id in token_ids:
        offsets.append(shown.locate(token_id))
        pieces.append(shown.push(token_id))
    return EchoedPrompt("".join([*pieces, shown.flush()]), tokens, offsets)


def _found(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Where in ``text``, which became ``token_ids``, each of them begins.

    A tokenizer may put special tokens and spaces before a text, which are not in it, so the search goes backwards: what is left
    over at the beginning has the place 0. Where a tokenizer changes a text (its case, say), places are in order but not exact.
    """
    data = text.encode("utf-8", "surrogatepass")
    characters = [i for i, character in enumerate(text) for _ in character.encode("utf-8", "surrogatepass")] + [len(text)]
    offsets, end = [], len(data)
    for token_id in reversed(token_ids):
        spelled = tokenizer.token_bytes(token_id)
        if spelled is None:
            spelled = (tokenizer.token_text(token_id) or "").encode()
        elif not data.endswith((spelled, spelled.removeprefix(b" ")), 0, end):
            near = data.rfind(spelled, max(0, end - len(spelled) - _NEAR), end)
            end = near + len(spelled) if near >= 0 else end
        for form in (spelled, spelled.removeprefix(b" ")):
            if data.endswith(form, 0, end):
                end -= len(form)
                break
        offsets.append(characters[end])
    return offsets[::-1]
