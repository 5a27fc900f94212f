"""Pegboard itself, through ``LLMEngine`` in this process."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads import Job, Result, serve

MODEL, DTYPE, THREADS = sys.argv[1], sys.argv[2], int(sys.argv[3])


class Pegboard:
    name = "pegboard"

    def __init__(self) -> None:
        from pegboard import LLMEngine

        self.engine = LLMEngine(model=MODEL, dtype=DTYPE, num_threads=THREADS)
        self.runs = 0

    def version(self) -> str:
        import pegboard

        return pegboard.__version__

    def run(self, jobs: list[Job]) -> list[Result]:
        from pegboard import SamplingParams

        self.runs += 1
        results = {f"{self.runs}/{i}": Result([]) for i in range(len(jobs))}
        for request_id, job in zip(results, jobs, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
            self.engine.add_request(request_id, job.prompt, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                result = results[output.request_id]
                ids = output.outputs[0].token_ids
                result.times += [time.perf_counter()] * (len(ids) - len(result.token_ids))
                result.token_ids = list(ids)
        return list(results.values())


if __name__ == "__main__":
    serve(Pegboard)
