"""Log probabilities in the form of the completions API: four lists with an entry per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pegboard.engine.outputs import CompletionOutput, Logprob, RequestOutput


@dataclass(slots=True)
class CompletionLogprobs:
    """``tokens`` are names as ``Logprob.decoded_token`` has them ("" without detokenization). ``token_logprobs`` and
    ``top_logprobs`` are None for the first token of a prompt, which nothing predicts. ``text_offset`` indexes the answer's whole
    text, in a stream all the pieces joined."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token: str, logprob: float | None, top: dict[str, float] | None, offset: int) -> None:
        """Append one token to all lists."""
        self.tokens.append(token)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(offset)

    def extend(self, more: CompletionLogprobs) -> None:
        """Append the next piece of a stream."""
        self.tokens += more.tokens
        self.token_logprobs += more.token_logprobs
        self.top_logprobs += more.top_logprobs
        self.text_offset += more.text_offset


def completion_logprobs(output: RequestOutput, completion: CompletionOutput, echo: bool = False) -> CompletionLogprobs:
    """What ``completion``, one of ``output.outputs``, says of its tokens. With ``echo`` the tokens of the prompt come first, if
    its logprobs were asked for and its text is in ``completion``: in a stream, in the first piece of each answer."""
    listed = CompletionLogprobs()
    if echo and completion.with_prompt and output.echo is not None and output.prompt_logprobs is not None:
        prompt = zip(output.echo.tokens, output.prompt_logprobs, output.echo.offsets, strict=True)
        for token, entry, offset in prompt:
            listed.add(token, None if entry is None else _chosen(entry).logprob, None if entry is None else _top(entry), offset)
    for entry, offset in zip(completion.logprobs or (), completion.text_offsets or (), strict=True):
        chosen = _chosen(entry)
        listed.add(chosen.decoded_token or "", chosen.logprob, _top(entry), offset)
    return listed


def _chosen(entry: Mapping[int, Logprob]) -> Logprob:
    return next(iter(entry.values()))


def _top(entry: Mapping[int, Logprob]) -> dict[str, float]:
    """By name, likeliest first, the chosen token always among them. Of several tokens with one name the likeliest counts."""
    found: dict[str, float] = {}
    for logprob in sorted(entry.values(), key=lambda p: p.rank):
        found.setdefault(logprob.decoded_token or "", logprob.logprob)
    return found
