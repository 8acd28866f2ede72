"""Where the trainer's tests of a single rank compute: on the CPU, or on a GPU with
RL_TEST_DEVICE=cuda (docs/benchmarks.md)."""

import os

import pytest
import torch

DEVICE = torch.device(os.environ.get("RL_TEST_DEVICE", "cpu"))

on_cpu = pytest.mark.skipif(DEVICE.type != "cpu", reason="about what only CPUs do")
