"""A child for the process tests; `behaviour` says which. Not a test."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spot_runtime.config import Frozen
from spot_runtime.daemons.process import Ready, run_child, spawn
from spot_runtime.errors import ModelError


class ChildConfig(Frozen):
    behaviour: str = "wait"
    folder: str = ""
    depth: int = 0


def main(config: ChildConfig, ready: Ready) -> int:
    return BEHAVIOURS[config.behaviour](config, ready)


def wait(config: ChildConfig, ready: Ready) -> int:
    """Ready at once, ends when asked; with a depth it is a parent itself."""
    pids = str(os.getpid())
    if config.depth:
        inner = ChildConfig(folder=config.folder, depth=config.depth - 1)
        child = spawn("process_child", inner, log_path=Path(config.folder) / f"depth{inner.depth}.log")
        pids += " " + str(child.ready(20)["pids"])
    ready.send("tcp://127.0.0.1:1", pids=pids, threads=os.environ["OMP_NUM_THREADS"])
    while not ready.stopping:
        time.sleep(0.01)
    return 0


def never(config: ChildConfig, ready: Ready) -> int:
    print("looking for the weights", flush=True)
    time.sleep(600)
    return 0


def refuse(config: ChildConfig, ready: Ready) -> int:
    raise ModelError("model = x: lacks vae")


def crash(config: ChildConfig, ready: Ready) -> int:
    raise ZeroDivisionError("one over none")


def vanish(config: ChildConfig, ready: Ready) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def deaf(config: ChildConfig, ready: Ready) -> int:
    """Ready, then does not listen to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.send()
    time.sleep(600)
    return 0


def leave_a_program(config: ChildConfig, ready: Ready) -> int:
    """Starts a program that knows nothing of lifelines; it must not keep the pipes of this child open."""
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
    ready.send(program=program.pid)
    return 7


def end_beside_a_call(config: ChildConfig, ready: Ready) -> int:
    """Ends while a call of one of its threads hangs."""
    ThreadPoolExecutor(1).submit(time.sleep, 600)
    ready.send()
    return 7


BEHAVIOURS = {
    each.__name__: each for each in (wait, never, refuse, crash, vanish, deaf, leave_a_program, end_beside_a_call)
}

if __name__ == "__main__":
    run_child(ChildConfig, main)
