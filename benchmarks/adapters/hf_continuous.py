"""transformers' continuous batching (``ContinuousBatchingManager``) with its paged cache."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads import Job, Result, serve

MODEL, DTYPE, THREADS = sys.argv[1], sys.argv[2], int(sys.argv[3])


class HFContinuous:
    name = "transformers-continuous"

    def __init__(self) -> None:
        import torch
        import transformers

        torch.set_num_threads(THREADS)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=getattr(torch, DTYPE), attn_implementation="sdpa"
        )
        self.model.eval()
        config = self.model.generation_config
        config.eos_token_id, config.do_sample, config.pad_token_id, config.max_new_tokens = -1, False, 0, 256
        batching = transformers.ContinuousBatchingConfig(
            page_size=32,
            num_blocks=512,
            max_batch_tokens=512,
            max_requests_per_batch=64,
            allow_block_sharing=True,
            use_async_batching=False,
            use_cuda_graph=False,
        )
        self.manager = self.model.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
        self.manager.start()

    def version(self) -> str:
        import transformers

        return transformers.__version__

    def run(self, jobs: list[Job]) -> list[Result]:
        place = {
            self.manager.add_request(j.prompt, max_new_tokens=j.max_tokens, eos_token_id=-1, record_timestamps=True): i
            for i, j in enumerate(jobs)
        }
        results: list[Result] = [Result([])] * len(jobs)
        left = len(jobs)
        while left:
            output = self.manager.get_result(timeout=1)
            if output is None:
                if not self.manager.is_running():
                    raise SystemExit("the batching thread stopped")
                continue
            if output.is_finished():
                if output.error:
                    raise SystemExit(f"a request failed: {output.error}")
                results[place[output.request_id]] = Result(list(output.generated_tokens), list(output.timestamps or []))
                left -= 1
        return results


if __name__ == "__main__":
    serve(HFContinuous)
