"""The section ``plugins.executor_mp``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from pegboard.config.models import Section
from pegboard.config.values import PositiveInt, Seconds, Text, parse_bytes, refuse_bool
from pegboard_executor_mp.queue.message_queue import CHUNK_BYTES, NUM_CHUNKS

ChunkBytes = Annotated[int, Field(ge=1024, le=2**31 - 1), BeforeValidator(parse_bytes), BeforeValidator(refuse_bool)]


class Options(Section):
    """``chunk_bytes`` and ``num_chunks`` hold for all queues: the one that carries calls and that of each rank's replies."""

    chunk_bytes: ChunkBytes = Field(
        default=CHUNK_BYTES, description="bytes per chunk of each message queue; larger messages take several chunks"
    )
    num_chunks: PositiveInt = Field(default=NUM_CHUNKS, description="chunks of each message queue")
    start_timeout: Seconds = Field(
        default=600.0,
        description="seconds until every rank has its process, plugins, device and weights, and of each later phase of the start",
    )
    shutdown_timeout: Seconds = Field(
        default=3.0, description="seconds that ranks get to end by themselves; then they are terminated, a second later killed"
    )
    bind_cores: bool | None = Field(
        default=None,
        description="give each rank processor cores of its own; default: for several ranks on the cpu, if each gets two at least",
    )
    start_method: Literal["fork_server", "spawn"] = Field(
        default="fork_server",
        description="fork_server: ranks are forked off a fresh process that has imported 'preload'; spawn: each is fresh",
    )
    preload: tuple[Text, ...] = Field(
        default=("torch",),
        description="modules that the fork server imports once for all ranks; that must start no thread and open no device",
    )
