"""`SequentialGP` in Ax experiments, and failed trials that teach.

    client.set_generation_strategy(seqgp.ax.generation_strategy())

Importing this package needs Ax (``pip install "seqgp[ax]"``) and registers what it adds with Ax's
storage: import it before loading an experiment that was made with it.
"""

from seqgp.ax.version_check import check_version, installed_version

check_version(installed_version())

from seqgp.ax import acquisition as _acquisition  # noqa: E402, F401 - registers itself with Ax
from seqgp.ax.model import AxSequentialGP  # noqa: E402
from seqgp.ax.strategy import generation_strategy, probability_of_validity  # noqa: E402
from seqgp.ax.transforms import VALIDITY  # noqa: E402

__all__ = [
    "VALIDITY",
    "AxSequentialGP",
    "generation_strategy",
    "probability_of_validity",
]
