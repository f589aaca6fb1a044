"""Without a GPU, Triton kernels run in Triton's interpreter, which is chosen where a kernel is decorated."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
