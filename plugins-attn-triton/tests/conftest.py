"""Kernels are compiled or interpreted, which is settled when triton is first imported. Tests in ``interpreted`` run in processes
of their own, which ``test_interpreted.py`` starts; here they are only collected where everything is interpreted."""

from __future__ import annotations

from pegboard_attn_triton.device import interpreting

collect_ignore = [] if interpreting() else ["interpreted"]
