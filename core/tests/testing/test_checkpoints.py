"""The tiny checkpoints and tokenizers that many tests stand on."""

import json

import pytest

from pegboard.testing.checkpoints import ARCHITECTURES, make_checkpoint
from pegboard.testing.tiny_tokenizer import BOS, write_tokenizer


def tensors_of(folder):
    from safetensors.torch import load_file

    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def test_the_seed_decides_the_weights(tmp_path):
    first, again, other = (
        tensors_of(make_checkpoint(tmp_path / name, seed=seed, tokenizer=False)) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    name = "model.layers.0.mlp.up_proj.weight"
    assert first[name].equal(again[name])
    assert not first[name].equal(other[name])


def test_shards_hold_the_same_tensors_and_an_index(tmp_path):
    whole = tensors_of(make_checkpoint(tmp_path / "whole", tokenizer=False))
    sharded = make_checkpoint(tmp_path / "sharded", tokenizer=False, shards=3)
    assert {name: t.shape for name, t in tensors_of(sharded).items()} == {name: t.shape for name, t in whole.items()}
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(whole)
    assert len(set(index["weight_map"].values())) == 3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_options_reach_config_and_tensors(architecture, tmp_path):
    folder = make_checkpoint(
        tmp_path,
        architecture,
        dtype="bfloat16",
        tie_word_embeddings=True,
        config_overrides={"vocab_size": 1100, "rope_theta": ...},
    )
    config, tensors = json.loads((folder / "config.json").read_text()), tensors_of(folder)
    assert config["architectures"] == [architecture]
    assert "rope_theta" not in config
    assert "lm_head.weight" not in tensors
    assert tuple(tensors["model.embed_tokens.weight"].shape) == (1100, 64)
    assert {str(t.dtype) for t in tensors.values()} == {"torch.bfloat16"}


@pytest.mark.parametrize("size", [260, 300, 1000, 1400])
@pytest.mark.parametrize("bos", [False, True])
def test_tokenizers_of_any_size_round_trip(size, bos, tmp_path):
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path, size=size, bos=bos)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "The capital of France — 12 émojis 🙂\n"
    ids = tokenizer.encode(text).ids
    assert tokenizer.get_vocab_size() == size
    assert (ids[0] == BOS) == bos
    assert tokenizer.decode(ids) == text
    assert max(ids) < size


@pytest.mark.parametrize("size", [100, 5000])
def test_an_impossible_tokenizer_size_is_refused(size, tmp_path):
    with pytest.raises(ValueError, match=f"size {size}"):
        write_tokenizer(tmp_path, size=size)
