"""The section ``plugins.executor_ray``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from pegboard.config.models import Section
from pegboard.config.values import Count, PositiveInt, Seconds, Text, parse_bytes, refuse_bool
from pegboard_executor_mp.options import ChunkBytes
from pegboard_executor_mp.queue.message_queue import CHUNK_BYTES, NUM_CHUNKS

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(refuse_bool)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(refuse_bool)]
OneDevice = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(refuse_bool)]
BufferBytes = Annotated[int, Field(ge=64 << 10, le=1 << 30), BeforeValidator(parse_bytes), BeforeValidator(refuse_bool)]


def _custom(names: dict[str, float]) -> dict[str, float]:
    if names.keys() & {"CPU", "GPU"}:
        raise ValueError("CPU and GPU are no custom resources; set num_cpus and num_gpus")
    return names


class Options(Section):
    """What both executors of this package share: the cluster, what a rank asks of it, and what ranks are given."""

    address: Text | None = Field(
        default=None,
        description="of the cluster, as for ray.init; default: RAY_ADDRESS, a cluster that runs on this machine, else a Ray of "
        "the engine's own",
    )
    namespace: Text | None = Field(
        default=None, description="Ray namespace of the ranks' actor names; default: that of the connection"
    )
    start_local: bool = Field(default=True, description="start a Ray on this machine where none is found")
    num_cpus: Amount | None = Field(
        default=None,
        description="CPUs that each rank reserves; default: executor.num_threads, or 1, on the processor, else 0",
    )
    num_gpus: OneDevice | None = Field(
        default=None, description="GPUs that each rank reserves; default: 1 where ranks compute on one, else 0"
    )
    resources: Annotated[dict[str, Positive], AfterValidator(_custom)] = Field(
        default_factory=dict, description="custom resources that each rank reserves, by name"
    )
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK", description="how the placement group that is made for the ranks spreads over nodes"
    )
    bundle_indices: tuple[Count, ...] | None = Field(
        default=None, description="bundles of the current placement group, one per rank, in rank order"
    )
    placement_timeout: Seconds = Field(default=600.0, description="seconds to wait for what the ranks reserve")
    start_timeout: Seconds = Field(
        default=600.0, description="seconds until every rank has its process, its plugins, its device and its weights"
    )
    shutdown_timeout: Seconds = Field(
        default=5.0, description="seconds that ranks get to end by themselves; then they are killed"
    )
    environment_block: tuple[Text, ...] = Field(
        default=(), description="environment variables, or patterns such as 'ACME_*', that ranks do not get from the engine"
    )
    environment_carry: tuple[Text, ...] = Field(
        default=(), description="environment variables, or patterns, that ranks get although they are a node's own by default"
    )
    runtime_env: dict[str, Any] = Field(default_factory=dict, description="Ray's runtime_env of the ranks")
    buffer_bytes: BufferBytes = Field(
        default=512 << 10,
        description="bytes of each buffer of the graph of 'ray', in Ray's object store; larger messages take longer",
    )
    chunk_bytes: ChunkBytes = Field(
        default=CHUNK_BYTES, description="bytes per chunk of each message queue of 'ray-mq'; larger messages take several chunks"
    )
    num_chunks: PositiveInt = Field(default=NUM_CHUNKS, description="chunks of each message queue of 'ray-mq'")
