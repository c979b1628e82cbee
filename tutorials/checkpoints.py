"""A stream that is killed and resumed
===================================

A process is killed, and another one resumes its stream from a checkpoint.

Run ``python -m tutorials.checkpoints`` (``--short`` for fewer batches). Calls arrive at a call
centre, and a model learns their rate through the day. It is saved after every batch. The process is
killed halfway, without a chance to clean up. Another process loads the file and resumes. At the end
its model is compared with that of a process that was not killed. They are bitwise the same, because
the file contains everything that the stream needs, and is always replaced as a whole. Figures
are saved in ``figures/``.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import PoissonLikelihood
from torch import Tensor

import seqgp
from seqgp.checkpoint import load_extra
from seqgp.streaming import MemoryOptions
from tutorials import common

SIZE = 60


# %%
# The stream
# ----------
#
# Calls per minute, in batches of an hour or two.


def rate(hour: Tensor) -> Tensor:
    """Calls per minute through the day."""
    morning, evening = (torch.exp(-0.5 * ((hour - at) / 1.6) ** 2) for at in (10, 17))
    return 1 + 7 * morning + 4 * evening


def batch(k: int, batches: int) -> tuple[Tensor, Tensor]:
    """The calls of the ``k``-th part of the day, reproducible."""
    generator = torch.Generator().manual_seed(k)
    hour = 24 * (k + torch.rand(SIZE, 1, generator=generator).sort(0).values) / batches
    return hour, torch.poisson(rate(hour), generator=generator)


# %%
# A process that can be killed
# ----------------------------
#
# It saves the model after each batch. When it starts, it looks for a checkpoint and resumes from
# there.


def stream(path: Path, batches: int) -> seqgp.SequentialGP:
    """Learn all batches, starting from the last checkpoint if there is one."""
    if path.exists():
        model, start = seqgp.load(path), load_extra(path)["next"]
        print(f"  resumes with batch {start}, after {model.num_seen} minutes", flush=True)
    else:
        kernel = ScaleKernel(MaternKernel(nu=2.5))
        kernel.base_kernel.lengthscale = 2.0
        Z = torch.linspace(0, 24, 25).unsqueeze(-1)
        nothing = torch.empty(0, 1)
        model, start = (
            seqgp.SequentialGP(
                *(nothing, nothing),
                likelihood=PoissonLikelihood(),
                covar_module=kernel,
                inducing_points=Z,
            ),
            0,
        )
    for k in range(start, batches):
        model.update(*batch(k, batches), memory=MemoryOptions(capacity=40), steps=10)
        seqgp.save(model, path, extra={"next": k + 1})
        print(f"  batch {k} is learnt and saved", flush=True)
    return model


def run_and_kill(path: Path, batches: int, after: int) -> None:
    """Run `stream` in another process, and kill it after some batches."""
    command = [sys.executable, "-m", "tutorials.checkpoints", "--worker", str(path), str(batches)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="")
            if line.startswith(f"  batch {after - 1} "):
                process.send_signal(signal.SIGKILL)
                print("  (killed)")
                break


def same(a: seqgp.SequentialGP, b: seqgp.SequentialGP, at: Tensor) -> bool:
    """Whether the states and predictions of two models are bitwise the same."""
    left, right = a.state_dict(), b.state_dict()
    state = all(torch.equal(value, right[key]) for key, value in left.items())
    memory = all(torch.equal(x, y) for x, y in zip(a.memory, b.memory, strict=True))
    says = torch.equal(a.posterior(at).mean, b.posterior(at).mean)
    return state and memory and says


# %%
# Killed, resumed, compared
# -------------------------


def main(arguments: list[str] | None = None) -> None:
    """Kill a process, resume, and compare with one that was not killed."""
    cli = common.parser(__doc__)
    cli.add_argument("--worker", nargs=2, metavar=("PATH", "BATCHES"), help="used by itself")
    given = cli.parse_args(arguments)
    common.begin(given)
    if given.worker:
        stream(Path(given.worker[0]), int(given.worker[1]))
        return
    batches = 6 if given.short else 12
    figure, panels = common.new_figure(1, 3, (17, 4.2), sharey=True)
    hours = torch.linspace(0, 24, 300).unsqueeze(-1)
    with tempfile.TemporaryDirectory() as directory:
        path, other = Path(directory) / "model.seqgp", Path(directory) / "other.seqgp"
        print("a process that is killed:")
        run_and_kill(path, batches, after=batches // 2)
        found = seqgp.load(path)
        size = path.stat().st_size / 1024
        print(
            f"its checkpoint: {size:.0f} KB after {found.num_seen} minutes\na process that resumes:"
        )
        resumed = stream(path, batches)
        print("a process that is not killed:")
        whole = stream(other, batches)
    print(f"bitwise the same: {same(resumed, whole, hours)}")
    titles = ("when it was killed", "resumed", "never killed")
    for panel, model, title in zip(panels[0], (found, resumed, whole), titles, strict=True):
        bounds = torch.tensor([[0.0], [24.0]])
        seqgp.plots.posterior(model, panel, bounds=bounds, legend=model is found)
        panel.plot(hours.squeeze(-1).numpy(), rate(hours).squeeze(-1).numpy(), "k:", label="truth")
        panel.set(title=title, xlabel="hour", ylabel="calls per minute" if model is found else "")
        panel.set_ylim(-0.6, 16)
    print(f"Figures: {common.save(figure, 'checkpoints')}")


if __name__ == "__main__":
    main()
