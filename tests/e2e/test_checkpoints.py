"""What a checkpoint says, and what the engine makes of it: embeddings, end-of-sequence ids, vocabularies, dtypes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from pegboard import SamplingParams
from pegboard.entrypoints.cli.main import main
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.gguf_files import write_gguf

CLOSE = 1e-3
"""A logit gap that rounding alone may make."""


@pytest.fixture
def checkpoint(tmp_path: Any) -> Callable[..., Any]:
    return lambda **options: make_checkpoint(tmp_path / f"model-{len(list(tmp_path.iterdir()))}", **options)


@pytest.mark.parametrize(("tied", "head"), [(True, None), (True, "copy"), (False, "different"), (False, "copy")])
def test_tied_and_untied_embeddings(
    checkpoint: Any, open_llm: Any, greedy: Any, random_prompts: Any, reference_of: Any, tied: bool, head: str | None
) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        if head == "copy":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    folder = checkpoint(tie_word_embeddings=tied, edit=edit)
    llm, reference = open_llm(folder), reference_of(folder)
    prompts = random_prompts([3, 20, 40])
    for prompt, output in zip(prompts, llm.generate(prompts, greedy(20)), strict=True):
        reference.check_greedy(prompt, output.outputs[0].token_ids)


def _spoken(llm: Any, greedy: Any) -> list[int]:
    tokens = llm.generate([[5, 6, 7]], greedy(30))[0].outputs[0].token_ids
    assert len(set(tokens)) > 5
    return tokens  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer_has_it"),
    [
        ("int", None, False),
        ("list of 3", None, False),
        (None, "int", False),
        ("other", "list", False),
        (None, None, True),
        ("other", None, True),
        ("bad list", None, False),
    ],
)
def test_any_end_of_sequence_id_of_the_union_ends_an_answer(
    checkpoint: Any, open_llm: Any, greedy: Any, caplog: Any, generation: Any, config: Any, tokenizer_has_it: bool
) -> None:
    folder = checkpoint()
    llm = open_llm(folder)
    tokens = _spoken(llm, greedy)
    place = next(i for i, t in enumerate(tokens) if i >= 4 and t not in tokens[:i])
    eos = tokens[place]
    forms = {"int": eos, "list": [1, eos], "list of 3": [1, 2, eos], "other": 3, "bad list": [5000, "x", eos], None: None}
    _change(folder / "generation_config.json", eos_token_id=forms[generation])
    _change(folder / "config.json", eos_token_id=forms[config])
    if tokenizer_has_it:
        _change(folder / "tokenizer_config.json", eos_token=llm.get_tokenizer().token_text(eos))
    else:
        _change(folder / "tokenizer_config.json", eos_token=None)
    llm = open_llm(folder)
    [output] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=30))
    answer = output.outputs[0]
    assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == (tokens[: place + 1], "stop", None)
    assert answer.text == llm.get_tokenizer().decode(tokens[:place])
    if generation == "bad list":
        assert "5000" in caplog.text
        assert "'x'" in caplog.text


def test_without_any_end_of_sequence_id_an_answer_runs_to_its_limit(checkpoint: Any, open_llm: Any) -> None:
    folder = checkpoint(generation_config={}, config_overrides={"eos_token_id": None})
    _change(folder / "tokenizer_config.json", eos_token=None)
    [output] = open_llm(folder).generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=20))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (20, "length")


def _change(file: Any, **changes: Any) -> None:
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_rows_that_only_pad_the_embedding_are_never_chosen(checkpoint: Any, open_llm: Any, greedy: Any) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"][1000:] = 3 * tensors["lm_head.weight"][:100]  # would win

    llm = open_llm(checkpoint(vocab_size=1100, tokenizer_size=1000, edit=edit))
    params = [
        greedy(20, logprobs=20),
        SamplingParams(temperature=2.0, top_k=1000, seed=1, max_tokens=40, logprobs=20, ignore_eos=True),
        SamplingParams(temperature=2.0, top_p=0.99, seed=2, max_tokens=40, logprobs=20, ignore_eos=True),
        SamplingParams(temperature=2.0, seed=3, max_tokens=40, logprobs=20, ignore_eos=True),
    ]
    for output in llm.generate([[5, 6, 7]] * 4, params):
        answer = output.outputs[0]
        assert max(answer.token_ids) < 1000
        assert max(t for entry in answer.logprobs for t in entry) < 1000
    assert llm.generate([[5, 1050, 7]], greedy(2))[0].outputs[0].finish_reason == "length", "an id that the embedding has"
    with pytest.raises(ValueError, match=r"=1100 is not in the model's vocabulary"):
        llm.generate([[5, 1100]], greedy(2))


def test_a_tokenizer_larger_than_the_embedding_warns_and_its_ids_are_refused(
    checkpoint: Any, open_llm: Any, greedy: Any, caplog: Any
) -> None:
    llm = open_llm(checkpoint(vocab_size=1000, tokenizer_size=1100))
    assert "ids from 1000 on are refused" in caplog.text
    word = next(t for i in range(1000, 1100) if llm.get_tokenizer().encode(t := llm.get_tokenizer().decode([i])) == [i])
    with pytest.raises(ValueError, match=r"tokens of prompt\[0\]=1\d\d\d is not in the model's vocabulary"):
        llm.generate(word, greedy(2))
    assert len(llm.generate(" the", greedy(2))[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize("saved", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16", "float16"])
def test_dtypes(checkpoint: Any, open_llm: Any, greedy: Any, reference_of: Any, caplog: Any, saved: str, asked: str) -> None:
    folder = checkpoint(dtype=saved)
    caplog.set_level(logging.INFO)
    [output] = open_llm(folder, dtype=asked).generate([[5, 6, 7, 8]], greedy(16))
    assert len(output.outputs[0].token_ids) == 16
    if asked == "float32" or (asked, saved) == ("auto", "float32"):
        reference_of(folder).check_greedy([5, 6, 7, 8], output.outputs[0].token_ids)


def test_a_dtype_that_is_none_lists_the_choices(checkpoint: Any, open_llm: Any) -> None:
    with pytest.raises(ValueError, match=r"foo.*auto.*float32.*bfloat16.*float16"):
        open_llm(checkpoint(), dtype="foo")


def test_logits_that_are_not_numbers_end_that_request_alone(checkpoint: Any, open_llm: Any, greedy: Any, streams: Any) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors["model.embed_tokens.weight"][77] = float("nan")

    engine = open_llm(checkpoint(edit=edit)).engine
    alone = streams(engine)
    expected = alone.add("good", [5, 6, 7], greedy(12))
    alone.run()
    running = streams(engine)
    good = running.add("good", [5, 6, 7], greedy(12))
    bad = running.add("bad", [5, 77, 7], greedy(12))
    running.run()
    assert (good.tokens, good.finish_reason) == (expected.tokens, "length")
    assert (bad.tokens, bad.finish_reason) == ([], "error")
    assert "nan" in str(bad.last.outputs[0].stop_reason).lower()
    assert engine.stats().kv_usage == 0


def test_activations_that_overflow_float16_end_the_request(
    checkpoint: Any, open_llm: Any, greedy: Any, streams: Any, reference_of: Any
) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"] *= 3e4  # each weight fits, their sums do not

    folder = checkpoint(dtype="float16", edit=edit)
    half = streams(open_llm(folder, dtype="float16").engine)
    stream = half.add("a", [5, 6, 7], greedy(12))
    half.run()
    assert (stream.tokens, stream.finish_reason) == ([], "error")
    assert "float32" in stream.last.outputs[0].stop_reason
    [output] = open_llm(folder, dtype="auto").generate([[5, 6, 7]], greedy(12))
    reference_of(folder).check_greedy([5, 6, 7], output.outputs[0].token_ids)


def test_norms_in_another_precision(checkpoint: Any, open_llm: Any, greedy: Any, reference_of: Any) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if "norm" in name:
                tensors[name] = tensors[name].float() + 1e-4

    folder = checkpoint(dtype="float16", edit=edit, config_overrides={"dtype": ...})
    [output] = open_llm(folder, dtype="auto").generate([[5, 6, 7]], greedy(16))
    reference_of(folder).check_greedy([5, 6, 7], output.outputs[0].token_ids)


def test_broken_weights_end_the_command_and_are_named(checkpoint: Any, capsys: Any) -> None:
    folder = checkpoint(shards=2)
    last = folder / "model-00002-of-00002.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    assert main(["generate", str(folder), "--prompt", "a"]) != 0
    told = capsys.readouterr()
    assert told.out == ""
    assert last.name in told.err
    assert "truncated" in told.err


@pytest.mark.parametrize("own_tokenizer", [True, False])
@pytest.mark.parametrize("file_type", ["F32", "F16", "Q8_0"])
def test_gguf_files_answer_as_the_checkpoint_that_they_were_made_from(
    checkpoint: Any, open_llm: Any, greedy: Any, reference_of: Any, tmp_path: Any, file_type: str, own_tokenizer: bool
) -> None:
    folder = checkpoint()
    file = write_gguf(folder, tmp_path / "model.gguf", file_type, tokenizer=own_tokenizer)
    options = {} if own_tokenizer else {"tokenizer": str(folder)}
    llm, text = open_llm(file, **options), "the model says"
    [output], [expected] = llm.generate([text], greedy(16)), open_llm(folder).generate([text], greedy(16))
    assert output.prompt_token_ids == expected.prompt_token_ids
    allowed = {"F32": CLOSE, "F16": 0.02, "Q8_0": 0.3}[file_type]
    gaps = reference_of(folder).gaps(output.prompt_token_ids, output.outputs[0].token_ids)
    assert max(gaps) < allowed
    messages = [{"role": "user", "content": "hi"}]
    assert llm.engine.input.render_chat(messages) == open_llm(folder).engine.input.render_chat(messages)


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_gguf_files_with_windows_and_caps(
    checkpoint: Any, open_llm: Any, greedy: Any, random_prompts: Any, reference_of: Any, tmp_path: Any, architecture: str
) -> None:
    folder = checkpoint(architecture=architecture, num_layers=4, tie_word_embeddings=True)
    llm = open_llm(write_gguf(folder, tmp_path / "model.gguf"))
    assert llm.engine.composition.parts["model"].name == "gemma"
    prompts = random_prompts([5, 40])
    for prompt, output in zip(prompts, llm.generate(prompts, greedy(20)), strict=True):
        reference_of(folder).check_greedy(prompt, output.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"type": "linear", "factor": 2.0}, 128),
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
        ({"rope_type": "yarn", "factor": 4.0}, 256),
        ({"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}, 64),
    ],
)  # fmt: skip
def test_a_scaled_context_is_used_whole_and_not_exceeded(
    checkpoint: Any, open_llm: Any, greedy: Any, random_prompts: Any, reference_of: Any, scaling: dict[str, Any], limit: int
) -> None:
    folder = checkpoint(max_position_embeddings=64, config_overrides={"rope_scaling": scaling})
    with pytest.raises(ValueError, match=rf"max_model_len.*\b{limit}\b"):
        open_llm(folder, max_model_len=limit + 1)
    [prompt] = random_prompts([limit - 1])
    [output] = open_llm(folder, scheduler={"max_num_batched_tokens": 50}).generate([prompt], greedy(1))
    reference_of(folder).check_greedy(prompt, output.outputs[0].token_ids)


def test_prompts_of_other_lengths_share_no_blocks_where_keys_depend_on_the_length(
    checkpoint: Any, open_llm: Any, greedy: Any, random_prompts: Any, reference_of: Any
) -> None:
    """Dynamic NTK turns the keys of a prompt by its length: a prefix computed for another length would be wrong."""
    folder = checkpoint(config_overrides={"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 4.0}})
    llm = open_llm(folder)
    (long,) = random_prompts([160])
    for prompt, cached in [(long, 0), (long[:100], 0), (long, 144)]:
        output = llm.generate([prompt], greedy(1))[0]  # the reference computes whole sequences: later ones turn all keys anew
        assert output.num_cached_tokens == cached
        reference_of(folder).check_greedy(prompt, output.outputs[0].token_ids)  # a new one: it remembers the longest length
