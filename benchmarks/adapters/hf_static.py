"""transformers ``generate`` on static batches of 8, left padded, sdpa attention."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads import Job, Result, serve

MODEL, DTYPE, THREADS = sys.argv[1], sys.argv[2], int(sys.argv[3])
BATCH = 8


class HFStatic:
    name = "transformers-static"

    def __init__(self) -> None:
        import torch
        import transformers

        torch.set_num_threads(THREADS)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=getattr(torch, DTYPE), attn_implementation="sdpa"
        )
        self.model.eval()
        config = self.model.generation_config
        config.eos_token_id, config.do_sample, config.pad_token_id = None, False, 0

    def version(self) -> str:
        import transformers

        return transformers.__version__

    def run(self, jobs: list[Job]) -> list[Result]:
        results: list[Result] = []
        for begin in range(0, len(jobs), BATCH):
            results += self.batch(jobs[begin : begin + BATCH])
        return results

    def batch(self, jobs: list[Job]) -> list[Result]:
        import torch
        from transformers import StoppingCriteria

        times: list[float] = []

        class Clock(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                times.append(time.perf_counter())
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        width = max(len(j.prompt) for j in jobs)
        ids = torch.tensor([[0] * (width - len(j.prompt)) + j.prompt for j in jobs])
        mask = torch.tensor([[0] * (width - len(j.prompt)) + [1] * len(j.prompt) for j in jobs])
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(j.max_tokens for j in jobs),
                do_sample=False,
                stopping_criteria=[Clock()],
            )
        return [
            Result(row[width : width + j.max_tokens].tolist(), times[: j.max_tokens]) for row, j in zip(out, jobs, strict=True)
        ]


if __name__ == "__main__":
    serve(HFStatic)
