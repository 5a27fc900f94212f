"""A message queue from one writer to N readers, over shared memory or TCP; usable alone."""

from pegboard_executor_mp.queue.contract import Closed, DeadReader, DeadWriter, HandleRefused, MessageError, NoSharedMemory
from pegboard_executor_mp.queue.handle import PROTOCOL, Handle
from pegboard_executor_mp.queue.message_queue import MessageQueue, attach

__all__ = [
    "PROTOCOL",
    "Closed",
    "DeadReader",
    "DeadWriter",
    "Handle",
    "HandleRefused",
    "MessageError",
    "MessageQueue",
    "NoSharedMemory",
    "attach",
]
