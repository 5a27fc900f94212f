"""What a checkpoint holds against what its configuration says: tied heads, missing and wrong tensors, precisions."""

import json
import logging

import pytest
import torch

from pegboard.contracts.weight_loader import WeightsError
from pegboard.testing.checkpoints import make_checkpoint
from pegboard.testing.model_session import ModelSession

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def logits_of(model, tokens):
    return ModelSession(model).step({"a": tokens(8)})["a"]


# tied and untied heads: what the configuration says and what the file holds --------------------------------------------


def no_head(tensors):
    tensors.pop(HEAD, None)


def equal_head(tensors):
    tensors[HEAD] = tensors[TABLE].clone()


def own_head(tensors):
    tensors[HEAD] = torch.randn(tensors[TABLE].shape, generator=torch.Generator().manual_seed(9)) * 0.5


def only_head(tensors):
    equal_head(tensors)
    del tensors[TABLE]


@pytest.mark.parametrize(
    ("tied", "edit", "warns"),
    [
        (True, no_head, False),
        (True, equal_head, False),
        (True, own_head, True),
        (True, only_head, False),
        (False, equal_head, False),
        (False, own_head, False),
    ],
)
def test_heads_follow_transformers(tied, edit, warns, tmp_path, load, reference, tokens, caplog):
    make_checkpoint(tmp_path, tokenizer=False, tie_word_embeddings=tied, edit=edit)
    wanted = reference(tmp_path)(torch.tensor([tokens(8)])).logits[0]
    caplog.clear()
    assert float((logits_of(load(tmp_path), tokens) - wanted).abs().max()) < 1e-4
    assert any(HEAD in record.getMessage() for record in caplog.records if record.name.startswith("pegboard")) == warns


def test_an_untied_model_without_a_head_is_refused(tmp_path, load):
    make_checkpoint(tmp_path, tokenizer=False, edit=no_head)
    with pytest.raises(WeightsError, match='tie_word_embeddings": true'):
        load(tmp_path)


# tensors that do not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "parts"),
    [
        ("model.layers.1.self_attn.k_proj.weight", None, ["missing", "[32, 64]"]),
        ("model.layers.0.input_layernorm.weight", None, ["missing", "[64]"]),
        ("model.layers.0.mlp.up_proj.weight", lambda t: t.T.contiguous(), ["wrong shape", "[128, 64]", "[64, 128]"]),
        (TABLE, lambda t: t[:-1].contiguous(), ["wrong shape", "[1000, 64]", "[999, 64]"]),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(name, change, parts, tmp_path, load):
    def edit(tensors):
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors[name])

    make_checkpoint(tmp_path, tokenizer=False, edit=edit)
    with pytest.raises(WeightsError) as caught:
        load(tmp_path)
    assert all(part in str(caught.value) for part in [name, *parts])


def test_a_renamed_layer_is_told_at_most_ten_times(tmp_path, load):
    def edit(tensors):
        for name in [n for n in tensors if ".layers." in n]:
            tensors[name.replace("layers", "blocks")] = tensors.pop(name)

    make_checkpoint(tmp_path, tokenizer=False, edit=edit)
    with pytest.raises(WeightsError) as caught:
        load(tmp_path)
    assert "18 missing" in str(caught.value)
    assert "and 8 more" in str(caught.value)
    assert str(caught.value).count("model.layers.") == 10


@pytest.mark.parametrize(
    ("said", "parts"), [(3, ["9 missing", "model.layers.2."]), (1, ["layers 1 to 1", "num_hidden_layers is 1"])]
)
def test_a_wrong_layer_count_is_refused(said, parts, tmp_path, load):
    make_checkpoint(tmp_path, tokenizer=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": said}))
    with pytest.raises(WeightsError) as caught:
        load(tmp_path)
    assert all(part in str(caught.value) for part in parts)


def test_superfluous_tensors(tmp_path, load, tokens, caplog):
    wanted = logits_of(load(make_checkpoint(tmp_path / "plain", tokenizer=False)), tokens)

    def harmless(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    def unknown(tensors):
        tensors["foo.bar"] = torch.ones(8)

    for edit, warns in ((harmless, False), (unknown, True)):
        caplog.clear()
        model = load(make_checkpoint(tmp_path / edit.__name__, tokenizer=False, edit=edit))
        assert torch.equal(logits_of(model, tokens), wanted)
        assert ("foo.bar" in caplog.text) == warns
        assert bool(caplog.records) == warns


# precisions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("used", [torch.float32, torch.bfloat16, torch.float16])
def test_any_precision_is_cast(stored, used, tmp_path, load, tokens, caplog):
    caplog.set_level(logging.INFO)
    model = load(make_checkpoint(tmp_path, dtype=stored, tokenizer=False), used)
    assert {p.dtype for p in model.parameters().values()} == {used}
    assert bool(torch.isfinite(ModelSession(model).to(used).step({"a": tokens(4)})["a"]).all())
    loses = torch.promote_types(getattr(torch, stored), used) != used
    assert len([r for r in caplog.records if f"stored as {stored}" in r.getMessage()]) == loses


def test_mixed_precisions_equal_transformers(tmp_path, load, reference, tokens):
    def norms_in_float32(tensors):
        for name in tensors:
            if "norm" in name:
                tensors[name] = tensors[name].float() + 1e-4

    make_checkpoint(tmp_path, dtype="bfloat16", tokenizer=False, edit=norms_in_float32)
    wanted = reference(tmp_path)(torch.tensor([tokens(8)])).logits[0]
    assert float((logits_of(load(tmp_path), tokens) - wanted).abs().max()) < 1e-4


def test_weights_that_overflow_float16_are_refused(tmp_path, load):
    def huge(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e6

    make_checkpoint(tmp_path, tokenizer=False, edit=huge)
    load(tmp_path, torch.bfloat16)
    with pytest.raises(WeightsError, match=r"up_proj.*1e\+06.*float16"):
        load(tmp_path, torch.float16)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_numbers_are_no_weights(dtype, tmp_path, load):
    def quantised(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(getattr(torch, dtype))

    make_checkpoint(tmp_path, tokenizer=False, edit=quantised)
    with pytest.raises(WeightsError, match=rf"model\.norm\.weight is stored as {dtype}"):
        load(tmp_path)
