"""Inverse frequencies of each rope type. Formulas and defaults are those of transformers' modeling_rope_utils."""

from __future__ import annotations

import math

import torch

from pegboard_plugins.layers.rope_parameters import RopeParameters


def inverse_frequencies(parameters: RopeParameters) -> tuple[torch.Tensor, float]:
    """[rotary_dim / 2] float32 frequencies for lengths up to the trained one, and what cos and sin are multiplied with."""
    base = 1.0 / parameters.theta ** exponents(parameters)
    if parameters.rope_type == "linear":
        return base / parameters.factor, 1.0
    if parameters.rope_type == "llama3":
        return _llama3(base, parameters), 1.0
    if parameters.rope_type == "yarn":
        return _yarn(base, parameters), yarn_attention_factor(parameters)
    if parameters.rope_type == "longrope":
        return base / torch.tensor(parameters.options["short_factor"]), longrope_attention_factor(parameters)
    return base, 1.0


def exponents(parameters: RopeParameters) -> torch.Tensor:
    """[rotary_dim / 2]: 0, 2 / d, 4 / d …"""
    return torch.arange(0, parameters.rotary_dim, 2, dtype=torch.int64).float() / parameters.rotary_dim


def frequencies_at_length(parameters: RopeParameters, lengths: torch.Tensor) -> torch.Tensor:
    """[T, rotary_dim / 2] frequencies of tokens whose sequences have ``lengths`` [T] tokens (dynamic and longrope only)."""
    powers = exponents(parameters).to(lengths.device)
    if parameters.rope_type == "longrope":
        base = 1.0 / parameters.theta**powers
        short, long = (base / torch.tensor(parameters.options[n], device=base.device) for n in ("short_factor", "long_factor"))
        return torch.where(lengths[:, None] > parameters.trained_len, long, short)
    dim, factor = parameters.rotary_dim, parameters.factor
    stretched = torch.clamp(lengths, min=parameters.trained_len).float()
    theta = parameters.theta * (factor * stretched / parameters.trained_len - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / theta[:, None] ** powers


def yarn_attention_factor(parameters: RopeParameters) -> float:
    """As stated, or by the paper's 0.1 ln(factor) + 1, or the ratio of the two ``mscale`` variants of it."""
    options = parameters.options
    if "attention_factor" in options:
        return float(options["attention_factor"])
    scale, all_dim = options.get("mscale"), options.get("mscale_all_dim")
    if scale and all_dim:
        return _yarn_mscale(parameters.factor, scale) / _yarn_mscale(parameters.factor, all_dim)
    return _yarn_mscale(parameters.factor, 1.0)


def longrope_attention_factor(parameters: RopeParameters) -> float:
    if "attention_factor" in parameters.options:
        return float(parameters.options["attention_factor"])
    if parameters.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(parameters.factor) / math.log(parameters.trained_len))


def _yarn_mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn(base: torch.Tensor, parameters: RopeParameters) -> torch.Tensor:
    """Fast pairs keep their frequency, slow ones are divided by ``factor``, with a linear ramp between."""
    dim, options = parameters.rotary_dim, parameters.options

    def pair_that_turns(rotations: float) -> float:
        """Index of the pair that makes ``rotations`` turns over the trained length."""
        return dim * math.log(parameters.trained_len / (rotations * 2 * math.pi)) / (2 * math.log(parameters.theta))

    low, high = pair_that_turns(options.get("beta_fast") or 32), pair_that_turns(options.get("beta_slow") or 1)
    if options["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return base / parameters.factor * (1 - kept) + base * kept


def _llama3(base: torch.Tensor, parameters: RopeParameters) -> torch.Tensor:
    """Short wavelengths keep their frequency, long ones are divided by ``factor``, with a smooth passage between."""
    low, high = parameters.options["low_freq_factor"], parameters.options["high_freq_factor"]
    turns = parameters.trained_len * base / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * base / parameters.factor + smooth * base
