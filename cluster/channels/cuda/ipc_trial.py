"""Tests whether CUDA IPC works between two processes of this machine, with a channel and a minimal drafter.

If run as a module, this file is the drafter, which attaches, waits until its standard input ends, and detaches.
"""

import secrets
import subprocess
import sys
from collections.abc import Sequence

import torch

from wingbeat.cluster.channels.cuda.cuda_ipc import CudaIpcChannel
from wingbeat.cluster.channels.cuda.cuda_runtime import CudaRuntime
from wingbeat.cluster.channels.doorbell import poll
from wingbeat.cluster.channels.header import ChannelError
from wingbeat.runtime.interpreter import module_command, module_environment
from wingbeat.runtime.protocol.messages import ChannelSpec

SPEC = ChannelSpec(
    num_slots=2,
    num_nodes=4,
    max_path=4,
    max_prefill_tokens=16,
    taps_size=8,
    max_model_len=64,
    max_blocks_per_seq=4,
    block_size=16,
    num_blocks=8,
)
ATTACHED_S = 90.0
"""Seconds for the other process to import torch, possibly from a cold disk, and to create a CUDA context."""
LEFT_S = 10.0
DRAFTER = module_command("wingbeat.cluster.channels.cuda.ipc_trial")


def try_cuda_ipc(
    device: torch.device, peer: torch.device, runtime: CudaRuntime | None = None, drafter: Sequence[str] = DRAFTER
) -> None:
    """Test CUDA IPC between `device`, which this process uses, and `peer`, which another process uses.

    The other process reads data that this process wrote on `device`, writes an answer there, and records events.

    Args:
        runtime: CUDA runtime; None uses torch's.
        drafter: command of the other process.

    Raises:
        ChannelError: data or events do not arrive in the other process; the message is one line that names what is
            missing.
    """
    name = f"wingbeat-trial-{secrets.token_hex(4)}"
    end = (channel := CudaIpcChannel.create(name, SPEC, device, runtime)).verifier_end
    try:
        command = [*drafter, name, str(peer.index)]
        with subprocess.Popen(
            command, text=True, env=module_environment(), stdin=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            try:
                poll(lambda: end.incarnation > 0, ATTACHED_S, gone=lambda: process.poll() is not None)
                if not end.incarnation:
                    raise ChannelError(_reason(process))
                channel.try_drafter()
                process.communicate(timeout=LEFT_S)
            finally:
                process.kill()
    except subprocess.TimeoutExpired:
        raise ChannelError(f"the process on {peer} does not let go within {LEFT_S:.0f} s") from None
    finally:
        end.close()


def _reason(process: subprocess.Popen[str]) -> str:
    if process.poll() is None:
        return f"no process has attached within {ATTACHED_S:.0f} s"
    said = [line for line in process.communicate(timeout=LEFT_S)[1].splitlines() if line.strip()]
    return said[-1] if said else f"the drafter's process ended with {process.returncode}"


def attach_until_input_ends(name: str, device: torch.device, runtime: CudaRuntime | None = None) -> int:
    """Run the drafter's side; returns the exit code.

    If the drafter cannot attach, the last line on stderr is the reason, and the exit code is 1.
    """
    try:
        end = CudaIpcChannel.attach(name, 1, device, runtime)
    except ChannelError as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdin.read()
    end.close()
    return 0


if __name__ == "__main__":
    sys.exit(attach_until_input_ends(sys.argv[1], torch.device("cuda", int(sys.argv[2]))))
