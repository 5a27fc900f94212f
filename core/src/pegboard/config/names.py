"""Names of fields: which one was meant by an unknown or a short one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

ENV_PREFIX: Final = "PEGBOARD_"
ENV_DELIMITER: Final = "__"

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
    """Those of ``candidates`` (dotted paths or plain names) that ``word`` was probably meant to be, best first."""
    everything = list(candidates)
    by_fold: dict[str, list[str]] = {}
    by_leaf: dict[str, list[str]] = {}
    for candidate in everything:
        by_fold.setdefault(folded(candidate), []).append(candidate)
        by_leaf.setdefault(folded(candidate).rpartition(".")[2], []).append(candidate)
    wanted = folded(word)
    leaf = wanted.rpartition(".")[2]
    found: list[str] = []
    if KNOWN_ELSEWHERE.get(leaf) in everything:
        found.append(KNOWN_ELSEWHERE[leaf])
    found += by_fold.get(wanted, [])
    found += by_leaf.get(leaf, [])
    found += [c for key in difflib.get_close_matches(wanted, by_fold, limit, 0.75) for c in by_fold[key]]
    if not found:
        found += [c for key in difflib.get_close_matches(leaf, by_leaf, limit, 0.75) for c in by_leaf[key]]
    return list(dict.fromkeys(found))[:limit]


def either(words: Sequence[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def question(found: Sequence[str]) -> str:
    """``did you mean a or b?``, or nothing if nothing was found."""
    return f"did you mean {either(found)}?" if found else ""


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """``question`` over what is near to ``word``."""
    return question(near(word, candidates))
