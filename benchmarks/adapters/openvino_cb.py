"""OpenVINO GenAI's continuous batching (its own Python: ``pip install openvino-genai numpy``). Reads a GGUF in F16."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads import Job, Result, serve

MODEL, DTYPE, THREADS = sys.argv[1], sys.argv[2], int(sys.argv[3])


class OpenVINO:
    name = "openvino-genai"

    def __init__(self) -> None:
        import openvino_genai as ov

        scheduler = ov.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 1, 2048, 64
        scheduler.enable_prefix_caching = True
        precision = {"bfloat16": "bf16", "float32": "f32"}[DTYPE]
        options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": THREADS}
        self.added = 0
        self.pipe = ov.ContinuousBatchingPipeline(MODEL, scheduler, "CPU", options)

    def version(self) -> str:
        import openvino_genai as ov

        return str(ov.__version__)

    def run(self, jobs: list[Job]) -> list[Result]:
        import numpy as np
        import openvino as ov_core
        import openvino_genai as ov

        handles = []
        for job in jobs:
            self.added += 1
            config = ov.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = job.max_tokens, True, False
            handles.append(self.pipe.add_request(self.added, ov_core.Tensor(np.array([job.prompt], dtype=np.int64)), config))
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
        return [Result(list(h.read_all()[0].generated_ids)) for h in handles]


if __name__ == "__main__":
    serve(OpenVINO)
