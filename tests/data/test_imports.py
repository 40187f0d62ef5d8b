"""The data layer stands below the trainer: importing it loads no torch and no torchtitan."""

import subprocess
import sys


def test_importing_the_data_layer_is_light() -> None:
    code = (
        "import sys, titan_relay.data, titan_relay.data.statistics; "
        "heavy = {'torch', 'torchtitan', 'datasets', 'pyarrow'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
