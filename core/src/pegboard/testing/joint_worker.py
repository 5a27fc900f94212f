"""JointWorker: the workers of several ranks as if they were one, for tests that know one worker only."""

from __future__ import annotations

from typing import Any

from pegboard.contracts.executor import WorkerError
from pegboard.contracts.worker import Worker
from pegboard.testing.thread_executor import ThreadExecutor
from pegboard.wire import GrammarOutput, KVCacheConfig, KVCacheSpec, MemoryReport, ModelRunnerOutput, SchedulerOutput


class JointWorker(Worker):
    """``execute_model`` and ``sample_tokens`` go to all ranks. Those of the last stage must agree, the others give nothing."""

    def __init__(self, config: Any, composition: Any) -> None:
        self._executor = ThreadExecutor(config, composition)  # which also boots them
        super().__init__(config, composition, self._executor.world)

    @property
    def workers(self) -> list[Worker]:
        return self._executor.workers

    def init_device(self) -> None: ...

    def load_model(self) -> None: ...

    def compile_or_warm_up(self) -> None:
        self._executor.collective_rpc("compile_or_warm_up")

    def check_health(self) -> None:
        self._executor.check_health()

    def shutdown(self) -> None:
        self._executor.shutdown()

    def determine_available_memory(self) -> MemoryReport:
        return min(self._executor.determine_available_memory(), key=lambda report: report.available)

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {name: spec for specs in self._executor.get_kv_cache_specs() for name, spec in specs.items()}

    def initialize_cache(self, kv_config: KVCacheConfig) -> None:
        self._executor.collective_rpc("initialize_cache", (kv_config,))

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        return self._agreed(self._ask("execute_model", plan))

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        output = self._agreed(self._ask("sample_tokens", grammar))
        assert output is not None
        return output

    def _ask(self, method: str, argument: Any) -> list[ModelRunnerOutput | None]:
        """Raises what a rank raised."""
        try:
            return self._executor.collective_rpc(method, (argument,))  # type: ignore[no-any-return]
        except WorkerError as error:
            raise error.__cause__ or error from None

    def _agreed(self, replies: list[ModelRunnerOutput | None]) -> ModelRunnerOutput | None:
        place = self.world.output_rank
        output = replies[place]
        assert all(reply == output for reply in replies[place:]), f"ranks that sample differ: {replies}"
        for reply in replies[:place]:
            assert (reply is None) == (output is None), f"one rank has a second half to come, another has not: {replies}"
            if reply is not None and output is not None:
                assert (reply.step_id, reply.slots) == (output.step_id, output.slots)
                results = [*filter(None, reply.sampled_token_ids), reply.logprobs, reply.prompt_logprobs, reply.errors]
                assert not any(results), f"a stage that is not the last gives {reply}"
        return output
