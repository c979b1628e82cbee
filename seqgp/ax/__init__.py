"""`SequentialGP` in Ax experiments, with models that learn from failed trials.

    client.set_generation_strategy(seqgp.ax.generation_strategy())

This package needs Ax (``pip install "seqgp[ax]"``). Importing it registers its classes with Ax's
storage: import it before loading an experiment that uses them.
"""

from seqgp.ax.version_check import check_version, installed_version

check_version(installed_version())

from seqgp.ax import acquisition as _acquisition  # noqa: E402, F401 - registers itself with Ax
from seqgp.ax.model import AxSequentialGP  # noqa: E402
from seqgp.ax.preferences import preference_spec  # noqa: E402
from seqgp.ax.strategy import generation_strategy, probability_of_validity  # noqa: E402
from seqgp.ax.transforms import VALIDITY  # noqa: E402

__all__ = [
    "VALIDITY",
    "AxSequentialGP",
    "generation_strategy",
    "preference_spec",
    "probability_of_validity",
]
