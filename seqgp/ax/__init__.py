"""`SequentialGP` in Ax experiments, and failed trials that teach.

    client.set_generation_strategy(seqgp.ax.generation_strategy())

Importing this package needs Ax (``pip install "seqgp[ax]"``) and registers what it adds with Ax's
storage: import it before loading an experiment that was made with it.
"""

from seqgp.ax._version_check import check_version, installed_version

check_version(installed_version())

from seqgp.ax.acquisition import ValidAcquisition  # noqa: E402
from seqgp.ax.model import AxSequentialGP  # noqa: E402
from seqgp.ax.strategy import generation_strategy, probability_of_validity  # noqa: E402
from seqgp.ax.transforms import VALIDITY, LearnFailures  # noqa: E402

__all__ = [
    "VALIDITY",
    "AxSequentialGP",
    "LearnFailures",
    "ValidAcquisition",
    "generation_strategy",
    "probability_of_validity",
]
