"""Names of fields: which one was meant by an unknown or a short one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

ENV_PREFIX: Final = "PEGBOARD_"
ENV_DELIMITER: Final = "__"
_ALIKE: Final = 0.72
"""Similarity (difflib's ratio) from which a name is suggested."""
_HARDLY_WORSE: Final = 0.06

KNOWN_ELSEWHERE: Final = {
    "attention_backend": "attention.backend",
    "distributed_executor_backend": "executor.name",
    "enable_prefix_caching": "kv_cache.allocator",
    "gpu_memory_utilization": "kv_cache.memory_fraction",
    "kv_cache_memory_bytes": "kv_cache.memory",
    "max_batch_size": "scheduler.max_num_seqs",
    "max_seq_len": "max_model_len",
    "model_name": "model",
    "model_path": "model",
    "num_gpu_blocks_override": "kv_cache.num_blocks",
    "pp_size": "executor.pipeline_parallel_size",
    "scheduling_policy": "scheduler.queue",
    "torch_dtype": "dtype",
    "tp_size": "executor.tensor_parallel_size",
}
"""What other engines call a field, for suggestions only."""


def folded(name: str) -> str:
    """Spellings that count as the same where a name comes as text: ``Max-Num-Seqs`` is ``max_num_seqs``."""
    return name.replace("-", "_").lower()


def env_name(path: str) -> str:
    """``scheduler.max_num_seqs`` as an environment variable: ``PEGBOARD_SCHEDULER__MAX_NUM_SEQS``."""
    return ENV_PREFIX + folded(path).replace(".", ENV_DELIMITER).upper()


def flag_name(path: str) -> str:
    """``scheduler.max_num_seqs`` as a command line flag: ``--scheduler.max-num-seqs``."""
    return "--" + path.replace("_", "-")


def near(word: str, candidates: Iterable[str], limit: int = 3) -> list[str]:
    """Those of ``candidates`` (dotted paths or plain names) that ``word`` was probably meant to be, best first: what another
    engine calls so, the same in another spelling, the same last segment, else what looks alike."""
    everything = list(dict.fromkeys(candidates))
    by_fold: dict[str, list[str]] = {}
    by_leaf: dict[str, list[str]] = {}
    for candidate in everything:
        by_fold.setdefault(folded(candidate), []).append(candidate)
        by_leaf.setdefault(folded(candidate).rpartition(".")[2], []).append(candidate)
    wanted = folded(word)
    leaf = wanted.rpartition(".")[2]
    for same in (by_fold.get(KNOWN_ELSEWHERE.get(leaf, "")), by_fold.get(wanted), by_leaf.get(leaf)):
        if same:
            return same[:limit]
    return (_alike(wanted, by_fold) or _alike(leaf, by_leaf))[:limit]


def _alike(word: str, names: dict[str, list[str]]) -> list[str]:
    """The best match, and those that are hardly worse."""
    ranked = [(_likeness(word, name), name) for name in names]
    best = max((ratio for ratio, _ in ranked), default=0.0)
    chosen = [name for ratio, name in sorted(ranked, reverse=True) if ratio >= max(_ALIKE, best - _HARDLY_WORSE)]
    return [candidate for name in chosen for candidate in names[name]]


def _likeness(word: str, name: str) -> float:
    """Of 0 to 1. In one section only the last segments count: a long common beginning makes nothing alike."""
    section, _, leaf = word.rpartition(".")
    if name.rpartition(".")[0] == section:
        word, name = leaf, name.rpartition(".")[2]
    return difflib.SequenceMatcher(None, name, word).ratio()


def either(words: Sequence[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def question(found: Sequence[str]) -> str:
    """``did you mean a or b?``, or nothing if nothing was found."""
    return f"did you mean {either(found)}?" if found else ""


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """``question`` over what is near to ``word``."""
    return question(near(word, candidates))
